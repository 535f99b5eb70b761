"""One forward pass that answers whatever is asked of it later.

    prepared = recorded_once(prepare(m, "The cat sat on the"))
    paths(m, prepared), lens(m, prepared, columns=[4]), maps_of(prepared)     # one pass for all of them

Gradients run one pass more, whose graph is kept for the next ones. Edits and traces still run the model: they
ask for more than its activations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from clearhead.core.taps import Recording, matching, record, tap_names
from clearhead.core.transformer import Output, evaluating
from clearhead.inside.inputs import Prepared
from clearhead.inside.names import kinds_of

LARGEST = 2**28  # numbers of all patterns together; where there would be more, none is kept
LARGEST_GRAPH = 2**24  # numbers of all patterns, of a pass that is kept with its gradients
SLOPED = (".z", ".pattern", ".v", ".scores", "embedding", "feedforward.out")
UNSEEN = (".pre", "resid_mid", "logits")


@dataclass(frozen=True)
class RecordedOnce(Prepared):
    """Inputs whose activations are recorded in one pass, at the first question about them."""

    @cached_property
    def _pass(self) -> tuple[Output, Recording]:
        """The hidden states, and every activation that is kept."""
        unseen = UNSEEN if self.holds_patterns else (*UNSEEN, ".pattern", ".scores")
        kept = [name for name in tap_names(self.model) if not name.endswith(unseen)]
        return super().record(*kept, logits="none")

    @cached_property
    def _graph(self) -> Recording:
        """What gradients are taken of."""
        kept = [name for name in tap_names(self.model) if name.endswith(SLOPED)]
        with torch.enable_grad(), record(self.model, *kept, detach=False) as seen:
            self.run(logits="none")
        return seen

    @cached_property
    def log_sums(self) -> dict[int, Tensor]:
        """By column: what `lens.followed` has to know of all choices to give the share of one, [L + 1]."""
        return {}

    @property
    def holds_patterns(self) -> bool:
        """Whether all patterns fit."""
        return self._pattern_numbers <= LARGEST

    @property
    def keeps_graph(self) -> bool:
        """Whether gradients share one pass; of a long text each takes a pass of its own."""
        return self._pattern_numbers <= LARGEST_GRAPH

    @property
    def _pattern_numbers(self) -> int:
        cells = {
            one: len(self.tokens_of("encoder." if one.kind == "encoder" else ""))
            * len(self.tokens_of("" if one.kind == "self" else "encoder."))
            for one, kind in kinds_of(self.model.config).items()
            if kind.patterned
        }
        return sum(one.n_heads * count for one, count in cells.items())

    def forget(self) -> None:
        """Free what was recorded; the next question runs the model again."""
        for name in ("_pass", "log_sums"):
            self.__dict__.pop(name, None)
        self.forget_graph()

    def forget_graph(self) -> None:
        """Free what gradients are taken of, which is most of the memory."""
        self.__dict__.pop("_graph", None)

    def record_graph(self, last: str, *patterns: str) -> Recording:
        """Return activations with their graph; of a long text, only those before the activation `last`."""
        return self._graph if self.keeps_graph else super().record_graph(last, *patterns)

    def record(self, *patterns: str, logits: Literal["all", "none"] = "all") -> tuple[Output, Recording]:
        """Return what was recorded; run a pass only for activations that are not kept."""
        output, seen = self._pass
        wanted = {
            name
            for pattern in patterns
            for name in ((pattern,) if pattern in seen else matching(self.model.config, pattern))
        }
        if not wanted <= seen.keys():
            return super().record(*patterns, logits=logits)
        if logits == "none":
            return output, seen
        with torch.no_grad(), evaluating(self.model):
            return replace(output, logits=self.model.head(output.hidden, None)), seen

    def hand_out(self, takers: Mapping[str, Callable[[Tensor], None]]) -> None:
        """Hand each named activation to its taker."""
        _, seen = self._pass
        if not takers.keys() <= seen.keys():
            return super().hand_out(takers)
        for name, take in takers.items():
            take(seen[name])


def recorded_once(prepared: Prepared) -> RecordedOnce:
    """Return the same inputs, whose pass is recorded once."""
    return RecordedOnce(**{field.name: getattr(prepared, field.name) for field in fields(prepared)})
