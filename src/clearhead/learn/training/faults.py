"""Diagnosis of a step that failed: the first part whose numbers are not finite, memory that ran out."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from clearhead.core.transformer import Transformer
from clearhead.errors import TrainingError, first_line
from clearhead.learn.batches.batch import Batch
from clearhead.learn.losses import Terms
from clearhead.learn.parallel.shards import local
from clearhead.learn.parallel.world import ALONE, World
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.tasks.task import Task
from clearhead.learn.training.machine import Precision
from clearhead.learn.training.state import State
from clearhead.run.kernels.training import unjoined

Kind = Literal["output", "loss", "gradient", "none"]  # from the cause to what follows from it
SHOWN = 8  # examples named in a line, at most
MODULES = 10**6  # more than a stage of a pipeline has


@dataclass(frozen=True)
class Fault:
    """The first value that is not finite, in the forward pass or else in the backward pass."""

    kind: Kind
    name: str = ""  # of the module with that output, or of the parameter with that gradient
    largest: float = 0.0  # the largest absolute value of the module's inputs
    dtype: torch.dtype = torch.float32  # of the module's output
    weight: str | None = None  # a parameter of that module that is itself not finite
    examples: tuple[int, ...] = ()  # the numbers of the examples in the data
    place: int = 0  # of the module among those that have finished

    @property
    def order(self) -> tuple[int, int, bool]:
        """What to sort faults by: the cause comes first."""
        return get_args(Kind).index(self.kind), self.place, self.weight is None

    def line(self, step: int, plan: TrainPlan) -> str:
        """Say in one line where the fault is, in which examples, and what to change."""
        examples = list(dict.fromkeys(self.examples))  # rows that fill up a batch have the last one's number
        shown = ", ".join(map(str, examples[:SHOWN])) + (", ..." if len(examples) > SHOWN else "")
        rows = f" in example{'s' if len(examples) > 1 else ''} {shown}" if examples else ""
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
    task: Task,
    world: World = ALONE,
    split_loss: Callable[[Batch], Tensor] | None = None,
) -> str:
    """Say in one line why the loss or gradient of step `step` was not finite.

    Call it with the weights from before the step and the same random state: it runs the batches again,
    uncompiled. Of several processes each has its rows or its part of the model: all of them run all of their
    batches, by `split_loss`, and say the same.
    """

    def loss_of(model: Transformer, batch: Batch) -> Tensor:
        if split_loss is not None:
            return split_loss(batch)
        with precision.autocast():
            return task.batch_loss(model, batch, plan.label_smoothing, plan.loss_chunk, terms=Terms.of(plan))[
                0
            ]

    faults = [find_fault(model, batch, loss_of, alone=split_loss is None) for batch in batches]
    of_all = itertools.chain.from_iterable(world.everyone(faults))
    return min(of_all, key=lambda fault: fault.order).line(step, plan)


def find_fault(
    model: Transformer, batch: Batch, loss_of: Callable[[Transformer, Batch], Tensor], alone: bool = True
) -> Fault:
    """Run one batch and find the first module whose output, or parameter whose gradient, is not finite.

    Modules are ordered by when they finish, parameters by the backward pass. The gradients that parameters
    already have are left unchanged. Not `alone`: the model is split, so that every process must run both
    passes to their ends, and the gradients are those of the batch.
    """
    everyone = tuple(range(len(batch)) if batch.numbers is None else batch.numbers.flatten().tolist())
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    faults: list[Fault] = []
    order = itertools.count(getattr(model, "stage", 0) * MODULES)  # stages of a pipeline follow each other

    def check_output(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], out: object) -> None:
        place = next(order)
        if faults or not isinstance(out, Tensor) or local(out).isfinite().all():
            return
        own = module.named_parameters(name, recurse=False)
        weight = next((called for called, parameter in own if not local(parameter).isfinite().all()), None)
        examples = everyone
        if out.ndim > 1 and out.shape[0] == len(everyone):
            finite = local(out).isfinite().flatten(1).all(1).tolist()
            examples = tuple(number for number, is_finite in zip(everyone, finite) if not is_finite)
        largest = _largest(*args, *kwargs.values())
        faults.append(Fault("output", name, largest, out.dtype, weight, examples, place))

    def check_gradient(name: str, gradient: Tensor) -> None:
        if not faults and not local(gradient).isfinite().all():
            faults.append(Fault("gradient", name, examples=everyone))

    with torch.compiler.set_stance("force_eager"), torch.enable_grad(), unjoined(model), ExitStack() as hooks:
        for name, part in model.named_modules():
            if name:
                hooks.enter_context(part.register_forward_hook(partial(check_output, name), with_kwargs=True))
        loss = loss_of(model, batch)
        if not faults and not loss.isfinite():
            faults.append(Fault("loss", examples=everyone))
        if not alone:
            model.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            for name, parameter in reversed(trained.items()):
                if parameter.grad is not None:
                    check_gradient(name, parameter.grad)
        elif not faults:
            for name, parameter in trained.items():
                hooks.enter_context(cast(Any, parameter).register_hook(partial(check_gradient, name)))
            torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return faults[0] if faults else Fault("none", examples=everyone)


@contextmanager
def naming_memory(state: State, world: World = ALONE) -> Iterator[None]:
    """Say in one line at which step, and in which process, memory ran out, and what needs less."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        who = f"process {world.rank} of {world.size}" if world.size > 1 else "the device"
        raise TrainingError(
            f"step {state.step + 1}: {who} has no memory left ({first_line(error)}): lower data.batch_size "
            "and raise train.accumulate, set train.checkpointing=true, or more processes for parallel.shard"
        ) from None


def _largest(*values: object) -> float:
    """Return the largest absolute value of the floating-point tensors among `values`; without any, 0."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    sizes = (float(local(tensor).detach().abs().max()) for tensor in tensors if tensor.numel())
    return max(sizes, default=0.0)
