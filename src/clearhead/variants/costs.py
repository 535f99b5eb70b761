"""The cost of a model from its config alone: parameters, FLOPs, memory. Nothing is built.

Every figure is a sum over the steps that the parts of the model yield. What is counted:

    parameters      every weight once; tied tables and shared layers count where they are first used
    flops           2·m·n·k for each matmul and convolution; attention in full, T x S
    activations     bytes that `train` keeps for the backward pass with the fused kernel, each tensor once. In
                    half precision it runs under autocast: the residual stream and the inputs of norms are
                    float32, each matmul keeps its own copy of its input. Statistics are float32 and dropout
                    masks one byte, as on a GPU. Without a fused kernel (values of another width than keys, a
                    learned bias, a soft-cap) the pattern [B, H, T, S] is kept. Not counted: on a CPU, wider
                    dropout masks and the pattern that the kernel keeps for attention dropout
    copies          bytes of weights that are kept too: those of q, k and v joined, and under autocast of all
"""

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from clearhead.core.config import ModelConfig, StackSpec
from clearhead.core.config.fields import passing
from clearhead.core.config.kinds import FULL
from clearhead.errors import ConfigError, InputError, nearest, refuse
from clearhead.variants.kinds import block_length
from clearhead.variants.presets import preset
from clearhead.variants.shortcuts import last_shape
from clearhead.variants.steps import Pass, Step, model_steps

DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of one value
# Bytes of a parameter in training, as float32: value, gradient, and two moments or hardly anything. Muon has
# one moment for matrices and two for the rest: two are counted.
LEARNING = {"adamw": 16, "adafactor": 8, "muon": 16, "normuon": 16}


@dataclass(frozen=True)
class Parts:
    """One figure for each part of the model."""

    embedding: int = 0
    positions: int = 0
    attention: int = 0
    cross: int = 0
    feedforward: int = 0
    norms: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        """The sum over the parts."""
        return sum(getattr(self, part.name) for part in fields(Parts))


@dataclass(frozen=True)
class Parameters(Parts):
    """The number of weights of each part."""

    active: int = 0  # without those of experts that a token does not visit


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one pass over the whole batch."""

    forward: Parts
    backward: Parts
    tokens: int  # of the stack that feeds the head, in the whole batch

    @property
    def training(self) -> int:
        """FLOPs of forward and backward pass."""
        return self.forward.total + self.backward.total

    @property
    def forward_per_token(self) -> float:
        """FLOPs of the forward pass, per token."""
        return self.forward.total / self.tokens

    @property
    def training_per_token(self) -> float:
        """FLOPs of forward and backward pass, per token."""
        return self.training / self.tokens


@dataclass(frozen=True)
class MemoryUse:
    """Memory in bytes."""

    weights: int
    learning: int  # weights, gradients and AdamW's two moments as `train` keeps them: always float32
    activations: Parts  # kept for the backward pass
    copies: int  # of weights, kept for the backward pass: of q, k and v joined; in half precision, of all
    loss: int  # log-probabilities that cross-entropy keeps, in float32 at least, unless computed in chunks
    attention_matrix: int  # the largest [B, H, T, S] of one layer, which the eager kernel allocates
    kv_cache: int  # self-attention keys and values of `length` tokens, in `Cache` and `FixedCache`
    window_cache: int  # the same in `WindowCache`, where layers with a window keep no more than that
    cross_cache: int  # cross-attention keys and values of the source

    @property
    def training(self) -> int:
        """What training takes: float32 weights, gradients and moments; activations, copies, the loss."""
        return self.learning + self.activations.total + self.copies + self.loss


@dataclass(frozen=True)
class Cost:
    """The cost of a model on `batch` rows of `length` inputs; `steps` has the details."""

    config: ModelConfig
    length: int
    source_length: int | None
    batch: int
    dtype: str
    parameters: Parameters
    flops: Flops
    memory: MemoryUse
    steps: tuple[Step, ...]

    def within(self, name: str) -> tuple[Step, ...]:
        """Return the steps of one part of the model: "blocks.3", "blocks.3.attention", "encoder", "head"."""
        return tuple(step for step in self.steps if f"{step.name}.".startswith(f"{name}."))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values with totals, without the steps."""
        return {
            entry.name: _plain(getattr(self, entry.name)) for entry in fields(self) if entry.name != "steps"
        }


def cost(
    config: ModelConfig | str,
    length: int | None = None,
    batch: int = 1,
    dtype: str = "float32",
    source_length: int | None = None,
    autocast: bool = True,
    mtp: bool = False,
) -> Cost:
    """Compute the cost of a model on `batch` rows of `length` inputs.

    Args:
        config: a config, or the name of a preset.
        length: tokens, vectors or frames of each row, of the decoder where there are two stacks; None:
            as many as the model has positions for, or one image.
        batch: rows.
        dtype: float64, float32, bfloat16 or float16: of weights and caches in use, of matmuls in training.
        source_length: the same for the encoder where there are two stacks; None: as `length`.
        autocast: in half precision, count activations as `train` keeps them. False: as with weights that are
            cast before the pass, as FSDP casts them: the residual stream is in half precision too.
        mtp: count the work of MTP layers, as training with their loss has it; their weights always count.
    """
    config = preset(config) if isinstance(config, str) else config
    size = bytes_of(dtype)
    refuse(batch < 1, f"batch {batch} must be 1 or more")
    first, main = config.stacks[0], config.main
    length, tokens = _measure(main, length, "length")
    source_tokens = 0
    if first is not main:
        wanted = length if source_length is None and first.input != "patches" else source_length
        source_length, source_tokens = _measure(first, wanted, "source_length")
    elif source_length is not None:
        raise InputError("source_length is for a model with an encoder and a decoder: give length alone")

    run = Pass(batch, size, autocast, mtp)
    steps = tuple(model_steps(config, run, length, source_length or 0))
    active = sum(step.parameters - step.idle for step in steps)
    parameters = Parameters(**vars(_by_part(steps, "parameters")), active=active)
    out = next((step for step in steps if step.name == "head.out"), Step("", "head"))
    memory = MemoryUse(
        weights=parameters.total * size,
        learning=parameters.total * LEARNING["adamw"],
        activations=_by_part(steps, "kept"),
        copies=sum(s.weights for s in steps if s.gradients > 1 and (s.joined or run.half)) * size,
        loss=out.m * out.n * max(size, 4),
        attention_matrix=max(
            (step.m * step.n * step.count * size for step in steps if step.name.endswith(".scores")),
            default=0,
        ),
        kv_cache=_cache(main, "attention", tokens, batch) * size,
        window_cache=_cache(main, "attention", tokens, batch, ring=True) * size,
        cross_cache=_cache(main, "cross", source_tokens, batch) * size,
    )
    flops = Flops(_by_part(steps, "forward"), _by_part(steps, "backward"), tokens=batch * tokens)
    return Cost(config, length, source_length, batch, dtype, parameters, flops, memory, steps)


def attention_matrix_bytes(length: int, dtype: str = "float32", heads: int = 1, batch: int = 1) -> int:
    """Return the bytes of the attention matrix of one layer: `heads` squares of `length` for each row."""
    return batch * heads * length * length * bytes_of(dtype)


def chunk_rows(vocab_size: int, memory: float) -> int:
    """Return how many positions are scored at a time on a GPU: as float32 logits, a sixteenth of its memory.

    Fewer are slower there: each chunk adds to the gradient of the whole embedding.
    """
    return max(1, int(memory) // 64 // vocab_size)


def bytes_of(dtype: str) -> int:
    """Return the bytes of one value."""
    refuse(
        dtype not in DTYPES,
        f'dtype "{dtype}" is not known{nearest(dtype, DTYPES)}: choose from {", ".join(DTYPES)}',
        ConfigError,
    )
    return DTYPES[dtype]


def _cache(spec: StackSpec, kind: str, tokens: int, batch: int, ring: bool = False) -> int:
    """Count the values that a cache holds; a ring has one slot more than its window, for what is not kept."""
    if not (spec.causal or block_length(spec)) or (kind == "cross" and not spec.cross):
        return 0
    total = math.prod(last_shape(spec)) if spec.recalls and kind == "attention" else 0
    for layer, seen in enumerate(spec.kinds):
        states = spec.state_shapes(layer) if kind == "attention" else []
        passed = passing(spec.capacities[layer], tokens)
        slots = passed if seen.reach is None or not ring else seen.slots
        attention = f"{spec.prefix}blocks.{layer}.{kind}"
        heads, key, value = (seen if kind == "attention" else FULL).kept(spec, attention)
        each = slots * heads * (key + value)
        total += sum(math.prod(shape) for shape in states) + (each if seen.masked or not states else 0)
    return batch * total


def _measure(spec: StackSpec, length: int | None, name: str) -> tuple[int, int]:
    """Return the number of inputs and of tokens of one row."""
    if spec.input == "patches":
        tokens = spec.n_tokens(0)
        refuse(
            length not in (None, tokens),
            f"{name} {length} was given for an image, which has {tokens} tokens: leave it out",
        )
        return tokens, tokens
    if length is None:
        length = spec.max_positions * (spec.conv_stride if spec.input == "frames" else 1)
    refuse(length < 1, f"{name} {length} must be 1 or more")
    tokens = spec.n_tokens(length)
    refuse(
        spec.bounded and tokens > spec.max_positions,
        f"{name} {length} makes {tokens} positions and the model has {spec.max_positions}: "
        "raise max_positions",
    )
    return length, tokens


def _by_part(steps: tuple[Step, ...], figure: str) -> Parts:
    return Parts(
        **{
            part.name: sum(getattr(step, figure) for step in steps if step.part == part.name)
            for part in fields(Parts)
        }
    )


def _plain(value: Any) -> Any:
    if isinstance(value, ModelConfig):
        return value.to_dict(derived=True)
    if not is_dataclass(value):
        return value
    names = [entry.name for entry in fields(value)]
    names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
    if isinstance(value, Parts) and "total" not in names:
        names.append("total")
    return {name: _plain(getattr(value, name)) for name in names}
