"""Examples with right answers, as batches in memory: what loss and accuracy are measured on while parts of a model are off.

    examples = examples_from(m, "reviews.tsv")      # files, folders, an embedded corpus; read as `clearhead eval` reads them
    examples = examples_from(m, ["One text.", "Another."], texts=True)
    judge(m.model, examples).loss

Shapes: B rows, T length, D model, N positions that have a target, C classes.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from clearhead.batches.batch import IGNORE, Batch
from clearhead.bundle import Model
from clearhead.data.examples import PAIRS, TEXT, Chunk, Corpus, Pair, Rows
from clearhead.data.plan import DataPlan
from clearhead.errors import InputError
from clearhead.evaluation.evaluate import BATCH_TOKENS, PICTURES, data_plan, judged_batches, task_for
from clearhead.evaluation.examples import renamed
from clearhead.model.heads import LanguageHead
from clearhead.model.transformer import Transformer, evaluating
from clearhead.tasks.corpus import open_examples
from clearhead.tasks.table import TASKS
from clearhead.training.losses import arguments_for, default_chunk, objective_of, summed

Files: TypeAlias = str | Path | Sequence[str | Path]


@dataclass(frozen=True, eq=False)
class Examples:
    """Batches that a model is judged on."""

    task: str
    batches: tuple[Batch, ...]
    said: tuple[str, ...] = ()  # what was guessed or cut, a short sentence each

    @property
    def rows(self) -> int:
        """Rows of all batches."""
        return sum(len(batch) for batch in self.batches)

    @property
    def targets(self) -> int:
        """Tokens, classes or tags that are asked for."""
        return sum(batch.n_targets for batch in self.batches)


@dataclass(frozen=True)
class Quality:
    """How good a model is on some examples."""

    loss: float  # the mean over all targets
    accuracy: float  # share of targets that the model puts first; answer: both ends right

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return dataclasses.asdict(self)


Data: TypeAlias = Examples | Corpus | Files


def examples_from(
    m: Model | Transformer,
    data: Any,
    plan: DataPlan | None = None,
    *,
    texts: bool = False,
    most: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Examples:
    """The examples of some data, as the model at hand reads them.

    Args:
        m: what `load` gave; a bare model takes `Examples`, or texts as lists of token ids.
        data: files, folders, globs or an embedded corpus, of which all is taken; a `Corpus`, of which its validation side is;
            with `texts`, the texts themselves, of an encoder-decoder pairs of source and target. `Examples` stay as they are.
        plan: how files are to be read; None: as the run that made the model read its own, else as they look.
        texts: are `data` texts and not names of files?
        most: rows that are read at most; of running text, whole batches up to about so many.
        batch_size: rows at a time; None: by their length.
        seed: of the masks of a masked language model.
    """
    if isinstance(data, Examples):
        return data
    m = m if isinstance(m, Model) else Model(m)
    if most is not None and most < 1:
        raise InputError(f"{most} examples are no data: ask for 1 or more")
    if texts and m.config.family == "decoder" and m.config.head == "lm":
        return _next_tokens(m, list(data)[:most])
    named = (
        (data,) if isinstance(data, str | Path) else () if texts or isinstance(data, Corpus) else tuple(data)
    )
    plan = data_plan(m.folder, named) if plan is None else plan
    task = task_for(m, plan.task)
    sizes: dict[str, Any] = {
        "batch_size": batch_size or PICTURES,
        "batch_tokens": None if batch_size else BATCH_TOKENS,
    }
    plan = dataclasses.replace(
        plan, task=task, validation=(), max_examples=None if TASKS[task].shape is TEXT else most, **sizes
    )
    if texts:
        corpus = _corpus(task, list(data))
    elif isinstance(data, Corpus):
        corpus = data
    else:
        corpus, _ = open_examples(
            dataclasses.replace(plan, paths=tuple(map(str, named)) or plan.paths), split=False
        )
    said = list(corpus.notes)
    if TASKS[task].classes:
        corpus = renamed(corpus, m, plan, said)
    with tempfile.TemporaryDirectory() as folder:
        batches, *_ = judged_batches(m, task, plan, corpus, folder, seed, said)
        taken: list[Batch] = []
        for batch in batches.all():
            if most is not None and sum(map(len, taken)) >= most:
                break
            taken.append(batch if m.config.n_types > 1 else dataclasses.replace(batch, types=None))
    return Examples(task, tuple(taken), tuple(said))


def _next_tokens(m: Model, texts: Sequence[str | Sequence[int]]) -> Examples:
    """Every token of each text but the first, to be guessed from those before it; texts of like length share a batch."""
    rows = sorted((m._prompt(text)[: m.max_length] for text in texts), key=len)
    short = next((row for row in rows if len(row) < 2), None)
    if not rows or short is not None:
        raise InputError("a text of fewer than two tokens leaves nothing to guess: give longer texts")
    made = []
    for start in range(0, len(rows), PICTURES):
        some = rows[start : start + PICTURES]
        length = len(some[-1])
        pad = m.special.get("pad", 0)
        ids = torch.tensor([row + [pad] * (length - len(row)) for row in some])  # B T+1
        mask = torch.tensor([[slot < len(row) for slot in range(length)] for row in some])
        made.append(
            Batch(ids[:, :-1], ids.masked_fill(~mask, IGNORE)[:, 1:], None if mask.all() else mask[:, 1:])
        )
    return Examples("lm", tuple(made))


def _corpus(task: str, texts: Sequence[Any]) -> Corpus:
    """Texts as a corpus to validate on."""
    shape = TASKS[task].shape
    if shape is PAIRS:
        if not all(isinstance(one, tuple | list) and len(one) == 2 for one in texts):
            raise InputError("texts of an encoder-decoder are pairs: give (source, target) for each")
        rows: Rows = [Pair(*one) for one in texts]
    elif shape is TEXT:
        rows = [Chunk(str(one), True) for one in texts]
    else:
        raise InputError(f"texts alone have no right answers for the task {task}: name a file that has them")
    if not texts:
        raise InputError("there are no texts: give one at least")
    return Corpus(shape.name, cast(Rows, []), rows, (), "texts", (), 0)


@torch.no_grad()
def judge(model: Transformer, examples: Examples) -> Quality:
    """Loss and accuracy over all targets; dropout is off."""
    device, total, right = next(model.parameters()).device, 0.0, 0
    objective = TASKS[examples.task].objective or objective_of("classifier")
    for batch in examples.batches:
        batch = batch.to(device)
        with evaluating(model):
            if isinstance(model.head, LanguageHead):
                loss, hits = _vocabulary(
                    model.head, model(**arguments_for(model, batch), logits="none").hidden, batch.targets
                )
            else:
                logits = model(**arguments_for(model, batch)).logits
                loss = objective.loss(logits, batch, 0.0)
                hits = _right(*objective.answers(logits, batch), whole=batch.is_span)
        total, right = total + float(loss), right + hits
    count = examples.targets
    if not count:
        raise InputError("the data asks for nothing, as when every word of it is unknown: give other data")
    return Quality(total / count, right / count)


def _vocabulary(head: LanguageHead, hidden: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Summed cross-entropy of [B, T, D] with targets [B, T], and how many are put first; some positions at a time."""
    asked = (targets.reshape(-1) != IGNORE).nonzero()[:, 0]
    rows, wanted = hidden.reshape(-1, hidden.shape[-1])[asked], targets.reshape(-1)[asked]  # N D, N
    total, hits = torch.zeros((), dtype=torch.float64), 0
    chunk = default_chunk(head.out.out_features, hidden.device)
    for start in range(0, len(rows), chunk):
        logits, some = head(rows[start : start + chunk], None), wanted[start : start + chunk]
        total += summed(logits, some).double().cpu()
        hits += int((logits.argmax(-1) == some).sum())
    return total, hits


def _right(said: Sequence[Any], meant: Sequence[Any], whole: bool) -> int:
    """Return how many answers of a head without a vocabulary are right; `whole`: a row counts as one."""
    if whole:
        return sum(one == other for one, other in zip(said, meant))
    return sum(one == other for row, right in zip(said, meant) for one, other in zip(row, right))
