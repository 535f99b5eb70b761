"""The exceptions clearhead raises for mistakes a user can mend, and dataclasses whose values are checked.

Each carries one line: what was wrong, the value, what is allowed, and the way out. The command line prints
that line and exits with code 2; library users catch `ClearheadError`.

`ModelConfig` and the sections of a recipe are dataclasses read from and written to plain values, each checked
against its annotation.
"""

import dataclasses
import difflib
import functools
import math
import shlex
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Table = TypeVar("Table")

LONGEST = 1500  # characters of a message
CONTROL = {code: ascii(chr(code))[1:-1] for code in (*range(32), 127)}  # shown as escapes


class ClearheadError(Exception):
    """Base of every error that is about the user's input rather than a fault of the program."""

    def __str__(self) -> str:
        """Return one line that any terminal prints, whatever the names that a file brought into it."""
        text = super().__str__()
        shown = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
        return shown.translate(CONTROL).encode("utf-8", "backslashreplace").decode("utf-8")


class ConfigError(ClearheadError, ValueError):
    """A model description that cannot be built."""


class InputError(ClearheadError, ValueError):
    """A tensor, text or option that the model at hand cannot take."""


class RequestError(InputError):
    """A request that cannot be answered, with the status and the code by which OpenAI's clients know it."""

    def __init__(
        self, message: str, code: str | None = None, status: int = 400, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.status, self.param = code, status, param


class CheckpointError(ClearheadError, ValueError):
    """A model directory that cannot be read or written."""


class TrainingError(ClearheadError, RuntimeError):
    """A run that cannot continue: its loss is not finite, or its data has changed."""


class MissingExtraError(ClearheadError, ImportError):
    """An optional dependency that this action needs."""


class BusyError(ClearheadError, RuntimeError):
    """A server that takes no more requests now."""


def refuse(mistake: object, message: str, error: type[ClearheadError] = InputError) -> None:
    """Raise an error with this one line if a mistake was made."""
    if mistake:
        raise error(message)


def refuse_outside(name: str, value: float, least: float, most: float = math.inf, open: bool = False) -> None:
    """Refuse a number below `least`, or equal to it if `open`, above `most`, or that is not finite."""
    low = f"above {least:g}" if open else f"{least:g} or more"
    within = (least < value if open else least <= value) and value <= most and math.isfinite(value)
    rule = low if most == math.inf else f"{low}, and {most:,.15g} at most"
    refuse(not within, f"{name} {value} must be {rule}")


def refuse_seed(seed: int) -> None:
    """Refuse a seed that random generators, and seeds made from it, do not take."""
    refuse_outside("seed", seed, 0, 2**32 - 1)


def refuse_unknown(what: str, name: object, known: Iterable[str]) -> None:
    """Refuse a name that is not among the known ones; the line gives the nearest of them, and all or many."""
    names = list(known)
    some = ", ".join(names if len(names) <= 24 else [*names[:24], "..."])
    refuse(name not in names, f'{what} "{name}" is not known{nearest(str(name), names)}: choose from {some}')


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean "x"?)' for the known name closest to `name`, or an empty string."""
    names = list(known)
    close = [name] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f' (did you mean "{close[0]}"?)' if close else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters; without one, its class."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def no_model(path: Path) -> str:
    """Return why a path names no model, and the way out; a .pt file is perhaps a Whisper of OpenAI's."""
    if path.suffix == ".pt" and path.is_file():
        folder, vocabulary = path.with_suffix(""), "gpt2" if ".en" in path.stem else "multilingual"
        command = shlex.join(["clearhead", "convert", str(path), f"{folder}/", "--tokenizer"])
        return (
            f"{path} is not a model directory: make one of OpenAI's Whisper file by "
            f"`{command} {vocabulary}.tiktoken`, with the vocabulary from whisper/assets in OpenAI's package"
        )
    if path.is_file():
        there = path.with_name("config.json").is_file()
        wanted = f"its directory {path.parent}" if there else "a model directory"
        return f"{path} is a file and no GGUF file: name {wanted}, or a GGUF file"
    return (
        f"{path} is not a directory: name a model directory or a GGUF file; one from the Hub is fetched by "
        f"`hf download {path} --local-dir DIR`"
    )


@contextmanager
def refusing(wrong: str, error: type[ClearheadError] = InputError) -> Iterator[None]:
    """Raise what a library raises as one line after `wrong`: a panic of the tokenizers library, too.

    A panic is no `Exception`, and its class cannot be imported.
    """
    try:
        yield
    except ClearheadError:
        raise
    except BaseException as raised:
        if not isinstance(raised, Exception) and type(raised).__name__ != "PanicException":
            raise
        raise error(f"{wrong}: {first_line(raised)}") from None


# Dataclasses as typed tables --------------------------------------------------------------------------------
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
    """Check every field of a dataclass against its annotation; a default is taken to fit its own."""
    cls = type(table)
    for name, hint in hints_of(cls).items():
        value = getattr(table, name)
        if value is not getattr(cls, name, dataclasses.MISSING):
            check_type(name, value, hint)


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
