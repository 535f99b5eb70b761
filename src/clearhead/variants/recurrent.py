"""Recurrent layers: what the gated delta rule, Mamba-2 and gated short convolutions have in common.

Each begins with a short causal convolution and reads from left to right; a cache keeps the last inputs of the
convolution, and the memory of those that have one.

Shapes: B batch, T length, D model, H heads, N chunks of C tokens, W width of the convolution's input.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.core.cache import LayerKV
from clearhead.core.config import StackSpec
from clearhead.core.config.kinds import Kind
from clearhead.core.dtypes import wide
from clearhead.core.masks import View
from clearhead.core.taps import SILENT, Tap
from clearhead.errors import refuse
from clearhead.variants.caches import LayerState
from clearhead.variants.kinds import ShortConvKind
from clearhead.variants.steps import Pass, Step, linear_step


class RecurrentState:
    """What one layer carries from call to call, and each call updates. No gradients flow through it."""

    tail: Tensor | None = None  # B kernel-1 W: inputs of the convolution at the last real tokens
    memory: Tensor | None = None  # B H E V
    document: Tensor | None = None  # B: the document of the last real token


class RecurrentLayer(nn.Module):
    """A recurrent module in a block, where its state comes from the cache: the first of two base classes.

    The module's `forward` maps x [B, T, D], which tokens are real, their documents, the state and a tap to
    [B, T, D].
    """

    keeps: tuple[str, ...] = ("memory", "tail")  # of the state, in the order of `Kind.state_shapes`

    def forward(
        self,
        x: Tensor,
        view: View,
        memory: Tensor | None = None,
        layer_kv: LayerKV | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        tokens = view.described()
        state: RecurrentState | None = None
        names = (*self.keeps, "document")
        if isinstance(layer_kv, LayerState):
            state = RecurrentState()
            for name, kept in zip(names, layer_kv.state):
                setattr(state, name, kept)
        y: Tensor = super().forward(x, tokens.real, tokens.documents, state, tap)
        if isinstance(layer_kv, LayerState):
            layer_kv.keep(*(kept for name in names if (kept := getattr(state, name)) is not None))
        return y


def convolve(
    x: Tensor,
    conv: Tensor,
    real: Tensor | None,
    documents: Tensor | None,
    state: RecurrentState | None,
    bias: Tensor | None = None,
    bend: Callable[[Tensor], Tensor] | None = F.silu,
) -> tuple[Tensor, Tensor | None]:
    """Convolve the real tokens of x [B, T, W] by conv [W, 1, kernel]; return also where documents start.

    `real` [B|1, T] is False for padding, which is not seen, wherever it stands. `documents` [B|1, T] are ids
    in runs, and a run sees nothing before it. `bend` is the activation.
    """
    B, T, W = x.shape
    reach, slots = conv.shape[-1] - 1, torch.arange(T, device=x.device)
    count, order = torch.full((B, 1), T, device=x.device), slots.expand(B, T)  # of each slot's token
    documents = None if documents is None else documents.expand(B, T)
    unnamed = state is not None and state.tail is not None and state.document is None
    refuse(
        unnamed and documents is not None,
        "this cache was filled without documents: name them from its first call on",
    )
    if real is not None:  # move the real tokens of each row to its front
        real = real.expand(B, T)
        order = real.long().cumsum(1)
        count, order = order[:, -1:], (order - 1).clamp(min=0)
        front = (~real).long().argsort(dim=1, stable=True)
        x = x.gather(1, front[..., None].expand(B, T, W))
        documents = None if documents is None else documents.gather(1, front)
    tail = x.new_zeros(B, reach, W) if state is None or state.tail is None else state.tail
    inputs = torch.cat([tail, x], dim=1)
    taps = [inputs[:, back : back + T] for back in range(reach + 1)]  # oldest first
    starts = runs = None
    if documents is not None:
        before = documents[:, :1]
        if state is not None and state.document is not None:
            before = state.document[:, None]
        documents = torch.cat([before, documents], dim=1)
        starts = (documents[:, 1:] != documents[:, :-1]) & (slots < count)
        runs = F.pad(starts.long().cumsum(1), (reach, 0))
        taps = [
            each * (runs[:, back : back + T] == runs[:, reach:])[..., None] for back, each in enumerate(taps)
        ]
    start = wide(x).new_zeros(()) if bias is None else wide(bias)
    y = sum((wide(each) * by for each, by in zip(taps, wide(conv[:, 0]).unbind(-1))), start=start)
    y = y if bend is None else bend(y)
    if state is not None:
        last = count + torch.arange(reach, device=x.device)  # positions of the last `reach` real tokens
        state.tail = inputs.gather(1, last[..., None].expand(B, reach, W)).detach()
        if documents is not None and runs is not None:
            ended = runs.gather(1, last) != runs.gather(1, count + reach - 1)
            state.tail = state.tail.masked_fill(ended[..., None], 0.0)
            state.document = documents.gather(1, count)[:, 0]
    if real is not None:
        y = y.gather(1, order[..., None].expand(B, T, W)).masked_fill(~real[..., None], 0.0)
        starts = None if starts is None else starts.gather(1, order) & real
    return y.to(x.dtype), starts


def decays(g: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is left within chunks of logs of decays g [B, H, N, C], of which C are in each of N chunks.

    From token j to token i, [B, H, N, C, C]; of what enters a chunk at each token, and of what each token
    writes at its end, [B, H, N, C, 1]. `starts` [B, T] is True where all before the token is forgotten.
    """
    N, C = g.shape[-2:]
    # A sum of what lies between: a difference of two long sums rounds.
    later = torch.ones(C, C, dtype=torch.bool, device=g.device).tril(-1)
    between = torch.where(later, g[..., None], 0.0).cumsum(-2)  # B H N C C: i, j
    seen, entering = later | torch.eye(C, dtype=torch.bool, device=g.device), g.cumsum(-1)
    if starts is not None:
        run = F.pad(starts.long(), (0, N * C - starts.shape[1])).reshape(-1, 1, N, C).cumsum(-1)
        seen = seen & (run[..., None] == run[..., None, :])  # runs that begin in this chunk
        entering = entering.masked_fill(run > 0, -torch.inf)  # nothing enters a run from before it
    decay = between.masked_fill(~seen, -torch.inf).exp()
    return decay, entering.exp()[..., None], decay[..., -1, :, None]


class ShortConv(nn.Module):
    """A short convolution between two gates: out(c · conv(b · x)), with b, c, x made of the token (LFM2)."""

    def __init__(self, d_model: int, kernel: int = 3, bias: bool = False) -> None:
        super().__init__()
        D = d_model
        self.k, self.q, self.v = (nn.Linear(D, D, bias=bias) for _ in "bcx")
        self.conv = nn.Parameter(torch.empty(D, 1, kernel).uniform_(-1, 1) * kernel**-0.5)
        self.conv_bias = nn.Parameter(torch.zeros(D)) if bias else None
        self.out = nn.Linear(D, D, bias=bias)

    def forward(
        self,
        x: Tensor,
        real: Tensor | None = None,
        documents: Tensor | None = None,
        state: RecurrentState | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map [B, T, D] -> [B, T, D]; see `convolve`."""
        # As one head: B 1 T D.
        b, c, v = (tap(n, part(x)[:, None])[:, 0] for n, part in zip("kqv", (self.k, self.q, self.v)))
        y, _ = convolve(tap.step("gated", b * v), self.conv, real, documents, state, self.conv_bias, None)
        z = tap("z", (c * tap.step("conv", y))[:, None])[:, 0]
        return tap("out", self.out(z))


class ShortConvLayer(RecurrentLayer, ShortConv):  # type: ignore[misc]
    """A gated short convolution in a block."""

    keeps = ("tail",)

    def __init__(self, spec: StackSpec, name: str, kind: Kind) -> None:
        assert isinstance(kind, ShortConvKind)
        ShortConv.__init__(self, spec.d_model, kind.kernel, kind.bias)

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, T: int, kind: Kind) -> Iterator[Step]:
        """Yield the steps on rows of T tokens."""
        assert isinstance(kind, ShortConvKind)
        D, rows = spec.d_model, run.batch * T
        for part in "kqv":
            yield linear_step(f"{name}.{part}", "attention", rows, D, D, kind.bias, kept=rows * D * run.size)
        yield convolution_step(run, name, T, D, kind.kernel, kind.bias)
        yield linear_step(f"{name}.out", "attention", rows, D, D, kind.bias, kept=rows * D * run.size)


def convolution_step(run: Pass, name: str, T: int, width: int, kernel: int, bias: bool) -> Step:
    """Return the step of a short convolution on rows of T tokens, and of what reads it."""
    rows = run.batch * T
    # Half precision is widened for each tap. Else the taps are views of one tensor.
    taps = kernel * (rows + 1) if run.size < run.wide else rows + run.batch * (kernel - 1)
    kept = (taps + rows) * width * run.wide
    return Step(f"{name}.conv", "attention", (kernel + bias) * width, kept=kept)
