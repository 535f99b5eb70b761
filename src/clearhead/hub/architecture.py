"""An architecture: the classes of its checkpoints, and how its config and tensors become ours and back."""

import dataclasses
import fnmatch
import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clearhead.core.config import MOST_LAYERS, MOST_WIDE, ModelConfig, RopeScaling, StackSpec
from clearhead.errors import CheckpointError, ConfigError, first_line
from clearhead.hub.fields import ONLY, ConfigPart, Json, count_labels
from clearhead.hub.files import refuse, refuse_key
from clearhead.hub.mtp import MTPTensors
from clearhead.hub.rules import Rule
from clearhead.hub.weights import Entry, equal

# Fields that change how a model is initialised or trained, and not what it computes. `bias` only sets others.
WITHOUT_EFFECT = (
    *("init", "init_std", "bias"),
    *("dropout", "attention_dropout", "embedding_dropout", "feedforward_dropout", "layer_drop"),
)

# transformers can build a base model without its pooler, and its config.json does not tell: ours does.
POOLER_KEY = "has_pooler"
WITHOUT_POOLER: Json = {"head": "none", "pooler": "none"}
BOTH_KEY = "is_encoder_decoder"
QUANTIZATION = "quantization_config"
SECTION = "clearhead"  # of config.json: our own config, where no architecture expresses all of it

# The largest values of some fields; of every other number it is MOST_WIDE.
MOST = {
    "n_layers": MOST_LAYERS,
    "n_encoder_layers": MOST_LAYERS,
    "vocab_size": 2**31,
    "source_vocab_size": 2**31,
    "max_positions": 2**31,
}


@dataclass(frozen=True)
class Architecture:
    """Data alone.

    `classes` maps each class name to what its head is in our fields; the first is the default.
    """

    model_type: str
    classes: Mapping[str, Json]
    config: tuple[ConfigPart, ...]
    rules: tuple[Rule, ...]
    heads: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)  # further rules, by our head
    prefix: str = ""  # of the base model's tensors within a model with a head
    ignored: tuple[str, ...] = ()  # tensors that some files hold though they are not learned
    open: tuple[str, ...] = ()  # fields that the tensors of a file decide, and config.json does not state
    carried: tuple[str, ...] = ()  # tensors of other heads than the class's own: kept, and written back
    tied: tuple[str, ...] = ()  # token tables that are one unless the file has others; the last is the output
    aliases: Mapping[str, str] = field(default_factory=dict)  # {further name: key}; it goes before the key
    named: bool = False  # its tensors are another's: config.json must say that it is this one
    quantized: tuple[str, ...] = ()  # the quant_methods of files whose weights can be read
    mtp: MTPTensors | None = None  # where files have layers for multi-token prediction

    def read(self, theirs: Json) -> ModelConfig:
        """Return our config, from a config.json."""
        renamed = {key: theirs[alias] for alias, key in self.aliases.items() if theirs.get(alias) is not None}
        with reading_config():
            values = self._values({**theirs, **renamed})
            check_sizes(values)
            check_common(theirs, values.get("family", "decoder"), self.quantized)
            return ModelConfig(**values)

    def _values(self, theirs: Json) -> Json:
        values: Json = {}
        for part in self.config:
            values |= part.read(theirs)
        values |= self.classes[self.class_of(theirs)]
        if values.get("head") == "embedding" and theirs.get(POOLER_KEY) is False:
            values |= WITHOUT_POOLER
        if values.get("head") in ("classifier", "tagger") and "n_classes" not in values:
            values["n_classes"] = count_labels(theirs)
        return values

    def class_of(self, theirs: Json) -> str:
        """Return the class that the checkpoint was saved from."""
        named = (theirs.get("architectures") or list(self.classes))[0]
        refuse(
            named not in self.classes,
            f'config.json names the class "{named}": '
            f"supported for {self.model_type} are {', '.join(self.classes)}",
        )
        return str(named)

    def write(self, config: ModelConfig) -> Json | None:
        """Return a config.json for our config, exact or not; None where no class has such a head."""
        for named, head in self._choices():
            if all(getattr(config, name) == value for name, value in head.items()):
                theirs: Json = {**named, "model_type": self.model_type}
                for part in self.config:
                    theirs |= part.write(config)
                return theirs
        return None

    def _choices(self) -> Iterator[tuple[Json, Json]]:
        """Yield how config.json names each head, and what that head is in our fields."""
        for name, head in self.classes.items():
            yield {"architectures": [name]}, head
            if head.get("head") == "embedding":
                yield {"architectures": [name], POOLER_KEY: False}, {**head, **WITHOUT_POOLER}

    def differences(self, config: ModelConfig) -> list[str] | None:
        """Return what this architecture cannot express, as "name value"; None without such a head."""
        try:
            theirs = self.write(config)
            if theirs is None:
                return None
            back = self.read(theirs)
        except (CheckpointError, ConfigError, AssertionError, KeyError, TypeError, ValueError):
            return None
        changed = changed_fields(config, back, without=(*WITHOUT_EFFECT, *self.open))
        return [f"{name} {getattr(config, name)!r}" for name in changed]

    def merge(self, config: ModelConfig, theirs: Json) -> ModelConfig:
        """Return our config, as it stands next to a config.json, with what has changed there since.

        Other tools keep our section and change their own fields: a field that no longer says what we wrote
        is the file's, every other one ours.
        """
        refuse(
            self.differences(config) is None,
            f"config.json has a section of our own that is no {self.model_type}: remove it",
        )
        now = self.read(theirs)
        changed = changed_fields(self.read(self.write(config) or {}), now)
        if not changed:
            return config
        return dataclasses.replace(config, **{name: getattr(now, name) for name in changed})

    def rules_for(self, config: ModelConfig) -> tuple[Rule, ...]:
        """Return the rules that apply to a model with this config, those of its head included."""
        rules = (*self.rules, *self.heads.get(config.head or "none", ()))
        rules = tuple(rule for rule in rules if rule.applies(config))
        return rules if self.mtp is None else (*rules, *self.mtp.rules(config, rules))

    def tensor_names(self) -> list[str]:
        """Return the names of all tensors, of every head, with placeholders for layers and experts."""
        return [rule.theirs for rules in (self.rules, *self.heads.values()) for rule in rules]

    def carries(self, config: ModelConfig, entries: Mapping[str, Entry]) -> tuple[str, ...]:
        """Return patterns for the tensors of a file that are kept for other programs."""
        return self.carried + (() if self.mtp is None else self.mtp.carried(config, entries))

    def names_all(self, names: Iterable[str]) -> bool:
        """Return whether each tensor could be one of this architecture's, with the prefix or without."""
        numbered = [re.sub(r"\\{\w\\}", r"\\d+", re.escape(name)) for name in self.tensor_names()]
        pattern = re.compile("|".join(numbered))
        bare = bool(self.prefix) and not any(name.startswith(self.prefix) for name in names)
        full = [self.prefix + name if bare else name for name in names]
        return all(pattern.fullmatch(name) or is_among(name, (*self.ignored, *self.carried)) for name in full)


def is_among(name: str, patterns: Iterable[str]) -> bool:
    """Return whether the name of a tensor matches one of the patterns."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def check_sizes(values: Json) -> None:
    """Refuse numbers that no model has, before anything is made that long."""
    for name, value in values.items():
        most = MOST.get(name, MOST_WIDE)
        refuse(
            isinstance(value, int) and abs(value) > most,
            f"config.json makes {name} {str(value)[:24]}: {most:,} is the most",
        )


def check_common(theirs: Json, family: str, quantized: Collection[str]) -> None:
    """Refuse what a config.json of any architecture can state, and transformers heeds, and we do not."""
    layers = theirs.get("per_layer_config")
    refuse_key(layers, "per_layer_config", layers, "every layer must have one config")
    stored = theirs.get(QUANTIZATION)
    known = isinstance(stored, dict) and stored.get("quant_method") in quantized
    allowed = " or ".join((*quantized, "floating point"))
    refuse_key(stored and not known, QUANTIZATION, stored, f"weights must be {allowed}")
    for key, families in (("is_causal", ("decoder", "encoder-decoder")), (BOTH_KEY, ("encoder-decoder",))):
        stated = theirs.get(key, True)
        refuse_key(family in families and not stated, key, stated, ONLY.format(True))


def changed_fields(
    a: ModelConfig, b: ModelConfig, without: Collection[str] = (), tolerance: float = 1e-12
) -> list[str]:
    """Return the fields in which two configs differ; numbers may differ by a share of `tolerance`."""

    def alike(x: Any, y: Any) -> bool:
        if isinstance(x, float) and isinstance(y, float):
            return math.isclose(x, y, rel_tol=tolerance)
        if isinstance(x, RopeScaling) and isinstance(y, RopeScaling):
            return all(map(alike, dataclasses.astuple(x), dataclasses.astuple(y)))
        return bool(x == y)

    names = [each.name for each in dataclasses.fields(ModelConfig) if each.name not in without]
    return [name for name in names if not alike(getattr(a, name), getattr(b, name))]


@contextmanager
def reading_config() -> Iterator[None]:
    """Refuse in one line a config.json that cannot be read as a config."""
    try:
        yield
    except CheckpointError:
        raise
    except ConfigError as error:
        raise CheckpointError(f"config.json describes a model that cannot be built: {error}") from None
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json has a value of the wrong kind: {first_line(error)}") from None


# What the tensors of a file decide, whatever config.json says -----------------------------------------------


Entries = dict[str, Entry]
MOST_EXPERTS = 4096  # of one block
TENSORS_OF_A_BLOCK = 3  # at least: a norm, and the two of a feed-forward alone


def as_stored(
    config: ModelConfig, theirs: Json, architecture: Architecture, entries: Entries
) -> tuple[ModelConfig, Entries]:
    """Return the config with what the file holds: a pooler, tables, an output layer, its bias, MTP layers.

    Some config.json say "tied" of weights that are not: tensors that differ are several, whatever it says.
    The entries come back with the tables that the file leaves out because they are tied to one that it has.
    """
    pooled = config.head == "embedding" and config.pooler != "none" and SECTION not in theirs
    if pooled and not any(".pooler." in name for name in entries):
        config = architecture.read({**theirs, POOLER_KEY: False})
    tables = {name: entries[name] for name in architecture.tied if name in entries}
    if tables and config.family == "encoder-decoder" and config.share_embeddings and config.tie_embeddings:
        first = next(iter(tables.values()))
        inputs = {name: tables.get(name, first) for name in architecture.tied[:-1]}
        if not all(equal(first, table) for table in inputs.values()):
            config = config.replace(share_embeddings=False, tie_embeddings=False)
            entries = {**inputs, **entries}
            if config.head == "lm":
                entries.setdefault(architecture.tied[-1], first)
    if config.head in ("lm", "mlm"):
        stored = {
            rule.ours: entries[rule.theirs]
            for rule in reversed(architecture.rules_for(config))
            if rule.theirs in entries
        }
        source, target = (
            stored.get((f"{stack}.embedding.front.tokens.weight",)) for stack in ("encoder", "decoder")
        )
        table, out = target or source, stored.get(("head.out.weight",))
        if config.tie_embeddings and table and out and not equal(table, out):
            config = config.replace(tie_embeddings=False)
        if config.head_bias and "head_bias" in architecture.open and ("head.out.bias",) not in stored:
            config = config.replace(head_bias=False)
    if architecture.mtp is not None:
        config = config.replace(n_mtp_layers=architecture.mtp.stored(config, entries))
    return config, entries


def common_dtype(theirs: Json, entries: Iterable[Entry]) -> torch.dtype | None:
    """Return the dtype for weights of several: the one that config.json states, or one that holds them all.

    None where there is only one.
    """
    dtypes = {entry.dtype for entry in entries if entry.dtype.is_floating_point}
    stated = theirs.get("dtype") or theirs.get("torch_dtype")
    named = [dtype for dtype in dtypes if str(dtype) == f"torch.{stated}"]
    return None if len(dtypes) < 2 else named[0] if named else functools.reduce(torch.promote_types, dtypes)


def check_bounds(folder: Path, config: ModelConfig, entries: Entries) -> None:
    """Refuse a config of more weights than the file holds, before anything so large is built."""
    blocks = sum(len(set(stack.block_of)) for stack in config.stacks)
    needed = sum(map(_least_weights, config.stacks))
    stored = sum(math.prod(entry.shape) for entry in entries.values())
    wrong = f"{folder}: config.json says {blocks:,} layers"
    refuse(
        config.n_experts > MOST_EXPERTS,
        f"{wrong} of {config.n_experts:,} experts: {MOST_EXPERTS:,} is the most",
    )
    refuse(
        TENSORS_OF_A_BLOCK * blocks > len(entries) or needed > stored,
        f"{wrong} with {needed:,} weights at least, and the file has {len(entries):,} tensors "
        f"with {stored:,}: they do not belong together",
    )


def _least_weights(stack: StackSpec) -> int:
    """Return the number of feed-forward weights: each of them is in the file once."""
    matrices, blocks = 3 if stack.gated else 2, len(set(stack.block_of)) - len(stack.feedforward_skips)
    dense = len({stack.block_of[layer] for layer in stack.dense_layers}) if stack.n_experts else blocks
    mixture = stack.n_experts * stack.d_expert + stack.d_shared_expert
    return (dense * stack.d_ff + (blocks - dense) * mixture) * matrices * stack.d_model
