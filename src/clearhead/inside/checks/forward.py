"""Rows of the equality suite that run the model in two ways: kernels, batches, padding, caches, copies.

Shapes: B rows, T tokens.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from clearhead.api import Model, load
from clearhead.config import ModelConfig
from clearhead.fast.prepare import prepared
from clearhead.inside.checks.inputs import Inputs
from clearhead.inside.checks.row import Comparison, gap
from clearhead.model.cache import Cache, WindowCache
from clearhead.model.fixed_cache import FixedCache
from clearhead.model.transformer import Transformer, attending

CacheForm = Callable[[Transformer, int, int], Cache]  # a model, its rows and their length
CACHES: dict[str, CacheForm] = {
    "growing": lambda model, rows, length: Cache(),
    "windowed": lambda model, rows, length: WindowCache(),
    "fixed": lambda model, rows, length: FixedCache(
        model.config, rows, length, next(model.parameters()).dtype, next(model.parameters()).device
    ),
}


def forward_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows about one forward pass, and about caches."""
    row, padded = inputs.compare, "real tokens with padding of random content among them"
    causal = inputs.model.main.spec.causal and inputs.sequences and inputs.length > 1
    return [
        row("fused = eager", "the fused attention kernel with the formula spelled out", _fused),
        row("batched = alone", "each row of a batch with the row by itself", _batched),
        row(
            "repeated = once",
            "the same input twice: no dropout, nothing random",
            lambda inputs: gap(inputs.run(), inputs.run()),
        ),
        *(
            row(f"padded = unpadded ({side})", padded, _padded, side, fits=inputs.sequences)
            for side in ("left", "right", "gaps")
        ),
        row("past = whole", "states of the past when the future is another one", _past, fits=causal),
        *(_cache_rows(inputs) if caches(inputs) else ()),
        row(
            "fast copy = model",
            "the copy that generation uses, its projections fused, with the model",
            lambda inputs: gap(inputs.of(prepared(inputs.model)).run(), inputs.run()),
            copies=True,
            fits=inputs.model.config.head == "lm",
        ),
    ]


def caches(inputs: Inputs) -> bool:
    """Return whether the model can go on from a cache."""
    return inputs.kind == "tokens" and inputs.model.config.head == "lm"


def cache_forms(model: Transformer) -> dict[str, CacheForm]:
    """Return the forms that differ for this model: without a window, the windowed one is the growing one."""
    windows = any(window is not None for window in model.main.spec.windows)
    return {name: form for name, form in CACHES.items() if windows or name != "windowed"}


def _cache_rows(inputs: Inputs) -> Iterator[Comparison]:
    several = inputs.length > 1
    moved = "rows that changed places in the cache, and went on, with the same rows from the beginning"
    for name, form in cache_forms(inputs.model).items():
        for size, tokens in ((1, "1 token"), (3, "3 tokens")):
            what = f"{tokens} at a time through the cache with one pass over all"
            yield inputs.compare(f"cached = recomputed ({name}, {size})", what, _cached, form, [size])
        yield inputs.compare(
            f"cached = recomputed ({name}, reordered)", moved, _reordered, form, fits=several
        )
    what = "a cache that went back half of the way, and on, with one pass over all"
    yield inputs.compare("cached = recomputed (cropped)", what, _cropped, fits=several)


def _fused(inputs: Inputs) -> float:
    fused = inputs.run()
    with attending(inputs.model, "eager"):
        return gap(fused, inputs.run())


def _batched(inputs: Inputs) -> float:
    together = inputs.run()
    return max(
        gap(together[row : row + 1], inputs.run(rows=slice(row, row + 1))) for row in range(inputs.rows)
    )


def _padded(inputs: Inputs, side: str) -> float:
    given, slots = inputs.padded(side)
    per_token = inputs.model.config.head in ("lm", "mlm", "tagger", "span", "none")
    out = inputs.model(**given).logits
    return gap(out[:, slots] if per_token else out, inputs.run())


def _past(inputs: Inputs) -> float:
    cut = inputs.length // 2
    changed = torch.cat([inputs.main[:, :cut], inputs.other[:, cut:]], dim=1)
    return gap(inputs.output(changed).hidden[:, :cut], inputs.output().hidden[:, :cut])


# Caches -----------------------------------------------------------------------------------------------------


def through(inputs: Inputs, cache: Cache, sizes: list[int]) -> torch.Tensor:
    """Return the logits [B, T, V] of the inputs fed through a cache in pieces of these sizes, in turn."""
    logits, start, sizes_in_turn = [], 0, itertools.cycle(sizes)
    while start < inputs.length:
        stop = start + next(sizes_in_turn)
        logits.append(inputs.model(**inputs.piece(start, stop), cache=cache).logits)
        start = stop
    return torch.cat(logits, dim=1)


def _cached(inputs: Inputs, form: CacheForm, sizes: list[int]) -> float:
    return gap(through(inputs, form(inputs.model, inputs.rows, inputs.length), sizes), inputs.run())


def _reordered(inputs: Inputs, form: CacheForm) -> float:
    cut = inputs.length // 2
    rows = torch.tensor([inputs.rows - 1, *range(inputs.rows - 1)], device=inputs.device)
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


# Copies on disk ---------------------------------------------------------------------------------------------


def disk_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows about what the model is built of, here and after it was written and read back."""
    of_copy: list[float] = []
    return [
        inputs.compare(
            "saved = loaded", "a copy written to disk and read back", _saved, of_copy, copies=True
        ),
        inputs.compare(
            "built = config",
            "how many weights, shared or not, are unlike what the config says, here and in that copy",
            lambda inputs: _strangers(inputs.model, inputs.model.config) + sum(of_copy),
            tolerance=0.0,
        ),
    ]


def _saved(inputs: Inputs, of_copy: list[float]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        Model(inputs.model).save(Path(folder) / "copy")
        copy = load(Path(folder) / "copy").model.to(inputs.device)
        of_copy.append(_strangers(copy, copy.config))
        return gap(inputs.of(copy).run(), inputs.run())


def _strangers(model: Transformer, config: ModelConfig) -> float:
    """Return how many names, shapes, shared weights and plans of a model are not what its config says."""
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
    shared, stated = [group for group in groups.values() if len(group) > 1], shared_weights(config)
    wrong |= {name for group in shared if group not in stated for name in group}
    wrong |= {name for group in stated if group not in shared for name in group}
    stacks = ((model.encoder, config.encoder), (model.decoder, config.decoder))
    return float(len(wrong) + sum(stack is not None and stack.spec != plan for stack, plan in stacks))


def shared_weights(config: ModelConfig) -> list[set[str]]:
    """Return the names of weights that the config makes one tensor: token tables and the output layer."""
    encoder, decoder = "encoder.embedding.front.tokens.weight", "decoder.embedding.front.tokens.weight"
    main = encoder if config.decoder is None else decoder
    tied = {main, "head.out.weight"} if config.tie_embeddings and config.head in ("lm", "mlm") else set()
    both = config.encoder is not None and config.decoder is not None and config.encoder.input == "tokens"
    if both and config.share_embeddings:
        tied |= {encoder, decoder}
    return [tied] if tied else []
