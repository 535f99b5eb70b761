"""Experiments on attention: positions, an LSTM in its place, kinds of attention, induction, removed heads."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

import clearhead as ch
from clearhead.core.transformer import Transformer
from clearhead.inside.ablation import Examples
from clearhead.inside.inputs import device_of
from clearhead.inside.interventions import ablating
from clearhead.inside.long_text import quickest
from clearhead.inside.pruning import By, ordered, scores
from clearhead.labs.lab.experiment import LOSS, LOSS_CURVE, Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import (
    USUAL,
    Training,
    held_out_loss,
    logits_of,
    loss_curve,
    next_loss,
    small_model,
    text,
    train,
    train_on_text,
)
from clearhead.learn.batches.batch import Batch
from clearhead.variants.costs import cost

# Positions: what each scheme knows of order, within and beyond the trained length --------------------------

N_SYMBOLS, BACK = 10, 3  # symbols of a row; positions that the wanted symbol lies back
TRAINED, BEYOND = 24, 96  # lengths
POSITIONS_PLAN = Training(steps=400, batch=32, length=TRAINED, lr=3e-3)
SCHEMES = ("none", "learned", "sinusoidal", "rope", "alibi", "relative")


def run_positions(scheme: str, setting: Conditions) -> Numbers:
    """Train an encoder to say which symbol came first, and a decoder to look three positions back."""
    common = {"vocab_size": N_SYMBOLS, "positions": scheme, "init": "xavier", "max_positions": BEYOND}
    first = Transformer(small_model(**common, family="encoder", n_classes=N_SYMBOLS, pooling="mean"))
    loss_curve(first, draw_symbols, order_loss, POSITIONS_PLAN, setting)
    delayed = Transformer(small_model(**common))
    curve = loss_curve(delayed, draw_symbols, delay_loss, POSITIONS_PLAN, setting)
    reach: list[list[float]] = [
        [length, delay_accuracy(delayed, length)] for length in (8, 16, TRAINED, 32, 48, 64, BEYOND)
    ]
    rows = draw_symbols(torch.Generator().manual_seed(1), 256).to(setting.device)
    with torch.no_grad():
        hits = logits_of(first.eval(), rows).argmax(-1) == rows[:, 0]
    return {
        "order": float(hits.float().mean()),
        "within": next(share for length, share in reach if length == TRAINED),
        "beyond": reach[-1][1],
        "reach": reach,
        "curve": curve,
    }


def draw_symbols(generator: torch.Generator, batch: int = 32, length: int = TRAINED) -> Tensor:
    """Draw rows of symbols [B, T]."""
    return torch.randint(N_SYMBOLS, (batch, length), generator=generator)


def order_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the loss of naming the first symbol of each row."""
    return nnf.cross_entropy(logits_of(model, rows), rows[:, 0])


def delay_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the loss of naming, at each position, the symbol `BACK` positions before."""
    return nnf.cross_entropy(logits_of(model, rows)[:, BACK:].flatten(0, 1), rows[:, :-BACK].flatten())


@torch.no_grad()
def delay_accuracy(model: nn.Module, length: int) -> float:
    """Return the share of right symbols in the last quarter of rows of a length."""
    rows = draw_symbols(torch.Generator().manual_seed(1), 64, length).to(device_of(model))
    hits = logits_of(model.eval(), rows)[:, BACK:].argmax(-1) == rows[:, :-BACK]
    return float(hits[:, -max(length // 4, 1) :].float().mean())


POSITIONS = Experiment(
    title="Schemes of positions",
    question="What does each scheme of positions know of order, and how far beyond the trained length?",
    arms={name: name for name in SCHEMES},
    run=run_positions,
    claims={
        "Without positions, an encoder does not know what came first.": Claim(
            "order", "none", "learned", 0.3
        ),
        "Learned positions end where training ended.": Claim("beyond", "learned", "relative", 0.2),
        "Rotary positions go on beyond it.": Claim("beyond", "learned", "rope", 0.2),
        "A causal mask alone does not tell distances.": Claim("within", "none", "rope", 0.2),
    },
    figures={
        "order": "share of rows whose first symbol an encoder names",
        "within": f"share of symbols {BACK} places back that a decoder names, at length {TRAINED}",
        "beyond": f"the same at length {BEYOND}, in the last quarter of the row",
    },
    pictures=(
        Picture("reach", "A symbol three places back", "tokens of a row", "share named", curve="reach"),
        Picture("order", "Which symbol came first?", "", "share named", figure="order"),
    ),
    seconds=25,
    setup={
        "model": "2 layers of width 64, 4 heads",
        "steps": POSITIONS_PLAN.steps,
        "batch": POSITIONS_PLAN.batch,
        "trained length": TRAINED,
    },
)


# A Transformer and an LSTM of equal size ------------------------------------------------------------------


FILLERS, REMEMBERED = 8, 8  # letters of the recall task: those to pass over, and those to name
RECALLED = 64  # the length of its rows
TEXT_PLAN = Training(steps=200, batch=16, length=64)
RECALL_PLAN = Training(steps=150, batch=16, length=RECALLED)
# The two learn best at rates that lie apart: each trial tries all of these on each task, with all steps.
RATES = (3e-3, 1e-2, 3e-2, 1e-1)


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
        logits: Tensor = self.out(self.layers(self.table(ids))[0])
        return logits


def make(kind: str, vocab_size: int, length: int) -> nn.Module:
    """Return a Transformer of two layers of width 64, or an LSTM of as many weights."""
    if kind == "LSTM":
        return Recurrent(vocab_size, 76)
    return Transformer(small_model(max_positions=length, vocab_size=vocab_size))


def read_text(kind: str, plan: Training, setting: Conditions) -> Numbers:
    """Train on text; return the loss on unseen text and the curve."""
    return train_on_text(make(kind, text().vocab_size, plan.length), plan, setting)


def memorise(kind: str, plan: Training, setting: Conditions) -> Numbers:
    """Train on recall; return the share recalled at each distance, and the curve."""
    model = make(kind, 1 + FILLERS + REMEMBERED, RECALLED)
    curve = loss_curve(model, draw_recall, recall_loss, plan, setting)
    recalls = [[distance, recall(model, distance)] for distance in (1, 4, 16, 32, RECALLED - 1)]
    return {"curve": curve, "recalls": recalls}


def at_best_rate(
    trained: Callable[[str, Training, Conditions], Numbers], kind: str, plan: Training, setting: Conditions
) -> Numbers:
    """Train at each rate; return what had the least loss at the end of training, and the losses by rate."""
    tried = []
    for rate in RATES:
        torch.manual_seed(setting.seed)
        numbers = trained(kind, replace(plan, lr=rate), setting)
        last = [loss for _, loss in numbers["curve"][-4:]] or [math.inf]
        tried.append((math.inf if numbers.get("diverged") else sum(last) / len(last), rate, numbers))
    _, best_rate, best = min(tried, key=lambda trial: trial[0])
    ends = [[math.log10(rate), end] for end, rate, _ in tried if math.isfinite(end)]
    return {**best, "rate": best_rate, "rates": ends}


def run_lstm(kind: str, setting: Conditions) -> Numbers:
    """Train on text and on recall, and time a step of training at several lengths."""
    numbers = at_best_rate(read_text, kind, TEXT_PLAN, setting)
    recalled = at_best_rate(memorise, kind, RECALL_PLAN, setting)
    timed = make(kind, text().vocab_size, 512).to(setting.device)
    times = [[length, seconds(timed, length)] for length in (32, 128, 512)]
    return {
        **numbers,
        "recall": recalled["recalls"][-1][1],
        "recalls": recalled["recalls"],
        "recall rate": recalled["rate"],
        "recall rates": recalled["rates"],
        "times": times,
        "time": times[-1][1] / times[0][1],
    }


def draw_recall(generator: torch.Generator, batch: int = 16, distance: int | None = None) -> Tensor:
    """Draw rows [B, T] of fillers; one letter to remember stands `distance` positions before the last."""
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
    return nnf.cross_entropy(logits_of(model, rows)[:, -1], wanted(rows))


@torch.no_grad()
def recall(model: nn.Module, distance: int) -> float:
    """Return the share of rows in which a letter seen `distance` positions ago is named."""
    rows = draw_recall(torch.Generator().manual_seed(1), 256, distance).to(device_of(model))
    return float((logits_of(model.eval(), rows)[:, -1].argmax(-1) == wanted(rows)).float().mean())


def seconds(model: nn.Module, length: int, batch: int = 8) -> float:
    """Return the seconds of one training step, after one to warm up."""
    rows = text().windows(torch.Generator().manual_seed(0), batch, length).to(device_of(model))

    def step() -> None:
        next_loss(model.train(), rows).backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)

    return quickest(step, device_of(model), repeats=1)


LSTM = Experiment(
    title="A Transformer and an LSTM of equal size",
    question="What does attention give that recurrence does not?",
    arms={"Transformer": "Transformer", "LSTM": "LSTM"},
    run=run_lstm,
    claims={
        "A Transformer recalls over longer distances.": Claim("recall", "LSTM", "Transformer", 0.1),
        "A Transformer has the lower loss on text.": Claim("loss", "Transformer", "LSTM", 0.0),
    },
    figures={
        **LOSS,
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
        LOSS_CURVE,
        Picture("rates", "Loss by learning rate", "logarithm of the rate", "nats a character", curve="rates"),
    ),
    seconds=100,
    setup={
        "transformer": "2 layers of width 64, 4 heads",
        "lstm": "2 layers of width 76",
        **{name: value for name, value in vars(TEXT_PLAN).items() if name != "lr"},
        "recall task": lambda setting: (
            f"rows of {RECALLED}, {setting.steps(RECALL_PLAN.steps)} steps of {RECALL_PLAN.batch} rows"
        ),
        "lr": f"in each trial and for each task the best of {', '.join(map(str, RATES))}, all tried with all "
        "steps, by the loss at the end of training",
    },
)


# Kinds of attention by length: what each costs, how far it sees, what it learns ---------------------------


KINDS_PLAN = Training(steps=150, batch=4, length=256)
TIMED = (128, 512, 2048)
SEEN = 96  # tokens of the row in which a change is looked for
KIND_ARMS = {
    "full": "full",
    "window of 16": "window(16)",
    "dilated": "dilated(16, 4)",
    "linear": "linear(elu)",
    "gated delta": "gated-delta",
}


def run_kinds(kind: str, setting: Conditions) -> Numbers:
    """Train on text, then time steps of training, and find how far back the model sees."""
    config = small_model(attention=kind, max_positions=TIMED[-1])
    model = Transformer(config)
    numbers = train_on_text(model, KINDS_PLAN, setting)
    times = [[length, seconds(model, length, batch=1)] for length in TIMED]
    work = [cost(config, length).flops.training_per_token for length in (TIMED[0], TIMED[-1])]
    return {
        **numbers,
        "time": times[-1][1] / times[0][1],
        "operations": work[1] / work[0],
        "reach": reach(model.eval()),
        "times": times,
    }


@torch.no_grad()
def reach(model: Transformer) -> int:
    """Return how many positions back a change of one token still changes the last logits."""
    device = device_of(model)
    row = torch.randint(1, model.config.vocab_size, (SEEN,), generator=torch.Generator().manual_seed(1))
    rows = row.repeat(SEEN, 1)  # [T, T]
    rows.fill_diagonal_(0)
    changed = logits_of(model, torch.cat([row[None], rows]).to(device))[:, -1]  # 1 + T, V
    moved = (changed[1:] - changed[0]).abs().amax(-1).cpu() > 0
    return SEEN - 1 - int(moved.nonzero().min())


KINDS = Experiment(
    title="Kinds of attention against length",
    question="What does each kind of attention cost as rows grow, and what does it give up?",
    arms=KIND_ARMS,
    run=run_kinds,
    claims={
        "A window makes the time grow more slowly.": Claim("time", "window of 16", "full"),
        "So does linear attention.": Claim("time", "linear", "full"),
        "A window sees less far than full attention.": Claim("reach", "window of 16", "full", 10.0),
        "Linear attention has the higher loss.": Claim("loss", "full", "linear"),
        "A gated delta rule learns more than plain linear attention.": Claim("loss", "gated delta", "linear"),
    },
    figures={
        **LOSS,
        "time": f"seconds of a training step at {TIMED[-1]} characters over those at {TIMED[0]}",
        "operations": "floating-point operations of a token at these lengths, the same ratio",
        "reach": f"places back that a change of one character is still seen, of {SEEN - 1}",
    },
    pictures=(
        Picture("time", "One training step of one row", "characters", "seconds", curve="times",
                logarithmic=True),
        LOSS_CURVE,
    ),
    seconds=30,
    setup={"model": "2 layers of width 64, 4 heads, RoPE", **vars(KINDS_PLAN)},
)  # fmt: skip


# Induction: a head that finds what followed the last time -------------------------------------------------


PAIR_SYMBOLS, PAIRS, PAIRS_LENGTH = 8, 3, 16  # pairs of a row; a row is drawn from them, a pair at a time
PAIRS_PLAN = Training(steps=600, batch=64, length=PAIRS_LENGTH, lr=1e-2, warmup=10)


def run_induction(depth: int, setting: Conditions) -> Numbers:
    """Train on rows of random pairs that come again; follow the strongest induction head and the loss."""
    size = {"vocab_size": PAIR_SYMBOLS, "d_model": 32, "n_layers": depth, "n_heads": 2}
    model = Transformer(small_model(**size, max_positions=PAIRS_LENGTH, init="xavier"))
    losses, scores = [], []
    for step, loss, _ in train(model, draw_pairs, repeat_loss, PAIRS_PLAN, setting, every=25):
        losses.append([step, loss])
        scores.append([step, induction(model)])
        model.train()
    model.eval()
    rows, known = (x.to(setting.device) for x in draw_pairs(torch.Generator().manual_seed(1), 256))
    with torch.no_grad():
        guessed = logits_of(model, rows)[:, :-1].argmax(-1)
    return {
        "accuracy": float((guessed == rows[:, 1:])[known[:, :-1]].float().mean()),
        "induction": scores[-1][1],
        "appears": next((step for step, score in scores if score > 0.5), setting.steps(PAIRS_PLAN.steps)),
        "curve": losses,
        "scores": scores,
    }


def draw_pairs(generator: torch.Generator, batch: int = PAIRS_PLAN.batch) -> tuple[Tensor, Tensor]:
    """Draw rows [B, T] of pairs in any order, and where the first of a pair stands that came before [B, T].

    Which symbol follows which is new in each row, so that only the row itself tells.
    """
    mixed = torch.rand(batch, PAIR_SYMBOLS, generator=generator).argsort(1)
    mixed = mixed[:, : 2 * PAIRS].view(batch, PAIRS, 2)
    picks = torch.randint(PAIRS, (batch, PAIRS_LENGTH // 2), generator=generator)
    rows = mixed.gather(1, picks[:, :, None].expand(-1, -1, 2)).flatten(1)
    before = (picks[:, :, None] == picks[:, None, :]).tril(-1).any(-1)  # B T/2
    return rows, torch.stack([before, torch.zeros_like(before)], dim=2).flatten(1)


def repeat_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of the second symbols of pairs that came before."""
    rows, known = batch[0], batch[1][:, :-1]
    return nnf.cross_entropy(logits_of(model, rows)[:, :-1][known], rows[:, 1:][known])


@torch.no_grad()
def induction(model: Transformer) -> float:
    """Return the mean weight that the strongest head gives to the symbols after earlier occurrences."""
    rows, known = draw_pairs(torch.Generator().manual_seed(2), 32)
    before = nnf.pad(rows[:, :-1], (1, 0), value=-1)  # the symbol before each key
    after = (rows[:, :, None] == before[:, None, :]).tril() & known[:, :, None]
    with ch.record(model.eval(), "*.pattern") as seen:
        model(rows.to(device_of(model)))
    shares = [(pattern.cpu() * after[:, None]).sum((0, 2, 3)) for pattern in seen.values()]  # H
    return float(torch.stack(shares).max() / after.any(-1).sum())


INDUCTION = Experiment(
    title="When induction appears",
    question="Does a model need two layers to copy what followed the last time, and when does it learn to?",
    arms={"1 layer": 1, "2 layers": 2, "3 layers": 3},
    run=run_induction,
    claims={
        "Induction needs two layers.": Claim("accuracy", "1 layer", "2 layers", 0.3),
        "A head that attends to what followed the last time is there.": Claim(
            "induction", "1 layer", "2 layers", 0.2
        ),
    },
    figures={
        "accuracy": "share of the symbols named that a pair before gives away",
        "induction": "weight of the strongest head on what followed the symbol before",
        "appears": "step at which that weight passes one half",
    },
    pictures=(
        Picture("scores", "The strongest induction head", "step", "weight", curve="scores"),
        Picture("loss", "Loss of the repeated symbols", "step", "nats a symbol", curve="curve"),
    ),
    seconds=20,
    setup={"model": "width 32, 2 heads, RoPE", **vars(PAIRS_PLAN)},
)


# Heads removed from a trained model -----------------------------------------------------------------------


SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def run_heads(order: str, setting: Conditions) -> Numbers:
    """Train a model of 16 heads, rank them on text that it was trained on, and switch them off one by one."""
    model = Transformer(small_model(n_heads=8, init="xavier"))
    train_on_text(model, USUAL, setting)
    rows = text().windows(torch.Generator().manual_seed(2), USUAL.batch, USUAL.length)
    examples = Examples("lm", (Batch(rows[:, :-1], rows[:, 1:]),))
    by: By = "random" if order == "random" else "importance"
    numbers = scores(model, examples, by, setting.seed).numbers(model.config)
    heads = [head for unit in ordered(model.config, numbers) for head in unit]
    heads = heads[::-1] if order == "most" else heads
    losses: dict[float, float] = {}
    for share in SHARES:
        with ablating(model, heads[: round(share * len(heads))]):
            losses[share] = held_out_loss(model, USUAL, batches=4)
    return {
        "whole": losses[0.0],
        "quarter": losses[0.25],
        "half": losses[0.5],
        "curve": [[share, loss] for share, loss in losses.items()],
    }


HEADS = Experiment(
    title="Heads removed",
    question="How many heads does a trained model need, and does their importance say which?",
    arms={"least important first": "least", "at random": "random", "most important first": "most"},
    run=run_heads,
    claims={
        "Half of the heads can go at less cost when the least important go first.": Claim(
            "half", "least important first", "at random"
        ),
        "The most important heads are missed most.": Claim(
            "half", "least important first", "most important first"
        ),
    },
    figures={
        "whole": "nats a character on unseen text, with all heads",
        "quarter": "the same with a quarter of the heads gone",
        "half": "the same with half of them gone",
    },
    pictures=(
        Picture("removed", "Loss against heads removed", "share removed", "nats a character", curve="curve"),
    ),
    seconds=25,
    setup={"model": "2 layers of width 64, 8 heads each, begun as Xavier's", **vars(USUAL)},
)
