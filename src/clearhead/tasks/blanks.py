"""Tokens for the masks of a text."""

from collections.abc import Sequence

from tokenizers import Encoding
from torch import Tensor

from clearhead.bundle import Bundle
from clearhead.errors import InputError, refuse
from clearhead.hub.encodings import encoding_of
from clearhead.tasks.results import Candidate
from clearhead.tasks.run import check_head, logits_of


def fill(m: Bundle, texts: Sequence[str], k: int = 5, batch_size: int = 32) -> list[list[list[Candidate]]]:
    """Return the k best tokens for each mask of each text; see `Model.fill`."""
    check_head(m, "fill")
    tokenizer = m.text_tokenizer
    refuse(
        "mask" not in m.special,
        "fill needs a tokenizer with a mask token, and this model has none: "
        "add mask_token to tokenizer_config.json",
    )
    refuse(
        not 1 <= k <= m.config.vocab_size, f"k {k} must lie between 1 and vocab_size {m.config.vocab_size}"
    )
    mask = m.special["mask"]
    rows = [encoding_of(tokenizer, text, special=True) for text in texts]
    for row in rows:
        if mask not in row.ids:
            raise InputError(
                f"a text has no {tokenizer.id_to_token(mask)}, the mask of this model: "
                "put one where a word is wanted"
            )
        refuse(
            len(row.ids) > m.max_length,
            f"a text has {len(row.ids)} tokens and the model takes {m.max_length}: shorten it",
        )
    return [
        [
            _candidates(m, text, row, at, logits[at].softmax(-1), k)
            for at, token in enumerate(row.ids)
            if token == mask
        ]
        for text, row, logits in zip(texts, rows, logits_of(m, rows, batch_size))
    ]


def _candidates(m: Bundle, text: str, row: Encoding, at: int, probability: Tensor, k: int) -> list[Candidate]:
    tokenizer, (start, end) = m.text_tokenizer, row.offsets[at]
    best = probability.topk(k)
    before = [token for token, added in zip(row.ids[:at], row.special_tokens_mask) if not added][-1:]
    prefix = tokenizer.decode(before, skip_special_tokens=False)
    made = []
    for token, value in zip(best.indices.tolist(), best.values.tolist()):
        piece = tokenizer.decode([*before, token], skip_special_tokens=False).removeprefix(prefix)
        left = text[:start]
        if not piece.startswith(" ") and before:
            left = left.rstrip()  # it goes on with the word before
        elif left and not left[-1].isspace():
            left += " "  # the mask took the space before it along
        spelled = tokenizer.id_to_token(token)
        made.append(Candidate(str(spelled), token, value, left + piece.lstrip(" ") + text[end:]))
    return made
