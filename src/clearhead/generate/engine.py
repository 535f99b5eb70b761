"""What generation keeps from call to call: a fast copy of the model, compiled steps, the prompt read last."""

from collections.abc import Sequence

from clearhead.fast.prepare import prepared
from clearhead.generate.compiled import Steps
from clearhead.generate.decode import Continuation, agreed, turns_by_length
from clearhead.model.attention import Attention
from clearhead.model.cache import Cache
from clearhead.model.taps import SILENT, tap_for
from clearhead.model.transformer import Transformer


class Prefix:
    """The cache of a single row, and the tokens it has read; the next prompt begins where it differs."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.cache = Cache()
        self.tokens: list[int] = []

    def begin(self, prompt: Sequence[int], room: int) -> Cache:
        """Return a cache with what `prompt`, all but its last token, shares with the tokens read before."""
        # Where angles go by the length of a call, what was read with fewer tokens was turned otherwise.
        common = 0 if turns_by_length(self.model) else agreed(self.tokens, prompt[:-1])
        self.cache.crop(common)
        self.cache.reserve = room
        return self.cache

    def end(self, row: Continuation) -> None:
        """Remember what the cache holds now."""
        self.tokens = (row.prompt + row.ids)[: self.cache.length]


class Engine:
    """The fast copy of one model and what belongs to it, made when needed and again when weights change."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.state: object = None  # of the weights that the copy was made from
        self.copy: Transformer | None = None
        self.steps: Steps | None = None  # of the copy, compiled
        self.prefix: Prefix | None = None  # what the last request with `reuse` has read

    def runner(self) -> Transformer:
        """Return the fast copy; the model itself while taps, hooks or a chosen kernel are set."""
        parts = list(self.model.modules())
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        chosen = any(isinstance(part, Attention) and part.kernel != "fused" for part in parts)
        if hooked or chosen or tap_for(self.model) is not SILENT:
            return self.model
        state = [
            (id(w), w.data_ptr(), w.dtype, w.device, -1 if w.is_inference() else w._version)
            for w in self.model.parameters()
        ]
        if self.copy is None or self.state != state:
            self.state, self.copy = state, prepared(self.model)
        return self.copy

    def steps_for(self, runner: Transformer, asked: bool | None) -> Steps | None:
        """Return the compiled steps of the fast copy, where they are asked for or may pay."""
        on_gpu = next(runner.parameters()).is_cuda
        if runner is self.model or not (on_gpu if asked is None else asked):
            return None
        if self.steps is None or self.steps.model is not runner:
            self.steps = Steps(runner)
        return self.steps

    def take_prefix(self, runner: Transformer) -> Prefix:
        """Take what the last request has read, if the model is still the same; no other call has it then."""
        prefix, self.prefix = self.prefix, None
        if prefix is not None and prefix.model is runner and runner is not self.model:
            return prefix
        return Prefix(runner)
