"""What went wrong when a loss or a gradient is not finite: the first part that broke, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.batches.batch import Batch
from clearhead.model.transformer import Transformer
from clearhead.training.losses import Objective, batch_loss
from clearhead.training.machine import parted
from clearhead.training.plan import TrainPlan
from clearhead.training.precision import Precision

SHOWN = 8  # numbers of examples in a line


@dataclass(frozen=True)
class Fault:
    """The first thing that is not finite in the forward pass or, if all of that is, in the backward pass."""

    kind: Literal["output", "loss", "gradient", "none"]
    name: str = ""  # of the module whose output it is, or of the parameter whose gradient it is
    largest: float = 0.0  # absolute value that went into that module
    dtype: torch.dtype = torch.float32  # of its output
    weight: str | None = None  # a parameter of that module that is itself not finite
    examples: tuple[int, ...] = ()  # by their numbers in the data

    def line(self, step: int, plan: TrainPlan) -> str:
        """One line for the user: where, in which examples, and what to change."""
        shown = ", ".join(map(str, self.examples[:SHOWN])) + (", ..." if len(self.examples) > SHOWN else "")
        rows = f" in example{'s' if len(self.examples) > 1 else ''} {shown}" if self.examples else ""
        calmer = f"lower train.lr (now {plan.lr:g}) or lengthen train.warmup"
        if self.weight is not None:
            what, way_out = (
                f"the weight {self.weight} is not finite",
                f"begin again, or from a sound checkpoint, and {calmer}",
            )
        elif self.kind == "output" and self.dtype == torch.float16:
            what = f"{self.name} passed 65504, where float16 ends, from an input of {self.largest:.3g}{rows}"
            way_out = "set train.precision to bfloat16 or float32"
        elif self.kind == "output":
            what, way_out = (
                f"{self.name} gave a number that is not finite from an input of {self.largest:.3g}{rows}",
                calmer,
            )
        elif self.kind == "loss":
            what, way_out = (
                f"scores are finite and their loss is not{rows}",
                "look for a target that is not allowed in these examples",
            )
        else:
            again = f"the loss is finite and the gradient of {self.name} is not{rows}"
            what = (
                again
                if self.kind == "gradient"
                else f"the gradient was not finite, and is when computed again{rows}"
            )
            clip = "" if 0 < plan.clip <= 1 else f"set train.clip (now {plan.clip:g}) to 1, "
            way_out = f"{clip}{calmer}, or set train.precision to float32"
        return f"step {step}: {what}: {way_out}"


def diagnose(
    model: Transformer,
    batches: Sequence[Batch],
    step: int,
    precision: Precision,
    plan: TrainPlan,
    objective: Objective | None = None,
) -> str:
    """Why step number `step` had a loss or gradient that is not finite, in one line.

    Call it with the weights from before the step and the same random state: it runs the batches once more, uncompiled.
    """

    def loss_of(model: Transformer, batch: Batch) -> Tensor:
        with precision.autocast():
            return batch_loss(model, batch, plan.label_smoothing, plan.loss_chunk, objective=objective)[0]

    faults = (find_fault(model, batch, loss_of) for batch in batches)
    return next((fault for fault in faults if fault.kind != "none"), Fault("none")).line(step, plan)


def find_fault(model: Transformer, batch: Batch, loss_of: Callable[[Transformer, Batch], Tensor]) -> Fault:
    """Run one batch and find the first module whose output is not finite, or the first parameter by its gradient.

    Modules count in the order in which they finish, parameters in the order of the backward pass. Gradients that the
    parameters hold are left alone.
    """
    numbers = batch.numbers if batch.numbers is not None else torch.arange(len(batch))
    everyone = tuple(numbers.flatten().tolist())
    with torch.compiler.set_stance("force_eager"), torch.enable_grad(), parted(model):
        with _watched(model) as broken:
            loss = loss_of(model, batch)
        if broken:
            name, module, given, out = broken[0]
            bad = [
                f"{name}.{own}"
                for own, weight in module.named_parameters(recurse=False)
                if not weight.isfinite().all()
            ]
            rows = (
                ~out.isfinite().flatten(1).all(1) if out.ndim > 1 and out.shape[0] == len(everyone) else None
            )
            examples = (
                everyone
                if rows is None
                else tuple(number for number, is_bad in zip(everyone, rows.tolist()) if is_bad)
            )
            return Fault("output", name, _largest(given), out.dtype, bad[0] if bad else None, examples)
        if not loss.isfinite():
            return Fault("loss", examples=everyone)
        name = _first_gradient(model, loss)
    return Fault("gradient" if name else "none", name, examples=everyone)


def _first_gradient(model: nn.Module, loss: Tensor) -> str:
    """The first parameter whose gradient is not finite, in the order of the backward pass; none: an empty name."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    broken: list[str] = []

    def watch(name: str) -> Callable[[Tensor], None]:
        return lambda gradient: None if broken or gradient.isfinite().all() else broken.append(name)

    hooks = [parameter.register_hook(watch(name)) for name, parameter in trained.items()]  # type: ignore[no-untyped-call]
    try:
        torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return broken[0] if broken else ""


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[tuple[str, nn.Module, list[Tensor], Tensor]]]:
    """Collect name, module, inputs and output of the first module whose output is not finite."""
    broken: list[tuple[str, nn.Module, list[Tensor], Tensor]] = []

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
            if not broken and isinstance(out, Tensor) and not out.isfinite().all():
                broken.append((name, module, _floating([*args, *kwargs.values()]), out.detach()))

        return look

    hooks = [
        part.register_forward_hook(watch(name), with_kwargs=True)
        for name, part in model.named_modules()
        if name
    ]
    try:
        yield broken
    finally:
        for hook in hooks:
            hook.remove()


def _floating(values: Iterable[object]) -> list[Tensor]:
    return [value.detach() for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest absolute value; of no tensors, 0."""
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)
