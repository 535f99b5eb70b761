"""A long text, the loss by position in it, and how time and memory grow with its length.

Rows are read in chunks with the cache, so that memory grows with the row and not with its square. A scaling
of RoPE whose angles go by the length of the call (dynamic, longrope) needs the whole row at once.

Time and memory are of one row of random tokens, without gradients and without the head. Memory is that of
tensors alive at once, weights excluded: PyTorch's own count on a GPU; elsewhere the storages that its
operations return, without what a kernel uses inside.

Shapes: T tokens of a row, N tokens of a chunk, D model, V vocabulary.
"""

import itertools
import math
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clearhead.core.config import ModelConfig, RopeScaling
from clearhead.core.heads import LanguageHead
from clearhead.core.transformer import Transformer
from clearhead.errors import nearest, refuse
from clearhead.hub.checkpoint import empty_model
from clearhead.inside.inputs import device_of
from clearhead.inside.results import Result
from clearhead.learn.batches.ragged import Ints
from clearhead.learn.evaluation.evaluate import data_plan, run_recipe, task_for
from clearhead.learn.evaluation.metrics import OnProgress, perplexity
from clearhead.learn.losses import default_chunk
from clearhead.learn.losses import token_losses as losses_of
from clearhead.learn.recipe import read_recipe
from clearhead.learn.tasks.table import open_examples, task_named
from clearhead.run.api import Model
from clearhead.run.generate.decode import PREFILL_CHUNK, cache_for
from clearhead.variants.contexts import evaluating
from clearhead.variants.costs import cost

NO_TEXT = (
    "no text is named, and the folder knows none: add --text FILE (in Python, text=FILE), "
    "a long text that the model has not seen"
)


@dataclass(frozen=True, eq=False)
class LongText:
    """The ids of a text, and those that the tokenizer puts in front of every text."""

    name: str
    ids: Ints  # N
    prefix: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # what was guessed, a short sentence each

    @property
    def room(self) -> int:
        """The longest row that the text gives, prefix included."""
        return len(self.prefix) + len(self.ids)

    def starts(self, length: int, rows: int) -> list[int]:
        """Return where up to `rows` rows of `length` tokens begin, none over another, all over the text."""
        refuse(
            length > self.room,
            f"{self.name} has {self.room:,} tokens and rows need {length:,}: give a longer text, "
            "or choose a smaller length",
        )
        own = length - len(self.prefix)
        count = min(rows, len(self.ids) // own)
        return [int(place) for place in np.linspace(0, len(self.ids) - own, count)]

    def rows(self, length: int, rows: int) -> Iterator[list[int]]:
        """Give those rows, each with the prefix."""
        for start in self.starts(length, rows):
            stop = start + length - len(self.prefix)
            yield [*self.prefix, *self.ids[start:stop].tolist()]


def read_text(m: Model, text: Any) -> LongText:
    """Return a text as ids.

    `text` names files, folders, globs or an embedded corpus, or is a sequence of token ids. Where it is
    empty, the run that made the model says what text it held out.
    """
    named = [text] if isinstance(text, str | Path) else list(text)
    if named and not isinstance(named[0], str | Path):
        ids = m.prompt_ids(text)
        outside = next((token for token in ids if not 0 <= token < m.config.vocab_size), None)
        refuse(
            outside is not None,
            f"{outside} is no token id of this model: ids go from 0 to {m.config.vocab_size - 1}",
        )
        return LongText("the text", np.array(ids))
    recipe, notes = run_recipe(m.folder), []
    if named:
        plan = replace(data_plan(m.folder, named), paths=tuple(map(str, named)), validation=())
    else:
        plan = read_recipe(recipe).data
        refuse(not plan.paths, NO_TEXT)
        notes.append(f"text: what the run held out of {', '.join(plan.validation or plan.paths)}")
    plan = replace(plan, task=task_for(m, plan.task))
    corpus, task = open_examples(plan, split=not named)
    with tempfile.TemporaryDirectory() as folder:
        own = task_named(task)
        encoded_text = own.encode_corpus(
            corpus, "validation", m.text_tokenizer, (), folder, special=m.special
        )
        encoded, prefix = np.array(encoded_text["ids"], np.int64), tuple(encoded_text.frame.special[0])
    name = ", ".join(map(str, named)) if named else "the text that the run held out"
    return LongText(name, encoded, prefix, (*notes, *corpus.notes, *encoded_text.notes))


# Loss by position -------------------------------------------------------------------------------------------


MULTIPLES = (1, 2, 4)  # of the trained length, at which scalings are tried
# What a scaling is called, its kind, and its usual factor. The angles of dynamic grow with the length by
# themselves: its factor says how much faster than that.
SCALINGS: dict[str, tuple[Literal["linear", "dynamic", "yarn", "llama3"], float]] = {
    "linear": ("linear", 4.0),
    "ntk": ("dynamic", 1.0),
    "dynamic": ("dynamic", 1.0),
    "yarn": ("yarn", 4.0),
    "llama3": ("llama3", 4.0),
}


@dataclass(frozen=True)
class PositionBin(Result):
    """The mean loss of the tokens at positions `start` up to, but not including, `stop`."""

    json_names = ("start", "stop", "targets", "loss", "perplexity")

    start: int
    stop: int
    targets: int
    loss: float  # NaN without targets

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return perplexity(self.loss)


@dataclass(frozen=True, eq=False)
class PositionLoss(Result):
    """The loss of every position, as a mean over rows of one length."""

    json_names = ("rows", "trained", "whole", "within", "beyond", "bins")

    losses: NDArray[np.float64]  # T; NaN at positions that nothing stands before
    rows: int
    trained: int  # the length the model was made for
    bins: tuple[PositionBin, ...]

    @property
    def whole(self) -> PositionBin:
        """All positions."""
        return self.mean(0, len(self.losses))

    @property
    def within(self) -> PositionBin:
        """Positions that the model knows from training."""
        return self.mean(0, min(self.trained, len(self.losses)))

    @property
    def beyond(self) -> PositionBin | None:
        """Positions past those; None where the rows end before."""
        return self.mean(self.trained, len(self.losses)) if self.trained < len(self.losses) else None

    def mean(self, start: int, stop: int) -> PositionBin:
        """Return the mean loss over some positions."""
        return _bin(self.losses, self.rows, start, stop)


@dataclass(frozen=True)
class ScalingTry(Result):
    """One scaling: the loss of the same tokens after a context of each length."""

    json_names = ("name", "scaling", "lengths", "losses", "perplexities", "targets", "bins")

    name: str
    scaling: RopeScaling | None
    lengths: tuple[int, ...]
    losses: tuple[float, ...]  # one for each length
    targets: int
    bins: tuple[PositionBin, ...]  # of all positions, in rows of the last length

    @property
    def perplexities(self) -> tuple[float, ...]:
        """The exponential of each loss."""
        return tuple(perplexity(loss) for loss in self.losses)


def trained_length(config: ModelConfig) -> int:
    """Return the length that positions are made for: before a scaling of RoPE, where that says it."""
    scaling = config.rope_scaling
    return (scaling.original_positions if scaling is not None else None) or config.max_positions


@torch.inference_mode()
def token_losses(model: Transformer, row: Sequence[int]) -> NDArray[np.float64]:
    """Return -log p of each token of a row but the first, given all before it: [T - 1]."""
    ids = torch.tensor([row], device=device_of(model))
    inputs, targets, losses = ids[:, :-1], ids[0, 1:], []
    length = inputs.shape[1] if model.config.rotates_by_length else PREFILL_CHUNK
    cache = cache_for(model, inputs.shape[1])
    chunk = default_chunk(model.config.vocab_size, ids.device)
    with evaluating(model):
        for some, wanted in zip(torch.split(inputs, length, 1), torch.split(targets, length)):
            hidden = model(some, cache=cache, logits="none").hidden[0]  # N D
            losses.append(losses_of(cast(LanguageHead, model.head), hidden, wanted, chunk)[1].double().cpu())
    return np.asarray(torch.cat(losses))


def loss_by_position(
    model: Transformer, text: LongText, length: int, rows: int, bins: int, on_progress: OnProgress
) -> PositionLoss:
    """Measure every position of up to `rows` rows of `length` tokens; the tokenizer's prefix is no target."""
    read, row_losses = list(text.rows(length, rows)), []
    for done, row in enumerate(read, start=1):
        row_losses.append(token_losses(model, row))
        on_progress("perplexity", done, len(read))
    losses = _by_position(row_losses, text)
    parts = _bins(losses, len(read), bins)
    return PositionLoss(losses, len(read), trained_length(model.config), parts)


def _by_position(row_losses: Sequence[NDArray[np.float64]], text: LongText) -> NDArray[np.float64]:
    """Return the mean over rows [T - 1] of each position [T]; NaN where no token of the text is predicted."""
    losses = np.concatenate([[np.nan], np.mean(row_losses, axis=0)])
    losses[: len(text.prefix)] = np.nan
    return losses


def _bins(losses: NDArray[np.float64], rows: int, bins: int) -> tuple[PositionBin, ...]:
    edges = sorted({round(number * len(losses) / bins) for number in range(bins + 1)})
    return tuple(_bin(losses, rows, *ends) for ends in itertools.pairwise(edges))


def _bin(losses: NDArray[np.float64], rows: int, start: int, stop: int) -> PositionBin:
    known = losses[start:stop][~np.isnan(losses[start:stop])]
    return PositionBin(start, stop, rows * len(known), float(known.mean()) if len(known) else np.nan)


# Scalings ---------------------------------------------------------------------------------------------------


def find_scaling(wanted: str | RopeScaling | None, config: ModelConfig) -> tuple[str, RopeScaling | None]:
    """Return a scaling and its name: "none", "own", "yarn", or "yarn:8" with a factor."""
    if wanted is None or wanted == "none":
        return "none", None
    if wanted == "own":
        return "own", config.rope_scaling
    if isinstance(wanted, RopeScaling):
        return f"{wanted.kind}:{wanted.factor:g}", wanted
    name, _, factor = wanted.partition(":")
    known = ("none", "own", *SCALINGS)
    refuse(
        name not in SCALINGS,
        f'no scaling is called "{wanted}"{nearest(name, known)}: choose from {", ".join(known)}, '
        "with a factor as in yarn:8",
    )
    kind, usual = SCALINGS[name]
    try:
        number = float(factor) if factor else usual
    except ValueError:
        number = 0.0
    refuse(not 0 < number < float("inf"), f'scaling "{wanted}" has no factor above 0: write yarn:8')
    scaling = RopeScaling(kind=kind, factor=number, original_positions=trained_length(config))
    return f"{name}:{number:g}", scaling


def scaled(model: Transformer, scaling: RopeScaling | None) -> Transformer:
    """Return a model with this scaling and the weights of `model`, which both share."""
    scaled_model = empty_model(model.config.replace(rope_scaling=scaling))
    scaled_model.load_state_dict(model.state_dict(), assign=True)
    scaled_model.tie()
    return scaled_model.eval()


def try_scalings(
    model: Transformer,
    text: LongText,
    scalings: Sequence[str | RopeScaling | None],
    rows: int,
    bins: int,
    on_progress: OnProgress,
) -> tuple[ScalingTry, ...]:
    """Measure the same tokens with each scaling, after 1, 2 and 4 times the trained length.

    A row has four times the trained length, and its last tokens, half of the trained length, are the targets.
    At each length the model reads that many of its last tokens.
    """
    config, trained = model.config, trained_length(model.config)
    refuse(
        config.positions != "rope",
        f"scalings are of rotary positions, and this model has positions {config.positions}: "
        "leave --scalings out",
    )
    named = [find_scaling(wanted, config) for wanted in scalings]
    lengths, targets = [trained * multiple for multiple in MULTIPLES], max(1, trained // 2)
    read = list(text.rows(lengths[-1], rows))
    tries = []
    for number, (name, scaling) in enumerate(named):
        other = scaled(model, scaling)
        means = []
        for at, length in enumerate(lengths):
            cut = [[*text.prefix, *row[lengths[-1] - length + len(text.prefix) :]] for row in read]
            losses = _by_position([token_losses(other, row) for row in cut], text)
            means.append(float(losses[-targets:].mean()))
            on_progress("scalings", number * len(lengths) + at + 1, len(named) * len(lengths))
        every = _bins(losses, len(read), bins)
        tries.append(ScalingTry(name, scaling, tuple(lengths), tuple(means), targets * len(read), every))
    return tuple(tries)


# Time and memory --------------------------------------------------------------------------------------------


POINTS, SHORTEST = 5, 16  # lengths, each half of the next; tokens of the first at least
REPEATS = 3  # passes, after one to warm up; the quickest counts: a busy machine only ever adds


@dataclass(frozen=True)
class GrowthPoint(Result):
    """One forward pass of `length` tokens."""

    length: int
    seconds: float  # measured
    peak: int  # bytes, measured
    flops: int  # computed
    activations: int  # bytes that training keeps, computed


@dataclass(frozen=True)
class Growth(Result):
    """Passes of several lengths, shortest first."""

    json_names = ("points", "slopes")

    points: tuple[GrowthPoint, ...]

    @property
    def slopes(self) -> dict[str, float]:
        """The slope of log quantity against log length, over all points: 1 is linear, 2 quadratic."""
        lengths = [point.length for point in self.points]
        names = ("seconds", "peak", "flops", "activations")
        return {name: slope(lengths, [getattr(point, name) for point in self.points]) for name in names}


def slope(lengths: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of log value against log length; NaN where there is none."""
    if len(lengths) < 2 or min(values) <= 0:
        return math.nan
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


@torch.no_grad()
def measure_growth(model: Transformer, longest: int, seed: int, on_progress: OnProgress) -> Growth:
    """Measure passes of `longest` tokens, half as many, and so on."""
    weight, config = next(model.parameters()), model.config
    device, dtype = weight.device, str(weight.dtype).removeprefix("torch.")
    halves = [longest >> power for power in range(POINTS)]
    lengths = sorted({length for length in halves if length >= min(SHORTEST, longest)})
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (1, longest), generator=random).to(device)
    points = []
    with evaluating(model):
        for done, length in enumerate(lengths, start=1):

            def run(tokens: Tensor = ids[:, :length]) -> None:
                model(tokens, logits="none")

            figures = cost(config, length=length, dtype=dtype)
            flops, kept = figures.flops.forward, figures.memory.activations
            peak = peak_bytes(model, run)
            points.append(
                GrowthPoint(
                    length, quickest(run, device), peak, flops.total - flops.head, kept.total - kept.head
                )
            )
            on_progress("cost", done, len(lengths))
    return Growth(tuple(points))


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run, until the device has done it."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if on_gpu:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def quickest(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the seconds of the quickest of some runs, after one to warm up."""
    run()
    return min(timed(run, device) for _ in range(repeats))


def peak_bytes(model: Transformer, run: Callable[[], None]) -> int:
    """Return the peak of bytes alive while `run` calls the model, less what was alive before."""
    device = device_of(model)
    if device.type != "cuda":
        with _Living([*model.parameters()]) as living:
            run()
        return int(living.most)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return int(torch.cuda.max_memory_allocated(device)) - before


class _Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of the storages that operations return, for as long as each lives."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.seen = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        before = {x.untyped_storage().data_ptr() for x in inputs}
        output = func(*args, **(kwargs or {}))
        for x in tree_leaves(output):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage(), before)
        return output

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        """Add a storage that is new; what is a view of another, or was there before, is not."""
        place, size = storage.data_ptr(), storage.nbytes()
        if not size or place in self.seen or place in before:
            return
        self.seen.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, place, size)

    def _free(self, place: int, size: int) -> None:
        self.seen.discard(place)
        self.now -= size
