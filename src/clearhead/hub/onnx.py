"""A model as a graph that other programs run: ONNX or `torch.export`, for any batch and length.

It is traced from a function of named tensors, checked against the model on inputs of other sizes, and put in
place. Names and shapes are those of ONNX files of Hugging Face models, so that programs which run these find
what they expect. Sound keeps clearhead's order of axes, time before bands.

Shapes: B batch, T length, S source length, P earlier tokens, D model, X experts, A active experts,
K key/value heads, E head width.
"""

import contextlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from clearhead.core.cache import Cache, LayerKV
from clearhead.core.config import ModelConfig, StackSpec
from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.masks import TokenInfo, join
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Output, Transformer
from clearhead.errors import CheckpointError, InputError, MissingExtraError, first_line, refuse
from clearhead.hub.sentences import Sentences
from clearhead.run.bundle import Bundle
from clearhead.run.kernels.lora import merged
from clearhead.run.kernels.parts import like
from clearhead.run.quant.apply import dequantized, shared_copy
from clearhead.run.quant.layers import quantized_parts
from clearhead.variants.contexts import attending, evaluating
from clearhead.variants.routing import Experts

# The cache --------------------------------------------------------------------------------------------------


class PastKV(LayerKV):
    """Keys of one layer, to which new ones are appended without writing into them."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return earlier and new keys and values: [B, K, P + T, E] each."""
        before_k, before_v = self.buffers()
        self.k, self.v = torch.cat([before_k, k], dim=2), torch.cat([before_v, v], dim=2)
        return self.k, self.v


class PastCache(Cache):
    """The cache of one call of a graph."""

    def __init__(self, past: list[tuple[Tensor, Tensor]], real: Tensor) -> None:
        """Begin with the keys and values of each layer; `real` [B, P] is False for padding."""
        super().__init__()
        self.length = real.shape[1]
        self._past = _tokens(real)
        # The count of earlier tokens is their largest: an empty slot before them counts where there are none.
        self.tokens = _tokens(torch.cat([real.new_zeros(real.shape[0], 1), real], dim=1))
        self.layers = {number: PastKV(k, v) for number, (k, v) in enumerate(past)}

    def layer(self, index: int, kind: Kind) -> LayerKV:
        """Return the self-attention keys of one layer."""
        return self.layers[index]

    def begin(self, tokens: TokenInfo) -> None:
        """Prepare for new tokens, before the first layer."""
        self._visible = join(self._past, tokens)

    def advance(self) -> None:
        """Leave all as it is: this cache lasts one call."""


def _tokens(real: Tensor) -> TokenInfo:
    order = (real.cumsum(1) - 1).clamp(min=0)
    return TokenInfo(order, order, real, None, plain=False)


# The function -----------------------------------------------------------------------------------------------


IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
INPUTS = {"tokens": IDS, "patches": "pixel_values", "vectors": "inputs_embeds", "frames": "input_features"}
OUTPUTS = {"none": "last_hidden_state", "embedding": "embedding"}  # of other heads: logits


@dataclass(frozen=True)
class Port:
    """A tensor that goes into a graph: its axes, by size, or by name where any size will do."""

    name: str
    axes: tuple[str | int, ...]
    dtype: torch.dtype = torch.int64
    below: int = 2  # whole numbers are smaller than this


def ports_of(config: ModelConfig, cache: bool = False) -> list[Port]:
    """Return what goes into the graph of a model."""
    stacks = config.stacks
    ports = _ports_of(stacks[0], "", "source" if len(stacks) == 2 else "length")
    if len(stacks) == 2:
        return ports + _ports_of(stacks[1], "decoder_", "length")
    if cache:
        spec = stacks[0]
        ports[1] = Port(MASK, ("batch", "past + length"))
        for number, names in enumerate(past_names("past_key_values", len(spec.kinds))):
            attention = f"{spec.prefix}blocks.{number}.attention"
            heads, *widths = spec.kinds[number].kept(spec, attention)
            for name, width in zip(names, widths):
                ports.append(Port(name, ("batch", heads, "past", width), torch.float32))
    return ports


def _ports_of(spec: StackSpec, prefix: str, length: str) -> list[Port]:
    name = prefix + INPUTS[spec.input]
    if spec.input == "patches":
        return [Port(name, ("batch", spec.n_channels, *spec.image_size), torch.float32)]
    port = Port(name, ("batch", length), below=spec.vocab_size)
    if spec.input != "tokens":
        port = Port(name, ("batch", length, spec.d_input), torch.float32)
    types = [Port(prefix + TYPES, ("batch", length), below=spec.n_types)] if spec.n_types > 1 else []
    return [port, Port(prefix + MASK, ("batch", length)), *types]


def past_names(prefix: str, layers: int) -> list[tuple[str, str]]:
    """Return the names of the keys and the values of each layer."""
    return [(f"{prefix}.{number}.key", f"{prefix}.{number}.value") for number in range(layers)]


class Function(nn.Module):
    """The model, called with tensors by name. `cache`: keys and values of earlier tokens go in and out."""

    def __init__(self, model: Transformer, sentences: Sentences | None, cache: bool) -> None:
        super().__init__()
        self.model, self.sentences, self.cache = model, sentences, cache
        self.ports = ports_of(model.config, cache)
        self.masked = any(kind != FULL and kind.masked for kind in model.main.spec.kinds)

    def forward(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run the model; masks are whole numbers, 1 for a token and 0 for padding."""
        stacks, own = self.model.config.stacks, "decoder_" if len(self.model.config.stacks) == 2 else ""
        mask = tensors[own + MASK].bool() if own + MASK in tensors else None
        # With a bias of nothing masks are spelled out: plans by blocks depend on the length.
        plain = self.masked and torch.compiler.is_compiling()
        call = {"types": tensors.get(own + TYPES), "bias": torch.zeros(1, 1, 1, 1) if plain else None}
        if own:
            call["source"], call["source_mask"] = tensors[INPUTS[stacks[0].input]], tensors[MASK].bool()
        inputs = tensors[own + INPUTS[stacks[-1].input]]
        if not self.cache or mask is None:
            return self.named(self.model(inputs, mask, **call), mask)
        layers = len(stacks[0].kinds)
        past = [(tensors[k], tensors[v]) for k, v in past_names("past_key_values", layers)]
        before = past[0][0].shape[2]
        cache = PastCache(past, mask[:, :before])
        output = self.model(inputs, mask[:, before:], cache=cache, **call)
        return self.named(output, None) | present(cache)

    def named(self, output: Output, mask: Tensor | None) -> dict[str, Tensor]:
        """Return what a pass gives, by name."""
        outputs = {OUTPUTS.get(str(self.model.config.head), "logits"): output.required_logits}
        if self.sentences is not None and mask is not None:
            outputs = {"sentence_embedding": self.sentences.vectors(output.hidden, mask)} | outputs
        return outputs


def present(cache: Cache) -> dict[str, Tensor]:
    """Return the keys and values of every layer of a cache, by name."""
    names = past_names("present", len(cache.layers))
    return {
        name: tensor
        for number, pair in enumerate(names)
        for name, tensor in zip(pair, cache.layers[number].buffers())
    }


class AllExperts(Experts):
    """A mixture in which every expert answers every token, and those that were not chosen count nothing.

    How many tokens an expert gets is known only from the tokens, which a graph cannot follow.
    """

    def forward(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        logits = self.router(x)
        weights, chosen = self.choose(logits)  # B T A
        shares = torch.zeros_like(logits).scatter(-1, chosen, weights)  # B T X
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mixed = mixed + shares[..., number, None] * expert(x)
        if self.shared is not None:
            weighed = 1.0 if self.shared_gate is None else self.shared_gate(x).sigmoid()
            mixed = mixed + weighed * self.shared(x)
        return mixed


def traceable(model: Transformer) -> Transformer:
    """Return a copy with the same parameters, whose parts a graph of any length can follow."""
    copy = shared_copy(model).eval()
    for name, part in list(copy.named_modules(remove_duplicate=False)):
        if isinstance(part, Experts):
            copy.set_submodule(name, like(part, AllExperts))
    return copy


# Inputs of several sizes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputSizes:
    """How many rows and tokens the inputs have."""

    batch: int
    length: int
    source: int
    past: int

    def __str__(self) -> str:
        """Return the sizes in words."""
        return f"batch {self.batch}, length {self.length}, source {self.source}, past {self.past}"

    def of(self, axis: str | int) -> int:
        """Return the size of an axis, which is known or has a name."""
        if isinstance(axis, int):
            return axis
        return sum(int(getattr(self, name)) for name in axis.split(" + "))


def sizes_of(config: ModelConfig) -> tuple[InputSizes, list[InputSizes]]:
    """Return the sizes that a graph is traced with, and others that it must work with too."""
    own, other = config.stacks[-1], config.stacks[0]
    step = other.conv_stride if other.input == "frames" else 1  # frames of a position
    tried = ((2, 5, 7, 3), (3, 11, 4, 6), (1, 1, 9, 0), (4, 2, 15, 1))
    first, *others = (
        InputSizes(
            batch,
            min(length, own.max_positions) * (step if own is other else 1),
            min(source, other.max_positions) * step,
            max(0, min(past, own.max_positions - length)),
        )
        for batch, length, source, past in tried
    )
    return first, others


def example(function: Function, sizes: InputSizes, seed: int) -> dict[str, Tensor]:
    """Draw inputs of a graph: the first row of a mask has padding at the left, the second at the right."""
    draw = torch.Generator().manual_seed(seed)
    return {port.name: _drawn(port, [sizes.of(axis) for axis in port.axes], draw) for port in function.ports}


def _drawn(port: Port, shape: list[int], draw: torch.Generator) -> Tensor:
    if port.dtype.is_floating_point:
        return torch.randn(shape, generator=draw)
    if not port.name.endswith(MASK):
        return torch.randint(port.below, shape, generator=draw)
    mask, padding = torch.ones(shape, dtype=torch.int64), shape[1] // 3
    mask[0, :padding] = 0
    mask[1:2, shape[1] - padding :] = 0
    return mask


def expected(function: Function, tensors: dict[str, Tensor], sizes: InputSizes) -> dict[str, Tensor]:
    """Return what the model says, and complete the inputs: the keys of earlier tokens are the model's own."""
    if not function.cache:
        return dict(function(tensors))
    model, cache, P = function.model, Cache(), sizes.past
    mask, name = tensors[MASK].bool(), INPUTS[model.main.spec.input]
    if P:
        earlier = tensors[name].new_zeros(sizes.batch, P) + torch.arange(P) % model.config.vocab_size
        model(earlier, mask[:, :P], cache=cache)
        for (k, v), keys in zip(past_names("past_key_values", len(cache.layers)), cache.layers.values()):
            tensors[k], tensors[v] = (part[:, :, :P].clone() for part in keys.buffers())
    outputs = function.named(model(tensors[name], mask[:, P:], cache=cache), None)
    return outputs | {name: keys[:, :, : cache.length] for name, keys in present(cache).items()}


def real_part(name: str, value: Tensor, function: Function, tensors: dict[str, Tensor]) -> Tensor:
    """Return what an output says of real tokens, one after another: at padding anything may stand.

    Keys and values [B, K, P + T, E] have the tokens of the whole mask, states and logits [B, T, ...] the last
    ones of it; pooled outputs [B, ...] have none.
    """
    mask = tensors.get(("decoder_" if len(function.model.config.stacks) == 2 else "") + MASK)
    if name.startswith("present."):
        value = value.transpose(1, 2)
    if mask is None or value.ndim < 3:
        return value
    spec = function.model.main.spec
    if spec.input == "frames":
        mask = mask[:, :: spec.conv_stride]
    return value[mask[:, -value.shape[1] :].bool()] if value.shape[1] else value


# Export -----------------------------------------------------------------------------------------------------


SUFFIXES = (".onnx", ".pt2")
TOLERANCE = 1e-5  # of the largest output, or of 1 where that is smaller: float32 sums differ in their order
MOST = 1 << 31  # tokens or rows, below which a graph may have no bound
Runner = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Exported:
    """What was written, and how far it is from the model."""

    path: Path
    inputs: dict[str, tuple[str | int, ...]]  # the axes of each, by name or size
    outputs: tuple[str, ...]
    difference: float  # the largest, as a share of the largest output
    tried: tuple[InputSizes, ...]


def export(m: Bundle, path: str | Path, cache: bool = False) -> Exported:
    """Write a model as a graph that other programs run, for any batch and length: ONNX or `torch.export`.

    The file is run on inputs of other sizes than it was traced with, with padding among them, and at every
    real token held against the model before it is put in place. It computes in float32. A mixture runs every
    expert on every token.

    Args:
        m: a model, as `ch.load` gives it.
        path: the file to write; its name ends in .onnx, or in .pt2 for `torch.export`.
        cache: of a decoder: keys and values of earlier tokens go in and out, so that a step reads one token.
    """
    path = Path(path)
    refuse(path.suffix not in SUFFIXES, f"{path} is no name of a graph: end it in {' or '.join(SUFFIXES)}")
    refuse(path.is_dir(), f"{path} is a directory: name a file")
    refuse(
        m.towers is not None,
        "two towers, of texts and of images, have no one graph: use clearhead to run them",
    )
    how = m.sentences
    refuse(
        how is not None and how.kind != "dense",
        "this model makes a sparse vector, or one for each token, and a graph of it would not: write that of "
        "its Transformer, from a copy of the directory without modules.json",
    )
    refuse(
        how is not None and how.prompts and not how.pools_prompt,
        "this model leaves its prompt out of the pooling (include_prompt), which a graph cannot know of",
    )
    _check(m.model, cache)
    if path.suffix == ".onnx":
        _packages()
    first, others = sizes_of(m.config)
    with merged(m.model), evaluating(m.model), torch.no_grad(), _quiet():
        model = dequantized(m.model) if quantized_parts(m.model) else m.model
        function = Function(model, m.sentences, cache)
        program, outputs = _traced(Function(traceable(model), m.sentences, cache), first)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as work:
                written = Path(work) / path.name
                run = (_write_onnx if path.suffix == ".onnx" else _write_pt2)(
                    program, outputs, function, written
                )
                difference = _verify(function, run, others)
                for file in sorted(Path(work).iterdir(), key=lambda file: file == written):  # weights first
                    os.replace(file, path.with_name(file.name))
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror or first_line(error)}") from None
    axes = {port.name: port.axes for port in function.ports}
    return Exported(path, axes, outputs, difference, tuple(others))


def _check(model: Transformer, cache: bool) -> None:
    """Refuse by name what a graph cannot be."""
    way_out = "run it with clearhead"
    for spec in model.config.stacks:
        formula = next((kind for kind in spec.kinds if kind.stateful and kind.name != "low-rank"), None)
        refuse(formula, f"attention {formula} goes by chunks, and a graph of any length cannot: {way_out}")
        indexed = next((kind for kind in spec.kinds if getattr(kind, "top", 0)), None)
        refuse(indexed, f"attention {indexed} has an indexer, of which there is no graph: {way_out}")
        chosen = next((kind for kind in spec.kinds if kind != FULL and spec is not model.main.spec), None)
        refuse(chosen, f"attention {chosen} in an encoder before a decoder has no graph: {way_out}")
        routed = any(share < 1 for share in spec.capacities)
        refuse(routed, f"layers that only some tokens visit have no graph of any length: {way_out}")
    refuse(
        cache and (model.config.family != "decoder" or model.config.input != "tokens"),
        f"a cache of keys is for a decoder of text, and this is an {model.config.family} of "
        f"{model.config.input}: leave it out",
    )
    refuse(cache and model.main.spec.stateful, "a layer of this model keeps no keys: leave the cache out")
    weight = next(model.parameters())
    plain = weight.dtype == torch.float32 and weight.device.type == "cpu"
    refuse(
        not plain,
        f"a graph is written in float32 from the CPU, and the model is "
        f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}: "
        'first m.to("cpu", "float32")',
    )


def _packages() -> tuple[Any, Any]:
    try:
        import onnxruntime
        import onnxscript
    except ImportError as error:
        raise MissingExtraError(
            f"ONNX files need the {error.name or 'onnx'} package: pip install 'clearhead[onnx]'"
        ) from None
    return onnxruntime, onnxscript


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the tracer and the translator report from the user: failures are raised."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def _traced(function: Function, sizes: InputSizes) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Return the graph of a function for any sizes, and the names of its outputs."""
    inputs = example(function, sizes, seed=0)
    shapes = {port.name: _axes(port, function.model.config) for port in function.ports}
    with attending(function.model, "eager"):
        try:
            program = torch.export.export(function, (inputs,), dynamic_shapes=(shapes,), strict=False)
        except Exception as error:  # of many classes: guards, data-dependent sizes, unknown operators
            raise InputError(
                f"torch.export cannot follow this model for any length: {first_line(error)}"
            ) from None
        ranges = [bound for bound in program.range_constraints.values() if bound.upper < MOST]
        bounds = " and ".join(f"{bound.lower} to {bound.upper}" for bound in ranges)
        refuse(bounds, f"torch.export follows this model for sizes of {bounds} only: run it with clearhead")
        return program, tuple(function(inputs))


def _axes(port: Port, config: ModelConfig) -> dict[int, Any]:
    """Return the axes of an input that may have any size, by number; frames come in whole positions."""
    stacks = config.stacks
    framed = "source" if len(stacks) == 2 else "length"
    axes: dict[int, Any] = {
        number: Dim.AUTO for number, axis in enumerate(port.axes) if isinstance(axis, str)
    }
    if stacks[0].input == "frames" and framed in port.axes:
        axes[1] = stacks[0].conv_stride * Dim("positions", min=1)
    return axes


def _write_onnx(program: ExportedProgram, outputs: tuple[str, ...], function: Function, path: Path) -> Runner:
    """Write an ONNX file, and return what runs it."""
    runtime, _ = _packages()
    names = [port.name for port in function.ports]
    try:
        onnx_program = torch.onnx.export(
            program, (), input_names=names, output_names=outputs, dynamo=True, verbose=False
        )
        assert onnx_program is not None
        onnx_program.save(path)
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
        raise InputError(f"ONNX has no graph of this model: {first_line(error)}") from None
    settings = runtime.SessionOptions()
    settings.log_severity_level = 4  # what fails is raised
    session = runtime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])

    def run(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        taken = {port.name for port in session.get_inputs()}
        arrays = {name: tensor.numpy() for name, tensor in tensors.items() if name in taken}
        return dict(zip(outputs, map(torch.from_numpy, session.run(list(outputs), arrays))))

    return run


def _write_pt2(program: ExportedProgram, outputs: tuple[str, ...], function: Function, path: Path) -> Runner:
    """Write `torch.export`'s file, and return what runs it."""
    torch.export.save(program, path)
    read = torch.export.load(path).module()
    return lambda tensors: dict(read(tensors))


def _verify(function: Function, run: Runner, sizes: list[InputSizes]) -> float:
    """Return the largest difference between the file and the model; an error where it is too large."""
    worst = 0.0
    for number, size in enumerate(sizes):
        inputs = example(function, size, seed=number + 1)
        wanted = expected(function, inputs, size)
        try:
            outputs = run(inputs)
        except Exception as error:  # the runtime's own classes
            raise InputError(f"the graph does not run with {size}: {first_line(error)}") from None
        for name, value in wanted.items():
            refuse(
                outputs[name].shape != value.shape,
                f"the graph's {name} has shape {list(outputs[name].shape)} where the model's has "
                f"{list(value.shape)}, with {size}: nothing was written. Please report this model",
            )
            theirs, ours = (real_part(name, output, function, inputs) for output in (outputs[name], value))
            scale = max(1.0, float(ours.abs().max())) if ours.numel() else 1.0
            difference = float((theirs - ours).abs().max()) / scale if ours.numel() else 0.0
            refuse(
                not difference <= TOLERANCE,
                f"the graph's {name} differs from the model's at real tokens by {difference:.1e} of the "
                f"largest value with {size}, and {TOLERANCE:.0e} is allowed: nothing was written. "
                "Please report this model",
            )
            worst = max(worst, difference)
    return worst
