"""How each part of the model is divided among devices, stated once, as data.

A mesh has the axes of `plan.AXES`. Two of them divide by the steps of `ch.cost`: `tensor` as `TENSOR` says of
each step, and `expert` the weights of experts. `pipeline` divides the layers, `context` the tokens of a row;
those of `plan.ROWS` divide the rows of a batch. What is left of a weight is divided by dimension 0 among the
ranks of `plan.HELD`, as `fully_shard` does. `split` splits the layers of a model as `TENSOR` says.
"""

import math
from typing import Literal, NamedTuple

from clearhead.core.config import ModelConfig
from clearhead.core.config.kinds import Full, Windowed
from clearhead.core.steps import Step
from clearhead.errors import nearest, refuse
from clearhead.learn.parallel.plan import AXES, HELD, ROWS

Split = Literal["columns", "rows", "vocabulary", "heads", "sequence", "whole"]
# The last name of a step, or its last two where they differ: its weights, and what it keeps for the backward
# pass. "whole": every rank of the axis has all of it. The inputs of a product by columns are gathered first.
TENSOR: dict[str, tuple[Split, Split]] = {
    "front.tokens": ("vocabulary", "whole"),
    "q": ("columns", "heads"),
    "k": ("columns", "heads"),
    "v": ("columns", "heads"),
    "beta": ("columns", "heads"),
    "decay": ("columns", "heads"),
    "q_norm": ("whole", "heads"),
    "k_norm": ("whole", "heads"),
    "scores": ("whole", "heads"),
    "z": ("whole", "heads"),
    "sink": ("columns", "heads"),
    "out": ("rows", "heads"),
    "gate": ("columns", "columns"),
    "up": ("columns", "columns"),
    "down": ("rows", "columns"),
    "feedforward.dropout": ("whole", "columns"),
    "attention_residual.dropout": ("whole", "sequence"),
    "cross_residual.dropout": ("whole", "sequence"),
    "feedforward_residual.dropout": ("whole", "sequence"),
    "before": ("whole", "sequence"),
    "inside": ("whole", "sequence"),
    "after": ("whole", "sequence"),
    "norm": ("whole", "sequence"),
    "router": ("whole", "sequence"),
    "sorted": ("whole", "sequence"),
    "encoder.hidden": ("whole", "sequence"),
    "head.out": ("vocabulary", "whole"),
}
# Products whose result stays with selective checkpointing; attention's answer stays too.
SELECTIVE = ("q", "v", "up", "down", "z")
SELECTIVE_GATED = ("q", "v", "gate", "down", "z")


class MeshSizes(NamedTuple):
    """The size of each axis of a mesh."""

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self)

    @property
    def sharing(self) -> int:
        """Number of ranks that share the weights that are not experts'."""
        return math.prod(getattr(self, axis) for axis in HELD)

    @property
    def rows(self) -> int:
        """Number of parts that the rows of a batch are divided into."""
        return math.prod(getattr(self, axis) for axis in ROWS)

    def stride(self, axis: str) -> int:
        """Return how many devices apart the neighbours on an axis are."""
        return math.prod(getattr(self, inner) for inner in AXES[AXES.index(axis) + 1 :])

    def __str__(self) -> str:
        """Return the axes that divide something: "shard 8, tensor 2"."""
        return (
            ", ".join(f"{name} {size}" for name, size in self._asdict().items() if size > 1) or "one device"
        )


def read_mesh(text: str) -> MeshSizes:
    """Return the mesh in a text such as "shard=8,tensor=2"."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (piece.strip() for piece in part.partition("="))
        refuse(
            not equals or not size.isdecimal() or int(size) < 1,
            f'mesh "{text}" is not understood: write axes and sizes, such as shard=8,tensor=2',
        )
        check_axis(axis)
        sizes[axis] = int(size)
    return MeshSizes(**sizes)


def check_axis(axis: str) -> None:
    """Refuse an axis that no mesh has."""
    refuse(
        axis not in MeshSizes._fields,
        f'a mesh has no axis "{axis}"{nearest(axis, MeshSizes._fields)}: '
        f"choose from {', '.join(MeshSizes._fields)}",
    )


def refusal(config: ModelConfig, mesh: MeshSizes, length: int) -> str | None:
    """Return why a mesh cannot divide a model on rows of `length`, in one line, or None."""
    for stack in config.stacks:
        heads = {stack.n_heads, *(len(stack.heads_of(pruned)) for pruned in stack.pruned_heads)}
        for name, size in [*(("heads", count) for count in sorted(heads)), ("d_ff", stack.d_ff)]:
            if size % mesh.tensor:
                return f"tensor {mesh.tensor} does not divide {name} {size}: {_choices(size)}"
        kinds = [kind for kind in stack.kinds if not kind.chooses]
        if mesh.tensor > 1 and kinds:
            return (
                f"tensor {mesh.tensor} is estimated for softmax attention, and a layer is {kinds[0]}: use 1"
            )
        kinds = [kind for kind in stack.kinds if not isinstance(kind, Full | Windowed)]
        if mesh.context > 1 and kinds:
            return (
                f"context {mesh.context} divides full and window layers, and the model has {kinds[0]}: use 1"
            )
    layers = sum(stack.n_layers for stack in config.stacks)
    if mesh.pipeline > layers:
        return f"pipeline {mesh.pipeline} is more than the {layers} layers: choose {layers} or less"
    if mesh.context > 1 and (length % (2 * mesh.context) or config.main.input == "patches"):
        return f"context {mesh.context} must cut rows of {length} into {2 * mesh.context} equal pieces: use 1"
    experts = config.n_experts or 1
    if experts % mesh.expert:
        return f"expert {mesh.expert} does not divide n_experts {experts}: {_choices(experts)}"
    return None


def _choices(size: int) -> str:
    return f"choose from {', '.join(str(n) for n in range(1, min(size, 128) + 1) if size % n == 0)}"


def tensor_split(step: Step) -> tuple[Split, Split]:
    """Return how the weights of a step and what it keeps are divided by `tensor`."""
    names = step.name.split(".")
    return TENSOR.get(".".join(names[-2:])) or TENSOR.get(names[-1]) or ("whole", "whole")


def is_expert(step: Step) -> bool:
    """Return True if the weights of a step are those of experts."""
    return ".experts." in step.name


def parts_of(step: Step, tensor: int, config: ModelConfig) -> int:
    """Return among how many ranks of `tensor` the heads or columns of a step are divided.

    Key and value heads fewer than the ranks are copied, so that every rank has one.
    """
    if step.name.rsplit(".", 1)[-1] in ("k", "v", "k_norm"):
        stack = next(s for s in config.stacks if step.name.startswith(f"{s.prefix}blocks."))
        return math.gcd(tensor, stack.kv_heads_of(step.name.rsplit(".", 1)[0]))
    return tensor


def weights_of(step: Step, mesh: MeshSizes, config: ModelConfig) -> tuple[int, int]:
    """Count the weights of a step that one rank computes with, and those that it stores.

    The first rank stores the most: rows of dimension 0 are divided and rounded up.
    """
    if not step.parameters:
        return 0, 0
    rows = _first_dimension(step, config)
    width, (split, _), tensor = (
        step.parameters // rows,
        tensor_split(step),
        parts_of(step, mesh.tensor, config),
    )
    sharing, inputs = mesh.sharing, step.weights // rows  # what is left of the width is a bias
    if is_expert(step):
        width, inputs, sharing = width // mesh.expert, inputs // mesh.expert, sharing // mesh.expert
    if split in ("columns", "vocabulary"):
        rows = math.ceil(rows / tensor)
    elif split == "rows":
        width += math.ceil(inputs / tensor) - inputs
    return rows * width, math.ceil(rows / sharing) * width


def _first_dimension(step: Step, config: ModelConfig) -> int:
    """Return the size of dimension 0 of a step's weights."""
    name, spec = step.name.rsplit(".", 1)[-1], config.main
    if step.n and step.weights:
        return step.n
    if name in ("tokens", "types"):
        return step.parameters // (spec.d_embedding if name == "tokens" else spec.d_summed)
    if name == "table" and step.parameters % spec.d_model == 0:
        return step.parameters // spec.d_model
    return step.parameters // (1 + spec.norm.bias) if step.part == "norms" else step.parameters
