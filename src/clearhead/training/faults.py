"""Diagnosis of a loss or gradient that is not finite: the first part that broke, and what to change."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from clearhead.batches.batch import Batch
from clearhead.fast.training import unjoined
from clearhead.losses import Objective, batch_loss
from clearhead.model.transformer import Transformer
from clearhead.recipe import TrainPlan
from clearhead.training.machine import Precision

SHOWN = 8  # examples named in a line, at most


@dataclass(frozen=True)
class Fault:
    """The first value that is not finite, in the forward pass or else in the backward pass."""

    kind: Literal["output", "loss", "gradient", "none"]
    name: str = ""  # of the module with that output, or of the parameter with that gradient
    largest: float = 0.0  # the largest absolute value of the module's inputs
    dtype: torch.dtype = torch.float32  # of the module's output
    weight: str | None = None  # a parameter of that module that is itself not finite
    examples: tuple[int, ...] = ()  # the numbers of the examples in the data

    def line(self, step: int, plan: TrainPlan) -> str:
        """Say in one line where the fault is, in which examples, and what to change."""
        shown = ", ".join(map(str, self.examples[:SHOWN])) + (", ..." if len(self.examples) > SHOWN else "")
        rows = f" in example{'s' if len(self.examples) > 1 else ''} {shown}" if self.examples else ""
        calmer = f"lower train.lr (now {plan.lr:g}) or lengthen train.warmup"
        clip = "" if 0 < plan.clip <= 1 else f"set train.clip (now {plan.clip:g}) to 1, "
        of_gradient = f"{clip}{calmer}, or set train.precision to float32"
        kind: str = self.kind
        if self.weight is not None:
            kind = "weight"
        elif kind == "output" and self.dtype == torch.float16:
            kind = "float16"
        what, way_out = {
            "output": (
                f"{self.name} gave a number that is not finite from an input of {self.largest:.3g}{rows}",
                calmer,
            ),
            "loss": (
                f"scores are finite and their loss is not{rows}",
                "look for a target that is not allowed in these examples",
            ),
            "gradient": (f"the loss is finite and the gradient of {self.name} is not{rows}", of_gradient),
            "none": (f"the gradient was not finite, and is when computed again{rows}", of_gradient),
            "weight": (
                f"the weight {self.weight} is not finite",
                f"begin again, or from a sound checkpoint, and {calmer}",
            ),
            "float16": (
                f"{self.name} passed 65504, where float16 ends, from an input of {self.largest:.3g}{rows}",
                "set train.precision to bfloat16 or float32",
            ),
        }[kind]
        return f"step {step}: {what}: {way_out}"


def diagnose(
    model: Transformer,
    batches: Sequence[Batch],
    step: int,
    precision: Precision,
    plan: TrainPlan,
    objective: Objective | None = None,
) -> str:
    """Say in one line why the loss or gradient of step `step` was not finite.

    Call it with the weights from before the step and the same random state: it runs the batches again,
    uncompiled.
    """

    def loss_of(model: Transformer, batch: Batch) -> Tensor:
        with precision.autocast():
            return batch_loss(model, batch, plan.label_smoothing, plan.loss_chunk, objective=objective)[0]

    faults = (find_fault(model, batch, loss_of) for batch in batches)
    return next((fault for fault in faults if fault.kind != "none"), Fault("none")).line(step, plan)


def find_fault(model: Transformer, batch: Batch, loss_of: Callable[[Transformer, Batch], Tensor]) -> Fault:
    """Run one batch and find the first module whose output, or parameter whose gradient, is not finite.

    Modules are ordered by when they finish, parameters by the backward pass. The gradients that parameters
    already have are left unchanged.
    """
    everyone = tuple(range(len(batch)) if batch.numbers is None else batch.numbers.flatten().tolist())
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: list[Fault] = []

    def check_output(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], out: object) -> None:
        if found or not isinstance(out, Tensor) or out.isfinite().all():
            return
        own = module.named_parameters(name, recurse=False)
        weight = next((called for called, one in own if not one.isfinite().all()), None)
        examples = everyone
        if out.ndim > 1 and out.shape[0] == len(everyone):
            finite = out.isfinite().flatten(1).all(1).tolist()
            examples = tuple(number for number, is_finite in zip(everyone, finite) if not is_finite)
        found.append(Fault("output", name, _largest(*args, *kwargs.values()), out.dtype, weight, examples))

    def check_gradient(name: str, gradient: Tensor) -> None:
        if not found and not gradient.isfinite().all():
            found.append(Fault("gradient", name, examples=everyone))

    with torch.compiler.set_stance("force_eager"), torch.enable_grad(), unjoined(model), ExitStack() as hooks:
        for name, part in model.named_modules():
            if name:
                hooks.enter_context(part.register_forward_hook(partial(check_output, name), with_kwargs=True))
        loss = loss_of(model, batch)
        if not found and not loss.isfinite():
            return Fault("loss", examples=everyone)
        if not found:
            for name, parameter in trained.items():
                hooks.enter_context(cast(Any, parameter).register_hook(partial(check_gradient, name)))
            torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return found[0] if found else Fault("none", examples=everyone)


def _largest(*values: object) -> float:
    """Return the largest absolute value of the floating-point tensors among `values`; without any, 0."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return max((float(tensor.detach().abs().max()) for tensor in tensors if tensor.numel()), default=0.0)
