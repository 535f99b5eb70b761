"""Which family fits which task, and how a text becomes one vector."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import Schooling, logits_of, school
from clearhead.learn.data.corpora import CORPORA

SYMBOLS, BEGIN, LENGTH = 8, 8, 8
PLAN = Schooling(steps=300, batch=64, length=LENGTH)
WANTED: dict[str, Callable[[Tensor], Tensor]] = {
    "majority": lambda rows: (2 * (rows[:, :-1] % 2).sum(1, keepdim=True) > LENGTH).long(),  # one label
    "reverse": lambda rows: rows[:, :-1].flip(1),  # a text for a text
    # What comes next: one of the last two symbols, four times, as a symbol that no model sees decides.
    "continue": lambda rows: rows[:, -3:-1].gather(1, rows[:, -1:] % 2).expand(-1, 4),
}


def model_of(family: str) -> Transformer:
    """Return a model of a family, of about one size."""
    layers = {"n_layers": 1, "n_encoder_layers": 1} if family == "encoder-decoder" else {"n_layers": 2}
    return Transformer(
        ModelConfig(
            family=family,  # type: ignore[arg-type]
            vocab_size=SYMBOLS + 1,
            d_model=64,
            n_heads=4,
            max_positions=2 * LENGTH + 2,
            d_ff=128,
            head="lm" if family != "encoder" else "mlm",
            **layers,  # type: ignore[arg-type]
        )
    )


def answers(model: Transformer, rows: Tensor, wanted: Tensor) -> Tensor:
    """Return the logits of each symbol of the answer: [B, N, V].

    The last symbol of a row is hidden. Decoders are given what stands before each symbol of the answer. An
    encoder sees blanks where the answer goes, and fills in all of them at once.
    """
    rows, count = rows[:, :-1], wanted.shape[1]
    begin = torch.full_like(wanted[:, :1], BEGIN)
    fed = torch.cat([begin, wanted[:, :-1]], dim=1)
    if model.config.family == "encoder-decoder":
        return logits_of(model, fed, source=rows)
    if model.config.family == "encoder":
        fed = begin.expand(-1, count)
    return logits_of(model, torch.cat([rows, fed], dim=1))[:, -count:]


def run_families(family: str, setting: Conditions) -> Numbers:
    """Train a family on each task from scratch; measure whole answers that are right, or the loss."""
    found: Numbers = {}
    for name, target in WANTED.items():
        torch.manual_seed(setting.seed)
        model = model_of(family)

        def loss_of(model: nn.Module, rows: Tensor, target: Callable[[Tensor], Tensor] = target) -> Tensor:
            wanted = target(rows.cpu()).to(rows.device)
            logits = answers(model, rows, wanted)  # type: ignore[arg-type]
            return nnf.cross_entropy(logits.flatten(0, 1), wanted.flatten())

        steps = list(
            school(model, lambda generator: draw(generator).to(setting.device), loss_of, PLAN, setting)
        )
        rows = draw(torch.Generator().manual_seed(1), 256).to(setting.device)
        wanted = target(rows.cpu()).to(rows.device)
        with torch.no_grad():
            logits = answers(model.eval(), rows, wanted)
        right = (logits.argmax(-1) == wanted).all(1).float().mean()
        surprise = nnf.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        found[name] = float(surprise if name == "continue" else right)
        found[f"curve of {name}"] = [[step, loss] for step, loss, _ in steps]
    return found


def draw(generator: torch.Generator, batch: int = PLAN.batch) -> Tensor:
    """Draw rows of symbols, and one that is hidden: [B, T + 1]."""
    return torch.randint(SYMBOLS, (batch, LENGTH + 1), generator=generator)


FAMILIES = Experiment(
    title="Three families on three tasks",
    question="How does each family do on the task that it is made for, and on those of the others?",
    arms={name: name for name in ("encoder", "decoder", "encoder-decoder")},
    run=run_families,
    claims=(
        Claim("A decoder can label a text too.", "majority", "encoder", "decoder", -0.1),
        Claim(
            "An encoder-decoder reverses no worse than a decoder.",
            "reverse",
            "decoder",
            "encoder-decoder",
            -0.1,
        ),
        Claim(
            "Where a text can go on in two ways, symbols that are filled in all at once do not agree.",
            "continue",
            "decoder",
            "encoder",
            0.2,
        ),
    ),
    figures={
        "majority": "share of rows whose majority, odd or even, is named",
        "reverse": "share of rows that are reversed without a fault",
        "continue": "nats a symbol of an answer with two ways on; 0.17 at best, 0.69 without agreement",
    },
    pictures=tuple(
        Picture(name, f"Loss: {name}", "step", "nats a symbol", curve=f"curve of {name}") for name in WANTED
    ),
    seconds=45,
    setup=vars(PLAN),
)

# Pooling --------------------------------------------------------------------------------------------------

NAMES = 40  # letters of a name that are read
POOLED = Schooling(steps=300, batch=32, length=NAMES)


def labelled() -> tuple[Tensor, Tensor, int]:
    """Return names [N, T], padded with 0 and begun with 1, their classes [N], and how many there are."""
    found: Any = CORPORA["unicode-names"].load()
    pairs: list[tuple[str, str]] = [(one.text, one.label) for one in found]
    letters = {
        letter: 2 + number for number, letter in enumerate(sorted({x for name, _ in pairs for x in name}))
    }
    labels = {label: number for number, label in enumerate(sorted({label for _, label in pairs}))}
    rows = torch.zeros(len(pairs), NAMES + 1, dtype=torch.long)
    for number, (name, _) in enumerate(pairs):
        ids = [1, *(letters[letter] for letter in name[:NAMES])]
        rows[number, : len(ids)] = torch.tensor(ids)
    return rows, torch.tensor([labels[label] for _, label in pairs]), len(labels)


def run_pooling(pooling: str, setting: Conditions) -> Numbers:
    """Train a classifier of names of characters that reads off the first token, or off the mean."""
    rows, classes, count = labelled()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    held, kept = order[:1000], order[1000:]
    model = Transformer(
        ModelConfig(family="encoder", vocab_size=int(rows.max()) + 1, d_model=64, n_layers=2, n_heads=4,
                    max_positions=NAMES + 1, n_classes=count, pooling=pooling)  # type: ignore[arg-type]
    )  # fmt: skip

    def pick(generator: torch.Generator) -> Tensor:
        return kept[torch.randint(len(kept), (POOLED.batch,), generator=generator)]

    def scored(model: nn.Module, chosen: Tensor) -> tuple[Tensor, Tensor]:
        given = rows[chosen].to(setting.device)
        return logits_of(model, given, mask=given > 0), classes[chosen].to(setting.device)

    steps = list(
        school(model, pick, lambda model, chosen: nnf.cross_entropy(*scored(model, chosen)), POOLED, setting)
    )
    with torch.no_grad():
        logits, wanted = scored(model.eval(), held)
    return {
        "accuracy": float((logits.argmax(-1) == wanted).float().mean()),
        "curve": [[step, loss] for step, loss, _ in steps],
    }


POOLING = Experiment(
    title="A class token and the mean",
    question="Should a classifier read the first token, or the mean of all?",
    arms={"class token": "cls", "mean": "mean"},
    run=run_pooling,
    claims=(Claim("The mean is learned sooner than a class token.", "accuracy", "class token", "mean", 0.0),),
    figures={"accuracy": "share of unseen names of characters whose general category is found"},
    pictures=(Picture("loss", "Loss while training", "step", "nats", curve="curve"),),
    seconds=30,
    setup={"data": "unicode-names", **vars(POOLED)},
)
