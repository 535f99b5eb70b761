"""The ladder: each known gain over a plain GPT-2 as one field, and what it saves in tokens and in time.

An arm is the baseline with one change of the recipe, trained by `ch.train` at two sizes. What it saves is
told at equal loss: at the worse of the two last losses, the share of the baseline's tokens that the arm
needed to get there, and the same for time. A share below 1 is a gain.
"""

import itertools
import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.learn.recipe import Settings
from clearhead.learn.training.events import Event, Stepped, Validated
from clearhead.learn.training.fit import NORMUON, QWEN3, gated_width
from clearhead.learn.training.run import train

BASELINE, EVERYTHING = "baseline", "everything"
STEPS, CHECKS = 150, 10  # of a trial; validations in it
SIZES = {
    "small": {"model.d_model": 64, "model.n_layers": 2},
    "large": {"model.d_model": 96, "model.n_layers": 3},
}
SHARED: Mapping[str, Any] = {
    **{"data.task": "lm", "data.batch_size": 16, "data.validation_share": 0.01, "tokens.kind": "char"},
    **{"model.base": "gpt2", "model.n_heads": 4, "model.max_positions": 64, "model.dropout": 0.0},
    **{
        "train.lr": 3e-3,
        "train.betas": (0.9, 0.99),
        "train.warmup": 20,
        "train.samples": 0,
        "train.compile": False,
    },
}
MUON = {"train.optimizer": "muon"}
ARMS: Mapping[str, Mapping[str, Any]] = {
    BASELINE: {},
    "rotary positions": {"model.positions": "rope"},
    "Muon": MUON,
    "NorMuon with Polar Express": NORMUON,
    "NorMuon with cautious decay": {**NORMUON, "train.cautious_decay": True},
    "QK-norm": {"model.qk_norm": "head"},
    "ReLU²": {"model.activation": "relu2"},
    "zero-initialised outputs": {"model.zero_init": True},
    "gate of each head": {"model.head_gate": 12},
    "value residual": {"model.value_residual": True},
    "value embeddings": {"model.value_embeddings": (0, 1)},
    "smear gate": {"model.smear_gate": 12},
    "pairs of tokens": {"model.bigrams": 8192},
    "skips of the input": {"model.input_skips": True},
    "mirrored skips": {"model.mirror_skips": True},
    "soft-capped logits": {"model.logit_softcap": 15.0},
    "z-loss": {"train.z_loss": 1e-4},
    "later tokens as targets": {"train.future_tokens": (0.5, 0.25)},
    "warm-up then stable then decay": {"train.schedule": "wsd"},
    "windows that widen": {"train.window_schedule": (16, 32)},
    "batches that grow": {"train.accumulate_schedule": (1, 2)},
    "Qwen3's parts": QWEN3,
    "Qwen3's parts and NorMuon": {**QWEN3, **NORMUON, "train.cautious_decay": True},
    EVERYTHING: {
        "model.positions": "rope",
        "model.norm": "rmsnorm",
        "model.bias": False,
        "model.qk_norm": "head",
        "model.activation": "relu2",
        "model.zero_init": True,
        "model.value_residual": True,
        "model.value_embeddings": (0, 1),
        "model.smear_gate": 12,
        "model.bigrams": 8192,
        "model.input_skips": True,
        "model.mirror_skips": True,
        "model.logit_softcap": 15.0,
        **NORMUON,
        "train.cautious_decay": True,
    },
}


class Watch:
    """Notes tokens, time of training and loss at each validation."""

    def __init__(self, device: str) -> None:
        # Of a CPU, the time of this process: a busy neighbour does not count.
        self.clock = time.process_time if device == "cpu" else time.perf_counter
        self.mark, self.seconds = self.clock(), 0.0
        self.points: list[list[float]] = []  # step, seconds, loss

    def __call__(self, event: Event) -> None:
        """Take note of an event; only what passes between steps counts."""
        now = self.clock()
        if isinstance(event, Stepped):
            self.seconds += now - self.mark
        elif isinstance(event, Validated):
            self.points.append([event.step, self.seconds, event.metrics["loss"]])
        self.mark = self.clock()


def sized(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which a gated feed-forward, of three matrices, is as large as a plain one of two."""
    gated = {"model.d_ff": gated_width(settings["model.d_model"])} if settings.get("model.gated") else {}
    return {**settings, **gated}


def run_arm(changes: Mapping[str, Any], setting: Conditions) -> Numbers:
    """Train the model with these settings at each size; return its loss and curves over tokens and time."""
    steps, numbers = setting.steps(STEPS), Numbers()
    every = max(1, steps // CHECKS)
    for size, shape in SIZES.items():
        own: Settings = {
            **sized({**SHARED, **shape, **changes}),
            **{"train.steps": steps, "train.validate_every": every, "train.save_every": steps},
            **{"train.log_every": every, "train.seed": setting.seed, "train.device": setting.device},
        }
        watch = Watch(setting.device)
        with tempfile.TemporaryDirectory() as folder:
            data = setting.data or "stdlib-docs"
            done = train(data, out=f"{folder}/run", settings=own, on_event=watch)
        sizes = changes.get("train.accumulate_schedule", (1,))
        per_step = SHARED["data.batch_size"] * SHARED["model.max_positions"]
        counts = [sizes[min(step * len(sizes) // steps, len(sizes) - 1)] * per_step for step in range(steps)]
        numbers |= {
            f"{size} loss": watch.points[-1][2],
            f"{size} over tokens": [[sum(counts[: int(step)]), loss] for step, _, loss in watch.points],
            f"{size} over time": [[seconds, loss] for _, seconds, loss in watch.points],
            f"{size} parameters": sum(weight.numel() for weight in done.model.model.parameters()),
        }
    return numbers


def reached(curve: Sequence[Sequence[float]], loss: float) -> float:
    """Return where a curve of [x, loss] first comes down to a loss, on the line between two points."""
    for (x, before), (y, after) in itertools.pairwise(curve):
        if after <= loss:
            return x + (y - x) * min(max((before - loss) / max(before - after, 1e-12), 0.0), 1.0)
    return curve[-1][0]


def with_shares(trials: Mapping[str, Sequence[Numbers]]) -> dict[str, list[Numbers]]:
    """Add to each trial its share of the baseline's tokens and time at equal loss, seed by seed."""
    told: dict[str, list[Numbers]] = {}
    for arm, runs in trials.items():
        told[arm] = [
            {**numbers, **dict(shares_of(numbers, plain))} for numbers, plain in zip(runs, trials[BASELINE])
        ]
    return told


def shares_of(
    numbers: Numbers, plain: Numbers, sizes: Iterable[str] = tuple(SIZES)
) -> list[tuple[str, float]]:
    """Return the shares of a trial by name."""
    shares = []
    for size in sizes:
        equal = max(numbers[f"{size} loss"], plain[f"{size} loss"])
        for what in ("tokens", "time"):
            name = f"{size} over {what}"
            ours, theirs = (reached(each[name], equal) for each in (numbers, plain))
            shares.append((f"{size} {what}", ours / theirs if theirs and math.isfinite(equal) else math.inf))
    return shares


LADDER = Experiment(
    title="Known gains, one field each",
    question="Which known gains over a plain GPT-2 reach its loss with fewer tokens, and in less time?",
    arms={arm: dict(changes) for arm, changes in ARMS.items()},
    run=run_arm,
    relate=with_shares,
    claims={
        f"{arm}: fewer tokens to equal loss, {size}.": Claim(f"{size} tokens", arm, BASELINE)
        for arm in ARMS
        if arm != BASELINE
        for size in SIZES
    },
    figures={
        f"{size} {figure}": f"{what}, {shape['model.n_layers']} layers of width {shape['model.d_model']}"
        for size, shape in SIZES.items()
        for figure, what in (
            ("tokens", "share of the baseline's tokens at equal loss"),
            ("time", "the same of its time"),
            ("loss", "nats a character on unseen text"),
        )
    },
    pictures=tuple(
        Picture(
            f"{what}-{size}",
            f"{what.capitalize()} to equal loss, {size}",
            "",
            "share of the baseline's",
            figure=f"{size} {what}",
        )
        for what in ("tokens", "time")
        for size in SIZES
    ),
    seconds=16,
    takes_data=True,
    setup={"text": "stdlib-docs, or --data", "steps": STEPS, "validations": CHECKS, **SHARED},
)  # fmt: skip
