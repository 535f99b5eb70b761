"""Ablation: what a model does without some of its heads, layers or feed-forwards. Its weights do not change.

    ablate(m, "test.txt", heads=["3.2"]).increase         # what the loss rises by
    effect(m, "The cat sat on the", heads=["3.2"]).kl     # the next token, class or tag, with and without
    effect_of_each(m, "The cat sat on the").kl["layer:0"] # every part alone, as rows of a few batched passes

An ablated part gives zeros (`how="zero"`), or its mean over some data (`how="mean"`):

    a head           its mixed values `z`, before the output projection, whose bias stays
    a feed-forward   its output `out`, bias included
    a layer          the outputs of all its sublayers: attention, cross-attention, feed-forward

An output is replaced before the norm, if any, between it and the residual stream (sandwich, output); the norm
after the sum (post) still acts. So in a pre-norm model a layer set to zero leaves the stream as it was. With
shared weights, a layer is one depth, not all that have its weights.

Shapes: B rows, T length, H heads, E head width, D model, N positions that have a target, C choices: the
vocabulary, or the classes.
"""

import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from clearhead.core.heads import LanguageHead
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.inside.inputs import AnyModel, Prepared, Target, as_model, choices_of, device_of, prepare
from clearhead.inside.interventions import (
    OnRows,
    Site,
    Values,
    find_parts,
    means_of,
    patched_scores,
    removed_scores,
    replacing,
    single_parts,
)
from clearhead.inside.names import Heads, Layers
from clearhead.inside.results import Result
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.batches.ragged import padded, real_tokens
from clearhead.learn.data.examples import Chunk, Corpus, Pair, Rows
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.evaluation import evaluate
from clearhead.learn.losses import arguments_for, default_chunk, summed
from clearhead.learn.tasks.table import TASKS, open_examples
from clearhead.run.api import Model
from clearhead.variants.contexts import evaluating


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
        """Tokens, classes or tags to predict."""
        return sum(batch.n_targets for batch in self.batches)


@dataclass(frozen=True)
class Quality(Result):
    """How good a model is on some examples."""

    loss: float  # the mean over all targets
    accuracy: float  # share of targets that the model puts first; answer: both ends right


Data = Examples | Corpus | str | Path | Sequence[str | Path]


def examples_from(
    m: AnyModel,
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
    m = as_model(m)
    refuse(most is not None and most < 1, f"{most} examples are no data: ask for 1 or more")
    if texts and m.config.family == "decoder" and m.config.head == "lm":
        return _next_tokens(m, list(data)[:most])
    files = () if texts or isinstance(data, Corpus) else data
    named = (files,) if isinstance(files, str | Path) else tuple(files)
    plan = evaluate.judged_plan(m, plan, named, batch_size)
    task = str(plan.task)
    plan = dataclasses.replace(plan, max_examples=None if TASKS[task].row is Chunk else most)
    if texts:
        corpus = _corpus(task, list(data))
    else:
        corpus = data if isinstance(data, Corpus) else open_examples(plan, split=False)[0]
    notes = list(corpus.notes)
    if TASKS[task].classes:
        corpus = evaluate.renamed(corpus, m, plan, notes)
    with tempfile.TemporaryDirectory() as folder:
        batches, *_ = evaluate.judged_batches(m, task, plan, corpus, folder, seed, notes)
        taken: list[Batch] = []
        for batch in batches.all():
            if most is not None and sum(map(len, taken)) >= most:
                break
            taken.append(batch if m.config.n_types > 1 else dataclasses.replace(batch, types=None))
    return Examples(task, tuple(taken), tuple(notes))


def _next_tokens(m: Model, texts: Sequence[str | Sequence[int]]) -> Examples:
    """Return texts whose tokens are predicted from those before them; texts of like length share a batch."""
    rows = sorted((m.prompt_ids(text)[: m.max_length] for text in texts), key=len)
    refuse(
        not rows or len(rows[0]) < 2,
        "a text of fewer than two tokens leaves nothing to predict: give longer texts",
    )
    batches = []
    for start in range(0, len(rows), evaluate.PICTURES):
        some = rows[start : start + evaluate.PICTURES]
        ids, mask = padded(some, m.special.get("pad", 0)), real_tokens(some)  # B T+1
        targets = ids.masked_fill(~mask, IGNORE)[:, 1:]
        batches.append(Batch(ids[:, :-1], targets, None if mask.all() else mask[:, 1:]))
    return Examples("lm", tuple(batches))


def _corpus(task: str, texts: Sequence[Any]) -> Corpus:
    """Return texts as a corpus to validate on."""
    row = TASKS[task].row
    refuse(
        row not in (Pair, Chunk),
        f"texts alone have no right answers for the task {task}: name a file that has them",
    )
    refuse(
        row is Pair and not all(isinstance(example, tuple | list) and len(example) == 2 for example in texts),
        "texts of an encoder-decoder are pairs: give (source, target) for each",
    )
    refuse(not texts, "there are no texts: give one at least")
    rows: Rows = [Chunk(str(example), True) for example in texts]
    if row is Pair:
        rows = [Pair(*example) for example in texts]
    return Corpus(row.PLURAL, cast(Rows, []), rows, (), "texts", (), 0)


@torch.no_grad()
def judge(model: Transformer, examples: Examples) -> Quality:
    """Measure loss and accuracy over all targets; dropout is off."""
    total, right, task = 0.0, 0, TASKS[examples.task]
    for batch in examples.batches:
        batch = batch.to(device_of(model))
        arguments = arguments_for(model, batch)
        with evaluating(model):
            if isinstance(model.head, LanguageHead):
                hidden = model(**arguments, logits="none").hidden
                loss, hits = _vocabulary(model.head, hidden, batch.targets)
            else:
                logits = model(**arguments).logits
                loss, rows = float(task.loss(logits, batch)), zip(*task.answers(logits, batch))
                answers = rows if batch.is_span else (pair for row in rows for pair in zip(*row))
                hits = sum(answer == target for answer, target in answers)
        total, right = total + loss, right + hits
    count = examples.targets
    refuse(not count, "the data has no targets: every token is unknown to the tokenizer; give other data")
    return Quality(total / count, right / count)


def _vocabulary(head: LanguageHead, hidden: Tensor, targets: Tensor) -> tuple[float, int]:
    """Return the summed cross-entropy of [B, T, D] with targets [B, T], and how many are put first."""
    counted = targets != IGNORE
    rows, wanted = hidden[counted], targets[counted]  # N D, N
    total, hits = 0.0, 0
    chunk = default_chunk(head.out.out_features, hidden.device)
    for some, right in zip(torch.split(rows, chunk), torch.split(wanted, chunk)):
        logits = head(some, None)
        total += float(summed(logits, right).double())
        hits += int((logits.argmax(-1) == right).sum())
    return total, hits


# Ablation ---------------------------------------------------------------------------------------------------


How = Literal["zero", "mean"]
NOTHING_NAMED = "nothing is named to be ablated: name heads such as 0.1, layers or feed-forwards"


@dataclass(frozen=True)
class Ablation(Result):
    """What some examples cost with and without parts of a model."""

    ablated: tuple[str, ...]  # names of what was off
    how: How
    rows: int
    targets: int
    increase: float  # by how much the loss is higher without
    before: Quality
    after: Quality


@dataclass(frozen=True)
class ChoiceEffect(Result):
    """One of the things a model may say, with and without."""

    label: str
    id: int
    before: float  # its probability
    after: float


@dataclass(frozen=True)
class Effect(Result):
    """What a model says of one text with and without some of its parts."""

    json_names = ("ablated", "how", "position", "kl", "tokens", "top")

    ablated: tuple[str, ...]
    how: How
    tokens: tuple[str, ...]  # what it read
    position: int | None  # of the token whose output is compared; None: of the whole text
    before: Tensor  # C logits
    after: Tensor  # C
    kl: float  # KL(before || after), bits
    top: tuple[ChoiceEffect, ...]  # the likeliest of either, by their probability before


# Means ------------------------------------------------------------------------------------------------------


def mean_activations(m: AnyModel, data: Data, **options: Any) -> dict[str, Tensor]:
    """Return the mean of what every head and sublayer gives; `options` are as for `examples_from`.

    Heads have [1, H, 1, E], sublayers [1, 1, D].
    """
    model, examples = opened(m, data, options)
    return means_of(model, (arguments_for(model, batch.to(device_of(model))) for batch in examples.batches))


def means_for(how: str, means: Values | None, average: Callable[[], Values]) -> Values | None:
    """Return what replaces parts that are off: None for zeros, the means given, or those `average` makes."""
    refuse(how not in ("zero", "mean"), f'how "{how}" is not known: choose zero or mean')
    if how == "zero":
        return None
    return average() if means is None else means


def opened(m: AnyModel, data: Any, options: Mapping[str, Any]) -> tuple[Transformer, Examples]:
    """Return the model and the examples."""
    return as_model(m).model, examples_from(m, data, **options)


# Effect on loss ---------------------------------------------------------------------------------------------


def ablate(
    m: AnyModel,
    data: Data,
    heads: Heads = (),
    layers: Layers = (),
    feedforwards: Layers = (),
    how: How = "zero",
    means: Values | None = None,
    **options: Any,
) -> Ablation:
    """Measure loss and accuracy with and without parts of a model, on data as for `examples_from`.

    Heads, layers and feed-forwards that are named are off together; see `ablating`.

    Args:
        how: zero, or mean: of `means`, as `mean_activations` gives them, else of the same data.
    """
    model, examples = opened(m, data, options)
    ablated, sites = find_parts(model.config, heads, layers, feedforwards)
    refuse(not ablated, NOTHING_NAMED)
    means = means_for(how, means, lambda: mean_activations(model, examples))
    before = judge(model, examples)
    with replacing(model, sites, means):
        after = judge(model, examples)
    return Ablation(
        ablated, how, examples.rows, examples.targets, after.loss - before.loss, before=before, after=after
    )


# Effect on one text -----------------------------------------------------------------------------------------


def effect(
    m: AnyModel,
    given: Any,
    heads: Heads = (),
    layers: Layers = (),
    feedforwards: Layers = (),
    how: How = "zero",
    means: Values | None = None,
    *,
    target: Target = None,
    pair: str | None = None,
    position: int | None = None,
    top: int = 10,
) -> Effect:
    """Return the distribution over the next token, the class or the tag, with and without parts of a model.

    Args:
        m, given, target, pair: as for `prepare`.
        heads, layers, feedforwards: what is off together; see `ablating`.
        how: zero, or mean: by the values in `means`, by default means over this text.
        position: the token whose output is compared, negative from the end; None: the last; of a masked
            language model the first mask, else the last.
        top: how many of the likeliest, before and after, are listed.
    """
    prepared = prepare(m, given, target, pair)
    parts = {"": find_parts(prepared.m.config, heads, layers, feedforwards)}
    refuse(not parts[""][0], NOTHING_NAMED)
    return _effects(prepared, parts, how, means, position, top)[""]


def _effects(
    prepared: Prepared,
    parts: Mapping[str, tuple[tuple[str, ...], Sequence[Site]]],
    how: How,
    means: Values | None,
    position: int | None,
    top: int,
    on_progress: OnRows = lambda done, total: None,
    known: dict[str, Tensor] | None = None,
) -> dict[str, Effect]:
    """Return what changes without each of some groups of parts, as rows of batched passes."""
    refuse(top < 1, f"top {top} must be 1 or more")
    where, choices = readout_position(prepared, position), choices_of(prepared)
    means = means_for(how, means, lambda: means_of(prepared.model, [prepared.arguments]))
    rows = {name: sites for name, (_, sites) in parts.items()}
    if how == "zero":
        scores = removed_scores(prepared, rows, where or 0, on_progress, known)  # [1 + parts, C]
    else:
        scores = patched_scores(prepared, means or {}, [(), *rows.values()], where or 0, on_progress)
    before, *others = scores
    effects = {}
    for (part, (ablated, _)), after in zip(parts.items(), others):
        log_p, log_q = (x.double().log_softmax(-1) for x in (before, after))
        p, q = log_p.exp(), log_q.exp()
        kl = float((p * (log_p - log_q)).sum().clamp(min=0)) / math.log(2)
        best = {int(choice) for row in (p, q) for choice in row.topk(min(top, len(p))).indices}
        listed = tuple(
            ChoiceEffect(choices.name(choice), choice, float(p[choice]), float(q[choice]))
            for choice in sorted(best, key=lambda choice: float(-p[choice]))
        )
        effects[part] = Effect(ablated, how, prepared.tokens.labels, where, before, after, kl, listed)
    return effects


def readout_position(prepared: Prepared, position: int | None) -> int | None:
    """Return the token whose output is compared, None: the whole text; refuse a head without choices."""
    head, ids, length = prepared.m.config.head, prepared.tokens.ids, len(prepared.tokens)
    refuse(
        head not in ("lm", "mlm", "classifier", "tagger"),
        f"a model with head {head} chooses nothing that could change: "
        "take one with lm, mlm, classifier or tagger",
    )
    if head == "classifier":
        return None
    if position is None:
        mask = prepared.m.special.get("mask")
        position = ids.index(mask) if head == "mlm" and mask is not None and mask in ids else -1
    refuse(
        not -length <= position < length,
        f"there is no token {position}: the text has tokens 0 to {length - 1}",
    )
    return position % length


# Each part alone --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EachEffect(Result):
    """What a model says of one text without each of its parts."""

    effects: dict[str, Effect]  # by part: a head "3.2", "cross.1.0", "feedforward:1", "layer:encoder.0"

    @property
    def kl(self) -> dict[str, float]:
        """KL(before || after) of each part, bits."""
        return {name: effect.kl for name, effect in self.effects.items()}


def effect_of_each(
    m: AnyModel,
    given: Any,
    how: How = "zero",
    *,
    target: Target = None,
    pair: str | None = None,
    position: int | None = None,
    top: int = 10,
    on_progress: OnRows = lambda done, total: None,
    parts: Sequence[str] | None = None,
    known: dict[str, Tensor] | None = None,
) -> EachEffect:
    """Return the effect of each part alone; the arguments are `effect`'s.

    `on_progress` is told how many parts are done, after each batch; `parts` names some, None: all. `known` is
    as in `interventions.removed_scores`.
    """
    prepared = prepare(m, given, target, pair)
    every = single_parts(prepared.m.config)
    named = every if parts is None else parts
    groups = {name: find_parts(prepared.m.config, **every[name]) for name in named}
    return EachEffect(_effects(prepared, groups, how, None, position, top, on_progress, known))
