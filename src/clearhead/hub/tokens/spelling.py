"""The bytes that each token writes, wherever it stands in a text."""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from clearhead.errors import refuse
from clearhead.hub.tokens.kinds import BYTES, byte_letters
from clearhead.hub.tokens.labels import decoded

CHECKED = 40  # tokens of which every pair is read side by side


def token_bytes(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """Return what each id below `size` adds to a text; nothing for special tokens and ids without a token.

    A tokenizer whose tokens read otherwise beside others is refused.
    """
    added = tokenizer.get_added_tokens_decoder()
    written = [None if number in added else tokenizer.id_to_token(number) for number in range(size)]
    kind = repr(tokenizer.decoder)
    if "ByteLevel(" in kind:
        values = {letter: value for value, letter in enumerate(byte_letters())}
        made = [
            bytes(map(values.__getitem__, token)) if values.keys() >= set(token) else token.encode()
            for token in (token or "" for token in written)
        ]
    else:
        made = _read(tokenizer, written)
        for number, token in enumerate(written):
            if "ByteFallback(" in kind and token in BYTES:
                made[number] = bytes([BYTES.index(token)])
    for number, one in added.items():
        if number < size:
            made[number] = b"" if one.special else one.content.encode()
    return made


def _read(tokenizer: Tokenizer, written: Sequence[str | None]) -> list[bytes]:
    """Return what each token adds behind another one, as the tokenizer reads it."""
    known = [number for number, token in enumerate(written) if token is not None]
    before = next((n for n in known if re.fullmatch(r"\w+", decoded(tokenizer, [n]))), known[0])
    start = len(decoded(tokenizer, [before]))
    texts = [text[start:] for text in tokenizer.decode_batch([[before, number] for number in known])]
    found = dict(zip(known, texts))
    short = sorted(known, key=lambda n: (len(found[n]), n))[:: max(1, len(known) // CHECKED // 4)][:CHECKED]
    pairs = [(a, b) for a in short for b in short if "\ufffd" not in found[a] + found[b]]
    for (a, b), text in zip(pairs, tokenizer.decode_batch([[before, a, b] for a, b in pairs])):
        refuse(
            text[start:] != found[a] + found[b],
            f'this tokenizer reads "{written[a]}" and "{written[b]}" side by side as "{text[start:]}": '
            "a form needs tokens that read alike wherever they stand",
        )
    return [found.get(n, "").replace("\ufffd", "").encode() for n in range(len(written))]
