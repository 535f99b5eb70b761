"""Recipes: every setting of a run, as TOML with sections such as data, tokens, model, train and generate.

A recipe that comes with clearhead is given by its name, any other by its file. `--set train.steps=2000`
changes a key. `[model]` takes any field of `ModelConfig`, and `base`: a preset's name, or a model directory
to start from.
"""

import dataclasses
import functools
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args, get_origin

from clearhead.core.config import ModelConfig
from clearhead.errors import (
    ConfigError,
    InputError,
    check_names,
    check_type,
    check_types,
    check_values,
    from_plain,
    hints_of,
    nearest,
    plain,
    refuse,
    shaped,
)
from clearhead.hub.tokens import TokensPlan
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.parallel import ParallelPlan

BASE = "base"  # the one key of [model] that is no field of the config
Settings: TypeAlias = Mapping[str, Any] | Iterable[str]  # {"train.steps": 30}, or "train.steps=30" strings
# Settings that take the place of another key: of two that say the same thing, the last one counts.
REPLACES = {"train.steps": "epochs", "train.epochs": "steps", "data.batch_size": "batch_tokens"}
# Optimizers with options of their own, which a recipe's go with when another optimizer is set
MUON, MUON_OPTIONS = ("muon", "normuon"), ("muon_coefficients", "cautious_decay")
FIELD_COMMENT = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)
UNSET: Any = object()  # the value of a setting that removes its key
MAX_THREADS = 1024  # with very many the process dies without a message
MAX_SEED = 2**32 - 1  # so that the seed of each step is one that PyTorch and NumPy take
# What the numbers of [train] and [generate] may be: names of keys, allowed values, and the same in words
RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "steps accumulate validate_every save_every log_every threads patience keep_best keep_last "
        "max_new_tokens num_beams updates turns",
        lambda value: value >= 1,
        "must be 1 or more",
    ),
    (
        "pretrain weight_decay clip warmup loss_chunk lora average samples temperature clip_high kl "
        "z_loss r_drop mtp_weight",
        lambda value: value >= 0,
        "must be 0 or more",
    ),
    (
        "group",
        lambda value: value >= 2,
        "must be 2 or more: answers are compared with others to their prompt",
    ),
    ("lr epochs eps lora_alpha beta scale", lambda value: value > 0, "must be above 0"),
    ("label_smoothing ema", lambda value: 0 <= value < 1, "must lie in [0, 1)"),
    ("layer_decay decay", lambda value: 0 < value <= 1, "must be above 0, and 1 at most"),
    ("floor", lambda value: 0 <= value <= 1, "must lie in [0, 1]: it is a share of lr"),
    ("seed", lambda value: 0 <= value <= MAX_SEED, f"must lie between 0 and {MAX_SEED}"),
    ("threads", lambda value: value <= MAX_THREADS, f"must be {MAX_THREADS} at most: more only slow it down"),
    ("top_p", lambda value: 0 < value <= 1, "must be above 0, and 1 at most: 1 keeps every token"),
    ("length_penalty", lambda value: -20 <= value <= 20, "must lie in [-20, 20]: 1 takes the mean"),
)


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """Settings of training."""

    # Length
    steps: int | None = None  # None: what `epochs` passes over the data take
    epochs: float | None = None  # None: chosen by the amount of data
    pretrain: int = 0  # classify, tag: steps of masked language modelling on the same texts before; 0: none
    accumulate: int = 1  # batches that make one step
    seed: int = 0  # of weights, batches and dropout

    # Optimizer
    # adafactor: less memory; muon: for matrices; normuon: the same, with each row of an update at one scale
    optimizer: Literal["adamw", "adafactor", "muon", "normuon"] = "adamw"
    # muon: of its five rounds; Polar Express ends closer to an orthogonal matrix
    muon_coefficients: Literal["jordan", "polar-express"] = "jordan"
    cautious_decay: bool = False  # muon: decay only weights that the update shrinks too
    lr: float = 1e-3  # the peak learning rate; `original`: a factor on its own rate
    betas: tuple[float, float] = (0.9, 0.95)  # decay of the running means of the gradient and of its square
    eps: float = 1e-8  # added to the root of the latter, which divides the update
    weight_decay: float = 0.1  # of matrices; never of norms, biases and embeddings
    clip: float = 1.0  # largest norm of the gradient; 0: none
    layer_decay: float = 1.0  # each layer's rate is this times that of the layer above it

    # Schedule
    schedule: Literal["original", "cosine", "linear", "constant", "wsd"] = "cosine"  # after the warm-up
    warmup: int | None = None  # steps; None: a twentieth of them, 4,000 for `original`
    decay: float = 0.2  # wsd: the share of the steps at the end in which the rate falls
    floor: float = 0.1  # the rate at the end, as a share of `lr`
    accumulate_schedule: tuple[int, ...] = ()  # `accumulate` in equal parts of the run, such as 1, 2, 4
    # windows of full attention in equal parts of the run, such as 64, 128; the last part sees all
    window_schedule: tuple[int, ...] = ()

    # Loss
    label_smoothing: float = 0.0  # the share of each target that is spread over all classes
    z_loss: float = 0.0  # weight of the squared logarithm of the softmax's denominator; 1e-4 is usual
    r_drop: float = 0.0  # weight of the divergence of two passes with other dropout; 1 to 5 is usual
    # weights of the tokens after the next as further targets of the same logits, such as 0.5, 0.25
    future_tokens: tuple[float, ...] = ()
    class_weights: Literal["balanced"] | None = None  # rare classes weigh more; None: all alike
    standardise: bool = False  # regress: learn numbers in deviations from their mean
    loss_chunk: int | None = None  # rows of logits at a time; None: by the vocabulary
    preference: str = "sigmoid"  # prefer: the loss of pairs, DPO's sigmoid or a variant: ipo, hinge, ...
    mtp_weight: float = 0.0  # of the loss of MTP layers (model.n_mtp_layers); the paper: 0.3, later 0.1
    beta: float = 0.1  # prefer: how strongly the reference model is kept to
    scale: float = 20.0  # embed: similarities are multiplied by this before the softmax
    widths: tuple[int, ...] = ()  # embed: the first so many numbers of a vector learn too (Matryoshka)

    # Machine
    device: str = "auto"  # cuda, mps, cpu; auto: the best there is
    precision: Literal["auto", "float32", "bfloat16", "float16", "float8"] = "auto"  # auto: float32 on CPUs
    compile: bool | None = None  # None: where it pays
    checkpointing: bool = False  # recompute activations in the backward pass: slower, smaller
    offload: bool = False  # keep weights and moments in main memory: slower, for models too large for a GPU
    threads: int | None = None  # of the CPU; None: PyTorch's own choice

    # What is trained
    freeze: tuple[str, ...] = ()  # names of parameters that stay as they are, with * for any part
    lora: int = 0  # rank of low-rank updates; 0: every weight is trained
    lora_alpha: float = 16.0  # they are scaled by this over their rank
    quantize: Literal["int8", "int4"] | None = None  # lora: what the frozen weights are kept in (QLoRA)
    lora_targets: tuple[str, ...] = ("q", "v")  # last names of the layers that get them; or all-linear

    # Validation
    validate_every: int | None = None  # steps; None: about twenty times in all, at least 50 steps apart
    metric: str | None = None  # what the best checkpoint is chosen by; None: by the task
    patience: int | None = None  # validations without progress before stopping; None: never
    keep_best: int = 1  # checkpoints to keep by the metric
    ema: float = 0.0  # decay of the averaged weights; 0: none
    average: int = 0  # average the weights of this many last checkpoints at the end; 0: none

    # Checkpoints
    save_every: int | None = None  # steps; None: at each validation
    keep_last: int = 1  # checkpoints to keep by age

    # Show
    log_every: int = 10  # steps
    samples: int = 2  # shown at each validation; 0: none
    tensorboard: bool = False  # write for TensorBoard too

    def __post_init__(self) -> None:
        _check_plan(self)
        refuse(
            not all(0 <= beta < 1 for beta in self.betas),
            f"betas {self.betas[0]}, {self.betas[1]} must each lie in [0, 1)",
            ConfigError,
        )
        for name in ("accumulate_schedule", "window_schedule", "future_tokens"):
            least, values = 0 if name == "future_tokens" else 1, getattr(self, name)
            refuse(
                any(value < least for value in values),
                f"{name} {', '.join(map(str, values))}: each must be {least} or more",
                ConfigError,
            )
        refuse(
            bool(self.accumulate_schedule) and self.accumulate != 1,
            f"accumulate {self.accumulate} and accumulate_schedule both say how many batches make a step: "
            "set one of them",
            ConfigError,
        )
        muon = self.optimizer in MUON
        refuse(
            not muon and (self.cautious_decay or self.muon_coefficients != "jordan"),
            f"muon_coefficients and cautious_decay are of muon, and optimizer is {self.optimizer}: "
            "set train.optimizer=muon or normuon",
            ConfigError,
        )
        refuse(
            self.quantize is not None and not self.lora,
            f"train.quantize {self.quantize} is for weights that LoRA freezes: set train.lora too",
            ConfigError,
        )
        refuse(
            self.steps is not None and self.epochs is not None,
            f"steps {self.steps} and epochs {self.epochs} both say how long to train: set one of them",
            ConfigError,
        )

    @property
    def accumulates(self) -> tuple[int, ...]:
        """The number of batches of a step in each equal part of the run."""
        return self.accumulate_schedule or (self.accumulate,)

    @property
    def passes(self) -> int:
        """How many forward passes of a batch its loss takes."""
        return 2 if self.r_drop else 1


@dataclass(frozen=True, kw_only=True)
class GeneratePlan:
    """Settings of generation during validation; saved as the model's defaults."""

    max_new_tokens: int = 100  # where a text ends at the latest
    temperature: float = 0.8  # lm; other tasks are greedy or take beams
    top_p: float = 0.95  # lm: draw from the likeliest tokens that have this much of the probability
    num_beams: int = 1  # answers searched side by side; 1: greedy
    length_penalty: float = 1.0  # beams: scores are divided by length to this power

    def __post_init__(self) -> None:
        _check_plan(self)


@dataclass(frozen=True, kw_only=True)
class GrpoPlan:
    """Settings of tuning by reward (GRPO)."""

    # FILE.py with functions that are rewards, FILE.py:NAME for one of them; or exact, regex, json_schema,
    # unit_tests, length, some with a value: length=200
    reward: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()  # of the rewards in their sum; none: 1 each
    # FILE.py with typed functions that the model may call while it answers
    tools: str | None = None
    turns: int = 4  # of the model in an answer with tools: its calls end with the one before the last
    group: int = 8  # answers to each prompt, which are compared with each other
    scale_rewards: bool = True  # divide advantages by the deviation of their group
    loss: Literal["dapo", "grpo", "dr_grpo"] = "dapo"  # mean over tokens, over answers, or by the most tokens
    updates: int = 1  # steps that each batch of answers is used for
    clip: float = 0.2  # how far below 1 a token's ratio of probabilities counts
    clip_high: float | None = None  # how far above 1; None: as far as below
    kl: float = 0.0  # weight of the divergence from the base

    def __post_init__(self) -> None:
        _check_plan(self)


def _check_plan(plan: TrainPlan | GeneratePlan | GrpoPlan) -> None:
    check_types(plan)
    for names, allowed, rule in RULES:
        check_values(plan, [name for name in names.split() if hasattr(plan, name)], allowed, rule)


SECTIONS = {
    "data": DataPlan,
    "tokens": TokensPlan,
    "model": ModelConfig,
    "train": TrainPlan,
    "generate": GeneratePlan,
    "grpo": GrpoPlan,
    "parallel": ParallelPlan,
}


@dataclass(frozen=True)
class Recipe:
    """Every setting of a training run."""

    data: DataPlan = field(default_factory=DataPlan)
    tokens: TokensPlan = field(default_factory=TokensPlan)
    model: Mapping[str, Any] = field(default_factory=dict)  # fields of `ModelConfig`, and `base`
    train: TrainPlan = field(default_factory=TrainPlan)
    generate: GeneratePlan = field(default_factory=GeneratePlan)
    grpo: GrpoPlan = field(default_factory=GrpoPlan)
    parallel: ParallelPlan = field(default_factory=ParallelPlan)

    def __post_init__(self) -> None:
        hints = {BASE: str, **hints_of(ModelConfig)}
        for name, value in self.model.items():
            refuse(
                name not in hints,
                f'unknown [model] key "{name}"{nearest(name, hints)}: [model] has {", ".join(hints)}',
                ConfigError,
            )
            check_type(f"[model] {name}", shaped(value, hints[name]), hints[name])

    @classmethod
    def from_tables(cls, tables: Mapping[str, Mapping[str, Any]]) -> Self:
        """Build a recipe from plain values by section and key."""
        _check_sections(tables)
        plans: dict[str, Any] = {
            section: from_plain(SECTIONS[section], values, f"[{section}]")
            for section, values in tables.items()
            if section != "model"
        }
        return cls(model=dict(tables.get("model", {})), **plans)

    def to_toml(self) -> str:
        """Write the recipe as TOML: every key, its value and its meaning."""
        return "\n".join(_written(section, getattr(self, section)) for section in SECTIONS)

    def replace(self, section: str, **values: Any) -> Self:
        """Return a copy with some keys of one section changed."""
        old = getattr(self, section)
        new: Any = {**old, **values} if section == "model" else dataclasses.replace(old, **values)
        return dataclasses.replace(self, **{section: new})


def read_recipe(name: str | Path | Recipe | None, settings: Settings = ()) -> Recipe:
    """Read a recipe and change some of its keys.

    Args:
        name: a recipe, its name, or its file; None: the defaults.
        settings: the changes, as a dictionary such as `{"train.steps": 2000}` or as strings such as
            `train.steps=2000`; `tokens.vocab_size=` unsets a key, which then has its default.
    """
    tables = _tables(name) if name is not None else {}
    _check_sections(tables)
    changes = list(_changes(settings))
    if any(name == "train" and key == "optimizer" and value not in MUON for name, key, value in changes):
        for option in MUON_OPTIONS:
            tables.get("train", {}).pop(option, None)
    for section, key, value in changes:
        table = tables.setdefault(section, {})
        table[key] = value
        if value is UNSET:
            del table[key]
        elif value is not None:  # None asks for nothing that another setting would have to give way to
            table.pop(REPLACES.get(f"{section}.{key}", ""), None)
    return Recipe.from_tables(tables)


def recipe_names() -> dict[str, str]:
    """Return the names of the recipes that come with clearhead, each with its first line."""
    files = sorted((resources.files("clearhead.learn") / "recipes").iterdir(), key=lambda path: path.name)
    return {
        path.name.removesuffix(".toml"): path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for path in files
        if path.name.endswith(".toml")
    }


def _tables(name: str | Path | Recipe) -> dict[str, dict[str, Any]]:
    if isinstance(name, Recipe):
        return {section: plain(getattr(name, section)) for section in SECTIONS}
    path, known = Path(name), recipe_names()
    unknown, names = not path.is_file() and str(name) not in known, ", ".join(known)
    refuse(
        unknown and path.suffix == ".toml",
        f"there is no recipe {path}: name a .toml file that exists, or one of {names}",
    )
    refuse(
        unknown,
        f'no recipe is called "{name}"{nearest(str(name), known)}: name a .toml file, or one of {names}',
    )
    file = path if path.is_file() else resources.files("clearhead.learn") / "recipes" / f"{name}.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"recipe {name} is not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {path} cannot be read: {error}") from None


def _check_sections(tables: Mapping[str, Any]) -> None:
    for section, values in tables.items():
        refuse(
            section not in SECTIONS,
            f'unknown section "{section}"{nearest(section, SECTIONS)}: a recipe has {", ".join(SECTIONS)}',
            ConfigError,
        )
        refuse(
            not isinstance(values, Mapping),
            f'"{section}" is a section, not a value: write [{section}] and its keys below it',
            ConfigError,
        )


def _changes(settings: Settings) -> Iterator[tuple[str, str, Any]]:
    """Yield section, key and value of each setting."""
    for setting in settings:
        named = isinstance(settings, Mapping)
        place, equals, text = (str(setting), "=", "") if named else setting.partition("=")
        section, _, key = place.strip().partition(".")
        refuse(
            not (equals and section and key),
            f'setting "{setting}" is not understood: write section.key=value, such as train.steps=2000',
        )
        _check_sections({section: {}})
        if (section, key) != ("model", BASE):
            check_names(SECTIONS[section], [key], f"[{section}]")
        hint = str if (section, key) == ("model", BASE) else hints_of(SECTIONS[section])[key]
        value = settings[setting] if isinstance(settings, Mapping) else _parsed(text, hint)
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        single = get_origin(hint) is tuple and isinstance(value, str | int | float)
        yield section, key, [value] if single else value


def _parsed(text: str, hint: Any) -> Any:
    """Parse the text of a setting by the type of its key; no text unsets it."""
    if not text.strip():
        return UNSET
    several = any(get_origin(choice) is tuple for choice in (hint, *get_args(hint)))
    value = _value(text, several)
    if hint in (str, str | None) and not isinstance(value, str):
        return text.strip()  # text that looks like a number
    return value


def _value(text: str, several: bool = False) -> Any:
    """Parse a TOML value; anything else is text or, where `several` are allowed, values between commas."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return [_value(part) for part in text.split(",")] if several and "," in text else text.strip()


def _written(section: str, table: Any) -> str:
    """Write one section as TOML; a key that is unset is written as a comment."""
    values = table if section == "model" else vars(table)
    notes = {name: f"  # {comment}" for name, comment in _comments(table.__class__).items()}
    lines = [
        (f"# {name} =" if value is None else f"{name} = {_toml(plain(value))}") + notes.get(name, "")
        for name, value in values.items()
    ]
    return "\n".join([f"[{section}]", *lines, ""])


@functools.cache
def _comments(cls: type) -> dict[str, str]:
    """Return the comment next to each field in the source of a dataclass and of its bases."""
    comments: dict[str, str] = {}
    for part in filter(dataclasses.is_dataclass, cls.__mro__):
        with suppress(OSError):  # no source is there
            comments |= dict(FIELD_COMMENT.findall(inspect.getsource(part)))
    return comments


def _toml(value: Any) -> str:
    """Write a value as TOML: numbers, booleans and text are as in JSON, but for the character DEL."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
