"""What knowledge of order a scheme of positions gives, within and beyond the trained length."""

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import Schooling, logits_of, school

SYMBOLS, BACK = 10, 3  # symbols of a row; places that the wanted symbol lies back
TRAINED, BEYOND = 24, 96  # lengths
PLAN = Schooling(steps=400, batch=32, length=TRAINED, lr=3e-3)
SCHEMES = ("none", "learned", "sinusoidal", "rope", "alibi", "relative")


def run(scheme: str, setting: Conditions) -> Numbers:
    """Train an encoder to say which symbol came first, and a decoder to look three places back."""
    common = {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "vocab_size": SYMBOLS,
        "positions": scheme,
        "init": "xavier",
    }
    first = Transformer(
        ModelConfig(
            **common,  # type: ignore[arg-type]
            family="encoder",
            max_positions=BEYOND,
            n_classes=SYMBOLS,
            pooling="mean",
        )
    )
    list(school(first, draw, order_loss, PLAN, setting))
    delayed = Transformer(ModelConfig(**common, max_positions=BEYOND))  # type: ignore[arg-type]
    steps = list(school(delayed, draw, delay_loss, PLAN, setting))
    reach: list[list[float]] = [
        [length, delay_accuracy(delayed, length)] for length in (8, 16, TRAINED, 32, 48, 64, BEYOND)
    ]
    rows = draw(torch.Generator().manual_seed(1), 256).to(setting.device)
    with torch.no_grad():
        hits = logits_of(first.eval(), rows).argmax(-1) == rows[:, 0]
    return {
        "order": float(hits.float().mean()),
        "within": next(share for length, share in reach if length == TRAINED),
        "beyond": reach[-1][1],
        "reach": reach,
        "curve": [[step, loss] for step, loss, _ in steps],
    }


def draw(generator: torch.Generator, batch: int = PLAN.batch, length: int = TRAINED) -> Tensor:
    """Draw rows of symbols [B, T]."""
    return torch.randint(SYMBOLS, (batch, length), generator=generator)


def order_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the loss of naming the first symbol of each row."""
    rows = rows.to(next(model.parameters()).device)
    return nnf.cross_entropy(logits_of(model, rows), rows[:, 0])


def delay_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the loss of naming, at each place, the symbol `BACK` places before."""
    rows = rows.to(next(model.parameters()).device)
    return nnf.cross_entropy(logits_of(model, rows)[:, BACK:].flatten(0, 1), rows[:, :-BACK].flatten())


@torch.no_grad()
def delay_accuracy(model: nn.Module, length: int) -> float:
    """Return the share of right symbols in the last quarter of rows of a length."""
    rows = draw(torch.Generator().manual_seed(1), 64, length).to(next(model.parameters()).device)
    hits = logits_of(model.eval(), rows)[:, BACK:].argmax(-1) == rows[:, :-BACK]
    return float(hits[:, -max(length // 4, 1) :].float().mean())


EXPERIMENT = Experiment(
    title="Schemes of positions",
    question="What does each scheme of positions know of order, and how far beyond the trained length?",
    arms={name: name for name in SCHEMES},
    run=run,
    claims=(
        Claim(
            "Without positions, an encoder does not know what came first.", "order", "none", "learned", 0.3
        ),
        Claim("Learned positions end where training ended.", "beyond", "learned", "relative", 0.2),
        Claim("Rotary positions go on beyond it.", "beyond", "learned", "rope", 0.2),
        Claim("A causal mask alone does not tell distances.", "within", "none", "rope", 0.2),
    ),
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
        "steps": PLAN.steps,
        "batch": PLAN.batch,
        "trained length": TRAINED,
    },
)
