"""Rows of the equality suite: before they are run (`Comparison`) and after (`Check`), the random inputs they
run a model on (`Inputs`), and the rows that compute one model in two ways: kernels, batches, padding, caches,
copies, pruned heads, the lens, devices, the compiler; accumulated gradients and resumed runs.

Shapes: B rows, T tokens of the stack that feeds the head, S tokens of the encoder before it, P padding.
"""

import copy
import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.config import ModelConfig
from clearhead.core.dtypes import precise
from clearhead.core.transformer import Output, Transformer
from clearhead.hub.checkpoint import empty_model
from clearhead.inside.interventions import ablating
from clearhead.inside.lens import stopped_at
from clearhead.inside.names import AttentionHead, attentions, states
from clearhead.inside.pruning import prune, units
from clearhead.inside.results import Result
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.losses import batch_loss
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.tasks.table import TASKS
from clearhead.learn.training import optim
from clearhead.learn.training.state import (
    State,
    load_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
    snapshot,
)
from clearhead.run.api import Model, load
from clearhead.run.generate.decode import steps_back
from clearhead.run.kernels.fixed_cache import FixedCache
from clearhead.run.kernels.prepare import prepared
from clearhead.run.quant.layers import quantized_parts
from clearhead.variants.caches import WindowCache
from clearhead.variants.contexts import attending, record
from clearhead.variants.kinds import GlobalKind

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
LARGE = 500_000_000  # parameters above which rows that copy the whole model are left out, unless `large`
PADDING = 3
SLOW = 50_000_000  # parameters
# relu(x) + 0.001: where a query is at the floor, its answer changes a thousand times as much, and
# rounding of 3e-7 becomes 3e-4. Half precision, which has more to round, is left at what it has.
FLOORED, FLOORED_MOST = 30, 5e-2


@dataclass(frozen=True)
class Comparison:
    """A comparison to run: `run` returns the largest difference."""

    name: str
    compared: str  # what with what, in words
    run: Callable[[], float]
    tolerance: float
    copies: bool = False  # does it make a copy of the whole model?
    fits: bool = True  # does it make sense for this model?


@dataclass(frozen=True)
class Check(Result):
    """A comparison that was run, or was skipped."""

    json_names = ("name", "compared", "difference", "tolerance", "seconds", "note", "verdict", "passed")

    name: str
    compared: str  # what with what, in words
    difference: float | None  # the largest, relative to the largest value above 1; None: nothing was compared
    tolerance: float
    seconds: float
    note: str = ""  # why it was left out, or what went wrong
    skipped: bool = False

    @property
    def verdict(self) -> Literal["equal", "differs", "error", "skipped"]:
        """Return "equal" within the tolerance, else "differs", as for NaN; without a difference, why."""
        if self.difference is None:
            return "skipped" if self.skipped else "error"
        return "equal" if self.difference <= self.tolerance else "differs"

    @property
    def passed(self) -> bool:
        """Return whether no fault was found; a row that was skipped found none: see `verdict`."""
        return self.verdict in ("equal", "skipped")


def gap(ours: Tensor, theirs: Tensor, least: float = 1.0) -> float:
    """Return the largest difference, relative to the largest of `theirs` where that is above `least`."""
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = precise(ours.detach()).cpu(), precise(theirs.detach()).cpu()
    return float((ours - theirs).abs().max()) / (max(least, float(theirs.abs().max())) or 1.0)


class Inputs:
    """Seeded inputs: `rows` rows of up to `length` tokens; by default a few, and fewer for a large model."""

    def __init__(
        self, model: Transformer, rows: int | None = None, length: int | None = None, seed: int = 0
    ) -> None:
        config, weight, plan = model.config, next(model.parameters()), model.main.spec
        slow = sum(weight.numel() for weight in model.parameters()) > SLOW
        rows, length = rows or (2 if slow else 3), length or (8 if slow else 12)
        self.model, self.rows, self.kind = model, rows, plan.input
        self.sequences = plan.input in ("tokens", "vectors")  # rows that can be padded
        self.caches = (
            plan.input == "tokens" and config.head == "lm" and plan.causal
        )  # the model can go on from a cache
        self.length = min(length, config.max_positions) if config.bounded else length
        self.device, self.dtype = weight.device, weight.dtype
        generator = torch.Generator().manual_seed(seed)

        def draw(kind: str, vocab: int, size: int) -> Tensor:
            if kind == "tokens":
                return torch.randint(vocab, (rows, size), generator=generator).to(self.device)
            image = (config.n_channels, *config.stacks[0].image_size)
            shape = image if kind == "patches" else (size, config.d_input)
            return torch.randn((rows, *shape), generator=generator).to(self.device, self.dtype)

        # What the model is called with; the others are for padding, and for another future.
        self.main, self.other = (draw(plan.input, plan.vocab_size, self.length) for _ in range(2))
        self.arguments = {"ids": self.main}
        if plan.n_types:
            self.arguments["types"] = draw("tokens", plan.n_types, self.length)
        marking = {kind.tokens for kind in plan.kinds if isinstance(kind, GlobalKind)}
        if marking & {"given", "question"}:  # random ids have no question
            self.arguments["global_mask"] = draw("tokens", 4, self.length) == 0
        self.source_kind = ""
        if model.encoder is not None and model.decoder is not None:
            front, length = model.encoder.spec, max(self.length - 2, 1)
            while front.bounded and front.input != "patches" and front.n_tokens(length) > front.max_positions:
                length //= 2
            self.source_kind = front.input
            self.arguments["source"] = draw(front.input, front.vocab_size, length)
            self.other_source = draw(front.input, front.vocab_size, length)

    def of(self, model: Transformer, fewer: int = 0) -> "Inputs":
        """Return inputs of the same size for another model, with `fewer` rows less."""
        return Inputs(model, self.rows - fewer, self.length)

    def compare(
        self,
        name: str,
        compared: str,
        run: Callable[..., float],
        *arguments: Any,
        tolerance: float | None = None,
        copies: bool = False,
        fits: bool = True,
    ) -> Comparison:
        """Return a row of the suite; `run` takes these inputs and the arguments.

        The usual tolerance is the dtype's; rounding grows in linear attention with relu features.
        """
        allowed = TOLERANCE[self.dtype] if tolerance is None else tolerance
        if any(
            getattr(kind, "features", "") == "relu"
            for stack in self.model.config.stacks
            for kind in stack.kinds
        ):
            allowed = max(allowed, min(FLOORED * allowed, FLOORED_MOST))
        return Comparison(name, compared, partial(run, self, *arguments), allowed, copies, fits)

    def chunk(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return what the model is called with for some tokens, when a cache holds the earlier ones."""
        return {name: x if name == "source" else x[:, start:stop] for name, x in self.arguments.items()}

    def run(self, model: Callable[..., Any] | None = None, **changes: Any) -> Tensor:
        """Run the model, or another form of it, and return its logits."""
        output: Output = (model or self.model)(**{**self.arguments, **changes})
        return output.required_logits

    def padded(self, side: str) -> tuple[dict[str, Tensor], Tensor]:
        """Return what the model is called with when padded, and the positions [T] of the real tokens.

        Padding of random content stands left, right or in between ("gaps"), in the source too.
        """
        arguments = dict(self.arguments)
        arguments["ids"], arguments["mask"], slots = _with_padding(self.main, self.other, side)
        for name in {"types", "global_mask"} & arguments.keys():
            arguments[name], _, _ = _with_padding(arguments[name], arguments[name].flip(1), side)
        if self.source_kind in ("tokens", "vectors"):
            arguments["source"], arguments["source_mask"], _ = _with_padding(
                arguments["source"], self.other_source, side
            )
        return arguments, slots


def _with_padding(x: Tensor, other: Tensor, side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return `x` [B, T, ...] among values of `other` [B, T + P, ...], its mask [B, T + P], its slots [T]."""
    length, count = x.shape[1], torch.arange(x.shape[1], device=x.device)
    gaps = (count * PADDING + length - 1) // length
    slots = {"left": count + PADDING, "right": count, "gaps": count + gaps}[side]
    filled = torch.cat([other] * (1 + PADDING), dim=1)[:, : length + PADDING].clone()
    filled[:, slots] = x
    mask = torch.zeros(filled.shape[:2], dtype=torch.bool, device=x.device)
    mask[:, slots] = True
    return filled, mask, slots


# One pass in two ways ---------------------------------------------------------------------------------------


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
        *(cached for name, form in forms.items() for cached in _cache_rows(inputs, name, form)),
        row(
            "cached = recomputed (cropped)",
            "a cache cropped to half, and continued, with one pass over all",
            _cropped,
            fits=inputs.caches and several and steps_back(inputs.model),
        ),
        row(
            "fast copy = model",
            "the copy that generation uses, its projections fused, with the model",
            fast,
            copies=True,
            fits=inputs.model.config.head == "lm",
        ),
        row("saved = loaded", "a copy written to disk and read back", saved, of_copy, copies=True),
        row(
            "built = config",
            "how many weights, shared or not, are unlike what the config says, in the model and in that copy",
            lambda inputs: _unlike_config(inputs.model) + sum(of_copy),
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
            "rows reordered in the cache, and continued, with the same rows from the beginning",
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
    alone = [{name: x[row : row + 1] for name, x in inputs.arguments.items()} for row in range(inputs.rows)]
    return max(
        gap(together[row : row + 1], inputs.model(**arguments).logits) for row, arguments in enumerate(alone)
    )


def _padded(inputs: Inputs, side: str) -> float:
    arguments, slots = inputs.padded(side)
    out = inputs.model(**arguments).logits
    return gap(out[:, slots] if out.ndim == 3 else out, inputs.run())


def _past(inputs: Inputs) -> float:
    cut = inputs.length // 2
    changed = torch.cat([inputs.main[:, :cut], inputs.other[:, cut:]], dim=1)
    whole, other = (inputs.model(**{**inputs.arguments, "ids": ids}).hidden for ids in (inputs.main, changed))
    return gap(other[:, :cut], whole[:, :cut])


# Caches -----------------------------------------------------------------------------------------------------


def through(inputs: Inputs, cache: Cache, sizes: list[int]) -> torch.Tensor:
    """Return the logits [B, T, V] of the inputs through a cache in chunks of these sizes, repeated."""
    ends = itertools.accumulate(itertools.cycle(sizes))
    stops = itertools.takewhile(lambda stop: stop < inputs.length, ends)
    chunks = [inputs.chunk(*limits) for limits in itertools.pairwise([0, *stops, inputs.length])]
    return torch.cat([inputs.model(**chunk, cache=cache).logits for chunk in chunks], dim=1)


def _cached(inputs: Inputs, form: CacheForm, sizes: list[int]) -> float:
    return gap(through(inputs, form(), sizes), inputs.run())


def _reordered(inputs: Inputs, form: CacheForm) -> float:
    cut = inputs.length // 2
    rows = torch.tensor([inputs.rows - 1, *range(inputs.rows - 1)], device=inputs.device)
    cache = form()
    inputs.model(**inputs.chunk(0, cut), cache=cache)
    cache.reorder(rows)
    rest = {name: value[rows] for name, value in inputs.chunk(cut, inputs.length).items()}
    return gap(inputs.model(**rest, cache=cache).logits, inputs.run()[rows, cut:])


def _cropped(inputs: Inputs) -> float:
    cache, cut = Cache(), inputs.length // 2
    inputs.run(cache=cache)
    cache.crop(cut)
    return gap(inputs.model(**inputs.chunk(cut, inputs.length), cache=cache).logits, inputs.run()[:, cut:])


# Copies ----------------------------------------------------------------------------------------------------


def fast(inputs: Inputs) -> float:
    """Compare the model that generation uses with the model."""
    return gap(inputs.of(prepared(inputs.model)).run(), inputs.run())


def saved(inputs: Inputs, of_copy: list[float]) -> float:
    """Compare a copy on disk with the model; the codes of quantized weights must be the same."""
    with tempfile.TemporaryDirectory() as folder:
        Model(inputs.model).save(Path(folder) / "copy")
        loaded = load(Path(folder) / "copy").model.to(inputs.device)
    of_copy.append(_unlike_config(loaded))
    codes, others = (
        {(name, kind): x for name, part in quantized_parts(model).items() for kind, x in part.named_buffers()}
        for model in (inputs.model, loaded)
    )
    same = codes.keys() == others.keys() and all(torch.equal(x, others[name]) for name, x in codes.items())
    return gap(inputs.of(loaded).run(), inputs.run()) if same else math.inf


def _unlike_config(model: Transformer) -> float:
    """Return how many names, shapes, shared weights and plans of a model are not what its config says."""
    config = model.config
    right = empty_model(config)
    weights, wanted = (dict(some.named_parameters(remove_duplicate=False)) for some in (model, right))
    shapes = [{(name, weight.shape) for name, weight in some.items()} for some in (weights, wanted)]
    wrong = {name for name, _ in shapes[0] ^ shapes[1]}
    groups = [
        {name for name, weight in weights.items() if weight is shared} for shared in set(weights.values())
    ]
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
    if config.qk_norm == "full" or config.value_residual or config.value_embeddings:
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


# Training ---------------------------------------------------------------------------------------------------


PARTS = (slice(0, 1), slice(1, 2), slice(2, 4))  # of a batch of four rows
STEPS, STOP = 3, 2  # of the run that is stopped


def training_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows for a model that has a loss and reads tokens or images."""
    learns = inputs.model.config.head not in ("embedding", "none")
    reads = inputs.kind in ("tokens", "patches") and inputs.source_kind in ("", "tokens")
    row = partial(inputs.compare, copies=True, fits=learns and reads)
    return [
        row(
            "accumulated = whole",
            "gradients of a batch with those of its parts, unequally long, added up",
            _accumulated,
        ),
        row(
            "resumed = uninterrupted",
            f"weights after {STEPS} steps with those of a run stopped after {STOP} and resumed: bit for bit",
            _resumed,
            tolerance=0.0,
        ),
        row(
            "sampled = trained",
            "log-probabilities of tokens as answers are sampled (GRPO) with those in the loss: bit for bit",
            _sampled,
            fits=learns and reads and inputs.model.config.head == "lm" and inputs.model.encoder is None,
            tolerance=0.0 if inputs.device.type == "cpu" else None,
        ),
    ]


def _accumulated(inputs: Inputs) -> float:
    model, batch = copy.deepcopy(inputs.model).requires_grad_(True), some_batch(inputs.model, 0)
    with torch.enable_grad():
        loss, count = batch_loss(model, batch, chunk=0)
        parts = [batch_loss(model, part_of(batch, rows), chunk=2)[0] for rows in PARTS]
        whole, summed = (
            torch.autograd.grad(total / count, tuple(model.parameters()), allow_unused=True)
            for total in (loss, torch.stack(parts).sum())
        )
    largest = max(float(gradient.abs().max()) for gradient in whole if gradient is not None) or 1.0
    return max(
        gap(b / largest, a / largest) for a, b in zip(whole, summed) if a is not None and b is not None
    )


def _sampled(inputs: Inputs) -> float:
    model, batch = copy.deepcopy(inputs.model).requires_grad_(True), some_batch(inputs.model, 0)
    sampled = TASKS["grpo"].outputs_of(model, batch, 0)
    with torch.enable_grad():
        trained = TASKS["grpo"].outputs_of(model, batch, 0).detach()
    return float((trained - sampled).abs().max())


def some_batch(model: Transformer, seed: int) -> Batch:
    """Return four rows of unequal lengths, and targets that fit the head."""
    inputs, config = Inputs(model, rows=4, seed=seed), model.config
    rows, length, generator = 4, inputs.length, torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator).to(inputs.device)

    if inputs.kind == "patches":
        each = () if config.head == "classifier" else (config.main.n_tokens(length),)
        return Batch(inputs.main, draw(config.n_classes, rows, *each))
    lengths = torch.tensor([length, length - 5, length - 1, length // 2], device=inputs.device).clamp(min=1)
    mask = torch.arange(length, device=inputs.device) < lengths[:, None]
    if config.head == "classifier":
        targets = draw(config.n_classes, rows)
    elif config.head == "span":
        targets = torch.stack([torch.zeros_like(lengths), lengths - 1], dim=1)
    else:
        kinds = config.vocab_size if config.head in ("lm", "mlm") else config.n_classes
        targets = draw(kinds, rows, length).masked_fill(~mask, IGNORE)
    arguments = {name: x for name, x in inputs.arguments.items() if name != "global_mask"}  # a batch has none
    return Batch(targets=targets, mask=mask, **arguments)


def part_of(batch: Batch, rows: slice) -> Batch:
    """Return some rows of a batch, truncated to the longest of them."""
    part = batch.rows(rows)
    if part.mask is None:
        return part
    padded, length = part.mask.shape, int(part.mask.sum(1).max())
    by_token = {"ids": part.ids, "mask": part.mask, "types": part.types, "targets": part.targets}
    cut = {name: x[:, :length] for name, x in by_token.items() if x is not None and x.shape[:2] == padded}
    return replace(part, **cut)


def _resumed(inputs: Inputs) -> float:
    plan = TrainPlan(steps=STEPS, warmup=1, lr=1e-3)
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(), torch.enable_grad():
        whole = copy.deepcopy(inputs.model).to("cpu").float().requires_grad_(True)
        optimizer = optim.make_optimizer(whole, plan, torch.device("cpu"))
        _steps(whole, optimizer, plan, 0, STOP)
        moments = optimizer_tensors(optimizer, whole)
        at = save_checkpoint(Path(folder), snapshot(Model(whole), whole, whole, moments, State(step=STOP)))
        _steps(whole, optimizer, plan, STOP, STEPS)
        del optimizer
        resumed = load(at, dtype=torch.float32).model
        tensors, state = load_checkpoint(at)
        optimizer = optim.make_optimizer(resumed, plan, torch.device("cpu"))
        restore_optimizer(optimizer, resumed, tensors)
        _steps(resumed, optimizer, plan, state.step, STEPS)
        theirs = dict(whole.named_parameters())
        return max(gap(weight, theirs[name]) for name, weight in resumed.named_parameters())


def _steps(model: Transformer, optimizer: Any, plan: TrainPlan, done: int, until: int) -> None:
    """Take steps; the batch, dropout and rate of each follow from its number, as in `training.loop`."""
    for step in range(done + 1, until + 1):
        torch.manual_seed(step)
        model.train()
        optim.set_lr(optimizer, optim.lr_at(plan, step, STEPS, model.config.d_model))
        loss, count = batch_loss(model, some_batch(model, step))
        (loss / count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
