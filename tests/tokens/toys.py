"""Text to train on, and the kinds of tokenizer."""

from __future__ import annotations

import functools
import hashlib
import tomllib
from pathlib import Path
from typing import get_args

from tokenizers import Tokenizer

from clearhead.hub.tokens import TokenKind, TokensPlan
from clearhead.hub.tokens.training import TextFiles, train_tokenizer
from clearhead.learn.tasks.table import TASKS as SPECS

KINDS = get_args(TokenKind)
TASKS = ("lm", "mlm", "denoise", "seq2seq", "classify", "tag", "answer")
LINES = [
    "The king's men, 12 of them, shall speak of England; shall they not?\n",
    "  Ein Hund läuft über die Straße, und e\u0301in anderer schläft.\n",
    "\tdef speak(of): return [of, 'England']  # spoken\r\n",
    "Москва и люди; 北京的人们 speak of it.\n",
] * 8
TEXT = "".join(LINES)
# Chat templates in the manner of the published ones, by name.
TEMPLATES = tomllib.loads(Path(__file__).with_name("chat_templates.toml").read_text())


def write(folder: Path) -> TextFiles:
    """The text in two files."""
    half = len(LINES) // 2
    for name, lines in (("a.txt", LINES[:half]), ("b.txt", LINES[half:])):
        (folder / name).write_bytes("".join(lines).encode())
    return TextFiles((folder / "a.txt", folder / "b.txt"))


@functools.cache
def trained(kind: str, task: str = "lm", **options: object) -> Tokenizer:
    """A tokenizer of this kind, trained once."""
    return train_tokenizer(LINES, TokensPlan(kind=kind, **options), SPECS[task].specials, len(TEXT.encode()))


def digest() -> str:
    """Of a new tokenizer.json of each kind."""
    files = [trained.__wrapped__(kind, task).to_str() for kind in KINDS for task in ("lm", "mlm")]
    return hashlib.sha256("".join(files).encode()).hexdigest()
