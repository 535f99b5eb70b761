"""Loss by position in long rows, and the same with other scalings of rotary positions.

Rows are read in pieces with the cache, so that memory grows with the row and not with its square. A scaling
whose angles go by the length of the call (dynamic, longrope) needs the whole row at once.

Shapes: T tokens of a row, N tokens of a piece, D model, V vocabulary.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray

from clearhead.core.config import ModelConfig, RopeScaling
from clearhead.core.dtypes import wide
from clearhead.core.transformer import Transformer, evaluating
from clearhead.errors import nearest, refuse
from clearhead.hub.checkpoint import empty_model
from clearhead.inside.inputs import device_of
from clearhead.inside.long.text import LongText
from clearhead.inside.results import Result
from clearhead.learn.evaluation.metrics import perplexity
from clearhead.learn.losses import default_chunk
from clearhead.run.generate.decode import PREFILL_CHUNK, cache_for
from clearhead.run.generate.prompts import turns_by_length

OnProgress = Callable[[str, int, int], None]  # told a stage, and how much of how much is done
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
    inputs, targets, found = ids[:, :-1], ids[0, 1:], []
    piece = inputs.shape[1] if turns_by_length(model) else PREFILL_CHUNK
    cache = cache_for(model, inputs.shape[1])
    chunk = default_chunk(model.config.vocab_size, ids.device)
    with evaluating(model):
        for some, wanted in zip(torch.split(inputs, piece, 1), torch.split(targets, piece)):
            hidden = model(some, cache=cache, logits="none").hidden[0]  # N D
            for states, right in zip(torch.split(hidden, chunk), torch.split(wanted, chunk)):
                logits = wide(model.head(states, None))  # N V
                found.append(nnf.cross_entropy(logits, right, reduction="none").double().cpu())
    return np.asarray(torch.cat(found))


def loss_by_position(
    model: Transformer, text: LongText, length: int, rows: int, bins: int, on_progress: OnProgress
) -> PositionLoss:
    """Measure every position of up to `rows` rows of `length` tokens; the tokenizer's prefix is no target."""
    read, found = list(text.rows(length, rows)), []
    for done, row in enumerate(read, start=1):
        found.append(token_losses(model, row))
        on_progress("perplexity", done, len(read))
    losses = _by_position(found, text)
    parts = _bins(losses, len(read), bins)
    return PositionLoss(losses, len(read), trained_length(model.config), parts)


def _by_position(found: Sequence[NDArray[np.float64]], text: LongText) -> NDArray[np.float64]:
    """Return the mean over rows [T - 1] of each position [T]; NaN where no token of the text is predicted."""
    losses = np.concatenate([[np.nan], np.mean(found, axis=0)])
    losses[: len(text.prefix)] = np.nan
    return losses


def _bins(losses: NDArray[np.float64], rows: int, bins: int) -> tuple[PositionBin, ...]:
    edges = sorted({round(number * len(losses) / bins) for number in range(bins + 1)})
    return tuple(_bin(losses, rows, *ends) for ends in itertools.pairwise(edges))


def _bin(losses: NDArray[np.float64], rows: int, start: int, stop: int) -> PositionBin:
    known = losses[start:stop][~np.isnan(losses[start:stop])]
    return PositionBin(start, stop, rows * len(known), float(known.mean()) if len(known) else np.nan)


# Scalings ---------------------------------------------------------------------------------------------------


def find_scaling(given: str | RopeScaling | None, config: ModelConfig) -> tuple[str, RopeScaling | None]:
    """Return a scaling and its name: "none", "own", "yarn", or "yarn:8" with a factor."""
    if given is None or given == "none":
        return "none", None
    if given == "own":
        return "own", config.rope_scaling
    if isinstance(given, RopeScaling):
        return f"{given.kind}:{given.factor:g}", given
    name, _, factor = given.partition(":")
    known = ("none", "own", *SCALINGS)
    refuse(
        name not in SCALINGS,
        f'no scaling is called "{given}"{nearest(name, known)}: choose from {", ".join(known)}, '
        "with a factor as in yarn:8",
    )
    kind, usual = SCALINGS[name]
    try:
        number = float(factor) if factor else usual
    except ValueError:
        number = 0.0
    refuse(not 0 < number < float("inf"), f'scaling "{given}" has no factor above 0: write yarn:8')
    scaling = RopeScaling(kind=kind, factor=number, original_positions=trained_length(config))
    return f"{name}:{number:g}", scaling


def scaled(model: Transformer, scaling: RopeScaling | None) -> Transformer:
    """Return a model with this scaling and the weights of `model`, which both share."""
    made = empty_model(model.config.replace(rope_scaling=scaling))
    made.load_state_dict(model.state_dict(), assign=True)
    made.tie()
    return made.eval()


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
    named = [find_scaling(given, config) for given in scalings]
    lengths, targets = [trained * multiple for multiple in MULTIPLES], max(1, trained // 2)
    read = list(text.rows(lengths[-1], rows))
    tries = []
    for number, (name, scaling) in enumerate(named):
        other = scaled(model, scaling)
        means = []
        for at, length in enumerate(lengths):
            cut = [[*text.prefix, *row[lengths[-1] - length + len(text.prefix) :]] for row in read]
            found = _by_position([token_losses(other, row) for row in cut], text)
            means.append(float(found[-targets:].mean()))
            on_progress("scalings", number * len(lengths) + at + 1, len(named) * len(lengths))
        every = _bins(found, len(read), bins)
        tries.append(ScalingTry(name, scaling, tuple(lengths), tuple(means), targets * len(read), every))
    return tuple(tries)
