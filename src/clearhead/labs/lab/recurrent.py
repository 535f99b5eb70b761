"""A Transformer beside an LSTM of equal size: loss, recall over distance, time against length.

The two learn best at rates that lie apart, so every trial tries the same rates for both and keeps the best.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.transformer import Transformer
from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import (
    Schooling,
    language_model,
    logits_of,
    next_loss,
    school,
    school_text,
    text,
)

FILLERS, REMEMBERED = 8, 8  # letters of the recall task: those to pass over, and those to name
RECALLED = 64  # the length of its rows
PLAN = Schooling(steps=200, batch=16, length=64)
RECALL = Schooling(steps=150, batch=16, length=RECALLED)
RATES = (3e-3, 1e-2, 3e-2, 1e-1)  # tried by each trial on each task, with all of the steps


class Recurrent(nn.Module):
    """A language model of two LSTM layers, with forget gates that begin open (Jozefowicz et al. 2015)."""

    def __init__(self, vocab_size: int, width: int, n_layers: int = 2) -> None:
        """Build it."""
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.layers = nn.LSTM(width, width, n_layers, batch_first=True)
        self.out = nn.Linear(width, vocab_size)
        with torch.no_grad():
            for name, bias in self.layers.named_parameters():
                if name.startswith("bias_ih"):
                    bias[width : 2 * width] = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> logits [B, T, V]."""
        found: Tensor = self.out(self.layers(self.table(ids))[0])
        return found


def make(kind: str, vocab_size: int, length: int) -> nn.Module:
    """Return a Transformer of two layers of width 64, or an LSTM of as many weights."""
    if kind == "LSTM":
        return Recurrent(vocab_size, 76)
    return Transformer(language_model(max_positions=length, vocab_size=vocab_size))


def read_text(kind: str, plan: Schooling, setting: Conditions) -> Numbers:
    """Train on text; return the loss on unseen text and the curve."""
    return school_text(make(kind, len(text().letters), plan.length), plan, setting)


def memorise(kind: str, plan: Schooling, setting: Conditions) -> Numbers:
    """Train on recall; return the share recalled at each distance, and the curve."""
    model = make(kind, 1 + FILLERS + REMEMBERED, RECALLED)
    steps = list(school(model, draw, recall_loss, plan, setting))
    recalls = [[distance, recall(model, distance)] for distance in (1, 4, 16, 32, RECALLED - 1)]
    return {"curve": [[step, loss] for step, loss, _ in steps], "recalls": recalls}


def at_best_rate(
    train: Callable[[str, Schooling, Conditions], Numbers], kind: str, plan: Schooling, setting: Conditions
) -> Numbers:
    """Train at each rate; return what had the least loss at the end of training, and the losses by rate."""
    tried = []
    for rate in RATES:
        torch.manual_seed(setting.seed)
        found = train(kind, replace(plan, lr=rate), setting)
        last = [loss for _, loss in found["curve"][-4:]] or [math.inf]
        tried.append((math.inf if found.get("diverged") else sum(last) / len(last), rate, found))
    best = min(tried, key=lambda one: one[0])
    ends = [[math.log10(rate), end] for end, rate, _ in tried if math.isfinite(end)]
    return {**best[2], "rate": best[1], "rates": ends}


def run(kind: str, setting: Conditions) -> Numbers:
    """Train on text and on recall, and time a step of training at several lengths."""
    found = at_best_rate(read_text, kind, PLAN, setting)
    recalled = at_best_rate(memorise, kind, RECALL, setting)
    timed = make(kind, len(text().letters), 512).to(setting.device)
    times = [[length, seconds(timed, length)] for length in (32, 128, 512)]
    return {
        **found,
        "recall": recalled["recalls"][-1][1],
        "recalls": recalled["recalls"],
        "recall rate": recalled["rate"],
        "recall rates": recalled["rates"],
        "times": times,
        "time": times[-1][1] / times[0][1],
    }


def draw(generator: torch.Generator, batch: int = RECALL.batch, distance: int | None = None) -> Tensor:
    """Draw rows [B, T] of fillers; one letter to remember stands `distance` places before the last."""
    far = torch.randint(1, RECALLED, (batch, 1), generator=generator)
    rows = torch.randint(1, 1 + FILLERS, (batch, RECALLED), generator=generator)
    place = RECALLED - 1 - (far if distance is None else torch.full_like(far, distance))
    letters = torch.randint(1 + FILLERS, 1 + FILLERS + REMEMBERED, (batch, 1), generator=generator)
    rows.scatter_(1, place, letters)
    rows[:, -1] = 0  # asks for it
    return rows


def wanted(rows: Tensor) -> Tensor:
    """Return the letter to remember, which has the largest number of its row: [B]."""
    return rows.amax(1)


def recall_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the loss of naming the letter at the end of a row."""
    rows = rows.to(next(model.parameters()).device)
    return nnf.cross_entropy(logits_of(model, rows)[:, -1], wanted(rows))


@torch.no_grad()
def recall(model: nn.Module, distance: int) -> float:
    """Return the share of rows in which a letter seen `distance` places ago is named."""
    rows = draw(torch.Generator().manual_seed(1), 256, distance).to(next(model.parameters()).device)
    return float((logits_of(model.eval(), rows)[:, -1].argmax(-1) == wanted(rows)).float().mean())


def seconds(model: nn.Module, length: int, batch: int = 8) -> float:
    """Return the seconds of one training step, the quicker of two."""
    rows = text().windows(torch.Generator().manual_seed(0), batch, length)
    found = []
    for _ in range(2):
        start = time.perf_counter()
        loss = next_loss(model.train(), rows)
        loss.backward()  # type: ignore[no-untyped-call]
        float(loss.detach())
        found.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    return min(found)


EXPERIMENT = Experiment(
    title="A Transformer and an LSTM of equal size",
    question="What does attention give that recurrence does not?",
    arms={"Transformer": "Transformer", "LSTM": "LSTM"},
    run=run,
    claims=(
        Claim("A Transformer recalls over longer distances.", "recall", "LSTM", "Transformer", 0.1),
        Claim("A Transformer has the lower loss on text.", "loss", "Transformer", "LSTM", 0.0),
    ),
    figures={
        "loss": "nats a character on unseen text",
        "recall": f"share of letters recalled over {RECALLED - 1} places",
        "rate": "learning rate on text",
        "recall rate": "learning rate on recall",
        "time": "seconds of a training step at 512 characters over those at 32",
        "parameters": "weights",
    },
    pictures=(
        Picture("recall", "A letter seen before", "places ago", "share recalled", curve="recalls"),
        Picture(
            "time", "One training step of 8 rows", "characters", "seconds", curve="times", logarithmic=True
        ),
        Picture("loss", "Loss while training", "step", "nats a character", curve="curve"),
        Picture("rates", "Loss by learning rate", "logarithm of the rate", "nats a character", curve="rates"),
    ),
    seconds=100,
    setup={
        "transformer": "2 layers of width 64, 4 heads",
        "lstm": "2 layers of width 76",
        **{name: value for name, value in vars(PLAN).items() if name != "lr"},
        "recall task": lambda setting: (
            f"rows of {RECALLED}, {setting.steps(RECALL.steps)} steps of {RECALL.batch} rows"
        ),
        "lr": f"in each trial and for each task the best of {', '.join(map(str, RATES))}, all tried with all "
        "steps, by the loss at the end of training",
    },
)
