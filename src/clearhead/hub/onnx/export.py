"""Writing a model as a graph: traced for any batch and length, checked against the model, put in place."""

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
from torch import Tensor
from torch.export import Dim, ExportedProgram

from clearhead.core.config import ModelConfig
from clearhead.core.config.kinds import FULL
from clearhead.core.transformer import Transformer, attending, evaluating
from clearhead.errors import CheckpointError, InputError, MissingExtraError, first_line, refuse
from clearhead.hub.onnx.function import Function, Port, traceable
from clearhead.hub.onnx.inputs import InputSizes, example, expected, real_part, sizes_of
from clearhead.run.bundle import Bundle
from clearhead.run.kernels.lora import merged
from clearhead.run.quant.apply import dequantized
from clearhead.run.quant.layers import quantized_parts

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
        formula = next((kind for kind in spec.kinds if not kind.chooses and kind.name != "low-rank"), None)
        refuse(formula, f"attention {formula} goes by chunks, and a graph of any length cannot: {way_out}")
        chosen = next((kind for kind in spec.kinds if kind != FULL and spec is not model.main.spec), None)
        refuse(chosen, f"attention {chosen} in an encoder before a decoder has no graph: {way_out}")
        routed = any(share < 1 for share in spec.capacities)
        refuse(routed, f"layers that only some tokens visit have no graph of any length: {way_out}")
    refuse(
        cache and (model.config.family != "decoder" or model.config.input != "tokens"),
        f"a cache of keys is for a decoder of text, and this is an {model.config.family} of "
        f"{model.config.input}: leave it out",
    )
    refuse(
        cache and any(not kind.chooses for kind in model.main.spec.kinds),
        "a layer of this model keeps no keys: leave the cache out",
    )
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
    given = example(function, sizes, seed=0)
    shapes = {port.name: _axes(port, function.model.config) for port in function.ports}
    with attending(function.model, "eager"):
        try:
            program = torch.export.export(function, (given,), dynamic_shapes=(shapes,), strict=False)
        except Exception as error:  # of many classes: guards, data-dependent sizes, unknown operators
            raise InputError(
                f"torch.export cannot follow this model for any length: {first_line(error)}"
            ) from None
        ranges = [found for found in program.range_constraints.values() if found.upper < MOST]
        bounds = " and ".join(f"{found.lower} to {found.upper}" for found in ranges)
        refuse(bounds, f"torch.export follows this model for sizes of {bounds} only: run it with clearhead")
        return program, tuple(function(given))


def _axes(port: Port, config: ModelConfig) -> dict[int, Any]:
    """Return the axes of an input that may have any size, by number; frames come in whole positions."""
    stacks = config.stacks
    framed = "source" if len(stacks) == 2 else "length"
    found: dict[int, Any] = {
        number: Dim.AUTO for number, axis in enumerate(port.axes) if isinstance(axis, str)
    }
    if stacks[0].input == "frames" and framed in port.axes:
        found[1] = stacks[0].conv_stride * Dim("positions", min=1)
    return found


def _write_onnx(program: ExportedProgram, outputs: tuple[str, ...], function: Function, path: Path) -> Runner:
    """Write an ONNX file, and return what runs it."""
    runtime, _ = _packages()
    names = [port.name for port in function.ports]
    try:
        made = torch.onnx.export(
            program, (), input_names=names, output_names=outputs, dynamo=True, verbose=False
        )
        assert made is not None
        made.save(path)
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
        raise InputError(f"ONNX has no graph of this model: {first_line(error)}") from None
    settings = runtime.SessionOptions()
    settings.log_severity_level = 4  # what fails is raised
    session = runtime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])

    def run(given: dict[str, Tensor]) -> dict[str, Tensor]:
        taken = {one.name for one in session.get_inputs()}
        arrays = {name: tensor.numpy() for name, tensor in given.items() if name in taken}
        return dict(zip(outputs, map(torch.from_numpy, session.run(list(outputs), arrays))))

    return run


def _write_pt2(program: ExportedProgram, outputs: tuple[str, ...], function: Function, path: Path) -> Runner:
    """Write `torch.export`'s file, and return what runs it."""
    torch.export.save(program, path)
    read = torch.export.load(path).module()
    return lambda given: dict(read(given))


def _verify(function: Function, run: Runner, sizes: list[InputSizes]) -> float:
    """Return the largest difference between the file and the model; an error where it is too large."""
    worst = 0.0
    for number, size in enumerate(sizes):
        given = example(function, size, seed=number + 1)
        wanted = expected(function, given, size)
        try:
            found = run(given)
        except Exception as error:  # the runtime's own classes
            raise InputError(f"the graph does not run with {size}: {first_line(error)}") from None
        for name, value in wanted.items():
            refuse(
                found[name].shape != value.shape,
                f"the graph's {name} has shape {list(found[name].shape)} where the model's has "
                f"{list(value.shape)}, with {size}: nothing was written. Please report this model",
            )
            theirs, ours = (real_part(name, one, function, given) for one in (found[name], value))
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
