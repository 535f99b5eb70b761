"""What generation keeps from call to call: its inference model, captured steps, the last prompt's cache.

Prompts are prefilled by the model as it is, whatever their length. Their keys then move into buffers of one
size, and from there on a step of `steps` takes every row one token further.

Shapes: B rows, V vocabulary.
"""

from collections import abc
from types import NoneType

from tokenizers import Tokenizer
from torch import Tensor, nn

from clearhead.core.attention import Attention
from clearhead.core.cache import Cache
from clearhead.core.taps import SILENT, tap_for
from clearhead.core.transformer import Transformer
from clearhead.learn.parallel.shards import is_split
from clearhead.run.generate.checks import steps_back
from clearhead.run.generate.grammar import Grammars
from clearhead.run.generate.sequence import Sequence
from clearhead.run.generate.steps import Steps
from clearhead.run.generate.stream import agreed
from clearhead.run.kernels.library import library
from clearhead.run.kernels.parts import JoinedLinear, PackedLinear, fingerprint, same
from clearhead.run.kernels.prepare import prepared
from clearhead.run.quant.layers import quantized_parts


class Prefix:
    """The cache of a single row, and the tokens it has read; the next prompt begins where it differs."""

    def __init__(self, model: Transformer, weights: abc.Sequence[Tensor] = ()) -> None:
        self.model, self.weights = model, weights  # `weights`: their fingerprints
        self.cache = Cache()
        self.tokens: list[int] = []

    def begin(self, prompt: abc.Sequence[int], room: int) -> Cache:
        """Return a cache with what `prompt`, all but its last token, shares with the tokens read before."""
        # Where angles go by the length of a call, what was read with fewer tokens was turned otherwise.
        shared = 0 if self.model.config.rotates_by_length else agreed(self.tokens, prompt[:-1])
        if shared < self.cache.length and not steps_back(self.model):
            shared = 0  # a state does not step back
        self.cache.crop(shared)
        self.cache.reserve = room
        return self.cache

    def end(self, row: Sequence) -> None:
        """Remember what the cache holds now."""
        self.tokens = row.tokens[: self.cache.length]


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
