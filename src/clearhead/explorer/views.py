"""What the page shows, as plain JSON: each view is one function of a run, and each has a path.

Served live, recorded into a file and shown in a notebook, they are the same bodies. Patterns are packed a byte a value,
logits as they are.

Shapes: L layers, H heads, T queries, S keys, V choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from clearhead.api import Model
from clearhead.errors import InputError, nearest
from clearhead.explorer.pack import finite, packed_bytes, packed_floats, packed_numbers, packed_picture
from clearhead.inside.attention import LayerMap, maps_of
from clearhead.inside.choices import Choices, choices_of, find_column
from clearhead.inside.contributions import contributions
from clearhead.inside.inputs import InputTokens, Prepared, prepare
from clearhead.inside.lens import lens
from clearhead.inside.names import attentions
from clearhead.inside.parts.effect import effect
from clearhead.inside.trace import trace
from clearhead.inside.trace.steps import TraceStep
from clearhead.tokens.stages import stages

TASKS = {"lm": "next", "mlm": "fill", "classifier": "classify", "tagger": "tag", "span": "span"}
CELLS = 512 * 512  # of one head's pattern while the page is live
THUMBNAIL = 32  # cells a side
CORNER = 64  # values a side that are shown of a step's result
LISTED = 200  # choices that are sent with their names


def model_view(m: Model, name: str) -> dict[str, Any]:
    """What the model is."""
    config = m.config
    main = m.model.main.spec
    encoder = m.model.encoder.spec if m.model.encoder is not None and m.model.decoder is not None else None
    return {
        "name": name,
        "family": config.family,
        "head": config.head,
        "task": TASKS.get(config.head or "", "embed"),
        "input": (encoder or main).input,
        "parameters": sum(parameter.numel() for parameter in m.model.parameters()),
        "layers": main.n_layers,
        "encoder_layers": encoder.n_layers if encoder is not None else 0,
        "d_model": config.d_model,
        "n_heads": main.n_heads,
        "n_kv_heads": main.n_kv_heads,
        "vocab_size": config.vocab_size,
        "max_length": m.max_length,
        "image_size": list(config.image_size) if config.image_size else None,
        "n_channels": config.n_channels,
        "labels": list(m.labels),
        "tokenizer": m.tokenizer is not None,
        "mask": m.tokenizer.id_to_token(m.special["mask"])
        if m.tokenizer is not None and "mask" in m.special
        else None,
        "attentions": [
            {"kind": kind, "layer": layer, "heads": heads} for kind, layer, heads in attentions(config)
        ],
    }


def tokens_view(m: Model, tokens: InputTokens | None) -> dict[str, Any] | None:
    """Labels, ids and where in the text each token comes from; tokens that were not typed are read as text."""
    if tokens is None:
        return None
    text = tokens.text or (
        m.tokenizer.decode(list(tokens.ids)) if m.tokenizer is not None and tokens.ids else ""
    )
    spans = [list(span) for span in tokens.spans]
    return {
        "labels": list(tokens.labels),
        "ids": list(tokens.ids),
        "spans": spans,
        "special": list(tokens.special),
        "text": text,
    }


@dataclass(frozen=True)
class Run:
    """One input of one model. `given`, `target` and `pair` are what `prepare` took; an answer that the model wrote is kept as ids."""

    m: Model
    prepared: Prepared
    given: Any
    target: Sequence[int] | None = None
    pair: str | None = None
    cells: int = CELLS
    roles: Callable[[], dict[str, str]] = field(default=dict, compare=False)

    @cached_property
    def scores(self) -> Tensor:
        """[columns, V] what the head says, in float32 on the CPU."""
        with torch.no_grad():
            return self.choices.scores(self.prepared.run().required_logits)[0].float().cpu()

    @cached_property
    def choices(self) -> Choices:
        """What the head chooses among."""
        return choices_of(self.prepared)

    def about(self) -> dict[str, Any]:
        """The run itself: its tokens, and where the model is asked."""
        task = TASKS.get(self.m.config.head or "", "embed")
        column = 0
        if task in ("next", "fill", "tag"):
            mask = self.m.special.get("mask")
            ids = self.prepared.tokens.ids
            column = ids.index(mask) if task == "fill" and mask in ids else len(self.prepared.tokens) - 1
        columns = list(self.choices.columns) if task != "embed" else []
        pixels = self.prepared.main[0].float().cpu().numpy() if self.m.config.input == "patches" else None
        return {
            "task": task,
            "tokens": tokens_view(self.m, self.prepared.tokens),
            "source": tokens_view(self.m, self.prepared.source_tokens),
            "picture": None if pixels is None else packed_picture(pixels),
            "pair": self.pair,
            "position": column,
            "columns": columns,
        }

    def stages(self) -> dict[str, Any]:
        """The four stages of tokenization, of the text that was typed and of the answer's."""
        text, tokenizer = self.given, self.m.tokenizer
        if not isinstance(text, str) or tokenizer is None or self.m.config.input == "patches":
            return {"text": None, "target": None}
        written = self.prepared.tokens.text if self.prepared.source is not None else ""
        return {
            "text": stages(tokenizer, text, self.pair).to_dict(),
            "target": self._target_stages(tokenizer, written) if written else None,
        }

    def _target_stages(self, tokenizer: Tokenizer, written: str) -> dict[str, Any]:
        """The stages of what the decoder has written, its last one token by token as the decoder reads them: see `prepare`."""
        start = self.m.start_ids
        body = stages(tokenizer, written).to_dict()
        begins = [
            {
                "token": tokenizer.id_to_token(token),
                "id": token,
                "start": 0,
                "end": 0,
                "type": 0,
                "text": None,
            }
            for token in start
        ]
        return body | {
            "final": begins + [token for token in body["final"] if token["id"] not in (*start, *self.m.stops)]
        }

    def trace(self) -> dict[str, Any]:
        """Every step of the forward pass, without the values."""
        body = trace(self.m, self.given, self.target, self.pair, keep_values=()).to_dict()
        return {name: body[name] for name in ("legend", "totals", "difference", "steps")}

    def step(self, name: str) -> dict[str, Any]:
        """The numbers of one step: the corner of its last two axes, of the first of all others."""
        return self.steps([name])[name]

    def steps(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The same for several steps, of one pass."""
        made = trace(self.m, self.given, self.target, self.pair, keep_values=names)
        return {name: _numbers_of(made[name]) for name in names}

    def attention(self, kind: str, layer: int) -> dict[str, Any]:
        """The patterns of one attention [H, T, S]."""
        return self._heads(self._maps(kind, [layer], self.cells)[0])

    def attentions(self, kind: str) -> dict[int, dict[str, Any]]:
        """The same for every layer of a kind, of one pass."""
        return {each.layer: self._heads(each) for each in self._maps(kind, None, self.cells)}

    def _heads(self, found: LayerMap) -> dict[str, Any]:
        bits = [head.entropy for head in found.heads()]
        names = [f"{found.name}.{number}" for number in range(len(found.pattern))]
        roles = self.roles()
        heads = [
            {"name": name, "role": roles.get(name), "entropy": entropy} for name, entropy in zip(names, bits)
        ]
        return {
            "kind": found.kind,
            "layer": found.layer,
            "heads": heads,
            "rows": list(found.queries.labels),
            "columns": list(found.keys.labels),
            "aggregated": found.aggregated,
            "pattern": packed_bytes(found.pattern),
        }

    def thumbnails(self, kind: str) -> dict[str, Any]:
        """Every head of one kind, small: [L, H, h, w]. A thumbnail's brightest cell is its largest weight."""
        layers = self._maps(kind, None, THUMBNAIL * THUMBNAIL)
        most, (height, width) = max(len(each.pattern) for each in layers), layers[0].pattern.shape[-2:]
        table = np.zeros((len(layers), most, height, width), dtype=np.float32)
        for place, each in zip(table, layers):
            place[: len(each.pattern)] = each.pattern
        return {
            "kind": kind,
            "layers": [each.layer for each in layers],
            "heads": [len(each.pattern) for each in layers],
            "entropy": [[float(head.entropy) for head in each.heads()] for each in layers],
            "aggregated": layers[0].aggregated,
            "pattern": packed_bytes(table),
        }

    def rollout(self, kind: str) -> dict[str, Any]:
        """What each place is made of after the last layer, if attention were all that moves anything."""
        rolled = maps_of(self.prepared, [kind], None, self.cells).rollout(kind)
        return {
            "rows": list(rolled.tokens.labels),
            "columns": list(rolled.tokens.labels),
            "pattern": packed_bytes(rolled.last),
        }

    def _maps(self, kind: str, layers: list[int] | None, cells: int) -> list[LayerMap]:
        return maps_of(self.prepared, [kind], layers, cells).of(kind)

    def lens(self) -> dict[str, Any]:
        """What the model would say if it stopped after each layer, at each position."""
        seen = lens(self.m, self.given, self.target, self.pair, top=5)
        listed = dict(
            zip(
                seen.top.flatten().tolist(),
                (name for layer in seen.top_names for cell in layer for name in cell),
            )
        )
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

    def next(self, position: int) -> dict[str, Any]:
        """The scores at one position, all of them, with the names of the largest."""
        column = find_column(position, self.choices.columns)
        scores = self.scores[column]
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
        heads: Sequence[str],
        layers: Sequence[str],
        feedforwards: Sequence[str],
        how: str,
        position: int,
    ) -> dict[str, Any]:
        """The scores at one position with parts of the model off, beside those with all of it."""
        seen = effect(
            self.m,
            self.given,
            heads=list(heads),
            layers=list(layers),
            feedforwards=list(feedforwards),
            how=how,  # type: ignore[arg-type]
            target=self.target,
            pair=self.pair,
            position=position,
        )
        both = seen.before.softmax(-1), seen.after.softmax(-1)
        best = sorted(
            {int(i) for p in both for i in p.topk(min(12, len(p))).indices}, key=lambda i: -float(both[0][i])
        )
        rows = [
            {"id": i, "label": self.choices.name(i), "before": float(both[0][i]), "after": float(both[1][i])}
            for i in best
        ]
        return {"ablated": list(seen.ablated), "how": how, "kl": seen.kl, "position": position, "rows": rows}

    def contributions(self, position: int, token: int | None) -> dict[str, Any]:
        """What each head, feed-forward and embedding adds to one choice's logit."""
        return contributions(self.m, self.given, token, position, self.target, pair=self.pair).to_dict()

    def extended(self, token: int) -> Run:
        """The run with one token more."""
        if self.m.config.head != "lm":
            raise InputError("only a model that writes can go on: this one reads")
        ids = [*self.prepared.tokens.ids, token]
        both = self.prepared.source is not None
        return begin(
            self.m, self.given if both else ids, ids if both else None, self.pair, self.cells, self.roles
        )


def begin(
    m: Model,
    given: Any,
    target: Any = None,
    pair: str | None = None,
    cells: int = CELLS,
    roles: Callable[[], dict[str, str]] = dict,
) -> Run:
    """A run; an answer that the model writes by itself is written once."""
    prepared = prepare(m, given, target, pair)
    written = list(prepared.tokens.ids) if prepared.source is not None else None
    return Run(m, prepared, given, written, pair, cells, roles)


def view(run: Run, path: str) -> Any:
    """A view of a run by its path: "trace", "attention/self/3", "next?position=4". What a number is not finite becomes null."""
    name, _, query = path.partition("?")
    options = dict(part.split("=", 1) for part in query.split("&") if "=" in part)
    parts = name.split("/")
    known: dict[str, Callable[[], Any]] = {
        "stages": run.stages,
        "trace": run.trace,
        "step": lambda: run.step("/".join(parts[1:])),
        "attention": lambda: run.attention(parts[1], _whole(parts[2])),
        "thumbnails": lambda: run.thumbnails(parts[1]),
        "rollout": lambda: run.rollout(parts[1]),
        "lens": run.lens,
        "next": lambda: run.next(_whole(options.get("position", "-1"))),
        "contributions": lambda: run.contributions(
            _whole(options.get("position", "-1")), _whole(options["token"]) if "token" in options else None
        ),
    }
    if parts[0] not in known or len(parts) < {"attention": 3, "thumbnails": 2, "rollout": 2, "step": 2}.get(
        parts[0], 1
    ):
        raise InputError(
            f'there is no view "{path[:80]}"{nearest(parts[0], known)}: views are {", ".join(known)}'
        )
    return finite(known[parts[0]]())


def _numbers_of(step: TraceStep) -> dict[str, Any]:
    """A step with its numbers: the corner of the last two axes, of the first of all others."""
    assert step.value is not None
    value = step.value
    while value.ndim > 2:
        value = value[0]
    corner = value[..., :CORNER] if value.ndim < 2 else value[:CORNER, :CORNER]
    axes = step.symbols.split()[-2:]
    return {
        **step.to_dict(),
        "values": packed_floats(corner.numpy()),
        "cut": corner.numel() < step.value.numel(),
        "axes": axes,
    }


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f'"{text[:40]}" is no whole number') from None
