"""A small model that learns from a larger one: the larger one's probabilities beside the text."""

import functools

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.lab.experiment import Claim, Experiment, Numbers, Picture, Setting
from clearhead.lab.learning import (
    Schooling,
    held_out_loss,
    language_model,
    logits_of,
    read,
    school,
    text,
)
from clearhead.model.transformer import Transformer

PLAN = Schooling(steps=300, batch=16, length=64)
TEACHER = Schooling(steps=600, batch=16, length=64)
WARMTH, SHARE = 2.0, 0.5  # temperature of the probabilities, and their share of the loss


def run(arm: str, setting: Setting) -> Numbers:
    """Train a teacher of four layers, then a student of two, alone or with its help."""
    torch.manual_seed(setting.seed)
    teacher, taught = read(language_model(n_layers=4), TEACHER, setting)
    torch.manual_seed(setting.seed + 1)
    student = Transformer(language_model(n_layers=2))
    if arm == "taught, begun from the teacher":
        begin(student, teacher)

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        rows = rows.to(setting.device)
        logits = logits_of(model, rows[:, :-1]).flatten(0, 1)
        hard = nnf.cross_entropy(logits, rows[:, 1:].flatten())
        if arm == "alone":
            return hard
        with torch.no_grad():
            guide = (logits_of(teacher, rows[:, :-1]).flatten(0, 1) / WARMTH).softmax(-1)
        soft = nnf.kl_div((logits / WARMTH).log_softmax(-1), guide, reduction="batchmean") * WARMTH**2
        return (1 - SHARE) * hard + SHARE * soft

    draw = functools.partial(text().windows, batch=PLAN.batch, length=PLAN.length)
    steps = list(school(student, draw, loss_of, PLAN, setting))
    return {
        "loss": held_out_loss(student, PLAN),
        "teacher": taught["loss"],
        "curve": [[step, loss] for step, loss, _ in steps],
    }


def begin(student: Transformer, teacher: Transformer) -> None:
    """Give the student the teacher's tables, and every second of its layers."""
    found = teacher.state_dict()
    kept = {name: value for name, value in found.items() if ".blocks." not in name}
    for number in range(len(student.main.blocks)):
        old, new = f".blocks.{2 * number}.", f".blocks.{number}."
        kept |= {name.replace(old, new): value for name, value in found.items() if old in name}
    student.load_state_dict(kept)


EXPERIMENT = Experiment(
    title="Distillation",
    question="Does a small model learn more from a larger one than from the text alone?",
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
    figures={"loss": "nats a character on unseen text", "teacher": "the same of the teacher"},
    pictures=(Picture("final", "Loss of the student", "", "nats a character", figure="loss"),),
    seconds=80,
    setup={"teacher": "4 layers, 600 steps", "student": "2 layers", **vars(PLAN)},
)
