"""Compiled decoding: the step that is run for every token, made once for a size of batch and cache and then replayed.

Prompts are read by the model as it is, whatever their length; their keys then move into buffers of one size, and from
there on one compiled step, on a GPU recorded as one CUDA graph, takes every row one token further. Sizes go by a few
coarse buckets, so prompts of all lengths share a handful of steps. A row that has ended runs on unseen.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.generate.decode import (
    Chooser,
    Ends,
    OnToken,
    Row,
    check_request,
    decode,
    prefill,
    turns_by_length,
)
from clearhead.generate.sampling import Sampling
from clearhead.model.cache import Cache
from clearhead.model.fixed_cache import FixedCache
from clearhead.model.transformer import Transformer

SMALLEST = 512  # slots of the smallest cache; larger ones double
AHEAD = 16  # greedy tokens made between two looks at them
WORTH = 1024  # new tokens for which compiling pays by itself
# Products with one row become fused reductions, which read weights faster than the library's matrix product.
OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True, "triton.cudagraphs": False}


def rows_bucket(rows: int) -> int:
    """1, 2, 4, 8, and then multiples of 8."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


def slots_bucket(slots: int, smallest: int = SMALLEST) -> int:
    """The smallest, doubled until it is enough."""
    return max(smallest, 1 << (slots - 1).bit_length())


class CompiledStep:
    """One more token for each of `rows` rows, with room for `slots` tokens each."""

    def __init__(
        self, model: Transformer, rows: int, slots: int, source: int = 0, backend: str = "inductor"
    ) -> None:
        weight = next(model.parameters())
        device = weight.device
        self.model = model
        self.cache = FixedCache(model.config, rows, slots, weight.dtype, device, source)
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)  # what goes in next
        self.made = torch.zeros(
            rows, slots, dtype=torch.long, device=device
        )  # by slot: the most probable token after it
        self.logits = torch.zeros(rows, model.config.vocab_size, dtype=weight.dtype, device=device)
        self._forward()  # what parts of the model make at first use, they make now, and not under the compiler
        options = OPTIONS if backend == "inductor" and device.type == "cuda" else None
        run = torch.compile(self._forward, fullgraph=True, dynamic=False, backend=backend, options=options)
        with torch._dynamo.config.patch(recompile_limit=64):  # one for each size
            run()
        self.replay: Callable[[], object] = _recorded(run) if device.type == "cuda" else run

    def _forward(self) -> None:
        logits = self.model(self.ids, cache=self.cache, logits="last").logits[:, -1]
        chosen = logits.argmax(-1, keepdim=True)
        self.logits.copy_(logits)
        self.made.index_copy_(1, self.cache.index, chosen)
        self.ids.copy_(chosen)

    def __call__(self, chosen: Tensor, cache: Cache) -> Tensor:
        """The `Step` of `decode`, for a `Handover`: chosen [B] -> logits [B, V]."""
        assert isinstance(cache, Handover)
        rows = cache.settle(self.cache)
        self.ids[rows, 0] = chosen
        self.ahead(1)
        return self.logits[rows]

    def ahead(self, count: int) -> Tensor:
        """Run `count` times, each time on the most probable token: those tokens, [B, count]."""
        start = self.cache.length
        for _ in range(count):
            self.replay()
        self.cache.length = (
            start + count
        )  # which a step that runs uncompiled, because someone watches, counts by itself
        return self.made[:, start : start + count]


def _recorded(run: Callable[[], object]) -> Callable[[], object]:
    """The kernels that `run` launches, recorded, to be launched all at once."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Handover(Cache):
    """A growing cache while prompts are read; after that only the list of rows that still run in a fixed one."""

    def __init__(self, reserve: int) -> None:
        super().__init__(reserve)
        self.places: Tensor | None = None

    def settle(self, fixed: FixedCache) -> Tensor:
        """Move into `fixed`, the first time; the numbers of the rows there, [B]."""
        if self.places is None:
            fixed.adopt(self)
            self.places = torch.arange(self.rows or 0, device=fixed.cursor.device)
            self.layers.clear()
            self.cross.clear()
        return self.places

    def reorder(self, rows: Tensor, cross: bool = True) -> None:
        """As in `Cache`."""
        if self.places is None:
            super().reorder(rows, cross)
        else:
            self.places = self.places[rows]


class Steps:
    """The compiled steps of one model by their sizes, each made when first needed and kept."""

    def __init__(self, model: Transformer, backend: str = "inductor") -> None:
        self.model, self.backend = model, backend
        self.made: dict[tuple[int, int, int], CompiledStep] = {}
        self.unfit = self._unfit()  # why none can be made

    def _unfit(self) -> str | None:
        if self.model.config.n_experts:
            return "its experts are chosen on the host"
        return "its angles depend on the longest row in the batch" if turns_by_length(self.model) else None

    def find(self, rows: int, slots: int, source: int, may_make: bool) -> CompiledStep | None:
        """The step for these sizes; None where there is none, and none may or can be made."""
        size = (rows_bucket(rows), slots_bucket(slots), slots_bucket(source, 64) if source else 0)
        if size not in self.made and may_make and self.unfit is None:
            try:
                self.made[size] = CompiledStep(self.model, *size, backend=self.backend)
            except (
                Exception
            ) as error:  # compilers fail in many ways, and none of them is a reason not to generate
                self.unfit = next(iter(str(error).strip().splitlines()), type(error).__name__)
                warn_uncompiled(self.unfit)
        return self.made.get(size)


def warn_uncompiled(reason: str) -> None:
    """Say that what should be fast is not."""
    warnings.warn(f"the decode step runs uncompiled: {reason}", RuntimeWarning, stacklevel=2)


@torch.inference_mode()
def decode_compiled(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    seeds: Sequence[int] | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    alternatives: int = 0,
    logprobs: bool = False,
    on_token: OnToken | None = None,
    deadline: float | None = None,
    cancel: Callable[[], bool] | None = None,
    cache: Cache | None = None,
    *,
    steps: Steps,
    asked: bool = False,
) -> list[Row]:
    """As `decode`, through one of `steps` where there is one for these sizes, or `asked` says to make it, or it would pay."""
    sampling = sampling or Sampling()
    check_request(model, prompts, max_new_tokens, sampling, alternatives, stop_ids)
    room = max(map(len, prompts)) + max_new_tokens
    step = None
    if asked and steps.unfit is not None:
        warn_uncompiled(steps.unfit)
    if cache is None:
        step = steps.find(
            len(prompts), room, 0 if source is None else source.shape[1], asked or max_new_tokens >= WORTH
        )
    more = (source, source_mask, alternatives, logprobs, on_token, deadline, cancel)
    if step is None:
        return decode(model, prompts, max_new_tokens, sampling, stop_ids, seeds, *more, cache)
    handover = Handover(max(map(len, prompts)))
    watched = on_token is not None or cancel is not None or logprobs or alternatives
    if watched or sampling.temperature > 0 or sampling.looks_back or sampling.restricts:
        return decode(model, prompts, max_new_tokens, sampling, stop_ids, seeds, *more, handover, step)
    rows = [Row(list(prompt)) for prompt in prompts]
    first = Chooser(sampling, rows, None, model).choose(
        prefill(model, prompts, handover, source, source_mask), list(range(len(rows)))
    )
    _follow(step, handover, first, rows, max_new_tokens, Ends(frozenset(stop_ids), None, deadline, None))
    return rows


def _follow(
    step: CompiledStep, cache: Handover, first: Tensor, rows: list[Row], most: int, ends: Ends
) -> None:
    """Greedy rows from their first token [B] on: tokens feed one another on the device, and are looked at a piece later."""
    running, launched, seen = list(range(len(rows))), 1, 0
    unread = [OnHost(first[:, None])]
    step.ids[cache.settle(step.cache), 0] = first
    while unread and running:
        if launched < most:
            count = min(AHEAD, most - launched)
            unread.append(OnHost(step.ahead(count)[: len(rows)]))
            launched += count
        for tokens in zip(*unread.pop(0).tolist()):
            seen, reason = seen + 1, ends.reason()
            running = [i for i in running if ends.go_on(i, rows[i], tokens[i], seen, reason)]


class OnHost:
    """A tensor on its way to the host, while the device goes on."""

    def __init__(self, tensor: Tensor) -> None:
        self.copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.copy.copy_(tensor, non_blocking=True)
        self.arrived = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self.arrived is not None:
            self.arrived.record()

    def tolist(self) -> list[list[int]]:
        """Its numbers, as soon as they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers: list[list[int]] = self.copy.tolist()
        return numbers
