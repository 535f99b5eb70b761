"""Kinds of attention against length: what each costs, how far it sees, what it learns."""

import torch

from clearhead.core.transformer import Transformer
from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import Schooling, language_model, logits_of, read
from clearhead.labs.lab.recurrent import seconds
from clearhead.variants.costs import cost

PLAN = Schooling(steps=150, batch=4, length=256)
TIMED = (128, 512, 2048)
SEEN = 96  # tokens of the row in which a change is looked for
KINDS = {
    "full": "full",
    "window of 16": "window(16)",
    "dilated": "dilated(16, 4)",
    "linear": "linear(elu)",
    "gated delta": "gated-delta",
}


def run(kind: str, setting: Conditions) -> Numbers:
    """Train on text, then time steps of training, and find how far back the model sees."""
    config = language_model(attention=kind, max_positions=TIMED[-1])
    model, found = read(config, PLAN, setting)
    times = [[length, seconds(model, length, batch=1)] for length in TIMED]
    work = [cost(config, length).flops.training_per_token for length in (TIMED[0], TIMED[-1])]
    return {
        **found,
        "time": times[-1][1] / times[0][1],
        "operations": work[1] / work[0],
        "reach": reach(model.eval()),
        "times": times,
    }


@torch.no_grad()
def reach(model: Transformer) -> int:
    """Return how many places back a change of one token still changes the last logits."""
    device = next(model.parameters()).device
    row = torch.randint(1, model.config.vocab_size, (SEEN,), generator=torch.Generator().manual_seed(1))
    rows = row.repeat(SEEN, 1)  # [T, T]
    rows.fill_diagonal_(0)
    changed = logits_of(model, torch.cat([row[None], rows]).to(device))[:, -1]  # 1 + T, V
    moved = (changed[1:] - changed[0]).abs().amax(-1).cpu() > 0
    return SEEN - 1 - int(moved.nonzero().min())


EXPERIMENT = Experiment(
    title="Kinds of attention against length",
    question="What does each kind of attention cost as rows grow, and what does it give up?",
    arms=KINDS,
    run=run,
    claims=(
        Claim("A window makes the time grow more slowly.", "time", "window of 16", "full"),
        Claim("So does linear attention.", "time", "linear", "full"),
        Claim("A window sees less far than full attention.", "reach", "window of 16", "full", 10.0),
        Claim("Linear attention has the higher loss.", "loss", "full", "linear"),
        Claim("A gated delta rule learns more than plain linear attention.", "loss", "gated delta", "linear"),
    ),
    figures={
        "loss": "nats a character on unseen text",
        "time": f"seconds of a training step at {TIMED[-1]} characters over those at {TIMED[0]}",
        "operations": "floating-point operations of a token at these lengths, the same ratio",
        "reach": f"places back that a change of one character is still seen, of {SEEN - 1}",
    },
    pictures=(
        Picture("time", "One training step of one row", "characters", "seconds", curve="times",
                logarithmic=True),
        Picture("loss", "Loss while training", "step", "nats a character", curve="curve"),
    ),
    seconds=30,
    setup={"model": "2 layers of width 64, 4 heads, RoPE", **vars(PLAN)},
)  # fmt: skip
