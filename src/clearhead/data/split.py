"""Split training from validation by the content of examples, never by their order.

Equal examples are on one side.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

from clearhead.errors import refuse

KEYS = 1 << 64


def key_of(*parts: str | bytes) -> int:
    """Return a number below `KEYS` that depends on the content alone."""
    whole = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(whole.digest(), "little")


def percent(share: float) -> str:
    """Return a share in percent: '10%', '0.4%'."""
    return f"{share * 100:.3g}%"


def bound(low: int, high: int, share: float) -> int:
    """Return the key below which examples validate: about `share` of them, and at least one on either side.

    `low` and `high` are the smallest and the largest key. An example keeps its side when others are added,
    unless it was alone on it.
    """
    refuse(
        low == high,
        "the data holds one example, or one many times: two that differ are needed to train and to validate",
    )
    return min(max(int(share * KEYS), low + 1), high)


def split_keys(keys: Sequence[int], share: float, names: Sequence[Sequence[str]] = ()) -> list[bool]:
    """Return for each example whether it validates.

    `names` are the labels or tags of each example: those of validation must occur in training. Where chance
    put all examples of a label among those to validate, they go back, with all that have the same key. If
    none is left then, those with the lowest key whose labels others have too take their place.
    """
    limit = bound(min(keys), max(keys), share)
    validates = [key < limit for key in keys]
    known = {name for own, held in zip(names, validates) if not held for name in own}
    back = {key for key, own, held in zip(keys, names, validates) if held and not known.issuperset(own)}
    validates = [held and key not in back for key, held in zip(keys, validates)]
    if not any(validates):
        own_names: dict[int, set[str]] = {}
        for key, own in zip(keys, names):
            own_names.setdefault(key, set()).update(own)
        count = Counter(name for own in own_names.values() for name in own)
        spare = [key for key, own in own_names.items() if all(count[name] > 1 for name in own)]
        refuse(
            not spare,
            "no example is left to validate on: "
            "each has a label that no other has; name files under validation",
        )
        validates = [key == min(spare) for key in keys]
    return validates
