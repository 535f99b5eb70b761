"""Dataclasses as typed tables: read from and written to plain values, each checked against its annotation.

`ModelConfig` and the sections of a recipe are such dataclasses. A wrong name or value is an error of one
line.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from clearhead.errors import ConfigError, nearest, refuse

Table = TypeVar("Table")
# What other libraries call a field, by theirs: those that no likeness of spelling would find.
OTHER_NAMES = {
    **dict.fromkeys(("hidden_size", "n_embd", "embed_dim", "emb_dim", "dim", "embedding_size"), "d_model"),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "decoder_layers", "depth", "n_layer"), "n_layers"),
    **dict.fromkeys(("num_attention_heads", "num_heads", "nhead", "heads", "n_head"), "n_heads"),
    **dict.fromkeys(("num_encoder_layers", "encoder_layers"), "n_encoder_layers"),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_key_value_heads"), "n_kv_heads"),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dim_feedforward", "n_inner", "d_mlp"), "d_ff"),
    **dict.fromkeys(
        ("max_position_embeddings", "block_size", "n_positions", "n_ctx", "max_seq_len"), "max_positions"
    ),
    **dict.fromkeys(("num_tokens", "d_vocab", "n_vocab", "padded_vocab_size"), "vocab_size"),
    **dict.fromkeys(("hidden_act", "activation_function", "act_fn"), "activation"),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps"), "norm_eps"),
    **dict.fromkeys(("num_labels", "num_classes"), "n_classes"),
    **dict.fromkeys(("num_experts", "num_local_experts"), "n_experts"),
    **dict.fromkeys(("tie_word_embeddings", "weight_tying"), "tie_embeddings"),
    **dict.fromkeys(("hidden_dropout_prob", "hidden_dropout", "resid_pdrop", "resid_dropout"), "dropout"),
    **dict.fromkeys(("attention_probs_dropout_prob", "attn_pdrop"), "attention_dropout"),
    **dict.fromkeys(("learning_rate", "max_lr"), "lr"),
    **dict.fromkeys(("max_steps", "max_iters", "total_steps"), "steps"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum"), "accumulate"),
    "head_dim": "d_head",
    "model_type": "family",
    "num_experts_per_tok": "n_active_experts",
    "type_vocab_size": "n_types",
    "rope_theta": "rope_base",
    "sliding_window": "window",
    "attention_bias": "qkv_bias",
    "initializer_range": "init_std",
    "warmup_steps": "warmup",
}
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "unset"}


def plain(value: Any) -> Any:
    """Convert a value for JSON and TOML; a nested dataclass leaves out fields at their default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if getattr(value, f.name) != f.default
        }
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def from_plain(cls: type[Table], values: Mapping[str, Any], table: str = "config") -> Table:
    """Build a dataclass from plain values; the error for an unknown name suggests the nearest known one."""
    check_names(cls, values, table)
    hints = hints_of(cls)
    try:
        return cls(**{name: shaped(value, hints[name]) for name, value in values.items()})
    except TypeError as error:
        raise ConfigError(str(error).replace(f"{cls.__name__}.__init__() ", "config is ")) from None


def check_names(cls: type, values: Iterable[str], table: str = "config") -> None:
    """Raise if a name is no field of the dataclass."""
    known = hints_of(cls)
    for name in map(str, values):
        if name not in known:
            other = OTHER_NAMES.get(name)
            near = nearest(other if other in known else name, known)
            raise ConfigError(f'unknown {table} key "{name}"{near}: {table} has {", ".join(known)}')


def shaped(value: Any, hint: Any) -> Any:
    """Convert lists to tuples, and tables to the dataclass that the annotation names."""
    if isinstance(value, list):
        return tuple(shaped(item, hint) for item in value)
    if isinstance(value, Mapping):
        inner = next((choice for choice in (hint, *get_args(hint)) if dataclasses.is_dataclass(choice)), None)
        if isinstance(inner, type):
            return from_plain(inner, value)
        return {name: shaped(item, hint) for name, item in value.items()}
    return value


def check_types(table: Any) -> None:
    """Check every field of a dataclass against its annotation."""
    for name, hint in hints_of(type(table)).items():
        check_type(name, getattr(table, name), hint)


def check_type(name: str, value: Any, hint: Any) -> None:
    """Check one value against an annotation."""
    if not _fits(value, hint):
        raise ConfigError(
            f"{name} {value!r} is not allowed: it must be {_describe(hint)}{_suggest(value, hint)}"
        )
    refuse(
        isinstance(value, float) and not math.isfinite(value),
        f"{name} {value} is not a finite number",
        ConfigError,
    )


def check_least(table: Any, least: int, *names: str) -> None:
    """Check that these fields, where they are set, are `least` or more."""
    check_values(table, names, lambda value: bool(value >= least), f"must be {least} or more")


def check_values(table: Any, names: Iterable[str], allowed: Callable[[Any], bool], rule: str) -> None:
    """Check that these fields, where they are set, have an `allowed` value; `rule` ends the error's line."""
    for name in names:
        value = getattr(table, name)
        refuse(value is not None and not allowed(value), f"{name} {value} {rule}", ConfigError)


def hints_of(cls: type) -> dict[str, Any]:
    """Return the annotation of each field."""
    return _hints(cls)


_hints = functools.cache(get_type_hints)


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in arguments)
    if origin is tuple:
        several = arguments[-1] is Ellipsis and isinstance(value, tuple)
        kinds = arguments[:1] * len(value) if several else arguments
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if origin is Mapping:
        key, item = arguments
        return isinstance(value, Mapping) and all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(choice) for choice in arguments)
    if origin is tuple:
        inner = [_describe(argument) for argument in arguments if argument is not Ellipsis]
        return f"a list of {inner[0]}" if Ellipsis in arguments else f"{len(inner)} values of {inner[0]}"
    return NAMES.get(hint, "a table" if origin is Mapping else str(getattr(hint, "__name__", hint)))


def _suggest(value: Any, hint: Any) -> str:
    literals = [option for option in (hint, *get_args(hint)) if get_origin(option) is Literal]
    choices = [str(choice) for literal in literals for choice in get_args(literal)]
    return nearest(value, choices) if isinstance(value, str) else ""
