"""Interventions: run a model with some of its activations replaced. Its weights do not change.

    with ablating(m, heads=["3.2", "encoder.0.5"]):       # whatever runs in here runs without them
        m.generate("Once upon")
    with replacing(m.model, [Site("blocks.2.attention.z", position=4, head=1)], clean):
        m.generate("Once upon")
    patched_scores(prepared, clean, [[site], [other]])    # a row for each intervention, in batched passes

    vector = steering_vector(m, "I love this", "I hate this", layer=2)
    with steering(m, vector, layer=2, strength=4):        # the difference of two texts, added to the stream
        m.generate("The film was", 20)

A `Site` is where: an activation by its name, perhaps some tokens and one head of it. `Values` are what: by
name, [1, ...] as the activation is, or with one token that is put at every token; no values at all are zeros.

Shapes: B rows of a batch, T tokens, H heads, D model, E head width, N choices.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.masks import tokens_from
from clearhead.core.stack import Inputs, Stack, StackCall
from clearhead.core.taps import tap_for
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.inside import names
from clearhead.inside.inputs import (
    AnyModel,
    Given,
    Prepared,
    as_model,
    choices_of,
    find_column,
    prepare,
    recorded,
)
from clearhead.inside.names import Heads, Layers
from clearhead.variants.contexts import edit, evaluating

TOKENS_AT_ONCE = 8192  # of all rows together: what one pass of patched rows may hold
RESUMED_AT_ONCE = 1536  # where rows resume: fewer, so that they begin at like layers
Values = Mapping[str, Tensor]
OnRows = Callable[[int, int], None]  # rows that are done, of how many


@dataclass(frozen=True)
class Site:
    """Where something is put: an activation by its name, perhaps some tokens and one head of it."""

    tap: str
    position: int | tuple[int, ...] | None = None  # of the run that is changed; None: every token
    head: int | None = None  # of a tap "z"; None: every head
    source: int | tuple[int, ...] | None = None  # the tokens of the values; None: the same


def replacing(
    model: Transformer, sites: Iterable[Site], values: Values | None = None
) -> AbstractContextManager[None]:
    """Replace activations in every row of what runs within a `with` block; without values, by zeros."""
    return edit(model, _changes([(slice(None), site) for site in sites], values or {}))


def _changes(
    sites: Sequence[tuple[int | slice, Site]], values: Values
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return what `edit` takes, for sites of some rows."""
    by_tap: dict[str, list[tuple[int | slice, Site]]] = {}
    for row, site in sites:
        refuse(
            values and site.tap not in values,
            f"the values hold nothing of {site.tap}: take those that mean_activations makes of this model",
        )
        by_tap.setdefault(site.tap, []).append((row, site))
    return {tap: partial(_put, value=values.get(tap), sites=some) for tap, some in by_tap.items()}


def _put(x: Tensor, value: Tensor | None, sites: Sequence[tuple[int | slice, Site]]) -> Tensor:
    """Return x [B, T, D], or [B, H, T, E], with a value [1, ...] at each row's sites; None: zeros."""
    x = x.clone()
    value = None if value is None else value.to(x)
    for row, site in sites:
        head = () if x.ndim == 3 else (slice(None) if site.head is None else site.head,)
        source = site.position if site.source is None else site.source
        x[(row, *head, _index(site.position))] = 0 if value is None else value[(0, *head, _index(source))]
    return x


def _index(tokens: int | tuple[int, ...] | None) -> Any:
    """Return what a tensor is indexed by."""
    return slice(None) if tokens is None else list(tokens) if isinstance(tokens, tuple) else tokens


def patched_scores(
    prepared: Prepared,
    values: Values,
    rows: Sequence[Sequence[Site]],
    column: int = -1,
    on_progress: OnRows = lambda done, total: None,
    figure: Callable[[Tensor], Tensor] = lambda scores: scores,
    ids: Tensor | None = None,
) -> Tensor:
    """Run an input once for each row of sites with the values there; return one column's scores [B, N].

    `column` is as in `Choices`; `on_progress` is told after each batch how many rows are done; `figure`
    makes what is returned of each batch's scores; `ids` [B, ...] are what each row reads, None: the same.
    """
    choices, length = choices_of(prepared), len(prepared.tokens) + len(prepared.source_tokens or ())
    column = find_column(column, choices.columns)
    resumed = Resumed.of(prepared) if ids is None else None
    at_once, order, scores = TOKENS_AT_ONCE, list(range(len(rows))), []
    if resumed is not None:  # rows that begin at like layers go together
        at_once, first = min(TOKENS_AT_ONCE, RESUMED_AT_ONCE), [resumed.first(sites) for sites in rows]
        order.sort(key=first.__getitem__)
    count = max(1, at_once // length)
    for start in range(0, len(rows), count):
        batch = [rows[place] for place in order[start : start + count]]
        changes = _changes([(row, site) for row, sites in enumerate(batch) for site in sites], values)
        repeated = {name: x.expand(len(batch), *x.shape[1:]) for name, x in prepared.arguments.items()}
        if ids is not None:
            repeated["ids"] = some_ids = ids[start : start + count]
            if prepared.vectors is not None:  # images stay where their tokens do
                kept = (some_ids == prepared.main)[..., None]
                front = prepared.model.main.embedding.front(some_ids)
                repeated["vectors"] = torch.where(kept, prepared.vectors, front)
        with torch.no_grad(), evaluating(prepared.model), edit(prepared.model, changes):
            hidden = None if resumed is None else resumed.hidden(batch)
            if hidden is None:
                hidden = prepared.model(**repeated, logits="none").hidden
            some = choices.column_scores(hidden, column).float()
        scores.append(figure(some))
        on_progress(start + len(batch), len(rows))
    return torch.cat(scores).cpu()[torch.tensor(order).argsort()]


def removed_scores(
    prepared: Prepared,
    rows: Mapping[str, Sequence[Site]],
    column: int = -1,
    on_progress: OnRows = lambda done, total: None,
    known: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return one column's scores of the model, and without each named part, set to zero: [1 + parts, N].

    `known` keeps rows between calls of the same input and column: what is in it is not computed again.
    """
    rows, known = {"whole": (), **rows}, {} if known is None else known
    missing = [name for name in rows if name not in known]
    if missing:
        scores = patched_scores(prepared, {}, [rows[name] for name in missing], column, on_progress)
        known.update(zip(missing, scores))
    return torch.stack([known[name] for name in rows])


@dataclass(frozen=True)
class Resumed:
    """A pass of one stack whose streams are kept: rows that change a late layer run from there on."""

    prepared: Prepared
    streams: Mapping[str, Tensor]  # before each layer: [1, T, D]

    @classmethod
    def of(cls, prepared: Prepared) -> "Resumed | None":
        """Keep a pass; None where one layer does not follow from the stream before it alone."""
        stack = prepared.model.main
        routed = any(block.router is not None for block in stack.layers())
        if len(prepared.m.config.stacks) > 1 or routed or stack.spec.carries or type(stack) is not Stack:
            return None
        # A pass of its own: one that is cached may be from before a `with` block around this.
        return cls(prepared, Prepared.record(prepared, "blocks.*.resid_pre", logits="none")[1])

    def first(self, sites: Sequence[Site]) -> int:
        """Return the first layer that a row changes, the last layer where it changes none; -1: before all."""
        numbers = [_LAYER.match(site.tap) for site in sites]
        last = self.prepared.model.main.spec.n_layers - 1
        return min((int(found[1]) if found else -1 for found in numbers), default=last)

    def hidden(self, rows: Sequence[Sequence[Site]]) -> Tensor | None:
        """Return the hidden states of rows of sites, within an `edit`; None where the embedding changes."""
        stack, main = self.prepared.model.main, self.prepared.main
        first = min(map(self.first, rows))
        if first < 0:
            return None
        x = self.streams[f"blocks.{first}.resid_pre"]
        x = x.expand(len(rows), *x.shape[1:])
        inputs = Inputs(main.expand(len(rows), *main.shape[1:]), types=self.prepared.types)
        tap, axes = tap_for(self.prepared.model), self.prepared.axes
        axes = None if axes is None else axes.expand(len(rows), -1, -1)
        tokens = tokens_from(len(rows), x.shape[1], x.device, axes=axes)
        blocks = stack.layers()
        call = StackCall(inputs, tokens, None, x.dtype, tap)
        for layer, inputs_of_layer in list(enumerate(stack.layer_inputs(blocks, call, None)))[first:]:
            x = blocks[layer](x, inputs_of_layer, tap.part(f"blocks.{layer}"))
        return x if stack.norm is None else tap("hidden", stack.norm(x))


_LAYER = re.compile(r"blocks\.(\d+)\.(?!resid_pre)")


# Parts of a model -------------------------------------------------------------------------------------------


def find_parts(
    config: ModelConfig, heads: Heads = (), layers: Layers = (), feedforwards: Layers = ()
) -> tuple[tuple[str, ...], list[Site]]:
    """Return the names of some parts, and where what they give is found.

    A head gives its mixed values `z`, a feed-forward its output `out`, a layer the outputs of its sublayers.
    """
    own = names.as_heads(config, heads)
    blocks, inner = names.find_blocks(config, layers), names.find_blocks(config, feedforwards)
    named = (
        *(f"head {head}" for head in own),
        *(f"layer {block.replace('blocks.', '')}" for block in blocks),
        *(f"feed-forward {block.replace('blocks.', '')}" for block in inner),
    )
    taps = [f"{block}.feedforward.out" for block in dict.fromkeys((*blocks, *inner))]
    for block in blocks:
        crosses = config.main.cross and not block.startswith("encoder.")
        taps += [f"{block}.attention.out", *([f"{block}.cross.out"] if crosses else [])]
    return named, [*(Site(f"{head.part}.z", head=head.number) for head in own), *map(Site, taps)]


def single_parts(config: ModelConfig) -> dict[str, dict[str, str]]:
    """Return every part that can be off by itself, by name, as an argument of `find_parts`."""
    layers = list(names.layer_names(config))
    return {
        **{str(head): {"heads": str(head)} for head in names.heads_in(names.attentions(config))},
        **{f"feedforward:{layer}": {"feedforwards": layer} for layer in layers},
        **{f"layer:{layer}": {"layers": layer} for layer in layers},
    }


def ablating(
    model: AnyModel,
    heads: Heads = (),
    layers: Layers = (),
    feedforwards: Layers = (),
    means: Values | None = None,
) -> AbstractContextManager[None]:
    """Run the model without some of its parts for the length of a `with` block.

    Args:
        model: what `load` gave, or the model itself.
        heads: by their names, such as "3.2", "encoder.0.5", "cross.1.2".
        layers: by their numbers, or names such as "encoder.3".
        feedforwards: those of these layers.
        means: what takes the place of what they give, from `mean_activations`; None: zeros.
    """
    model = as_model(model).model
    return replacing(model, find_parts(model.config, heads, layers, feedforwards)[1], means)


def means_of(model: Transformer, passes: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of what every head and sublayer gives over real tokens: [1, H, 1, E], [1, 1, D].

    `passes` are the arguments of some forward passes.
    """
    config, sums, counts = model.config, dict[str, Tensor](), Counter[str]()
    taps = ["*.z", "*.attention.out", "*.feedforward.out", *(["*.cross.out"] if config.main.cross else [])]
    for arguments in passes:
        for name, x in recorded(model, taps, **arguments).items():
            kind, mask = ("encoder", "source_mask") if name.startswith("encoder.") else ("self", "mask")
            real = arguments.get(mask)
            if real is not None and names.spec_of(config, kind).input == "frames":
                real = real[:, :: config.conv_stride]
            rows = x.transpose(1, 2) if name.endswith(".z") else x  # B T ...
            rows = rows.flatten(0, 1) if real is None else rows[real]
            sums[name] = sums.get(name, 0) + rows.double().sum(0).cpu()
            counts[name] += len(rows)
    means = {name: (total / counts[name]).float() for name, total in sums.items()}  # H E, or D
    return {name: mean[None, ..., None, :] for name, mean in means.items()}


# Steering ---------------------------------------------------------------------------------------------------


def steering_vector(m: AnyModel, toward: Given, away: Given, layer: int) -> Tensor:
    """Return the stream after a layer at the last token of one text, less that of another: [D]."""
    tap = _stream_after(as_model(m).model, layer)
    last = [prepare(m, text).record(tap, logits="none")[1][tap][0, -1] for text in (toward, away)]
    return last[0] - last[1]


def steering(m: AnyModel, vector: Tensor, layer: int, strength: float = 1.0) -> AbstractContextManager[None]:
    """Add `strength` times a vector [D] to the stream after a layer, at every token, in a `with` block."""
    model = as_model(m).model
    return edit(model, {_stream_after(model, layer): lambda x: x + strength * vector.to(x)})


def _stream_after(model: Transformer, layer: int) -> str:
    """Return the name of the stream after a layer of the stack that feeds the head."""
    taps = names.states(model.main.spec)[1:]
    refuse(not 0 <= layer < len(taps), f"there is no layer {layer}: layers are 0 to {len(taps) - 1}")
    return taps[layer]
