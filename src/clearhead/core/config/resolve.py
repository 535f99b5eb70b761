"""Resolve a config: derive the fields that were not given, then the specifications of stacks and head."""

import dataclasses
from typing import Any, TypeVar

from clearhead.core.config.fields import Fields, HeadSpec, NormSpec, StackSpec
from clearhead.core.config.kinds import FULL, Kind, Windowed
from clearhead.core.config.registry import Registry
from clearhead.errors import ConfigError

Spec = TypeVar("Spec", StackSpec, HeadSpec)
Value = TypeVar("Value")
READERS: Registry[Any] = Registry({"kind": "clearhead.variants.checks:read_kind"})  # of a text


def derive(config: Fields) -> dict[str, Any]:
    """Return the default of each field that may be None, derived from the others."""
    both, D, H = config.family == "encoder-decoder", config.d_model, config.n_heads
    if config.d_head is None and D % H:
        fitting = ", ".join(str(n) for n in range(1, D + 1) if D % n == 0)
        raise ConfigError(
            f"d_model {D} is not divisible by n_heads {H}: set d_head, or choose n_heads from {fitting}"
        )
    usual_head = "classifier" if config.n_classes else "mlm" if config.family == "encoder" else "lm"
    head, d_head, d_ff = config.head or usual_head, config.d_head or D // H, config.d_ff or 4 * D
    return {
        "n_encoder_layers": config.n_layers if both else None,
        "n_kv_heads": H,
        "n_encoder_heads": H if both else None,
        "d_head": d_head,
        "d_encoder_head": _encoder_d_head(config, d_head) if both else None,
        "d_value": d_head,
        "d_ff": d_ff,
        "d_encoder_ff": d_ff if both else None,
        "max_encoder_positions": config.max_positions if both else None,
        "d_expert": d_ff if config.n_experts else None,
        "source_vocab_size": config.vocab_size if both else None,
        "d_embedding": D,
        "embedding_projection": config.d_embedding not in (None, D),
        "attention_scale": d_head**-0.5,
        "qkv_bias": config.bias,
        "key_bias": config.bias if config.qkv_bias is None else config.qkv_bias,
        "attention_out_bias": config.bias,
        "feedforward_bias": config.bias,
        "norm_bias": config.bias and config.norm == "layernorm",
        "final_norm": config.norm_position != "post",
        "attention_dropout": config.dropout,
        "embedding_dropout": config.dropout,
        "head": usual_head,
        "pooling": "cls" if config.family == "encoder" else "last",
        "head_transform": head == "mlm",
        "head_activation": config.activation,
        "head_bias": head != "lm",
    }


def _encoder_d_head(config: Fields, d_head: int) -> int:
    """Return the encoder's head width: d_model / heads where the decoder's is, else the decoder's width."""
    D, heads = config.d_model, config.n_encoder_heads
    if heads is None or D % config.n_heads or d_head != D // config.n_heads:
        return d_head
    if config.d_encoder_head is None and D % heads:
        raise ConfigError(f"d_model {D} is not divisible by n_encoder_heads {heads}: set d_encoder_head")
    return D // heads


def stack_specs(config: Fields) -> tuple[StackSpec | None, StackSpec | None]:
    """Return the specifications of encoder and decoder; None for a stack that the family lacks."""
    if config.family == "decoder":
        return None, _stack(config, causal=True)
    if config.family == "encoder":
        return _stack(config), None
    encoder = _stack(
        config,
        prefix="encoder.",
        n_layers=config.n_encoder_layers,
        n_heads=config.n_encoder_heads,
        n_kv_heads=config.n_encoder_heads if config.n_kv_heads == config.n_heads else config.n_kv_heads,
        d_head=config.d_encoder_head,
        d_ff=config.d_encoder_ff,
        vocab_size=config.source_vocab_size,
        max_positions=config.max_encoder_positions,
    )
    return encoder, _stack(config, causal=True, cross=True, input="tokens")


def head_spec(config: Fields) -> HeadSpec:
    """Return the specification of the head."""
    return _filled(
        HeadSpec,
        config,
        n_classes=2 if config.head == "span" else config.n_classes,
        tied=config.tie_embeddings,
        transform=config.head_transform,
        activation=config.head_activation,
        bias=config.head_bias,
        norm=_norm(config),
    )


def _stack(config: Fields, **own: Any) -> StackSpec:
    """Return the specification of a stack; `own` has the values that differ from the config's fields."""
    size: dict[str, Any] = {
        **{"prefix": "", "causal": False, "cross": False, "input": config.input},
        **{"n_layers": config.n_layers, "d_head": config.d_head, "d_ff": config.d_ff},
        **own,
    }
    layers, d_head = size["n_layers"], size["d_head"]
    groups = min(config.layer_groups or layers, layers)
    start, span, times = config.loop or (layers, 0, 1)
    distinct = layers - span * (times - 1)  # blocks with weights of their own: `n_layers` counts every use
    order = [*range(start), *[*range(start, start + span)] * times, *range(start + span, distinct)]
    tokens = size["input"] == "tokens"
    # A scale and widths that follow from d_head and d_ff follow from those of this stack.
    scaled = config.d_head is not None and config.attention_scale == config.d_head**-0.5
    return _filled(
        StackSpec,
        config,
        **size,
        d_value=d_head if config.d_value == config.d_head else config.d_value,
        d_expert=size["d_ff"] if config.d_expert in (None, config.d_ff) else config.d_expert,
        attention_scale=d_head**-0.5 if scaled else config.attention_scale,
        d_rotary=int(d_head * config.rope_fraction),
        block_of=tuple(block * groups // layers for block in order),
        kinds=_kinds(config, layers),
        capacities=_capacities(config, layers),
        d_embedding=config.d_embedding if tokens else config.d_model,
        embedding_projection=config.embedding_projection and tokens and not config.project_tokens,
        project_tokens=config.project_tokens and tokens,
        n_types=config.n_types if tokens else 0,
        image_size=config.image_size or (0, 0),
        norm=_norm(config),
    )


def _kinds(config: Fields, layers: int) -> tuple[Kind, ...]:
    """Return the kind of attention of each layer, from `attention` and `window`."""
    names = config.attention if isinstance(config.attention, tuple) else (config.attention,)
    kinds = [READERS["kind"](name) for name in _repeated("attention", names, layers)]
    windows = config.window if isinstance(config.window, tuple) else (config.window,) * layers
    if len(windows) != layers:
        lists = f"window lists {len(windows)} layers and there are {layers}"
        raise ConfigError(f"{lists}: give one entry per layer, or one number")
    for layer, (kind, window) in enumerate(zip(kinds, windows)):
        if window is None:
            continue
        if window < 1:
            raise ConfigError(f"window {window} must be 1 or more")
        if kind != FULL:
            raise ConfigError(
                f'layer {layer} has window {window} and attention "{kind}": '
                'leave window out, or say attention "window(...)" there'
            )
        kinds[layer] = Windowed(window)
    return tuple(kinds)


def _capacities(config: Fields, layers: int) -> tuple[float, ...]:
    """Return the share of the tokens that go through each layer; one number is for every second layer."""
    capacity = config.depth_capacity
    if not isinstance(capacity, tuple):
        return tuple(capacity if layer % 2 else 1.0 for layer in range(layers))
    return _repeated("depth_capacity", capacity, layers)


def _repeated(name: str, values: tuple[Value, ...], layers: int) -> tuple[Value, ...]:
    """Return a value for each layer: those given, again and again."""
    if not values or layers % len(values):
        raise ConfigError(
            f"{name} lists {len(values)} layers, which do not repeat to {layers}: give one entry per layer, "
            "or a number of them that divides the layers"
        )
    return values * (layers // len(values))


def _norm(config: Fields) -> NormSpec:
    return NormSpec(config.norm, config.norm_eps, bool(config.norm_bias), config.norm_unit_offset)


def _filled(spec: type[Spec], config: Fields, **own: Any) -> Spec:
    """Build a specification from `own` values and, for the rest, from fields of the same name."""
    names = {entry.name for entry in dataclasses.fields(spec)}
    return spec(**{name: getattr(config, name) for name in names - own.keys()}, **own)
