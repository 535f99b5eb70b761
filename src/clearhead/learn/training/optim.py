"""The optimizer: which parameters are trained, their weight decay, and the learning rate of each step."""

import fnmatch
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clearhead.errors import ConfigError, nearest, refuse
from clearhead.learn.parallel.shards import local, part_like, whole
from clearhead.learn.recipe import TrainPlan

BLOCK = re.compile(r"^(.*?)blocks\.(\d+)\.")
FUSED = ("cpu", "cuda", "mps", "xpu")  # devices on which AdamW updates all weights in one pass

ORIGINAL_WARMUP = 4000

# PyTorch's default for the first, 1e-7, also bounds a gradient's mean square from below; language models have
# smaller ones. Its square must be a float32 number, so that a gradient of 0 gives an update of 0.
ADAFACTOR_EPS = (1e-16, 1e-3)
MOMENTUM = 0.95
# Of each round, by name: singular values end between about 0.7 and 1.2, or nearer to 1 (Amsel et al., 2025,
# as cushioned for bfloat16 in the public speedrun).
COEFFICIENTS = {
    "jordan": ((3.4445, -4.7750, 2.0315),) * 5,
    "polar-express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
CUSHION = {"jordan": 1.0, "polar-express": 1.02}  # what the norm is multiplied by: its rounds diverge above 1
ROW_DECAY = 0.95  # of NorMuon's running mean square of each row
LIKE_ADAMW = 0.2  # the root mean square of a usual update of AdamW
TOGETHER = 2**26  # numbers of matrices that are orthogonalised at once


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match, with `*` for any part, or that belong to a module so named."""
    named = dict(model.named_parameters(remove_duplicate=False))  # a shared weight has several names
    for pattern in patterns:
        matches = fnmatch.filter(named, pattern) + fnmatch.filter(named, f"{pattern}.*")
        known = [*named, *(name for name, _ in model.named_modules() if name)]
        refuse(
            not matches,
            f'train.freeze "{pattern}" names no parameter{nearest(pattern, known)}: '
            f"they are called like {next(iter(named))}, with * for any part",
        )
        for name in matches:
            named[name].requires_grad_(False)


def parameter_groups(model: nn.Module, plan: TrainPlan) -> list[dict[str, Any]]:
    """Return the trainable parameters in groups, each with a weight decay and a `scale` of the learning rate.

    Only matrices decay: not norms, biases and vectors, nor embeddings of tokens, types and positions, even
    where the output layer shares one. With `layer_decay`, the scale falls from the head down to the
    embedding. `orthogonal` groups are for Muon: they hold the matrices of blocks.
    """
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
        decay = plan.weight_decay if parameter.ndim >= 2 and id(parameter) not in tables else 0.0
        scale = plan.layer_decay ** _below_head(model, name)
        inner = BLOCK.match(name) is not None and parameter.ndim == 2 and id(parameter) not in tables
        orthogonal = plan.optimizer in ("muon", "normuon") and inner and min(parameter.shape) > 1
        new = {"params": [], "weight_decay": decay, "scale": scale, "orthogonal": orthogonal}
        mesh = getattr(parameter, "device_mesh", None)  # one update takes parameters of one mesh
        groups.setdefault((decay, scale, mesh, orthogonal), new)["params"].append(parameter)
    refuse(not groups, "train.freeze leaves nothing to train: freeze less")
    return list(groups.values())


def _below_head(model: nn.Module, name: str) -> int:
    """Return how many layers a parameter lies below the head: 1 for the last block."""
    block = BLOCK.match(name)
    if block is not None:
        return _n_blocks(model, block[1]) - int(block[2])
    stack, _, part = name.partition(".")
    return _n_blocks(model, f"{stack}.") + 1 if part.startswith(("embedding.", "positions.")) else 0


def _n_blocks(model: nn.Module, prefix: str) -> int:
    return len(list(model.get_submodule(f"{prefix}blocks").children()))


def make_optimizer(model: nn.Module, plan: TrainPlan, device: torch.device) -> Optimizer:
    """Freeze the parameters named in `plan.freeze`, and return AdamW, Adafactor or Muon for the others.

    Adafactor's rate is relative to the size of each weight. It keeps a row and a column per matrix in place
    of two matrices, and ignores `betas` and `eps`. Muon multiplies in the precision of the run.
    """
    freeze(model, plan.freeze)
    groups = parameter_groups(model, plan)
    if plan.optimizer == "adafactor":
        refuse(
            any(hasattr(parameter, "device_mesh") for parameter in model.parameters()),
            "train.optimizer adafactor works on whole weights, and several processes or train.offload split "
            "them: choose adamw or muon",
            ConfigError,
        )
        return torch.optim.Adafactor(groups, lr=plan.lr, eps=ADAFACTOR_EPS)
    if plan.optimizer in ("muon", "normuon"):
        return Muon(groups, device, plan, lr=plan.lr, betas=plan.betas, eps=plan.eps)
    return torch.optim.AdamW(groups, lr=plan.lr, betas=plan.betas, eps=plan.eps, fused=device.type in FUSED)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next step to `lr`, times each group's scale."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # captured steps read it on the device
            group["lr"].fill_(lr * group["scale"])
        else:
            group["lr"] = lr * group["scale"]


def step_if_finite(
    optimizer: Optimizer, scaler: torch.amp.GradScaler, loss: Tensor, norm: Tensor
) -> Callable[[], list[float]]:
    """Take a step, unless the loss [] or the gradient norm [] is not finite.

    On a GPU, fused AdamW checks them itself, without waiting for the device. A scaled gradient may be
    infinite: the scaler then skips the step and lowers its scale.

    Returns: a function that reads loss, norm and a number that is finite if all is well. It waits for this
        step, but not for what the device was given after it.
    """
    norm = norm.to(loss.device)
    numbers = torch.stack([loss, norm, loss if scaler.is_enabled() else loss + norm])
    there = optimizer.param_groups[0]["params"][0].is_cuda
    if scaler.is_enabled() or not (there and optimizer.defaults.get("fused")):
        values: list[float] = numbers.tolist()
        if math.isfinite(values[-1]):
            scaler.step(optimizer)
        scaler.update()  # also where the step is skipped: the scaler would not unscale again before
        return lambda: values
    read = read_later(numbers)
    step_unless(optimizer, ~numbers[-1].isfinite())
    return read


def step_unless(optimizer: Optimizer, bad: Tensor) -> None:
    """Take a step of fused AdamW, unless `bad` [] is true on the device."""
    optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
    optimizer.step()


def read_later(numbers: Tensor) -> Callable[[], list[float]]:
    """Copy numbers [N] from a GPU without waiting; return a function that waits for the copy and reads it."""
    if not numbers.is_cuda:
        values: list[float] = numbers.tolist()
        return lambda: values
    here = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return here.tolist()

    return read


# Learning-rate schedules: pure functions from a step to a rate --------------------------------------------


def original_schedule(step: int, d_model: int, warmup: int = ORIGINAL_WARMUP) -> float:
    """Return the original Transformer's rate: linear up to step `warmup`, then falling as 1/sqrt(step).

    d_model^-0.5 · min(step^-0.5, step · warmup^-1.5); the first step is 1, and step 0 has rate 0.
    """
    return float(d_model**-0.5 * min(step**-0.5, step * max(warmup, 1) ** -1.5)) if step > 0 else 0.0


def warmup_steps(plan: TrainPlan, steps: int) -> int:
    """Return the number of warm-up steps."""
    usual = ORIGINAL_WARMUP if plan.schedule == "original" else steps // 20
    return usual if plan.warmup is None else plan.warmup


def lr_at(plan: TrainPlan, step: int, steps: int, d_model: int) -> float:
    """Return the learning rate of `step` (the first is 1) in a run of `steps`.

    The rate rises linearly to `plan.lr` during the warm-up. Then it stays there (constant), falls to the
    share `plan.floor` at the last step (cosine, linear), or stays and falls linearly at the end (wsd).
    `original` has its own peak and no floor.
    """
    warmup = warmup_steps(plan, steps)
    if plan.schedule == "original":
        return plan.lr * original_schedule(step, d_model, warmup)
    if step < warmup:
        return plan.lr * max(step, 0) / warmup
    begin = max(warmup, steps - round(plan.decay * steps)) if plan.schedule == "wsd" else warmup
    progress = min(max(step - begin, 0) / max(steps - begin, 1), 1.0)  # 0: the fall begins; 1: the last step
    heights = {
        "constant": 1.0,
        "linear": 1 - progress,
        "wsd": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }
    return plan.lr * (plan.floor + (1 - plan.floor) * heights[plan.schedule])


def part_of(parts: int, step: int, steps: int) -> int:
    """Return in which of so many equal parts of a run a step lies; the first of each is 0 and 1."""
    return min((step - 1) * parts // max(steps, 1), parts - 1)


def batches_of(plan: TrainPlan, step: int, steps: int) -> range:
    """Return the numbers of the batches of a step; the first are 0 and 1."""
    sizes = plan.accumulates
    part = part_of(len(sizes), step, steps)
    ends = [-(-number * steps // len(sizes)) for number in range(part + 1)]  # steps before each part
    before = sum(size * (end - begin) for size, begin, end in zip(sizes, ends, ends[1:]))
    begin = before + sizes[part] * (step - 1 - ends[part])
    return range(begin, begin + sizes[part])


# Muon -------------------------------------------------------------------------------------------------------


class Muon(torch.optim.AdamW):
    """Muon for groups that are `orthogonal`, AdamW for the others.

    Matrices of one shape are orthogonalised together. One of which this process holds a part is gathered, and
    each of its processes does so. NorMuon (Li et al., 2025) divides each row of that, which makes one neuron,
    by its running size.
    """

    def __init__(
        self, groups: list[dict[str, Any]], device: torch.device, plan: TrainPlan, **settings: Any
    ) -> None:
        super().__init__(groups, fused=device.type in FUSED, **settings)
        narrow = plan.precision in ("bfloat16", "float8")
        self.device, self.dtype = device, torch.bfloat16 if narrow else torch.float32  # of the matmuls
        self.coefficients, self.cautious = plan.muon_coefficients, plan.cautious_decay
        self.by_row = plan.optimizer == "normuon"

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step; gradients of matrices are used up."""
        groups = self.param_groups
        for group in groups:
            matrices = [parameter for parameter in group["params"] if parameter.grad is not None]
            for shape in dict.fromkeys(matrix.shape for matrix in matrices if group["orthogonal"]):
                alike = [matrix for matrix in matrices if matrix.shape == shape]
                most = max(1, TOGETHER // shape.numel())
                for begin in range(0, len(alike), most):
                    self._move(alike[begin : begin + most], group["lr"], group["weight_decay"])
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups

    @torch.no_grad()
    def _move(self, matrices: Sequence[Tensor], rate: float | Tensor, decay: float) -> None:
        """Move matrices of one shape, unless `found_inf` says that this step is to be skipped."""
        kept = [self.state[matrix] for matrix in matrices]
        used = [matrix.grad for matrix in matrices if matrix.grad is not None]  # all have one
        for gradient, state in zip(used, kept):
            if not state:
                state["momentum"] = torch.zeros_like(gradient)
        here = [local(matrix) for matrix in matrices]
        gradients = [local(gradient) for gradient in used]
        momenta = [local(state["momentum"]) for state in kept]
        skip: Tensor | None = getattr(
            self, "found_inf", None
        )  # on the device, which the host does not wait for
        if skip is not None:
            rate = rate * (1 - skip)
            for gradient, momentum in zip(gradients, momenta):
                torch.where(skip.bool().to(gradient.device), momentum, gradient, out=gradient)
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        torch._foreach_lerp_(gradients, momenta, MOMENTUM)  # Nesterov's
        update = torch.stack([whole(gradient).to(self.device, self.dtype) for gradient in used])
        update = orthogonal(update, self.coefficients)
        size = LIKE_ADAMW * math.sqrt(max(matrices[0].shape))
        if self.by_row:
            update = self._rows_alike(update.float(), kept, here[0].device, skip)
            size = LIKE_ADAMW * math.sqrt(matrices[0].numel())  # its norm is 1
        parts = [part_like(each, matrix) for each, matrix in zip(update, matrices)]
        moves = [part.to(own.device, own.dtype) for part, own in zip(parts, here)]
        if self.cautious:
            for own, move in zip(here, moves):
                own.mul_(1 - rate * decay * (move * own > 0))
        else:
            torch._foreach_mul_(here, 1 - rate * decay)
        torch._foreach_mul_(moves, -rate * size)
        torch._foreach_add_(here, moves)

    def _rows_alike(
        self, update: Tensor, kept: Sequence[dict[str, Tensor]], place: torch.device, skip: Tensor | None
    ) -> Tensor:
        """Divide each row of updates [K, N, D] by its running size; then each matrix by its norm."""
        squares = update.square().mean(2, keepdim=True).to(place)  # K N 1
        for state, square in zip(kept, squares):
            if "rows" not in state:
                state["rows"] = torch.zeros_like(square)
        rows = torch.stack([state["rows"] for state in kept])
        squares = squares if skip is None else torch.where(skip.bool().to(place), rows, squares)
        rows.lerp_(squares, 1 - ROW_DECAY)
        torch._foreach_copy_([state["rows"] for state in kept], list(rows))
        update = update / rows.to(update.device).sqrt().clamp(min=1e-10)
        norm: Tensor = torch.linalg.matrix_norm(update, keepdim=True)
        return update / norm.clamp(min=1e-10)


def orthogonal(matrices: Tensor, coefficients: str = "jordan") -> Tensor:
    """Return matrices [K, N, D] with the same singular vectors, and singular values near 1."""
    norm = torch.linalg.matrix_norm(matrices, keepdim=True)
    x: Tensor = matrices / (norm * CUSHION[coefficients]).clamp(min=1e-7)
    tall = matrices.shape[1] > matrices.shape[2]
    x = x.mT if tall else x
    for a, b, c in COEFFICIENTS[coefficients]:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
