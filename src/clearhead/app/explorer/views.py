"""What the page shows of a run, as plain JSON; `clearhead.app.views` has the path of each view.

Served live, recorded into a file and shown in a notebook, they are the same bodies. Patterns and logits are
packed as they are, the small pictures of heads a byte a value.

Shapes: L layers, H heads, T queries, S keys, V choices.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.errors import ClearheadError, InputError, refuse
from clearhead.hub.preprocessor import in_colours
from clearhead.hub.tokens.text import decoded, stages
from clearhead.inside.attention import LayerMap, attention, mean_entropy
from clearhead.inside.attribution import looks, paths, reads
from clearhead.inside.features.dictionary import Dictionary
from clearhead.inside.held import refuse_bent
from clearhead.inside.inputs import (
    CachedPass,
    Choices,
    InputTokens,
    Prepared,
    cached_pass,
    choices_of,
    find_column,
    prepare,
)
from clearhead.inside.interventions import single_parts
from clearhead.inside.lens import best_choices, contributions, followed, lens
from clearhead.inside.memories import ReadCorpus
from clearhead.inside.names import AttentionHead, find_heads, kinds_of, unpatterned
from clearhead.inside.results import plain
from clearhead.inside.trace import Trace, TraceStep, trace
from clearhead.inside.trace_words import filled_words
from clearhead.learn.tasks.images import ImagePrompt, shown_picture
from clearhead.run.api import Model
from clearhead.run.quant.layers import quantized_parts
from clearhead.variants.contexts import Recording, evaluating, tap_names
from clearhead.variants.kinds import denoises

CELLS = 512 * 512  # of one head's pattern while the page is live
THUMBNAIL = 32  # cells a side
CORNER = 64  # values a side that are shown of a step's result
LISTED = 200  # choices that are sent with their names
EDGES = 300  # of a path, the largest ones
KEPT_SCORES = 2**25  # numbers that a run keeps of the scores without each part
READ_PARTS = 7  # that are listed of what a feed-forward reads
HIDDEN = -1e30  # scores below this are masked
MIX = "Each value counts as much as its share; what is shown is the length of what each token gives."
GRAPH_PARAMETERS = 500_000_000  # of a model whose graph the page computes: it takes a copy in float64
OnPart = Callable[..., None]  # told (done, total), perhaps with what is there already
TASKS = {"lm": "next", "mlm": "fill", "classifier": "classify", "tagger": "tag", "span": "span"}


# Arrays as the page gets them: base64 within JSON -----------------------------------------------------------


def packed_bytes(values: ArrayLike, low: float = 0.0, high: float = 1.0) -> dict[str, Any]:
    """Pack values between `low` and `high`, a byte each: off by 1/510 of that range at most."""
    array = np.nan_to_num(np.asarray(values, dtype=np.float32), nan=low)
    levels = np.clip(np.rint((array - low) / (high - low or 1.0) * 255), 0, 255).astype(np.uint8)
    return {**_packed(levels, "u8"), "low": low, "high": high}


def packed_floats(values: ArrayLike) -> dict[str, Any]:
    """Pack values as float32; what is not finite becomes the largest number there is, so that order stays."""
    return _packed(np.nan_to_num(np.asarray(values, dtype=np.float32)), "f32")


def packed_picture(pixels: ArrayLike) -> dict[str, Any]:
    """Pack pixels [channels, height, width] as a picture between 0 and 1, whatever range the model reads."""
    array = np.asarray(pixels, dtype=np.float32)
    low, high = float(array.min()), float(array.max())
    return packed_bytes(array if low >= 0 and high <= 1 else (array - low) / (high - low or 1.0))


def packed_numbers(values: ArrayLike) -> dict[str, Any]:
    """Pack whole numbers, four bytes each."""
    return _packed(np.asarray(values, dtype=np.int32), "i32")


def _packed(array: NDArray[Any], kind: str) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
    return {"shape": list(array.shape), "type": kind, "data": data}


def short(value: float) -> float:
    """Return a float32 with the digits that it has: in a file the others would be most of the bytes."""
    return float(f"{value:.9g}")


def finite(value: Any) -> Any:
    """Return plain JSON: numbers that are not finite become null, in lists and objects too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


# A model and a run ------------------------------------------------------------------------------------------


def task_of(config: ModelConfig) -> str:
    """Return what the page asks a model: a diffusion model, as a masked one, what stands at a place."""
    return "fill" if denoises(config) else TASKS.get(config.head or "", "embed")


def model_view(m: Model, name: str, example: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the model is, and what the page begins with."""
    config, main = m.config, m.config.main
    encoder = config.encoder if config.decoder is not None else None
    return {
        **{"name": name, "ready": True, "failed": False, "says": "", "example": example},
        "family": config.family,
        "head": config.head,
        "task": task_of(config),
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
        "image_token": image_token(m),
        "labels": list(m.labels),
        "tokenizer": m.tokenizer is not None,
        "unknown": getattr(m.tokenizer.model, "unk_token", None) if m.tokenizer else None,
        "mask": m.tokenizer.id_to_token(m.special["mask"]) if m.tokenizer and "mask" in m.special else None,
        "attentions": [
            {
                "kind": attention.kind,
                "layer": attention.layer,
                "heads": attention.n_heads,
                "pattern": kind.patterned,
                "removable": kind.has_heads,
            }
            for attention, kind in kinds_of(config).items()
        ],
        "unpatterned": unpatterned(config),
        "graph": _takes_graph(m),
        "denoises": denoises(config),
    }


def _takes_graph(m: Model) -> bool:
    """Return whether `graph` takes the model, and a copy of it in float64 is not too large for a page."""
    small = sum(weight.numel() for weight in m.model.parameters()) <= GRAPH_PARAMETERS
    if not small or m.config.head not in TASKS or m.config.head_layer or quantized_parts(m.model):
        return False
    try:
        refuse_bent(m.model)
    except ClearheadError:
        return False
    return True


def image_token(m: Model) -> str | None:
    """Return the token that stands for an image in a prompt; None for a model that reads text alone."""
    if m.image_encoder is None or m.tokenizer is None:
        return None
    return m.tokenizer.id_to_token(m.image_encoder.config.token_id)


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
    raise InputError(f'there is no second run "{name[:20]}" next to this one')


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
    corpus: Callable[[], ReadCorpus | None] | None = field(
        default=None, compare=False
    )  # see `interventions.fired`
    features: Callable[[], tuple[Dictionary, ...]] = field(default=tuple, compare=False)  # of feed-forwards
    removed: dict[int, dict[str, Tensor]] = field(default_factory=dict, compare=False)  # see `removed_at`
    number: int = 0  # of the model, where the page has two
    others: Callable[[str], PageRun] = field(default=_alone, compare=False)
    progress: OnPart = field(default=lambda done, total, part=None: None, compare=False)
    wrote: bool = False  # the answer that the decoder has written is the model's own

    def scores(self, column: int) -> Tensor:
        """Return the scores of the head at one column [V], in float32 on the CPU."""
        output, _ = self.prepared.record(logits="none")
        with torch.no_grad(), evaluating(self.prepared.model):
            return self.choices.column_scores(output.hidden, column)[0].float().cpu()

    def removed_at(self, column: int) -> dict[str, Tensor] | None:
        """Return what keeps the scores without parts at one column, the latest; None where they are many."""
        if self.choices.count * len(single_parts(self.m.config)) > KEPT_SCORES:
            return None
        if column not in self.removed:
            self.removed.clear()
        return self.removed.setdefault(column, {})

    @cached_property
    def choices(self) -> Choices:
        """Return what the head chooses among."""
        return choices_of(self.prepared)

    def about(self, name: str) -> dict[str, Any]:
        """Return the run itself under this name: its tokens, and where the model is asked."""
        task = task_of(self.m.config)
        ids, mask = self.prepared.tokens.ids, self.m.special.get("mask")
        words = [place for place, mark in enumerate(self.prepared.tokens.special) if not mark]
        column = len(self.prepared.tokens) - 1 if task == "next" else 0
        if self.wrote and column:
            column -= 1  # after the last token the answer has ended
        if task in ("fill", "tag"):
            column = ids.index(mask) if task == "fill" and mask in ids else words[0] if words else 0
        pixels = self._pixels()
        sound = self.prepared.source if self.m.config.input == "frames" else None
        return {
            **{"run": name, "model": self.number, "task": task},
            "tokens": tokens_view(self.m, self.prepared.tokens),
            "source": tokens_view(self.m, self.prepared.source_tokens),
            "picture": None if pixels is None else packed_picture(pixels.numpy()),
            # M T, the lowest band last, as pictures of sound are drawn
            "sound": None if sound is None else packed_picture(sound[0].T.flip(0).float().cpu().numpy()),
            "pair": self.pair,
            "position": column,
            "columns": list(self.choices.columns) if task != "embed" else [],
        }

    def _pixels(self) -> Tensor | None:
        """Return the image that the model reads, alone or in its prompt; None where there is not one."""
        if self.m.config.input == "patches":
            pixels = self.prepared.main[0]
        elif isinstance(self.given, ImagePrompt) and len(self.given.images) == 1:
            pixels = shown_picture(self.m, self.given.images[0])
        else:
            return None
        return in_colours(pixels.float().cpu(), self.m.images)

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
        (heads,) = attention(self.m, self.prepared, kinds=[kind], layers=[layer], budget=self.cells).of(kind)
        if head is None:
            return self._heads(heads)
        last = len(heads.pattern) - 1
        refuse(not 0 <= head <= last, f"there is no head {head} in layer {layer}: heads are 0 to {last}")
        own, bits = slice(head, head + 1), heads.recorded_entropies
        one = replace(
            heads, pattern=heads.pattern[own], recorded_entropies=None if bits is None else bits[own]
        )
        return self._heads(one, head)

    def attentions(self, kind: str) -> list[dict[str, Any]]:
        """Return the patterns of all layers of a kind, from one pass."""
        maps = attention(self.m, self.prepared, kinds=[kind], budget=self.cells)
        return [self._heads(each) for each in maps.of(kind)]

    def _heads(self, layer: LayerMap, first: int = 0) -> dict[str, Any]:
        """Return the heads of a map, whose numbers begin with `first`."""
        roles = self.roles()
        named = {f"{layer.name}.{first + place}": head for place, head in enumerate(layer.heads())}
        return {
            **{"kind": layer.kind, "layer": layer.layer},
            "heads": [
                {"name": name, "role": roles.get(name), "entropy": head.entropy}
                for name, head in named.items()
            ],
            "rows": list(layer.queries.labels),
            "columns": list(layer.keys.labels),
            "aggregated": layer.aggregated,
            "pattern": packed_floats(layer.pattern),
        }

    def thumbnails(self, kind: str) -> dict[str, Any]:
        """Return every head of one kind, small: [L, H, h, w].

        A thumbnail's brightest cell is its largest weight.
        """
        layers = attention(self.m, self.prepared, kinds=[kind], budget=THUMBNAIL * THUMBNAIL).of(kind)
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
        rolled = attention(self.m, self.prepared, kinds=[kind], budget=self.cells).rollout(kind)
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
        return {
            "columns": columns,
            "says": [[choices.name(choice) for choice in row] for row in best.tolist()],
        }

    def followed(self, token: int, first: int | None = None, count: int | None = None) -> dict[str, Any]:
        """Return the probability of one choice after each layer, at each column or at some."""
        columns = None if first is None else self._some(first, count or 1)
        p = followed(self.m, self.prepared, token, columns=columns)
        return {"token": token, "label": self.choices.name(token), "p": packed_floats(p.numpy())}

    def _some(self, first: int, count: int) -> range:
        """Return so many columns from the first on, as far as there are any."""
        return range(find_column(first, self.choices.columns), min(first + count, len(self.choices.columns)))

    def next(self, position: int = -1) -> dict[str, Any]:
        """Return all scores at one position, with the names of the largest."""
        column = find_column(position, self.choices.columns)
        scores = self.scores(column)
        best = scores.topk(min(LISTED, len(scores))).indices.tolist()
        ids, writes = self.prepared.tokens.ids, task_of(self.m.config) == "next"
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

    def contributions(
        self, position: int = -1, token: int | None = None, against: int | None = None
    ) -> dict[str, Any]:
        """Return what each head, feed-forward and embedding adds to one choice's logit."""
        return contributions(self.m, self.prepared, token, position, against=against).to_dict()

    def paths(
        self, position: int = -1, token: int | None = None, against: int | None = None
    ) -> dict[str, Any]:
        """Return what heads carried to one choice's logit, by source token: the largest edges, and sums."""
        carried = paths(self.m, self.prepared, token, position, against=against)
        return {
            **{
                name: plain(getattr(carried, name))
                for name in ("column", "choice", "against", "centred", "probability", "rows", "terms")
            },
            "edges": [plain(edge) for edge in carried.strongest(EDGES)],
            "sources": carried.sources.tolist(),
            "memory": None if carried.memory is None else carried.memory.tolist(),
            **{name: getattr(carried, name) for name in ("rest", "total", "logit")},
        }

    def looks(self, head: str, reader: int, source: int) -> dict[str, Any]:
        """Return what made a head look from one token at another."""
        return looks(self.m, self.prepared, head, reader, source, features=self.features()).to_dict()

    def reads(self, layer: int, reader: int) -> dict[str, Any]:
        """Return which earlier parts made what a feed-forward reads at one token, each with its share."""
        return reads(self.m, self.prepared, layer, reader, count=READ_PARTS).to_dict()

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


# One head at one token, in five stops: q·k, scale, mask and position, softmax, the mix of values ------------


def head_stops(prepared: Prepared, heads: Sequence[str], reader: int) -> list[dict[str, Any]]:
    """Return what each head computes for one reader in a recorded pass: [S] numbers a stop; masked: null."""
    config = prepared.m.config
    known_heads, known = find_heads(config, heads), tap_names(config)
    seen_kinds = {attention.part for attention, kind in kinds_of(config).items() if kind.patterned}
    for head in known_heads:
        refuse(head.part not in seen_kinds, f"head {head} has no attention pattern to look into")
    taps = {f"{head.part}.{tap}" for head in known_heads for tap in ("q", "k", "v", "scores", "pattern")}
    _, seen = prepared.record(*sorted(taps & set(known)), logits="none")
    return [_stops_of(prepared, seen, head, reader) for head in known_heads]


def _stops_of(prepared: Prepared, seen: Recording, head: AttentionHead, reader: int) -> dict[str, Any]:
    """Return one head's stops from what the pass has recorded."""
    model = prepared.model
    stack = model.encoder if head.kind == "encoder" else model.main
    assert stack is not None
    block = list(stack.layers())[head.layer]
    attention: Any = block.cross if head.kind == "cross" else block.attention
    rows = prepared.tokens_of("encoder." if head.kind == "encoder" else "").labels
    columns = prepared.tokens_of("" if head.kind == "self" else "encoder.").labels
    place = find_column(reader, rows)

    def of_group(tap: str, heads: int) -> Tensor:
        """Return the keys or values that the head reads, [S, E]: those of its group."""
        x = seen[f"{head.part}.{tap}"][0].float()
        return x[len(x) * head.number // heads]

    shares = seen[f"{head.part}.pattern"][0].float()
    numbers: dict[str, tuple[str, Tensor]] = {}  # by stop: the step it is of, [S] numbers
    if f"{head.part}.scores" in seen:
        masked = seen[f"{head.part}.scores"][0, head.number, place].float()
        query = seen[f"{head.part}.q"][0, head.number, place].float()
        dots = of_group("k", len(shares)) @ query
        scaled, cap = dots * attention.scale, attention.softcap
        numbers["q·k"] = "scores", dots
        numbers["scale"] = (
            ("scaled", scaled) if cap is None else ("softcapped", cap * torch.tanh(scaled / cap))
        )
        numbers["mask"] = "masked", masked
    numbers["softmax"] = "pattern", shares[head.number, place]
    stops = []
    for stop, (step, values) in numbers.items():
        words = filled_words(model.config, f"{head.part}.{step}", values)
        shown = [None if value <= HIDDEN else short(value) for value in values.tolist()]
        stops.append({"stop": stop, "formula": words.formula, "why": words.why, "values": shown})
    mix = shares[head.number, place] * of_group("v", len(shares)).norm(dim=-1)
    stops.append(
        {"stop": "mix", "formula": "share × |v|", "why": MIX, "values": [short(x) for x in mix.tolist()]}
    )
    return {
        "head": str(head),
        "reader": place,
        "label": rows[place],
        "columns": list(columns),
        "stops": stops,
    }
