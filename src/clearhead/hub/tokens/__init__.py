"""Tokenizers: training them (`training`), chat templates (`chat`), tokens as text (`text`)."""

from dataclasses import dataclass
from typing import Literal

from clearhead.errors import check_types

TokenKind = Literal["char", "byte", "word", "bpe", "wordpiece", "unigram"]


@dataclass(frozen=True, kw_only=True)
class TokensPlan:
    """How text becomes ids."""

    kind: TokenKind | None = None  # None: by the size of the data
    vocab_size: int | None = None  # with special tokens; None: by the size of the data (char, byte: all)
    lowercase: bool = False  # the tokenizer lowers every letter
    pattern: str | None = None  # word: a regular expression that matches words; None: words and punctuation
    model: str | None = None  # take the tokenizer of this directory instead of training one
    template: str | None = None  # chat: a Jinja file, plain or chatml; None: the model's own, else plain

    def __post_init__(self) -> None:
        check_types(self)
