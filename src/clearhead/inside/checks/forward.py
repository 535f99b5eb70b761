"""Rows of the equality suite that run the model in two ways: kernels, batches, padding, caches, copies.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

from clearhead.api import Model, load
from clearhead.config import ModelConfig
from clearhead.fast.prepare import prepared
from clearhead.inside.checks.inputs import Inputs
from clearhead.inside.checks.row import Row, gap
from clearhead.model.cache import Cache
from clearhead.model.fixed_cache import FixedCache
from clearhead.model.transformer import Transformer, attending
from clearhead.model.window_cache import WindowCache

CacheForm = Callable[[Transformer, int, int], Cache]  # a model, its rows and their length
CACHES: dict[str, CacheForm] = {
    "growing": lambda model, rows, length: Cache(),
    "windowed": lambda model, rows, length: WindowCache(),
    "fixed": lambda model, rows, length: FixedCache(
        model.config, rows, length, next(model.parameters()).dtype, next(model.parameters()).device
    ),
}


def forward_rows(inputs: Inputs, tolerance: float) -> Iterator[Row]:
    """Every row that fits the model."""
    model = inputs.model
    per_token = model.config.head in ("lm", "mlm", "tagger", "span", "none")
    yield Row(
        "fused = eager",
        "the fused attention kernel with the formula spelled out",
        partial(_fused, inputs),
        tolerance,
    )
    yield Row(
        "batched = alone", "each row of a batch with the row by itself", partial(_batched, inputs), tolerance
    )
    yield Row(
        "repeated = once",
        "the same input twice: no dropout, nothing random",
        lambda: gap(inputs.run(), inputs.run()),
        tolerance,
    )
    if inputs.sequences:
        for side in ("left", "right", "gaps"):
            what = "real tokens with padding of random content among them"
            yield Row(
                f"padded = unpadded ({side})", what, partial(_padded, inputs, side, per_token), tolerance
            )
    if model.main.spec.causal and inputs.sequences and inputs.length > 1:
        yield Row(
            "past = whole",
            "states of the past when the future is another one",
            partial(_past, inputs),
            tolerance,
        )
    if caches(inputs):
        yield from _cache_rows(inputs, tolerance)
    if model.config.head == "lm":
        what = "the copy that generation uses, its projections fused, with the model"
        yield Row(
            "fast copy = model",
            what,
            lambda: gap(Inputs(prepared(model), inputs.rows, inputs.length).run(), inputs.run()),
            tolerance,
            copies=True,
        )


def caches(inputs: Inputs) -> bool:
    """Does the model go on from a cache?"""
    return inputs.kind == "tokens" and inputs.model.config.head == "lm"


def cache_forms(model: Transformer) -> dict[str, CacheForm]:
    """The forms that differ for this model: without a window, the windowed one is the growing one."""
    windows = any(window is not None for window in model.main.spec.windows)
    return {name: form for name, form in CACHES.items() if windows or name != "windowed"}


def _cache_rows(inputs: Inputs, tolerance: float) -> Iterator[Row]:
    for name, form in cache_forms(inputs.model).items():
        for chunk in (1, 3):
            what = f"{chunk} token{'s' * (chunk > 1)} at a time through the cache with one pass over all"
            yield Row(
                f"cached = recomputed ({name}, {chunk})",
                what,
                partial(_cached, inputs, form, [chunk]),
                tolerance,
            )
        if inputs.length > 1:
            what = "rows that changed places in the cache, and went on, with the same rows from the beginning"
            yield Row(
                f"cached = recomputed ({name}, reordered)", what, partial(_reordered, inputs, form), tolerance
            )
    if inputs.length > 1:
        what = "a cache that went back half of the way, and on, with one pass over all"
        yield Row("cached = recomputed (cropped)", what, partial(_cropped, inputs), tolerance)


def _fused(inputs: Inputs) -> float:
    fused = inputs.run()
    with attending(inputs.model, "eager"):
        return gap(fused, inputs.run())


def _batched(inputs: Inputs) -> float:
    together = inputs.run()
    return max(
        gap(together[row : row + 1], inputs.run(rows=slice(row, row + 1))) for row in range(inputs.rows)
    )


def _fast_copy(inputs: Inputs) -> float:
    return gap(Inputs(prepared(inputs.model), inputs.rows, inputs.length).run(), inputs.run())


def _padded(inputs: Inputs, side: str, per_token: bool) -> float:
    padded = inputs.padded(side)
    out = inputs.model(**padded.given).logits
    return gap(out[:, padded.slots] if per_token else out, inputs.run())


def _past(inputs: Inputs) -> float:
    cut = inputs.length // 2
    changed = torch.cat([inputs.main[:, :cut], inputs.other[:, cut:]], dim=1)
    return gap(inputs.output(changed).hidden[:, :cut], inputs.output().hidden[:, :cut])


# Caches ---------------------------------------------------------------------------------------------------------------


def through(inputs: Inputs, cache: Cache, sizes: list[int]) -> torch.Tensor:
    """Logits [B, T, V] of the inputs fed through a cache in pieces of these sizes, again and again."""
    said, start, turn = [], 0, 0
    while start < inputs.length:
        stop = start + sizes[turn % len(sizes)]
        said.append(inputs.model(**inputs.piece(start, stop), cache=cache).logits)
        start, turn = stop, turn + 1
    return torch.cat(said, dim=1)


def _cached(inputs: Inputs, form: CacheForm, sizes: list[int]) -> float:
    return gap(through(inputs, form(inputs.model, inputs.rows, inputs.length), sizes), inputs.run())


def _reordered(inputs: Inputs, form: CacheForm) -> float:
    cut, rows = (
        inputs.length // 2,
        torch.tensor([inputs.rows - 1, *range(inputs.rows - 1)], device=inputs.device),
    )
    cache = form(inputs.model, inputs.rows, inputs.length)
    inputs.model(**inputs.piece(0, cut), cache=cache)
    cache.reorder(rows)
    rest = {name: value[rows] for name, value in inputs.piece(cut, inputs.length).items()}
    return gap(inputs.model(**rest, cache=cache).logits, inputs.run()[rows, cut:])


def _cropped(inputs: Inputs) -> float:
    cache, cut = Cache(), inputs.length // 2
    inputs.run(cache=cache)
    cache.crop(cut)
    return gap(inputs.model(**inputs.piece(cut, inputs.length), cache=cache).logits, inputs.run()[:, cut:])


# Copies on disk -------------------------------------------------------------------------------------------------------


def disk_rows(inputs: Inputs, tolerance: float) -> Iterator[Row]:
    """Rows about what the model is built of, here and after it was written and read back."""
    seen: list[float] = []

    def saved() -> float:
        with tempfile.TemporaryDirectory() as folder:
            Model(inputs.model).save(Path(folder) / "copy")
            copy = load(Path(folder) / "copy").model.to(inputs.device)
            seen.append(_strangers(copy, copy.config))
            return gap(Inputs(copy, inputs.rows, inputs.length).run(), inputs.run())

    yield Row("saved = loaded", "a copy written to disk and read back", saved, tolerance, copies=True)
    yield Row(
        "built = config",
        "of all weights, and of those that are to be one tensor, how many are not as the config says, here and in that copy",
        lambda: _strangers(inputs.model, inputs.model.config) + sum(seen),
        0.0,
    )


def _strangers(model: Transformer, config: ModelConfig) -> float:
    """How many names, shapes, shared weights and plans of a model are not what its config says."""
    with torch.device("meta"):
        right = Transformer(config)
    shapes = [
        {name: weight.shape for name, weight in some.named_parameters(remove_duplicate=False)}
        for some in (model, right)
    ]
    wrong = {name for name, _ in shapes[0].items() ^ shapes[1].items()}
    groups: dict[int, set[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(weight), set()).add(name)
    wrong |= {name for group in _disagreeing(list(groups.values()), shared_weights(config)) for name in group}
    stacks: list[tuple[nn.Module | None, object]] = [
        (model.encoder, config.encoder),
        (model.decoder, config.decoder),
    ]
    return float(len(wrong) + sum(stack is not None and stack.spec != plan for stack, plan in stacks))


def _disagreeing(found: list[set[str]], said: list[set[str]]) -> list[set[str]]:
    """Sets of more than one name that stand on one side only."""
    return [group for group in found if len(group) > 1 and group not in said] + [
        group for group in said if group not in found
    ]


def shared_weights(config: ModelConfig) -> list[set[str]]:
    """The names of weights that are one tensor, by the config: the stacks' token tables, and the output layer's."""
    encoder, decoder = "encoder.embedding.front.tokens.weight", "decoder.embedding.front.tokens.weight"
    main = encoder if config.decoder is None else decoder
    tied = {main, "head.out.weight"} if config.tie_embeddings and config.head in ("lm", "mlm") else set()
    if (
        config.encoder is not None
        and config.decoder is not None
        and config.encoder.input == "tokens"
        and config.share_embeddings
    ):
        return [{encoder, decoder} | tied]
    return [tied] if tied else []
