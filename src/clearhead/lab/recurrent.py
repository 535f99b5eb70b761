"""A Transformer beside an LSTM of equal size: loss, recall over distance, time against length.

The two learn best at rates that lie far apart. Each gets its own, found by one small search.
"""

import functools
import time
from dataclasses import replace

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.lab.learning import Schooling, language_model, logits_of, next_loss, school, school_text, text
from clearhead.model.transformer import Transformer

SYMBOLS, RECALLED = 16, 24  # letters of the recall task, and the length of its rows
PLAN = Schooling(steps=300, batch=16, length=64)
RECALL = Schooling(steps=400, batch=48, length=RECALLED)
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # tried for each model and task, with a third of the steps
SEARCH_SEED = 1_000  # no trial has it


class Recurrent(nn.Module):
    """A language model of two LSTM layers, its output tied to its table.

    Forget gates begin open (Jozefowicz et al. 2015), and inputs as large as a gate needs to see them.
    """

    def __init__(self, vocab_size: int, width: int, n_layers: int = 2) -> None:
        """Build it."""
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.layers = nn.LSTM(width, width, n_layers, batch_first=True)
        nn.init.normal_(self.table.weight, std=width**-0.5)
        with torch.no_grad():
            for name, bias in self.layers.named_parameters():
                if name.startswith("bias_ih"):
                    bias[width : 2 * width] = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> logits [B, T, V]."""
        found: Tensor = self.layers(self.table(ids))[0]
        return found @ self.table.weight.T


def make(kind: str, vocab_size: int, length: int) -> nn.Module:
    """Return a Transformer of two layers of width 64, or an LSTM of as many weights."""
    if kind == "LSTM":
        return Recurrent(vocab_size, 77)
    return Transformer(language_model(max_positions=length, vocab_size=vocab_size))


def read_text(kind: str, plan: Schooling, setting: Conditions) -> Numbers:
    """Train on text; return the loss on unseen text and the curve."""
    return school_text(make(kind, len(text().letters), plan.length), plan, setting)


def memorise(kind: str, plan: Schooling, setting: Conditions) -> Numbers:
    """Train on recall; return the share recalled at each distance, and the curve."""
    model = make(kind, SYMBOLS, RECALLED)
    steps = list(school(model, draw, recall_loss, plan, setting))
    recalls = [[distance, recall(model, distance)] for distance in (2, 4, 8, 16, RECALLED - 2)]
    return {"curve": [[step, loss] for step, loss, _ in steps], "recalls": recalls}


TASKS = {"text": (read_text, PLAN), "recall": (memorise, RECALL)}


@functools.cache
def best_rate(kind: str, task: str, setting: Conditions) -> float:
    """Return the rate with the least loss at the end of a third of the steps."""
    train, plan = TASKS[task]

    def end(rate: float) -> float:
        torch.manual_seed(setting.seed)
        short = replace(plan, lr=rate, steps=plan.steps // 3)
        last = [loss for _, loss in train(kind, short, setting)["curve"][-4:]]
        return float(sum(last) / len(last))

    return min(RATES, key=end)


def run(kind: str, setting: Conditions) -> Numbers:
    """Train on text and on recall, and time a step of training at several lengths."""
    rates = {task: best_rate(kind, task, replace(setting, seed=SEARCH_SEED)) for task in TASKS}
    torch.manual_seed(setting.seed)
    found = read_text(kind, replace(PLAN, lr=rates["text"]), setting)
    recalls = memorise(kind, replace(RECALL, lr=rates["recall"]), setting)["recalls"]
    timed = make(kind, len(text().letters), 512).to(setting.device)
    times = [[length, seconds(timed, length)] for length in (32, 128, 512)]
    return {
        **found,
        "recall": recalls[-1][1],
        "recalls": recalls,
        "rate": rates["text"],
        "recall rate": rates["recall"],
        "times": times,
        "time": times[-1][1] / times[0][1],
    }  # fmt: skip


def draw(generator: torch.Generator, batch: int = RECALL.batch, distance: int | None = None) -> Tensor:
    """Draw rows [B, T] of letters; a mark stands `distance` places before the last, which asks for it."""
    far = torch.randint(2, RECALLED - 1, (batch, 1), generator=generator)
    rows = torch.randint(2, SYMBOLS, (batch, RECALLED), generator=generator)
    place = RECALLED - 1 - (far if distance is None else torch.full_like(far, distance))
    rows.scatter_(1, place, 1)  # what follows this mark is to be remembered
    rows[:, -1] = 0
    return rows


def wanted(rows: Tensor) -> Tensor:
    """Return the letter after the mark: [B]."""
    place = (rows == 1).int().argmax(1) + 1
    return rows.gather(1, place[:, None].clamp(max=rows.shape[1] - 1))[:, 0]


def recall_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the loss of naming the marked letter at the end of a row."""
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
        "recall": f"share of letters recalled over {RECALLED - 2} places",
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
    ),
    seconds=60,
    setup={
        "transformer": "2 layers of width 64, 4 heads",
        "lstm": "2 layers of width 77",
        **{name: value for name, value in vars(PLAN).items() if name != "lr"},
        "lr": f"for each model and task the best of {', '.join(map(str, RATES))} by the loss at the end of a "
        "third of the steps",
    },
)
