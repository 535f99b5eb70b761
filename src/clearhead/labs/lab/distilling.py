"""A small encoder that learns from a larger one by DistilBERT's recipe (Sanh et al., 2019).

Masked characters are guessed. The student's loss has three parts: the teacher's probabilities at masked
places, softened; the masked characters themselves; the direction of the teacher's last states.
"""

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import Schooling, language_model, school, text

PLAN = Schooling(steps=300, batch=16, length=64)
TEACHER = Schooling(steps=600, batch=16, length=64)
MASKED = 0.15  # share of the characters
WARMTH = 2.0  # temperature of the teacher's probabilities
SOFT, HARD, COSINE = 5.0, 2.0, 1.0  # weights of the three parts


def reader(n_layers: int) -> ModelConfig:
    """Return the config of an encoder of characters, with one id more for what is masked."""
    return language_model(family="encoder", head="mlm", n_layers=n_layers, vocab_size=len(text().letters) + 1)


def draw(generator: torch.Generator, held_out: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ids with some masked [B, T], the true characters [B, T], and which are masked [B, T]."""
    rows = text().windows(generator, PLAN.batch, PLAN.length, held_out)[:, :-1]
    masked = torch.rand(rows.shape, generator=generator) < MASKED
    return rows.masked_fill(masked, len(text().letters)), rows, masked


def run(arm: str, setting: Conditions) -> Numbers:
    """Train a teacher of four layers, then a student of two, alone or with its help."""
    teacher = Transformer(reader(4))
    list(school(teacher, draw, guess_loss, TEACHER, setting))
    torch.manual_seed(setting.seed + 1)
    student = Transformer(reader(2))
    if arm == "taught, begun from the teacher":
        begin(student, teacher)

    def taught_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        ids, wanted, masked = (one.to(setting.device) for one in batch)
        found = model(ids)
        with torch.no_grad():
            guide = teacher(ids)
        soft = nnf.kl_div(
            (found.required_logits[masked] / WARMTH).log_softmax(-1),
            (guide.required_logits[masked] / WARMTH).softmax(-1),
            reduction="batchmean",
        )
        hard = nnf.cross_entropy(found.required_logits[masked], wanted[masked])
        apart = 1 - nnf.cosine_similarity(found.hidden, guide.hidden, dim=-1).mean()
        return SOFT * WARMTH**2 * soft + HARD * hard + COSINE * apart

    loss_of = guess_loss if arm == "alone" else taught_loss
    curve = [
        [step, unseen(student)] for step, _, _ in school(student, draw, loss_of, PLAN, setting, every=30)
    ]
    return {"loss": unseen(student), "teacher": unseen(teacher), "curve": curve}


def guess_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross-entropy of the masked characters."""
    device = next(model.parameters()).device
    ids, wanted, masked = (one.to(device) for one in batch)
    return nnf.cross_entropy(model(ids).required_logits[masked], wanted[masked])


@torch.no_grad()
def unseen(model: nn.Module) -> float:
    """Return the loss of masked characters of text that was not trained on, in nats."""
    generator, training = torch.Generator().manual_seed(1), model.training
    model.eval()
    losses = [float(guess_loss(model, draw(generator, held_out=True))) for _ in range(8)]
    model.train(training)
    return sum(losses) / len(losses)


def begin(student: Transformer, teacher: Transformer) -> None:
    """Give the student the teacher's tables, and every second of its layers."""
    found = teacher.state_dict()
    kept = {name: value for name, value in found.items() if ".blocks." not in name}
    for number in range(len(student.main.blocks)):
        old, new = f".blocks.{2 * number}.", f".blocks.{number}."
        kept |= {name.replace(old, new): value for name, value in found.items() if old in name}
    student.load_state_dict(kept)


EXPERIMENT = Experiment(
    title="Distillation, by DistilBERT's recipe",
    question="Does a small encoder learn more from a larger one than from the text alone?",
    arms={name: name for name in ("alone", "taught", "taught, begun from the teacher")},
    run=run,
    claims=(
        Claim("A teacher's probabilities help.", "loss", "taught", "alone", 0.0),
        Claim(
            "Half of the teacher's layers are a good start.",
            "loss",
            "taught, begun from the teacher",
            "taught",
            0.0,
        ),
    ),
    figures={"loss": "nats a masked character of unseen text", "teacher": "the same of the teacher"},
    pictures=(
        Picture("loss", "Loss of the student on unseen text", "step", "nats a character", curve="curve"),
        Picture("final", "Loss of the student", "", "nats a character", figure="loss"),
    ),
    seconds=90,
    setup={
        "teacher": lambda setting: f"4 layers, {setting.steps(TEACHER.steps)} steps",
        "student": "2 layers",
        "masked": MASKED,
        "temperature": WARMTH,
        "weights": f"soft {SOFT:g}, hard {HARD:g}, cosine {COSINE:g}",
        **vars(PLAN),
    },
)
