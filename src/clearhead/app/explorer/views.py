"""What the page shows, as plain JSON: a view is a function of a run and its parameters; `table` has its path.

Served live, recorded into a file and shown in a notebook, they are the same bodies. Patterns and logits are
packed as they are, the small pictures of heads a byte a value.

Shapes: L layers, H heads, T queries, S keys, V choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from clearhead.app.explorer import atlas
from clearhead.app.explorer.described import TASKS
from clearhead.app.explorer.pack import packed_bytes, packed_floats, packed_numbers, packed_picture
from clearhead.app.explorer.stops import head_stops
from clearhead.core.transformer import evaluating
from clearhead.errors import InputError, refuse
from clearhead.hub.tokens.text import decoded, stages
from clearhead.inside.attention import LayerMap, maps_of, mean_entropy
from clearhead.inside.attribution import looks, paths
from clearhead.inside.inputs import (
    CachedPass,
    Choices,
    InputTokens,
    cached_pass,
    choices_of,
    find_column,
    prepare,
)
from clearhead.inside.lens import best_choices, contributions, lens
from clearhead.inside.memories import ReadCorpus
from clearhead.inside.patch import OnRows
from clearhead.inside.results import plain
from clearhead.inside.trace import Trace, TraceStep, trace
from clearhead.run.api import Model

CELLS = 512 * 512  # of one head's pattern while the page is live
THUMBNAIL = 32  # cells a side
CORNER = 64  # values a side that are shown of a step's result
LISTED = 200  # choices that are sent with their names
EDGES = 300  # of a path, the largest ones


def tokens_view(m: Model, tokens: InputTokens | None) -> dict[str, Any] | None:
    """Return labels, ids and the place of each token in the text, which is decoded where nobody typed it."""
    if tokens is None:
        return None
    text = tokens.text or ("" if m.tokenizer is None else decoded(m.tokenizer, tokens.ids))
    return {
        **{name: list(getattr(tokens, name)) for name in ("labels", "ids", "special")},
        "spans": [list(span) for span in tokens.spans],
        "text": text,
    }


def _alone(name: str) -> PageRun:
    raise InputError(f'there is no second run "{name[:20]}" beside this one')


@dataclass(frozen=True)
class PageRun:
    """One input of one model; its methods are the views.

    `given`, `target` and `pair` are what `prepare` took; an answer that the model wrote is kept as ids.
    """

    m: Model
    prepared: CachedPass
    given: Any
    target: Sequence[int] | None = None
    pair: str | None = None
    cells: int = CELLS
    roles: Callable[[], dict[str, str]] = field(default=dict, compare=False)
    corpus: Callable[[], ReadCorpus | None] | None = field(default=None, compare=False)  # see `worth.fired`
    number: int = 0  # of the model, where the page has two
    others: Callable[[str], PageRun] = field(default=_alone, compare=False)
    progress: OnRows = field(default=lambda done, total: None, compare=False)
    wrote: bool = False  # the answer that the decoder has written is the model's own

    def scores(self, column: int) -> Tensor:
        """Return the scores of the head at one column [V], in float32 on the CPU."""
        output, _ = self.prepared.record(logits="none")
        with torch.no_grad(), evaluating(self.prepared.model):
            return self.choices.column_scores(output.hidden, column)[0].float().cpu()

    @cached_property
    def choices(self) -> Choices:
        """Return what the head chooses among."""
        return choices_of(self.prepared)

    def about(self, name: str) -> dict[str, Any]:
        """Return the run itself under this name: its tokens, and where the model is asked."""
        task = TASKS.get(self.m.config.head or "", "embed")
        ids, mask = self.prepared.tokens.ids, self.m.special.get("mask")
        words = [place for place, mark in enumerate(self.prepared.tokens.special) if not mark]
        column = len(self.prepared.tokens) - 1 if task == "next" else 0
        if self.wrote and column:
            column -= 1  # behind the last token the answer has ended
        if task in ("fill", "tag"):
            column = ids.index(mask) if task == "fill" and mask in ids else words[0] if words else 0
        pixels = self.prepared.main[0].float().cpu().numpy() if self.m.config.input == "patches" else None
        sound = self.prepared.source if self.m.config.input == "frames" else None
        return {
            **{"run": name, "model": self.number, "task": task},
            "tokens": tokens_view(self.m, self.prepared.tokens),
            "source": tokens_view(self.m, self.prepared.source_tokens),
            "picture": None if pixels is None else packed_picture(pixels),
            # M T, the lowest band last, as pictures of sound are drawn
            "sound": None if sound is None else packed_picture(sound[0].T.flip(0).float().cpu().numpy()),
            "pair": self.pair,
            "position": column,
            "columns": list(self.choices.columns) if task != "embed" else [],
        }

    def stages(self) -> dict[str, Any]:
        """Return the four stages of tokenization, of the text that was typed and of the answer's."""
        text, tokenizer = self.given, self.m.tokenizer
        if not isinstance(text, str) or tokenizer is None or self.m.config.input != "tokens":
            return {"text": None, "target": None}
        written = self.prepared.tokens.text if self.prepared.source is not None else ""
        return {
            "text": stages(tokenizer, text, self.pair).to_dict(),
            "target": self._target_stages(tokenizer, written) if written else None,
        }

    def _target_stages(self, tokenizer: Tokenizer, written: str) -> dict[str, Any]:
        """Return the stages of what the decoder has written, the last one as the decoder reads it."""
        start = self.m.start_ids
        body = stages(tokenizer, written).to_dict()
        nowhere = {"start": 0, "end": 0, "type": 0, "text": None}
        begins = [{"token": tokenizer.id_to_token(token), "id": token, **nowhere} for token in start]
        written_tokens = [token for token in body["final"] if token["id"] not in (*start, *self.m.stops)]
        return body | {"final": begins + written_tokens}

    def trace(self) -> dict[str, Any]:
        """Return every step of the forward pass, without the values."""
        seen = self._traced
        return {
            "legend": seen.legend,
            "totals": seen.figures(),
            "difference": seen.difference,
            "steps": [step.to_dict() for step in seen.steps],
        }

    def step(self, name: str) -> dict[str, Any]:
        """Return the numbers of one step: the corner of its last two axes, at index 0 of all others."""
        return self.steps([name])[name]

    def steps(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the numbers of several steps."""
        return {name: _numbers_of(self._traced[name]) for name in names}

    @cached_property
    def _traced(self) -> Trace:
        """Trace a pass; of each step's result keep what the page shows."""
        return trace(self.m, self.prepared, keep_values=_corner)

    def attention(self, kind: str, layer: int, head: int | None = None) -> dict[str, Any]:
        """Return the patterns of one attention [H, T, S], or of one of its heads [1, T, S]."""
        (found,) = maps_of(self.prepared, [kind], [layer], self.cells).of(kind)
        if head is None:
            return self._heads(found)
        last = len(found.pattern) - 1
        refuse(not 0 <= head <= last, f"there is no head {head} in layer {layer}: heads are 0 to {last}")
        own, bits = slice(head, head + 1), found.recorded_entropies
        one = replace(
            found, pattern=found.pattern[own], recorded_entropies=None if bits is None else bits[own]
        )
        return self._heads(one, head)

    def attentions(self, kind: str) -> list[dict[str, Any]]:
        """Return the patterns of all layers of a kind, from one pass."""
        return [self._heads(each) for each in maps_of(self.prepared, [kind], None, self.cells).of(kind)]

    def _heads(self, found: LayerMap, first: int = 0) -> dict[str, Any]:
        """Return the heads of a map, whose numbers begin with `first`."""
        roles = self.roles()
        named = {f"{found.name}.{first + place}": one for place, one in enumerate(found.heads())}
        return {
            **{"kind": found.kind, "layer": found.layer},
            "heads": [
                {"name": name, "role": roles.get(name), "entropy": one.entropy} for name, one in named.items()
            ],
            "rows": list(found.queries.labels),
            "columns": list(found.keys.labels),
            "aggregated": found.aggregated,
            "pattern": packed_floats(found.pattern),
        }

    def thumbnails(self, kind: str) -> dict[str, Any]:
        """Return every head of one kind, small: [L, H, h, w].

        A thumbnail's brightest cell is its largest weight.
        """
        layers = maps_of(self.prepared, [kind], None, THUMBNAIL * THUMBNAIL).of(kind)
        most = max(len(each.pattern) for each in layers)
        table = np.zeros((len(layers), most, *layers[0].pattern.shape[-2:]), dtype=np.float32)
        for place, each in zip(table, layers):
            place[: len(each.pattern)] = each.pattern
        return {
            "kind": kind,
            "layers": [each.layer for each in layers],
            "heads": [len(each.pattern) for each in layers],
            "entropy": [mean_entropy(each.entropies()).tolist() for each in layers],
            "aggregated": layers[0].aggregated,
            "pattern": packed_bytes(table),
        }

    def rollout(self, kind: str) -> dict[str, Any]:
        """Return what each place is made of after the last layer, if attention alone moved information."""
        rolled = maps_of(self.prepared, [kind], None, self.cells).rollout(kind)
        labels = list(rolled.tokens.labels)
        return {"rows": labels, "columns": labels, "pattern": packed_floats(rolled.last)}

    def lens(self, first: int | None = None, count: int | None = None) -> dict[str, Any]:
        """Return what the model would say if it stopped after each layer, at each position or at some."""
        columns = None if first is None else self._some(first, count or 1)
        seen = lens(self.m, self.prepared, top=5, columns=columns)
        named = (name for layer in seen.top_names for cell in layer for name in cell)
        listed = dict(zip(seen.top.flatten().tolist(), named))
        return {
            "layers": list(seen.layers),
            "columns": list(seen.columns),
            "ids": packed_numbers(seen.top.numpy()),  # [L + 1, C, 5]
            "p": packed_floats(seen.top_probabilities.numpy()),
            "names": {str(choice): name for choice, name in sorted(listed.items())},
            "entropy": packed_floats(seen.entropy.numpy()),
            "final": packed_floats(seen.chosen_probabilities.numpy()),
            "chosen": list(seen.chosen_names),
        }

    def said(self, columns: list[int]) -> dict[str, Any]:
        """Return what the model would say after each layer at some columns, by name: [L + 1, C]."""
        choices, best = best_choices(self.m, self.prepared, columns)
        return {"columns": columns, "says": [[choices.name(one) for one in row] for row in best.tolist()]}

    def _some(self, first: int, count: int) -> range:
        """Return so many columns from the first on, as far as there are any."""
        return range(find_column(first, self.choices.columns), min(first + count, len(self.choices.columns)))

    def next(self, position: int) -> dict[str, Any]:
        """Return all scores at one position, with the names of the largest."""
        column = find_column(position, self.choices.columns)
        scores = self.scores(column)
        best = scores.topk(min(LISTED, len(scores))).indices.tolist()
        ids, writes = self.prepared.tokens.ids, self.m.config.head == "lm"
        actual = ids[column + 1] if writes and column + 1 < len(ids) else None
        return {
            "position": column,
            "label": self.choices.columns[column],
            "kind": self.choices.kind,
            "logits": packed_floats(scores.numpy()),
            "top": best,
            "labels": [self.choices.name(choice) for choice in best],
            "actual": actual,
            "actual_label": None if actual is None else self.choices.name(actual),
        }

    def ablate(
        self,
        heads: list[str],
        layers: list[str],
        feedforwards: list[str],
        how: str,
        position: int,
        second: PageRun | None = None,
    ) -> dict[str, Any]:
        """Return the scores at one position with parts of the model off, beside those of the whole model."""
        return atlas.ablated(self, heads, layers, feedforwards, how, position, second)

    def contributions(self, position: int, token: int | None, against: int | None) -> dict[str, Any]:
        """Return what each head, feed-forward and embedding adds to one choice's logit."""
        return contributions(self.m, self.prepared, token, position, against=against).to_dict()

    def paths(self, position: int, token: int | None, against: int | None) -> dict[str, Any]:
        """Return what heads carried to one choice's logit, by source token: the largest edges, and sums."""
        found = paths(self.m, self.prepared, token, position, against=against)
        return {
            **{
                name: plain(getattr(found, name)) for name in ("column", "choice", "against", "rows", "terms")
            },
            "edges": [plain(edge) for edge in found.strongest(EDGES)],
            "sources": found.sources.tolist(),
            "memory": None if found.memory is None else found.memory.tolist(),
            **{name: getattr(found, name) for name in ("rest", "total", "logit")},
        }

    def looks(self, head: str, reader: int, source: int) -> dict[str, Any]:
        """Return what made a head look from one token at another."""
        return {"edges": plain(looks(self.m, self.prepared, head, reader, source))}

    def stops(self, head: str, reader: int) -> dict[str, Any]:
        """Return one head at one reader, stop by stop."""
        return self.all_stops([head], reader)[0]

    def all_stops(self, heads: Sequence[str], reader: int) -> list[dict[str, Any]]:
        """Return several heads at one reader."""
        return head_stops(self.prepared, heads, reader)

    def extended(self, token: int) -> PageRun:
        """Return the run with one token more."""
        refuse(self.m.config.head != "lm", "only a model that writes can go on: this one reads")
        ids = [*self.prepared.tokens.ids, token]
        given, target = (ids, None) if self.prepared.source is None else (self.given, ids)
        kept = {name: getattr(self, name) for name in ("cells", "roles", "corpus", "number", "others")}
        return replace(begin(self.m, given, target, self.pair), **kept)


def begin(m: Model, given: Any, target: Any = None, pair: str | None = None) -> PageRun:
    """Start a run; an answer that the model writes by itself is written once."""
    embeds = TASKS.get(m.config.head or "") is None  # its second text is read by itself
    prepared = cached_pass(prepare(m, given, target, None if embeds else pair))
    written = list(prepared.tokens.ids) if prepared.source is not None else None
    return PageRun(m, prepared, given, written, pair, wrote=written is not None and target is None)


def _corner(x: Tensor) -> Tensor:
    """Return the corner of the last two axes, at index 0 of all others."""
    shown = min(x.ndim, 2)
    return x[(0,) * (x.ndim - shown) + (slice(CORNER),) * shown].clone()


def _numbers_of(step: TraceStep) -> dict[str, Any]:
    """Return a step with the numbers that were kept of it."""
    assert step.value is not None
    return {
        **step.to_dict(),
        "values": packed_floats(step.value.numpy()),
        "cut": step.value.numel() < math.prod(step.shape),
        "axes": step.symbols.split()[-2:],
    }
