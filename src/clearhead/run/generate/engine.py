"""What generation keeps from call to call: its inference model, captured steps, the last prompt's cache.

Prompts are prefilled by the model as it is, whatever their length. Their keys then move into buffers of one
size, and from there on a step of `steps` takes every row one token further.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from types import NoneType
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from clearhead.core.attention import Attention
from clearhead.core.cache import Cache
from clearhead.core.taps import SILENT, tap_for
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.learn.parallel.shards import is_split
from clearhead.run.generate.decode import (
    LENGTH_ALONE,
    Continuation,
    Ends,
    Prompts,
    agreed,
    check_request,
    decode,
    prefill_fixed,
    slides,
    steps_back,
    streams,
    turns_by_length,
)
from clearhead.run.generate.grammar import Grammars
from clearhead.run.generate.request import Request
from clearhead.run.generate.sampling import NOT_NUMBERS, adjust_by, best_of
from clearhead.run.generate.steps import Running, Steps, warn_uncompiled
from clearhead.run.kernels.fixed_cache import NOTHING
from clearhead.run.kernels.kernels import without_plans
from clearhead.run.kernels.library import library
from clearhead.run.kernels.parts import JoinedLinear, PackedLinear, fingerprint, same
from clearhead.run.kernels.prepare import prepared
from clearhead.run.quant.layers import quantized_parts

STEPS_PER_SYNC = 16  # greedy tokens made between two looks at them


@torch.inference_mode()
@without_plans()
def decode_compiled(
    model: Transformer,
    request: Request,
    prompts: Prompts,
    ends: Ends = LENGTH_ALONE,
    cache: Cache | None = None,
    *,
    steps: Steps,
) -> list[Continuation]:
    """`decode` through one of `steps`, where there is one of this size or one can be made."""
    check_request(model, request, prompts, ends)
    step, source, most = None, prompts.source, request.max_new_tokens
    if request.compile and steps.unfit is not None:
        warn_uncompiled(steps.unfit)
    if request.compile and streams(model, request, prompts):
        warn_uncompiled("a text that streams turns its first keys anew for each token")
    moving = slides(model, request, prompts) or streams(model, request, prompts)
    if cache is None and not moving and request.early_exit is None and request.cache is None:
        read = 0 if source is None else model.config.stacks[0].n_tokens(source.shape[1])
        sizes = (len(prompts.ids), prompts.longest + most, read)
        step = steps.find(*sizes, compiles=bool(request.compile))
    if step is None:
        return decode(model, request, prompts, ends, cache)
    watched = ends.on_token is not None or ends.cancel is not None or request.reports
    watched |= ends.rule is not None
    if watched or request.temperature > 0 or request.looks_back or request.restricts:
        reading = partial(prefill_fixed, model, prompts, step.cache)
        return decode(
            model, request, prompts, ends, Running(len(prompts.ids), step.ids.device), step, reading
        )
    # Greedy rows go on from their first token [B]; the host reads tokens some steps later.
    first = best_of(adjust_by(prefill_fixed(model, prompts, step.cache), request), request)
    rows = [Continuation(list(prompt)) for prompt in prompts.ids]
    running, launched, seen, unread = list(range(len(rows))), 1, 0, [OnHost(first[:, None])]
    step.ids[: len(rows), 0] = first
    while unread and running:
        if launched < most:
            count = min(STEPS_PER_SYNC, most - launched)
            unread.append(OnHost(step.run(count)[: len(rows)]))
            launched += count
        for tokens in zip(*unread.pop(0).tolist()):
            refuse(any(tokens[i] == NOTHING for i in running), NOT_NUMBERS)
            seen, reason = seen + 1, ends.reason()
            running = [i for i in running if ends.go_on(i, rows[i], tokens[i], seen, reason)]
    return rows


class OnHost:
    """A tensor on its way to the host, while the device goes on."""

    def __init__(self, tensor: Tensor) -> None:
        self.copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.copy.copy_(tensor, non_blocking=True)
        self.arrived = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self.arrived is not None:
            self.arrived.record()

    def tolist(self) -> list[list[int]]:
        """Wait for the copy, and return its numbers."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return cast(list[list[int]], self.copy.tolist())


class Prefix:
    """The cache of a single row, and the tokens it has read; the next prompt begins where it differs."""

    def __init__(self, model: Transformer, weights: Sequence[Tensor] = ()) -> None:
        self.model, self.weights = model, weights  # `weights`: their fingerprints
        self.cache = Cache()
        self.tokens: list[int] = []

    def begin(self, prompt: Sequence[int], room: int) -> Cache:
        """Return a cache with what `prompt`, all but its last token, shares with the tokens read before."""
        # Where angles go by the length of a call, what was read with fewer tokens was turned otherwise.
        shared = 0 if turns_by_length(self.model) else agreed(self.tokens, prompt[:-1])
        if shared < self.cache.length and not steps_back(self.model):
            shared = 0  # a state does not step back
        self.cache.crop(shared)
        self.cache.reserve = room
        return self.cache

    def end(self, row: Continuation) -> None:
        """Remember what the cache holds now."""
        self.tokens = (row.prompt + row.ids)[: self.cache.length]


class Engine:
    """The inference model and what belongs to it, made when needed and kept up to date."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.made_of: object = None  # the parts, parameters and options that the copy was made from
        self.copy: Transformer | None = None
        self.kept: list[JoinedLinear | PackedLinear] = []  # the parts of the copy that keep weights
        self.steps: Steps | None = None  # of the copy, compiled
        self.prefix: Prefix | None = None  # what the last request with `reuse` has read
        self.grammars: Grammars | None = None  # of the tokenizer that was used last

    def runner(self) -> Transformer:
        """Return the inference model; the model itself where it is split, hooked, tapped or has a kernel."""
        parts = list(self.model.modules())
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        hooked |= any("forward" in vars(part) for part in parts)
        chosen = any(isinstance(part, Attention) and part.kernel != "fused" for part in parts)
        if hooked or chosen or is_split(self.model) or tap_for(self.model) is not SILENT:
            return self.model
        made_of = [_described(part) for part in parts]
        if self.copy is None or self.made_of != made_of:
            self.copy = prepared(self.model)  # may lay out weights anew
            self.made_of = [_described(part) for part in parts]
            keeping = (JoinedLinear, PackedLinear)
            self.kept = [part for part in self.copy.modules() if isinstance(part, keeping)]
        else:
            for kept in self.kept:
                kept.refresh()
        return self.copy

    def reader(self) -> Transformer:
        """Return what runs whole texts: on a CPU the inference model, where its matmuls are compiled.

        Not with quantized weights: there the inference model rounds its inputs too.
        """
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        exact = on_cpu and library() is not None and not quantized_parts(self.model)
        return self.runner() if exact else self.model

    def steps_for(self, runner: Transformer, asked: bool | None) -> Steps | None:
        """Return the compiled steps of the inference model, where they are asked for or may pay."""
        on_gpu = next(runner.parameters()).is_cuda
        if runner is self.model or not (on_gpu if asked is None else asked):
            return None
        if self.steps is None or self.steps.model is not runner:
            self.steps = Steps(runner)
        return self.steps

    def grammars_of(self, tokenizer: Tokenizer) -> Grammars:
        """Return the grammars of a tokenizer, whose tokens are spelled out once."""
        if self.grammars is None or self.grammars.tokenizer is not tokenizer:
            self.grammars = Grammars(tokenizer, self.model.config.vocab_size)
        return self.grammars

    def take_prefix(self, runner: Transformer) -> Prefix:
        """Take what the last request has read, if the model is still the same; no other call has it then."""
        prefix, self.prefix = self.prefix, None
        weights = [fingerprint(weight) for weight in self.model.parameters()]
        if prefix is not None and prefix.model is runner is not self.model and same(prefix.weights, weights):
            return prefix
        return Prefix(runner, weights)


PLAIN = (int, float, str, NoneType)


def _described(part: nn.Module) -> list[object]:
    """Return what of a part its copy has by value, and what it shares by identity."""
    owned = [tensor for tensor in (*part._parameters.values(), *part._buffers.values()) if tensor is not None]
    tensors = [(id(tensor), tensor.data_ptr(), tensor.dtype, tensor.device) for tensor in owned]
    options = [
        value if isinstance(value, PLAIN) else _by_value(value)
        for name, value in vars(part).items()
        if name[0] != "_" and name != "training"
    ]
    return [part, type(part), tensors, options]


def _by_value(value: object) -> object:
    """Return a container spelled out, since it can be changed in place, and the identity of all else."""
    return repr(value) if isinstance(value, tuple | list | dict | set) else id(value)
