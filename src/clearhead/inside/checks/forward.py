"""Rows of the equality suite that run the model in two ways: kernels, batches, padding, caches, copies,
pruned heads, the lens, devices and the compiler.

Shapes: B rows, T tokens.
"""

import copy
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from clearhead.core.cache import Cache
from clearhead.core.config import ModelConfig
from clearhead.core.taps import record
from clearhead.core.transformer import Transformer, attending
from clearhead.inside.checks.rows import TOLERANCE, Comparison, Inputs, gap
from clearhead.inside.lens import stopped_at
from clearhead.inside.names import AttentionHead, attentions, states
from clearhead.inside.parts.ablate import ablating
from clearhead.inside.parts.prune import prune, units
from clearhead.run.api import Model, load
from clearhead.run.kernels.fixed_cache import FixedCache
from clearhead.run.kernels.prepare import prepared
from clearhead.variants.caches import WindowCache

DEVICE_TOLERANCE = 1e-4  # of float32: sums are taken in another order there
CacheForm = Callable[[], Cache]


def forward_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows about one forward pass, about caches, and about copies in memory and on disk."""
    row, padded = inputs.compare, "real tokens with padding of random content among them"
    several, of_copy = inputs.length > 1, list[float]()
    causal = inputs.model.main.spec.causal and inputs.sequences and several
    forms = cache_forms(inputs) if inputs.caches else {}
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
        *(one for name, form in forms.items() for one in _cache_rows(inputs, name, form)),
        row(
            "cached = recomputed (cropped)",
            "a cache that went back half of the way, and on, with one pass over all",
            _cropped,
            fits=inputs.caches and several and all(kind.chooses for kind in inputs.model.main.spec.kinds),
        ),
        row(
            "fast copy = model",
            "the copy that generation uses, its projections fused, with the model",
            lambda inputs: gap(inputs.of(prepared(inputs.model)).run(), inputs.run()),
            copies=True,
            fits=inputs.model.config.head == "lm",
        ),
        row("saved = loaded", "a copy written to disk and read back", _saved, of_copy, copies=True),
        row(
            "built = config",
            "how many weights, shared or not, are unlike what the config says, here and in that copy",
            lambda inputs: _strangers(inputs.model) + sum(of_copy),
            tolerance=0.0,
        ),
    ]


def cache_forms(inputs: Inputs) -> dict[str, CacheForm]:
    """Return the forms that differ for this model: without a window, the windowed one is the growing one."""
    spec = inputs.model.main.spec
    windowed, whole = any(kind.reach is not None for kind in spec.kinds), min(spec.capacities) == 1
    sizes = (inputs.model.config, inputs.rows, inputs.length, inputs.dtype, inputs.device)
    return {
        "growing": Cache,
        **({"windowed": WindowCache} if windowed else {}),
        **({"fixed": lambda: FixedCache(*sizes)} if whole else {}),
    }


def _cache_rows(inputs: Inputs, name: str, form: CacheForm) -> list[Comparison]:
    row, whole = inputs.compare, "at a time through the cache with one pass over all"
    return [
        row(f"cached = recomputed ({name}, 1)", f"1 token {whole}", _cached, form, [1]),
        row(f"cached = recomputed ({name}, 3)", f"3 tokens {whole}", _cached, form, [3]),
        row(
            f"cached = recomputed ({name}, reordered)",
            "rows that changed places in the cache, and went on, with the same rows from the beginning",
            _reordered,
            form,
            fits=inputs.length > 1,
        ),
    ]


def _fused(inputs: Inputs) -> float:
    fused = inputs.run()
    with attending(inputs.model, "eager"):
        return gap(fused, inputs.run())


def _batched(inputs: Inputs) -> float:
    together = inputs.run()
    alone = [{name: x[row : row + 1] for name, x in inputs.given.items()} for row in range(inputs.rows)]
    return max(gap(together[row : row + 1], inputs.model(**given).logits) for row, given in enumerate(alone))


def _padded(inputs: Inputs, side: str) -> float:
    given, slots = inputs.padded(side)
    out = inputs.model(**given).logits
    return gap(out[:, slots] if out.ndim == 3 else out, inputs.run())


def _past(inputs: Inputs) -> float:
    cut = inputs.length // 2
    changed = torch.cat([inputs.main[:, :cut], inputs.other[:, cut:]], dim=1)
    whole, other = (inputs.model(**{**inputs.given, "ids": ids}).hidden for ids in (inputs.main, changed))
    return gap(other[:, :cut], whole[:, :cut])


# Caches -----------------------------------------------------------------------------------------------------


def through(inputs: Inputs, cache: Cache, sizes: list[int]) -> torch.Tensor:
    """Return the logits [B, T, V] of the inputs fed through a cache in pieces of these sizes, in turn."""
    ends = itertools.accumulate(itertools.cycle(sizes))
    stops = itertools.takewhile(lambda stop: stop < inputs.length, ends)
    pieces = [inputs.piece(*limits) for limits in itertools.pairwise([0, *stops, inputs.length])]
    return torch.cat([inputs.model(**piece, cache=cache).logits for piece in pieces], dim=1)


def _cached(inputs: Inputs, form: CacheForm, sizes: list[int]) -> float:
    return gap(through(inputs, form(), sizes), inputs.run())


def _reordered(inputs: Inputs, form: CacheForm) -> float:
    cut = inputs.length // 2
    rows = torch.tensor([inputs.rows - 1, *range(inputs.rows - 1)], device=inputs.device)
    cache = form()
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


def _saved(inputs: Inputs, of_copy: list[float]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        Model(inputs.model).save(Path(folder) / "copy")
        loaded = load(Path(folder) / "copy").model.to(inputs.device)
        of_copy.append(_strangers(loaded))
        return gap(inputs.of(loaded).run(), inputs.run())


def _strangers(model: Transformer) -> float:
    """Return how many names, shapes, shared weights and plans of a model are not what its config says."""
    config = model.config
    with torch.device("meta"):
        right = Transformer(config)
    weights, wanted = (dict(some.named_parameters(remove_duplicate=False)) for some in (model, right))
    shapes = [{(name, weight.shape) for name, weight in some.items()} for some in (weights, wanted)]
    wrong = {name for name, _ in shapes[0] ^ shapes[1]}
    groups = [{name for name, weight in weights.items() if weight is one} for one in set(weights.values())]
    shared, stated = [group for group in groups if len(group) > 1], shared_weights(config)
    wrong.update(*(group for group in shared if group not in stated))
    wrong.update(*(group for group in stated if group not in shared))
    stacks = ((model.encoder, config.encoder), (model.decoder, config.decoder))
    return float(len(wrong) + sum(stack is not None and stack.spec != plan for stack, plan in stacks))


def shared_weights(config: ModelConfig) -> list[set[str]]:
    """Return the names of weights that the config makes one tensor: token tables and the output layer."""
    encoder, decoder = "encoder.embedding.front.tokens.weight", "decoder.embedding.front.tokens.weight"
    main = encoder if config.decoder is None else decoder
    tied = {main, "head.out.weight"} if config.tie_embeddings and config.head in ("lm", "mlm") else set()
    if config.share_embeddings and [spec.input for spec in config.stacks] == ["tokens", "tokens"]:
        tied |= {encoder, decoder}
    return [tied] if tied else []


# Pruned heads, the lens, the machine ------------------------------------------------------------------------


def inside_rows(inputs: Inputs, compile: bool) -> list[Comparison]:
    """Return the rows about pruned heads, the lens, a device that is not the CPU, and the compiler."""
    heads = _prunable(inputs)
    return [
        inputs.compare(
            "pruned = masked",
            f"a copy without heads {', '.join(map(str, heads))} with the model in which they give zeros",
            _pruned,
            heads,
            copies=True,
            fits=bool(heads),
        ),
        inputs.compare(
            "lens at the last layer = logits",
            "the logit lens after the last layer with what the model says",
            _lens,
            fits=inputs.model.config.head != "none",
        ),
        inputs.compare(
            "device = CPU",
            f"logits on {inputs.device} with those on the CPU",
            lambda inputs: gap(inputs.run(), inputs.of(copy.deepcopy(inputs.model).to("cpu")).run()),
            tolerance=max(TOLERANCE[inputs.dtype], DEVICE_TOLERANCE),
            copies=True,
            fits=inputs.device.type != "cpu",
        ),
        inputs.compare(
            "compiled = not",
            "torch.compile's model with the model",
            lambda inputs: gap(inputs.run(), inputs.run(torch.compile(inputs.model))),
            fits=compile,
        ),
    ]


def _prunable(inputs: Inputs) -> list[AttentionHead]:
    """Return some heads that can be pruned together while every layer keeps one."""
    config = inputs.model.config
    if config.qk_norm == "full":
        return []
    for unit in units(config):
        taken = Counter((head.kind, head.layer) for head in unit)
        if all(taken[kind, layer] < count for kind, layer, count in attentions(config)):
            return list(unit)
    return []


def _pruned(inputs: Inputs, heads: list[AttentionHead]) -> float:
    smaller = inputs.of(prune(inputs.model, heads).model)
    with ablating(inputs.model, heads=heads):
        return gap(smaller.run(), inputs.run())


def _lens(inputs: Inputs) -> float:
    last = states(inputs.model.main.spec)[-1]
    with record(inputs.model, last) as seen:
        logits = inputs.run()
    return gap(stopped_at(inputs.model, seen[last]), logits)
