"""`TaskSpec`: everything that makes up a task, from the rows it reads to the figures it is judged by.

`tasks.table` collects the entries. Data, tokens and batches are below this folder: they take from an entry
what they need.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.config.fields import HeadName
from clearhead.errors import ConfigError, InputError, refuse
from clearhead.hub.tokens.training import SpecialTokens
from clearhead.learn.batches.batching import Batching
from clearhead.learn.data.examples import Corpus, Images, Shape
from clearhead.learn.losses import Objective
from clearhead.learn.recipe import Recipe, TrainPlan
from clearhead.run.bundle import Bundle
from clearhead.variants.presets import preset

# What a model is used for, by its head; every model also embeds.
USES: dict[HeadName, tuple[str, ...]] = {
    "lm": ("generate", "score"),
    "mlm": ("fill",),
    "classifier": ("classify",),
    "tagger": ("tag",),
    "span": ("answer",),
    "embedding": (),
    "none": (),
}
LONGEST = 80  # letters of an input in a sample, whose prediction is never cut
Answers = Sequence[Sequence[Any]]  # of each row: its class, the tags of its words, the ends of a span


def sampled(given: str, said: object, wanted: object) -> str:
    """Return a sample on one line: what was given, cut where it is long, what was said, what is right."""
    shown, right = (
        text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…" for text in (given, str(wanted))
    )
    return f"{shown} -> {said}  ({right})"


def balanced_weights(corpus: Corpus, labels: Sequence[str]) -> list[float]:
    """Return a weight for each class: all examples / (classes · its own examples), as scikit-learn does."""
    rows: Any = corpus.train
    if isinstance(rows, Images):
        count = Counter(labels[number] for number in rows.labels.tolist())
    else:
        count = Counter(name for row in rows for name in row.names())
    return [count.total() / (len(labels) * max(count[name], 1)) for name in labels]


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


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task."""

    name: str
    # Data
    batching: Batching  # row shape, encoding, batches
    tokens: SpecialTokens | None  # None: the task reads no text
    guessed: bool = True  # whether data of this shape, without a named task, is taken for it
    remarks: Callable[[Corpus], Sequence[str]] = lambda corpus: ()  # sentences on the data, shown to the user
    # Model
    head: HeadName
    usual: UsualModel
    families: tuple[str, ...] = ()  # further families that fit
    classes: bool = False  # whether the head has an output for each label of the data
    outputs: int = 0  # otherwise: how many outputs it has, apart from a vocabulary
    pooled: bool = True  # whether the head reads one vector of the whole text
    stated: Mapping[str, Any] = field(default_factory=dict)  # what config.json says beside the config
    # Gives a new model what the task needs besides, such as a chat template; returns a note.
    ready: Callable[[Bundle, Recipe], str] | None = None
    # Training
    objective: Objective | None = None  # None: cross-entropy over the vocabulary
    # The same, where it follows from the recipe and the model.
    objective_for: Callable[[TrainPlan, Bundle], Objective] | None = None
    metrics: tuple[str, ...] = ("loss",)  # that `train.metric` may name; of all but the loss, more is better
    metric: str | Callable[[Sequence[str]], str] = "loss"  # the default, perhaps by the labels
    # (answers, targets, labels) -> scores by name.
    scores: Callable[[Answers, Answers, Sequence[str]], dict[str, float]] = lambda *given: {}
    # (answers, targets, labels) -> a sentence on what is never predicted; "": nothing.
    missing: Callable[[Answers, Answers, Sequence[str]], str] = lambda *given: ""
    # Makes the objective of weights by class, for `train.class_weights`.
    weighted: Callable[[Tensor], Objective] | None = None
    pretrain: bool = False  # whether masked language modelling on the same texts may come first
    chats: bool = False  # whether rows are conversations, which need a chat template
    one_shape: bool = False  # whether all batches of a stream have one shape, without padding
    # Use
    writes: bool = False  # whether the answers are generated
    command: str  # what to try after training
    # (model, example, generation plan, seed) -> what the model says of the example.
    sample: Callable[..., str]
    figures: Callable[..., list[str]]  # (judgement) -> what the model says of each example; adds its figures

    @property
    def shape(self) -> Shape:
        """Return the shape of the rows."""
        return self.batching.shape

    @property
    def specials(self) -> SpecialTokens:
        """Return the special tokens of a task that reads text."""
        if self.tokens is None:
            raise InputError(f'task "{self.name}" has no tokens: it reads {self.shape.name}')
        return self.tokens

    @property
    def fitting_families(self) -> tuple[str, ...]:
        """Return the families of models that fit, the usual one first."""
        return preset(self.usual.preset).family, *self.families

    def settled(self, plan: TrainPlan, loaded: Bundle, corpus: Corpus) -> "TaskSpec":
        """Return the task with the objective that a recipe asks for."""
        made = None if self.objective_for is None else self.objective_for(plan, loaded)
        if plan.class_weights is not None:
            refuse(
                self.weighted is None,
                f"train.class_weights is for tasks that choose one class, and this is {self.name}: "
                "leave it out",
                ConfigError,
            )
            assert self.weighted is not None
            made = self.weighted(torch.tensor(balanced_weights(corpus, loaded.labels)))
        return self if made is None else replace(self, objective=made)

    def n_classes(self, labels: Sequence[str]) -> int:
        """Return the number of outputs of the head."""
        return len(labels) if self.classes else self.outputs

    def default_metric(self, labels: Sequence[str]) -> str:
        """Return what the best checkpoint is chosen by where the recipe does not say."""
        return self.metric(labels) if callable(self.metric) else self.metric

    def check_metric(self, metric: str | None) -> None:
        """Refuse a metric that is not measured."""
        refuse(
            metric is not None and metric not in self.metrics,
            f"train.metric {metric} is not measured for task {self.name}: "
            f"choose {' or '.join(self.metrics)}, or leave it out",
            ConfigError,
        )

    def judges(self, config: ModelConfig, problem: str | None) -> bool:
        """Return True if a model may be judged by this task; `problem` is transformers' `problem_type`."""
        usual = preset(self.usual.preset)
        same = config.head == self.head and config.family in self.fitting_families
        kind = None if problem == "single_label_classification" else problem
        several = not self.classes or config.n_classes > 1
        return same and several and config.input == usual.input and kind == self.stated.get("problem_type")
