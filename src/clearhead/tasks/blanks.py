"""Tokens for the masks of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import Encoding
from torch import Tensor

from clearhead.errors import InputError
from clearhead.hub.encodings import encoding_of
from clearhead.tasks.results import Candidate
from clearhead.tasks.run import check_head, logits_of

if TYPE_CHECKING:
    from clearhead.bundle import Model


def fill(loaded: Model, text: str | list[str], k: int = 5, batch_size: int = 32) -> Any:
    """The k best tokens for the mask in a text, with their probabilities; one list for each mask where there are several.

    Each mask is filled on its own, the others left standing. A list of texts gives a list.
    """
    check_head(loaded, "fill")
    tokenizer = loaded.text_tokenizer
    if "mask" not in loaded.special:
        raise InputError(
            "fill needs a tokenizer with a mask token, and this model has none: add mask_token to tokenizer_config.json"
        )
    if not 1 <= k <= loaded.config.vocab_size:
        raise InputError(f"k {k} must lie between 1 and vocab_size {loaded.config.vocab_size}")
    mask = loaded.special["mask"]
    texts = [text] if isinstance(text, str) else list(text)
    rows = [encoding_of(tokenizer, one, special=True) for one in texts]
    for row in rows:
        if mask not in row.ids:
            raise InputError(
                f"a text has no {tokenizer.id_to_token(mask)}, the mask of this model: put one where a word is wanted"
            )
        if len(row.ids) > loaded.max_length:
            raise InputError(
                f"a text has {len(row.ids)} tokens and the model takes {loaded.max_length}: shorten it"
            )
    made = []
    for one, row, logits in zip(texts, rows, logits_of(loaded, rows, batch_size)):
        masks = [at for at, token in enumerate(row.ids) if token == mask]
        found = [_candidates(loaded, one, row, at, logits[at].softmax(-1), k) for at in masks]
        made.append(found[0] if len(found) == 1 else found)
    return made[0] if isinstance(text, str) else made


def _candidates(
    loaded: Model, text: str, row: Encoding, at: int, probability: Tensor, k: int
) -> list[Candidate]:
    tokenizer, (start, end) = loaded.text_tokenizer, row.offsets[at]
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
