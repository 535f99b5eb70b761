"""Training of two towers from captioned pictures: rows of an image file and its caption.

A run is a directory: `step-N` holds the model, the optimizer and the place in the data, `log.jsonl` a line
for each validation, and the directory itself the model at the end. A run that was stopped goes on where it
was, and ends with the same weights as one that was not.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from clearhead.errors import ConfigError, InputError, TrainingError, refuse
from clearhead.hub import files
from clearhead.hub.towers import load_towers
from clearhead.learn.data.formats import format_of
from clearhead.learn.data.tables import Record, read_json, read_table
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.tasks.towers import embed, image_pixels, text_inputs, towers_of
from clearhead.learn.training.optim import make_optimizer, rate, set_rate
from clearhead.run.bundle import Bundle
from clearhead.variants.towers import pair_loss

CAPTIONS = ("caption", "text")  # names of the column, the first that is there
LARGEST_SCALE = 4.6052  # of the logits, as a logarithm: 100, beyond which CLIP found training unstable
OPTIMIZER, PROGRESS, LOG = "optimizer.safetensors", "progress.json", "log.jsonl"


@dataclass(frozen=True)
class Captioned:
    """An image file and the text that describes it."""

    image: Path
    caption: str


@dataclass(frozen=True, kw_only=True)
class CaptionPlan:
    """Settings of a run."""

    steps: int = 1000
    batch_size: int = 64  # pairs that are told from each other
    lr: float = 5e-4  # the peak: it rises for a twentieth of the steps, then falls by a cosine
    weight_decay: float = 0.1
    clip: float = 1.0  # largest norm of the gradient
    seed: int = 0  # of the order of pairs, and of dropout
    validate_every: int = 100  # steps; a checkpoint is written too

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "validate_every"):
            value = getattr(self, name)
            refuse(type(value) is not int or value < 1, f"{name} {value!r} must be 1 or more", ConfigError)
        refuse(
            self.batch_size < 2,
            "the other pairs of a batch are what a pair is told from: set batch_size to 2 or more",
            ConfigError,
        )
        refuse(not self.lr > 0, f"lr {self.lr} must be above 0", ConfigError)


def read_captions(path: str | Path) -> list[Captioned]:
    """Read rows of image and caption: TSV or CSV with a header, or JSON lines.

    The columns are `image`, a path from the folder of the file on, and `caption` or `text`.
    """
    source = Path(path)
    refuse(
        not source.is_file(), f"{source} is no file: give rows of image and caption, TSV, CSV or JSON lines"
    )
    kind = format_of(source)
    refuse(
        kind not in ("tsv", "csv", "json", "jsonl"),
        f"{source} looks like {kind}: give rows of image and caption as TSV, CSV or JSON lines",
    )
    records = read_table(source, kind, header=True) if kind in ("tsv", "csv") else read_json(source)
    rows = [_captioned(record, source.parent) for record in records]
    refuse(not rows, f"{source} holds no row of image and caption")
    return rows


def _captioned(record: Record, folder: Path) -> Captioned:
    column = next((name for name in CAPTIONS if name in record.cells), CAPTIONS[0])
    image, caption = folder / record.text("image"), record.text(column).strip()
    refuse(not image.is_file(), f"{record.place}: the image {image} is not there")
    refuse(not caption, f"{record.place}: the {column} is empty")
    return Captioned(image, caption)


def retrieval(m: Bundle, rows: Sequence[Captioned]) -> dict[str, float]:
    """Return how often the nearest caption is an image's own, and an image of the caption the nearest to it.

    Captions that stand several times count as one. `chance` is what drawing a caption would give.
    """
    captions = list(dict.fromkeys(row.caption for row in rows))
    own = torch.tensor([captions.index(row.caption) for row in rows])
    cosines = embed(m, [row.image for row in rows]) @ embed(m, captions).T  # rows, captions
    to_text = (cosines.argmax(1) == own).float().mean()
    to_image = (own[cosines.argmax(0)] == torch.arange(len(captions))).float().mean()
    return {"image_to_text": float(to_text), "text_to_image": float(to_image), "chance": 1 / len(captions)}


def train_towers(
    m: Bundle,
    data: str | Path,
    folder: str | Path,
    plan: CaptionPlan | None = None,
    validation: str | Path | None = None,
    resume: bool = False,
    on_validation: Callable[[dict[str, float]], None] = lambda figures: None,
) -> list[dict[str, float]]:
    """Train both towers, in place, where the model is; return a line of figures for each validation.

    Args:
        m: two towers with their tokenizer and preprocessor_config.json.
        data: a file of rows, see `read_captions`.
        folder: the run; a new one, unless `resume`.
        plan: settings; None: the usual ones.
        validation: held-out rows; None: every tenth row of `data`.
        resume: go on with the run in `folder`, which must have the same data and plan.
        on_validation: told each line of figures.
    """
    towers, plan, run = towers_of(m, "training on captions"), plan or CaptionPlan(), Path(folder)
    rows = read_captions(data)
    held = rows[9::10] if validation is None else read_captions(validation)
    train = [row for number, row in enumerate(rows) if validation is not None or number % 10 != 9]
    size = plan.batch_size
    refuse(
        len(train) < size or not held,
        f"{data} has {len(train)} pairs to train on and {len(held)} held out: batch_size {size} needs more",
    )
    device, done, lines = next(towers.parameters()).device, 0, list[dict[str, float]]()
    stated = {**dataclasses.asdict(plan), "pairs": len(train)}
    last = max(run.glob("step-*"), key=lambda path: int(path.name[5:]), default=None)
    refuse(
        last is not None and not resume,
        f"{run} holds a run already: set resume to go on with it, or name another directory",
    )
    refuse(resume and last is None, f"{run} holds no run to go on with: leave resume out")
    if last is not None:
        towers.load_state_dict(load_towers(last).state_dict())
    optimizer = make_optimizer(
        towers, TrainPlan(lr=plan.lr, weight_decay=plan.weight_decay, seed=plan.seed), device
    )
    if last is not None:
        done, lines = _resumed(last, optimizer, stated)
    order, epoch = list[int](), -1
    for step in range(1, plan.steps + 1):
        whole = len(train) // size
        if (step - 1) // whole != epoch:
            epoch = (step - 1) // whole
            order = torch.randperm(len(train), generator=_seeded(plan.seed, epoch)).tolist()
        if step <= done:
            continue
        at = (step - 1) % whole * size
        loss = _step(m, [train[number] for number in order[at : at + size]], optimizer, plan, step)
        if step % plan.validate_every == 0 or step == plan.steps:
            lines.append({"step": step, "loss": loss, **retrieval(m, held)})
            _write(m, run, optimizer, {"step": step, "lines": lines, "plan": stated})
            on_validation(lines[-1])
    m.save(run)
    return lines


def _seeded(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


def _step(m: Bundle, rows: Sequence[Captioned], optimizer: Optimizer, plan: CaptionPlan, step: int) -> float:
    """Take one step on a batch of pairs; return its loss."""
    towers = towers_of(m, "training on captions")
    weight = next(towers.parameters())
    torch.manual_seed(plan.seed * 1_000_003 + step)  # of dropout, so that a resumed run draws the same
    ids, mask = text_inputs(m, [row.caption for row in rows])
    pixels = image_pixels(m, (row.image for row in rows)).to(weight)
    towers.train()
    out = towers(ids.to(weight.device), pixels, None if mask is None else mask.to(weight.device))
    loss = pair_loss(out.logits, towers.config.loss)
    refuse(not bool(loss.isfinite()), f"the loss of step {step} is not finite: lower lr", TrainingError)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(towers.parameters(), plan.clip)
    set_rate(optimizer, rate(TrainPlan(lr=plan.lr), step, plan.steps, towers.config.text.d_model))
    optimizer.step()
    with torch.no_grad():
        towers.logit_scale.clamp_(max=LARGEST_SCALE)
    towers.eval()
    return float(loss.detach())


def _write(m: Bundle, run: Path, optimizer: Optimizer, progress: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all, then remove the one before."""
    older = list(run.glob("step-*"))
    state = optimizer.state_dict()["state"]
    with files.whole_folder(run / f"step-{progress['step']}") as work:
        m.save(work)
        tensors = {f"{at}.{name}": value for at, each in state.items() for name, value in each.items()}
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in tensors.items()}, work / OPTIMIZER
        )
        files.write_json(work / PROGRESS, progress)
    (run / LOG).write_text("".join(json.dumps(line) + "\n" for line in progress["lines"]), encoding="utf-8")
    for path in older:
        shutil.rmtree(path)


def _resumed(last: Path, optimizer: Optimizer, stated: dict[str, Any]) -> tuple[int, list[dict[str, float]]]:
    """Give the optimizer its state back; return the steps done and the figures so far."""
    progress = files.read_json(last / PROGRESS)
    if progress["plan"] != stated:
        changed = [name for name, value in stated.items() if progress["plan"].get(name) != value]
        raise InputError(f"{last} was trained with another {', '.join(changed)}: give the same plan and data")
    groups, state = optimizer.state_dict()["param_groups"], dict[int, dict[str, Any]]()
    for name, tensor in load_file(last / OPTIMIZER).items():
        at, key = name.split(".", 1)
        state.setdefault(int(at), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return int(progress["step"]), list(progress["lines"])
