"""Training and validation apart: by the content of examples, never by their order, so that equal examples are on one side."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from clearhead.errors import InputError

KEYS = 1 << 64


def key_of(*parts: str | bytes) -> int:
    """A number below `KEYS` that depends on nothing but the content."""
    whole = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(whole.digest(), "little")


def percent(share: float) -> str:
    """'10%', '0.4%'."""
    return f"{share * 100:.3g}%"


def bound(low: int, high: int, share: float) -> int:
    """Examples whose key lies below this validate: about `share` of them, and at least one on either side.

    `low` and `high` are the smallest and the largest key. An example keeps its side when others are added, unless it
    stood alone on it.
    """
    if low == high:
        raise InputError(
            "the data holds one example, or one many times: two that differ are needed to train and to validate"
        )
    return min(max(int(share * KEYS), low + 1), high)


def split_keys(keys: Sequence[int], share: float, names: Sequence[Sequence[str]] | None = None) -> list[bool]:
    """Does each example validate? `names` are the labels or tags of each: those of validation must occur in training.

    Where chance put all examples of a label among those to validate, they go back, with all that have the same key; if none
    is left then, those with the lowest key whose labels others have too take their place.
    """
    limit = bound(min(keys), max(keys), share)
    validates = [key < limit for key in keys]
    if names is not None:
        known = {name for own, held in zip(names, validates) if not held for name in own}
        back = {key for key, own, held in zip(keys, names, validates) if held and not known.issuperset(own)}
        validates = [held and key not in back for key, held in zip(keys, validates)]
        if not any(validates):
            own_names: dict[int, set[str]] = {}
            for key, own in zip(keys, names):
                own_names.setdefault(key, set()).update(own)
            count = Counter(name for own in own_names.values() for name in own)
            spare = min(
                (key for key, own in own_names.items() if all(count[name] > 1 for name in own)), default=None
            )
            if spare is None:
                raise InputError(
                    "no example is left to validate on: each has a label that no other has; name files under validation"
                )
            validates = [key == spare for key in keys]
    return validates
