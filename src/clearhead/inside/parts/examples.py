"""Examples with right answers, as batches in memory: what loss and accuracy are measured on.

    examples = examples_from(m, "reviews.tsv")      # read as `clearhead eval` reads files, folders, corpora
    examples = examples_from(m, ["One text.", "Another."], texts=True)
    judge(m.model, examples).loss

Shapes: B rows, T length, D model, N positions that have a target, C classes.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from clearhead.core.heads import LanguageHead
from clearhead.core.transformer import Transformer, evaluating
from clearhead.errors import refuse
from clearhead.inside import inputs, results
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.batches.padding import padded, real_tokens
from clearhead.learn.data.examples import PAIRS, TEXT, Chunk, Corpus, Pair, Rows
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.evaluation.evaluate import BATCH_TOKENS, PICTURES, data_plan, judged_batches, task_for
from clearhead.learn.evaluation.examples import renamed
from clearhead.learn.losses import arguments_for, default_chunk, summed
from clearhead.learn.tasks.table import TASKS, open_examples
from clearhead.run.api import Model


@dataclass(frozen=True, eq=False)
class Examples:
    """Batches that a model is judged on."""

    task: str
    batches: tuple[Batch, ...]
    notes: tuple[str, ...] = ()  # what was guessed or cut, a short sentence each

    @property
    def rows(self) -> int:
        """Rows of all batches."""
        return sum(len(batch) for batch in self.batches)

    @property
    def targets(self) -> int:
        """Tokens, classes or tags that are asked for."""
        return sum(batch.n_targets for batch in self.batches)


@dataclass(frozen=True)
class Quality(results.Result):
    """How good a model is on some examples."""

    loss: float  # the mean over all targets
    accuracy: float  # share of targets that the model puts first; answer: both ends right


Data = Examples | Corpus | str | Path | Sequence[str | Path]


def examples_from(
    m: inputs.AnyModel,
    data: Any,
    plan: DataPlan | None = None,
    *,
    texts: bool = False,
    most: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Examples:
    """Return the examples of some data, as the model reads them.

    Args:
        m: what `load` gave; a bare model takes `Examples`, or texts as lists of token ids.
        data: files, folders, globs or an embedded corpus, of which all is taken; a `Corpus`, of which its
            validation side is; with `texts`, the texts themselves, of an encoder-decoder pairs of source and
            target. `Examples` stay as they are.
        plan: how files are to be read; None: as the run that made the model read its own, else as they look.
        texts: are `data` texts and not names of files?
        most: rows that are read at most; of running text, whole batches up to about so many.
        batch_size: rows at a time; None: by their length.
        seed: of the masks of a masked language model.
    """
    if isinstance(data, Examples):
        return data
    m = inputs.as_model(m)
    refuse(most is not None and most < 1, f"{most} examples are no data: ask for 1 or more")
    if texts and m.config.family == "decoder" and m.config.head == "lm":
        return _next_tokens(m, list(data)[:most])
    files = () if texts or isinstance(data, Corpus) else data
    named = (files,) if isinstance(files, str | Path) else tuple(files)
    plan = data_plan(m.folder, named) if plan is None else plan
    task = task_for(m, plan.task)
    plan = dataclasses.replace(
        plan,
        task=task,
        paths=tuple(map(str, named)) or plan.paths,
        validation=(),
        max_examples=None if TASKS[task].shape is TEXT else most,
        batch_size=batch_size or PICTURES,
        batch_tokens=None if batch_size else BATCH_TOKENS,
    )
    if texts:
        corpus = _corpus(task, list(data))
    else:
        corpus = data if isinstance(data, Corpus) else open_examples(plan, split=False)[0]
    notes = list(corpus.notes)
    if TASKS[task].classes:
        corpus = renamed(corpus, m, plan, notes)
    with tempfile.TemporaryDirectory() as folder:
        batches, *_ = judged_batches(m, task, plan, corpus, folder, seed, notes)
        taken: list[Batch] = []
        for batch in batches.all():
            if most is not None and sum(map(len, taken)) >= most:
                break
            taken.append(batch if m.config.n_types > 1 else dataclasses.replace(batch, types=None))
    return Examples(task, tuple(taken), tuple(notes))


def _next_tokens(m: Model, texts: Sequence[str | Sequence[int]]) -> Examples:
    """Return texts whose tokens are guessed from those before them; texts of like length share a batch."""
    rows = sorted((m.prompt_ids(text)[: m.max_length] for text in texts), key=len)
    refuse(
        not rows or len(rows[0]) < 2,
        "a text of fewer than two tokens leaves nothing to guess: give longer texts",
    )
    made = []
    for start in range(0, len(rows), PICTURES):
        some = rows[start : start + PICTURES]
        ids, mask = padded(some, m.special.get("pad", 0)), real_tokens(some)  # B T+1
        targets = ids.masked_fill(~mask, IGNORE)[:, 1:]
        made.append(Batch(ids[:, :-1], targets, None if mask.all() else mask[:, 1:]))
    return Examples("lm", tuple(made))


def _corpus(task: str, texts: Sequence[Any]) -> Corpus:
    """Return texts as a corpus to validate on."""
    shape = TASKS[task].shape
    refuse(
        shape not in (PAIRS, TEXT),
        f"texts alone have no right answers for the task {task}: name a file that has them",
    )
    refuse(
        shape is PAIRS and not all(isinstance(one, tuple | list) and len(one) == 2 for one in texts),
        "texts of an encoder-decoder are pairs: give (source, target) for each",
    )
    refuse(not texts, "there are no texts: give one at least")
    rows: Rows = [Chunk(str(one), True) for one in texts]
    if shape is PAIRS:
        rows = [Pair(*one) for one in texts]
    return Corpus(shape.name, cast(Rows, []), rows, (), "texts", (), 0)


@torch.no_grad()
def judge(model: Transformer, examples: Examples) -> Quality:
    """Measure loss and accuracy over all targets; dropout is off."""
    total, right = 0.0, 0
    for batch in examples.batches:
        batch = batch.to(inputs.device_of(model))
        arguments = arguments_for(model, batch)
        with evaluating(model):
            if isinstance(model.head, LanguageHead):
                hidden = model(**arguments, logits="none").hidden
                loss, hits = _vocabulary(model.head, hidden, batch.targets)
            else:
                logits = model(**arguments).logits
                task = TASKS[examples.task]
                loss = float(task.loss(logits, batch))
                hits = _right(*task.answers(logits, batch), whole=batch.is_span)
        total, right = total + loss, right + hits
    count = examples.targets
    refuse(not count, "the data has no targets: every token is unknown to the tokenizer; give other data")
    return Quality(total / count, right / count)


def _vocabulary(head: LanguageHead, hidden: Tensor, targets: Tensor) -> tuple[float, int]:
    """Return the summed cross-entropy of [B, T, D] with targets [B, T], and how many are put first."""
    asked = targets != IGNORE
    rows, wanted = hidden[asked], targets[asked]  # N D, N
    total, hits = 0.0, 0
    chunk = default_chunk(head.out.out_features, hidden.device)
    for some, right in zip(torch.split(rows, chunk), torch.split(wanted, chunk)):
        logits = head(some, None)
        total += float(summed(logits, right).double())
        hits += int((logits.argmax(-1) == right).sum())
    return total, hits


def _right(answers: Sequence[Any], targets: Sequence[Any], whole: bool) -> int:
    """Return how many answers of a head without a vocabulary are right; `whole`: a row counts as one."""
    if whole:
        return sum(one == other for one, other in zip(answers, targets))
    return sum(one == other for row, right in zip(answers, targets) for one, other in zip(row, right))
