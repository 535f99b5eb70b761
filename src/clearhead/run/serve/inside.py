"""What a request may see of its own text: the activations that `record` gives, and what `lens` gives.

The whole text, prompt and answer, is read once more by the model itself, alone and between two steps, when it
has ended. So nobody else's logits change, and prefixes that were found in the pool are seen too.

Shapes: T tokens of the text, S tokens of a source.
"""

import base64
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.core.taps import matching
from clearhead.errors import InputError, refuse
from clearhead.inside.inputs import Prepared, prepare
from clearhead.inside.lens import Lens, lens
from clearhead.inside.results import on_cpu, plain
from clearhead.run.api import Model

LENS = "lens"
MOST_NAMES = 32  # of one request
MOST_TOKENS = 4096  # of the text and its source together
MOST_VALUES = 1 << 20  # numbers of one answer
TRIED = (3, 5)  # lengths from which sizes are told


class InsideView:
    """What may be seen of one model."""

    def __init__(self, m: Model) -> None:
        self.m = m

    def check(self, names: Sequence[str], length: int, sources: int) -> None:
        """Refuse names that are unknown, and more numbers than an answer may have."""
        refuse(len(names) > MOST_NAMES, f"inside has {len(names)} names: at most {MOST_NAMES} are taken")
        count, wider = 0, {TRIED[0]: length, TRIED[0] + 1: sources}
        for name in names:
            if name == LENS:
                count += (self.m.config.main.n_layers + 1) * length * len(Lens.__dataclass_fields__)
                continue
            for one in _named(self.m, name):
                first, *_, second = self._shapes.get(one, [(), ()])
                count += math.prod(a if a == b else wider.get(a, length) for a, b in zip(first, second))
        refuse(
            length + sources > MOST_TOKENS or count > MOST_VALUES,
            f"inside would give {count:,} numbers of {length + sources} tokens, and at most {MOST_VALUES:,} "
            f"of {MOST_TOKENS} are given: name fewer activations, or shorten the text",
        )

    @functools.cached_property
    def _shapes(self) -> dict[str, list[tuple[int, ...]]]:
        """The shapes of every activation at two lengths of the text; those of a source are one longer."""
        found: dict[str, list[tuple[int, ...]]] = {}
        for length in TRIED:
            source = [0] * (length + 1) if self.m.config.family == "encoder-decoder" else None
            for name, value in self._prepared([0] * length, source).record("*")[1].items():
                found.setdefault(name, []).append(tuple(value.shape[1:]))
        return found

    def _prepared(self, ids: list[int], source: list[int] | None) -> Prepared:
        return prepare(self.m, ids) if source is None else prepare(self.m, source, ids)

    @torch.inference_mode()
    def look(self, names: Sequence[str], ids: list[int], source: Tensor | None) -> dict[str, Any]:
        """Return what was asked for by name, ready for JSON; `source` [1, S]."""
        given = None if source is None else source[0].tolist()
        patterns, found = [name for name in names if name != LENS], {}
        if patterns:
            seen = self._prepared(ids, given).record(*patterns)[1]
            found = {name: packed(value[0]) for name, value in seen.items()}
        if LENS in names:
            read = lens(self.m, ids) if given is None else lens(self.m, given, ids)
            found[LENS] = packed(vars(read))
        return found


def _named(m: Model, pattern: str) -> list[str]:
    try:
        return matching(m.config, pattern)
    except InputError as error:
        raise InputError(f"inside: {error}") from None


def packed(value: Any) -> Any:
    """Return a value as JSON has it; tensors become their shape and their numbers in base64."""
    if isinstance(value, Mapping):
        return {name: packed(one) for name, one in value.items()}
    if not isinstance(value, Tensor):
        return plain(value)
    numbers = on_cpu(value) if value.is_floating_point() else value.cpu()
    raw = numbers.contiguous().numpy()
    return {
        "shape": list(raw.shape),
        "dtype": str(raw.dtype),
        "base64": base64.b64encode(raw.tobytes()).decode(),
    }
