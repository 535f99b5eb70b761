"""`Task`: everything that makes up a task, from the rows it reads to the figures it is judged by.

A task is a subclass in a module of `tasks/entries`, where `tasks.table` finds it. It states what its rows and
its model are, and overrides the steps in which it differs: read, encode, batch, loss, score, judge, sample.

Shapes: B batch, T length, D model, C classes.
"""

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.core.config.fields import HeadName
from clearhead.core.heads import LanguageHead
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, InputError, refuse
from clearhead.hub.tokens.chat import ChatTemplate
from clearhead.hub.tokens.training import READER, SpecialTokens
from clearhead.learn import losses
from clearhead.learn.batches.batch import IGNORE, Batch, Batches
from clearhead.learn.batches.encoding import (
    BpeDropout,
    Columns,
    Encoded,
    Encoder,
    Setting,
    open_or_encode,
    redrawn,
)
from clearhead.learn.data.corpus import open_corpus
from clearhead.learn.data.examples import Corpus, Images, RowType
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.evaluation.metrics import Judged, Metric
from clearhead.learn.recipe import GeneratePlan, GrpoPlan, Recipe, TrainPlan
from clearhead.run.bundle import Bundle
from clearhead.variants.presets import preset
from clearhead.variants.routing import BALANCE

VERSION = 2  # of encoded examples: raise it when the encoding changes, and old caches are written again
LONGEST = 80  # letters of an input in a sample, whose prediction is never cut
Answers = Sequence[Sequence[Any]]  # of each row: its class, the tags of its words, the ends of a span
Scored = tuple[Metric, Any, Any]  # a metric, predictions, and what was wanted
Side = Literal["train", "validation"]


def sampled(text: str, predicted: object, wanted: object) -> str:
    """Return a sample on one line: input and right answer, cut where they are long, and the model's."""
    texts = (text, str(wanted))
    shown, right = (line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…" for line in texts)
    return f"{shown} -> {predicted}  ({right})"


def balanced_weights(corpus: Corpus, labels: Sequence[str]) -> list[float]:
    """Return a weight for each class: all examples / (classes · its own examples), as scikit-learn does."""
    rows: Any = corpus.train
    if isinstance(rows, Images):
        counts = Counter(labels[number] for number in rows.labels.tolist())
    else:
        counts = Counter(name for row in rows for name in row.names())
    return [counts.total() / (len(labels) * max(counts[name], 1)) for name in labels]


@dataclass(frozen=True)
class UsualModel:
    """What a model is when the recipe names none: a published kind, at a size for a CPU or for a GPU."""

    preset: str
    changes: Mapping[str, Any]
    small: Mapping[str, Any]  # trained on a CPU in minutes
    middle: Mapping[str, Any]  # trained on a GPU

    def config(self, large: bool) -> ModelConfig:
        """Return the config at one of the two sizes."""
        return preset(self.preset).replace(**self.changes, **(self.middle if large else self.small))


DECODER = UsualModel(
    "gpt2",
    {},
    {"d_model": 128, "n_layers": 4, "n_heads": 4, "max_positions": 128, "dropout": 0.0},
    {"d_model": 384, "n_layers": 6, "n_heads": 6, "max_positions": 256, "dropout": 0.2},
)
ENCODER = UsualModel(
    "bert-base",
    {"norm_position": "post"},
    {"d_model": 128, "n_layers": 2, "n_heads": 4, "max_positions": 128},
    {"d_model": 256, "n_layers": 4, "n_heads": 4, "max_positions": 256},
)
ENCODER_DECODER = UsualModel(
    "bart-base",
    {"norm_position": "pre"},
    {"d_model": 128, "n_layers": 2, "n_heads": 4, "max_positions": 128},
    {"d_model": 256, "n_layers": 3, "n_heads": 4, "max_positions": 256, "dropout": 0.2},
)
VISION = UsualModel(
    "vit-tiny",
    {"norm_eps": 1e-12},
    {"d_model": 64, "n_layers": 4, "n_heads": 4, "dropout": 0.0},
    {"d_model": 192, "n_layers": 6, "n_heads": 6, "dropout": 0.1},
)


class Task:
    """A task. Subclasses with a `name` in `tasks/entries` are in the table."""

    name: ClassVar[str]
    # Data
    row: ClassVar[RowType]  # what a row is, and how it is read
    tokens: ClassVar[SpecialTokens | None] = READER  # of its tokenizer; None: the task reads no text
    guessed: ClassVar[bool] = True  # whether such rows, without a named task, are taken for it
    separator: ClassVar[str | None] = None  # text: the role of the token between documents
    sentinels: ClassVar[bool] = False  # whether spans are replaced by sentinels
    chats: ClassVar[bool] = False  # whether rows are conversations, which need a chat template
    batches: ClassVar[Any]  # the class of its `Batches`, called with a `Setting`
    one_shape: ClassVar[bool] = False  # whether all batches of a stream have one shape, without padding
    # Model
    head: ClassVar[HeadName]
    usual: ClassVar[UsualModel] = ENCODER  # what a model is when the recipe names none
    families: ClassVar[tuple[str, ...]] = ()  # further families that fit
    classes: ClassVar[bool] = False  # whether the head has an output for each label of the data
    outputs: ClassVar[int] = 0  # otherwise: how many outputs it has, apart from a vocabulary
    pooled: ClassVar[bool] = True  # whether the head reads one vector of the whole text
    stated: ClassVar[Mapping[str, Any]] = {}  # what config.json says besides the config
    # Training
    # What the loss is computed from: the head's logits of a vocabulary, its other logits, the last hidden
    # states [B, T, D], or the summed log-probabilities of the targets of a row's two documents [B, 2].
    reads: ClassVar[Literal["vocabulary", "logits", "states", "answers"]] = "logits"
    # What `train.metric` may name; of all but the loss, more is better.
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    metric: ClassVar[str] = "loss"  # the default
    sampled: ClassVar[bool] = False  # whether batches are sampled from the model in training, none ahead
    redraws: ClassVar[bool] = False  # whether texts may have other tokens in each epoch (BPE dropout)
    pretrain: ClassVar[bool] = False  # whether masked language modelling on the same texts may come first
    # Use
    writes: ClassVar[bool] = False  # whether the answers are generated
    command: ClassVar[str]  # what to try after training

    # Read, encode, batch ------------------------------------------------------------------------------------

    def read(self, plan: DataPlan, split: bool = True) -> Corpus:
        """Open the data that a plan names; without `split`, all examples are to validate on."""
        return open_corpus(plan, self.row, split)

    def remarks(self, corpus: Corpus) -> Sequence[str]:
        """Return sentences on the data, shown to the user."""
        return ()

    def encode(self, rows: Iterable[Any], encoder: Encoder) -> Iterator[Columns]:
        """Yield the examples as arrays, many at a time."""
        raise NotImplementedError

    def batch(self, setting: Setting) -> Batches:
        """Return the batches of encoded examples."""
        batches: Batches = self.batches(setting)
        return batches

    def encode_corpus(
        self,
        corpus: Corpus,
        side: Side,
        tokenizer: Tokenizer | None,
        labels: Sequence[str],
        folder: str | Path,
        *,
        special: Mapping[str, int],
        template: ChatTemplate | None = None,
    ) -> Encoded:
        """Return the examples of one side as ids, from the cache in `folder`, written first where missing.

        Rows keep their full length: batches cut them to what a model takes, so a cache serves models of any
        length. The tokenizer's truncation and padding are not applied. `labels` are in the order of their
        numbers; `special` are the ids of special tokens by role, for the one between documents.
        """
        refuse(
            corpus.shape != self.row.PLURAL,
            f"the task {self.name} learns from {self.row.PLURAL}, and the data are {corpus.shape}: "
            "choose another data.task, or other data",
        )
        if tokenizer is None:
            raise InputError(f"the task {self.name} needs a tokenizer")
        separator = special.get(self.separator) if self.separator else None
        described = tokenizer.to_str()
        hashed = hashlib.sha256(described.encode()).hexdigest()
        facts = [VERSION, corpus.fingerprint, hashed, self.name, side, list(labels), separator]
        facts += [] if template is None else [template.source, dict(template.tokens), template.tool_source]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        encoder = Encoder(Tokenizer.from_str(described), dict(zip(labels, count())), separator, template)
        columns = self.encode(getattr(corpus, side), encoder)
        place = Path(folder) / f"{self.name}-{side}-{key[:16]}"
        return open_or_encode(place, key, self.name, encoder, columns, self.sentinels)

    def redrawn(
        self,
        encoded: Encoded,
        corpus: Corpus,
        tokenizer: Tokenizer,
        labels: Sequence[str],
        special: Mapping[str, int],
        dropout: BpeDropout,
    ) -> Encoded:
        """Return the training examples with tokens that are drawn anew, in memory; see `encode_corpus`."""
        separator = special.get(self.separator) if self.separator else None
        plain = Tokenizer.from_str(tokenizer.to_str())
        plain.no_truncation()
        plain.no_padding()
        encoder = Encoder(plain, dict(zip(labels, count())), separator, dropout=dropout)
        return redrawn(encoded, self.encode(cast(Any, corpus.train), encoder))

    def make_batches(
        self,
        encoded: Encoded,
        plan: DataPlan,
        *,
        special: Mapping[str, int],
        length: int,
        seed: int,
        training: bool,
        cut_left: bool = False,
    ) -> Batches:
        """Make the batches of one side.

        The arguments are those of `Setting`, and the plan may ask for shorter rows.
        """
        length = min(length, plan.max_length or length)
        setting = Setting(encoded, plan, special, length, seed, training, cut_left)
        sizes = {name: len(array) for name, array in encoded.arrays.items() if name not in ("mean", "std")}
        refuse(
            not any(size - 1 if name.endswith("_offsets") else size for name, size in sizes.items()),
            f"there are no examples for {setting.side}: give more data",
        )
        batches = self.batch(setting)
        batches.notes = encoded.notes + batches.notes
        return batches

    def direct_batches(
        self, loaded: Any, corpus: Corpus, side: Side, plan: DataPlan, seed: int, training: bool = True
    ) -> Batches | None:
        """Return the batches of a run or an evaluation whose examples are not encoded; None: they are."""
        return None

    # Model --------------------------------------------------------------------------------------------------

    @property
    def specials(self) -> SpecialTokens:
        """Return the special tokens of a task that reads text."""
        if self.tokens is None:
            raise InputError(f'task "{self.name}" has no tokens: it reads {self.row.PLURAL}')
        return self.tokens

    @property
    def fitting_families(self) -> tuple[str, ...]:
        """Return the families of models that fit, the usual one first."""
        return preset(self.usual.preset).family, *self.families

    def n_classes(self, labels: Sequence[str]) -> int:
        """Return the number of outputs of the head."""
        return len(labels) if self.classes else self.outputs

    def model_for(self, recipe: Recipe, corpus: Corpus, base: Any) -> Any:
        """Return the model of a task that builds its own; None: as the recipe says."""
        return None

    def module(self, loaded: Bundle) -> nn.Module:
        """Return the module to train."""
        return loaded.model

    def ready(self, loaded: Bundle, recipe: Recipe, corpus: Corpus) -> str:
        """Add what the task needs to a new model, such as a chat template; return a note, or ""."""
        return ""

    def planned(self, recipe: Recipe) -> Self:
        """Return the task with what it needs of the recipe before the data is encoded."""
        refuse(
            recipe.grpo != GrpoPlan(),
            f"[grpo] is for tuning by reward, and this is {self.name}: leave it out, or set data.task=grpo",
            ConfigError,
        )
        return self

    def begin(self, run: Any, recipe: Recipe) -> None:
        """Bind what works with the model in training to a run."""

    def settled(self, plan: TrainPlan, loaded: Bundle, corpus: Corpus) -> Self:
        """Return the task with the loss of the recipe."""
        refuse(
            plan.class_weights is not None,
            f"train.class_weights is for tasks that choose one class, and this is {self.name}: leave it out",
            ConfigError,
        )
        return self

    def with_values(self, **values: Any) -> Self:
        """Return a copy with some attributes of its own."""
        changed = copy.copy(self)
        changed.__dict__.update(values)
        return changed

    # Loss ---------------------------------------------------------------------------------------------------

    def outputs_of(self, model: Transformer, batch: Batch, chunk: int | None = None) -> Tensor:
        """Return what the loss is computed from, see `reads`."""
        arguments = losses.arguments_for(model, batch)
        if self.reads == "logits":
            return cast(Tensor, model(**arguments).required_logits)
        hidden: Tensor = model(**arguments, logits="none").hidden  # B T D
        if self.reads == "states":
            return hidden
        assert isinstance(model.head, LanguageHead)
        chunk = losses.default_chunk(model.config.vocab_size, hidden.device) if chunk is None else chunk
        return losses.answer_logprobs(model.head, hidden, batch, chunk)

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the loss summed over the targets of a batch: [], the usual one of the head."""
        return losses.head_loss(self.head, outputs, batch, smoothing)

    def row_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each row [B], as it is judged; each by itself, unless overridden."""
        rows = [slice(row, row + 1) for row in range(len(batch))]
        return torch.stack([self.loss(outputs[row], batch.rows(row)) for row in rows])

    def answers(self, outputs: Tensor, batch: Batch) -> losses.Answered:
        """Return of each row the model's answers, and the right ones."""
        raise NotImplementedError

    def batch_loss(
        self,
        model: Transformer,
        batch: Batch,
        smoothing: float = 0.0,
        chunk: int | None = None,
        balance: float = BALANCE,
        total: Callable[[Tensor], Tensor] = lambda value: value,
        terms: losses.Terms = losses.NO_TERMS,
    ) -> tuple[Tensor, int]:
        """Return the loss summed over the targets of a batch, and their number; see `losses.batch_loss`."""

        def own(model: Transformer, batch: Batch) -> Tensor:
            if not terms.r_drop:
                return self.loss(self.outputs_of(model, batch, chunk), batch, smoothing)
            first, second = self.outputs_of(model, batch.twice(), chunk).chunk(2)
            loss = (self.loss(first, batch, smoothing) + self.loss(second, batch, smoothing)) / 2
            flat, other = (outputs.reshape(-1, outputs.shape[-1]) for outputs in (first, second))
            shares = batch.targets.is_floating_point()  # of classes: every row has some
            counted = flat.new_ones(len(flat)) if shares else batch.targets.reshape(-1) != IGNORE
            return loss + terms.r_drop * losses.divergence(flat, other, counted)

        own_loss = None if self.reads == "vocabulary" else own
        return losses.batch_loss(model, batch, smoothing, chunk, balance, own_loss, total, terms)

    def take_figures(self) -> dict[str, float]:
        """Return what the task measured since the last call, such as the reward of its samples."""
        return {}

    def after_step(self, model: nn.Module) -> None:
        """Bring weights within bounds after the optimizer's step."""

    @property
    def capturable(self) -> bool:
        """Whether the loss can be part of a captured CUDA graph: it must not wait for the device."""
        return self.reads == "vocabulary"

    # Score --------------------------------------------------------------------------------------------------

    def default_metric(self, labels: Sequence[str]) -> str:
        """Return what the best checkpoint is chosen by where the recipe does not say."""
        return self.metric

    def check_metric(self, metric: str | None) -> None:
        """Refuse a metric that is not measured."""
        refuse(
            metric is not None and metric not in self.metrics,
            f"train.metric {metric} is not measured for task {self.name}: "
            f"choose {' or '.join(self.metrics)}, or leave it out",
            ConfigError,
        )

    def score(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """Return what is measured of the answers to all rows, by name."""
        return {}

    def missing(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> str:
        """Return a sentence on what is never predicted; "": nothing."""
        return ""

    def judges(self, config: ModelConfig, problem: str | None) -> bool:
        """Return True if a model may be judged by this task; `problem` is transformers' `problem_type`."""
        usual = preset(self.usual.preset)
        same = config.head == self.head and config.family in self.fitting_families
        kind = None if problem == "single_label_classification" else problem
        several = not self.classes or config.n_classes > 1
        return same and several and config.input == usual.input and kind == self.stated.get("problem_type")

    def judge(self, judged: Judged) -> list[str]:
        """Add the figures of an evaluation; return what the model says of each example, if anything."""
        scores = self.score(judged.predicted, judged.expected, judged.loaded.class_names)
        for name, (metric, predicted, expected) in scores.items():
            judged.add(name, predicted, expected, metric)
        return []

    # Sample -------------------------------------------------------------------------------------------------

    def sample(self, loaded: Any, row: Any, plan: GeneratePlan, seed: int) -> str:
        """Return what a model says of an example, on one line; "": nothing is shown."""
        return ""


class ClassTask(Task):
    """A task that chooses one of several classes, which `train.class_weights` may weigh."""

    classes = True
    weights: Tensor | None = None  # of the classes [C], in training; validation has the loss without them

    def settled(self, plan: TrainPlan, loaded: Bundle, corpus: Corpus) -> Self:
        """Weigh the classes, where the recipe asks for it."""
        if plan.class_weights is None:
            return self
        return self.with_values(weights=torch.tensor(balanced_weights(corpus, loaded.labels)))

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the summed cross-entropy of logits [..., C]."""
        return losses.summed(outputs, batch.targets, smoothing, self.weights)

    def row_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """See `Task.row_losses`."""
        return Task.row_losses(self.with_values(weights=None), outputs, batch)

    @property
    def capturable(self) -> bool:
        """See `Task.capturable`."""
        return self.weights is None
