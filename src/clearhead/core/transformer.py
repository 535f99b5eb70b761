"""The Transformer: an optional encoder stack, an optional decoder stack, a head.

Shapes: B batch, T query length, S source length, D model, V vocabulary.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from clearhead.core import checks, heads, masks
from clearhead.core.attention import KERNELS, Attention
from clearhead.core.cache import Cache
from clearhead.core.config import ModelConfig, StackSpec
from clearhead.core.stack import Memory, Stack, stack_steps
from clearhead.core.steps import Pass, Step
from clearhead.core.taps import Tap, tap_for, unwrapped
from clearhead.errors import InputError, refuse


@dataclass
class Output:
    """What a forward pass returns."""

    logits: Tensor | None  # B T V, or by head: B C, B T C, B T 2, B D; None where none were asked for
    hidden: Tensor  # B T D, after the last norm
    memory: Tensor | None = None  # B S D, the encoder's output where there are two stacks

    @property
    def required_logits(self) -> Tensor:
        """The logits; an error where none were asked for."""
        if self.logits is None:
            raise InputError('this pass was run with logits="none": run it with logits="all" or "last"')
        return self.logits


# So that torch.export, vmap and the like see the tensors in it.
torch.utils._pytree.register_dataclass(Output)


class Transformer(checks.CalledByName, nn.Module):
    """Any model the config can describe. See `forward` for what goes in and `Output` for what comes out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Stack(config.encoder) if config.encoder is not None else None
        shared = self.encoder.embedding.front if self.encoder is not None and shares_front(config) else None
        self.decoder = Stack(config.decoder, shared) if config.decoder is not None else None
        self.head = heads.HEADS[config.readout.head](config.readout)
        if not next(self.parameters()).is_meta:
            initialise(self, config)
        self.tie()

    def tie(self) -> None:
        """Make shared weights one tensor: the output layer and the token table of the stack that feeds it."""
        out = self.head.out if isinstance(self.head, heads.LanguageHead) else None
        if isinstance(out, nn.Linear) and self.config.tie_embeddings:  # one of few bits has no parameter
            out.weight = cast(nn.Embedding, self.main.embedding.front.tokens).weight

    @property
    def main(self) -> Stack:
        """The stack that feeds the head."""
        return cast(Stack, self.decoder if self.decoder is not None else self.encoder)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        *,
        types: Tensor | None = None,
        documents: Tensor | None = None,
        source_documents: Tensor | None = None,
        prefix: Tensor | None = None,
        bias: Tensor | None = None,
        global_mask: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
    ) -> Output:
        """Run the model.

        Args:
            ids: [B, T] token ids, or by `config.input` pixels [B, C, H, W], vectors, frames [B, T, d_input].
                With an encoder and a decoder, these feed the decoder.
            mask: [B, T] boolean, True = real token; padding may stand on either side or in between.
            source: the input of the encoder, where there is a decoder too. With a cache, later calls omit it.
            source_mask: [B, S] boolean, for `source`.
            positions: [B, T] position of each token; None: counted from the mask.
            cache: keys and values of earlier tokens, carried on by this call.
            types: [B, T] segment ids, for a model that has them.
            documents: [B, T] packed documents as runs of equal ids; a token sees its own document only.
            source_documents: [B, S] the same for `source`.
            prefix: [B] how many leading tokens of each row every token may see (prefix language model).
            bias: [B|1, H|1, T, S] added to the self-attention scores of the stack that feeds the head.
            global_mask: [B, T] boolean, True = global token, for layers of attention global(...).
            logits: for which positions the head is run; "none" gives None in place of logits.
        """
        tap, memory, spec = tap_for(self), None, self.main.spec
        if not torch.compiler.is_compiling():
            checks.check_call(spec, ids, mask, positions, cache, types, documents, prefix, bias, global_mask)
            refuse(
                logits not in ("all", "last", "none"),
                f'logits "{logits}" is not known: choose all, last or none',
            )
        if self.encoder is not None and self.decoder is not None:
            memory = self._encode(
                self.encoder, source, source_mask, source_documents, cache, ids.shape[0], tap
            )
        else:
            refuse(source is not None, "source is for a model with an encoder and a decoder: give ids alone")
        tokens, input_mask = _tokens(spec, ids, mask, positions, documents, cache, "ids")
        hidden = self.main(ids, tokens, memory, cache, types, prefix, bias, input_mask, global_mask, tap)
        answer, states, real = None, hidden, tokens.real
        if logits == "last" and isinstance(self.head, heads.LanguageHead):
            states, real = heads.pool(hidden, real, "last")[:, None], None
        if logits != "none":
            answer = tap("logits", self.head(states, real, tap.part("head")))
        return Output(answer, hidden, memory.hidden if memory is not None else None)

    def _encode(
        self,
        encoder: Stack,
        source: Tensor | None,
        mask: Tensor | None,
        documents: Tensor | None,
        cache: Cache | None,
        batch: int,
        tap: Tap,
    ) -> Memory:
        """Run the encoder, unless an earlier call with this cache has."""
        if cache is not None and cache.source is not None:
            return Memory(None, cache.source)
        if source is None:
            raise InputError("this model has an encoder: give source, the ids the encoder reads")
        if not torch.compiler.is_compiling():
            checks.check_tokens(encoder.spec, source, mask, None, documents, "source")
            rows = source.shape[0]
            refuse(rows != batch, f"source has {rows} rows and ids {batch}: give one source per row")
        tokens, input_mask = _tokens(encoder.spec, source, mask, None, documents, None, "source tokens")
        hidden = encoder(source, tokens, input_mask=input_mask, tap=tap.part("encoder"))
        if cache is not None:
            cache.source = tokens
        return Memory(hidden, tokens)

    def extra_repr(self) -> str:
        """Return the line that `print(model)` shows."""
        return f"{sum(p.numel() for p in self.parameters()):,} parameters"


def _tokens(
    spec: StackSpec,
    inputs: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    documents: Tensor | None,
    cache: Cache | None,
    name: str,
) -> tuple[masks.Tokens, Tensor | None]:
    """Return the tokens of a stack, and the mask of its inputs where its front needs it.

    An error calls the inputs `name`.
    """
    batch, length, input_mask = inputs.shape[0], spec.n_tokens(inputs.shape[1]), None
    if spec.input == "frames" and mask is not None:
        input_mask, mask = mask, mask[:, :: spec.conv_stride]
    tokens = masks.tokens_from(
        batch,
        length,
        inputs.device,
        mask,
        positions,
        documents,
        before=cache.tokens if cache is not None else None,
    )
    if not torch.compiler.is_compiling():
        checks.check_length(tokens, cache, spec, name)
    return tokens, input_mask


def shares_front(config: ModelConfig) -> bool:
    """Return True if both stacks read one token table."""
    return len(config.stacks) == 2 and config.stacks[0].input == "tokens" and config.share_embeddings


def model_steps(config: ModelConfig, run: Pass, length: int, source_length: int) -> Iterator[Step]:
    """Yield every step of one forward pass, in order, from the config alone."""
    lengths, memory = [source_length, length][-len(config.stacks) :], 0
    for stack, inputs in zip(config.stacks, lengths):
        yield from stack_steps(stack, run, inputs, memory, stack is config.decoder and shares_front(config))
        memory = stack.n_tokens(inputs)
    yield from heads.HEADS[config.readout.head].steps(config.readout, run, memory)


@contextmanager
def _with(parts: list[nn.Module], name: str, value: object) -> Iterator[None]:
    """Set one attribute of these parts within a `with` block; afterwards restore the value of each."""
    # By `vars`: a module looks in four places before it sets an attribute, and `generate` does it each time.
    others = [(vars(part), vars(part)[name]) for part in parts if vars(part)[name] != value]
    try:
        for attributes, _ in others:
            attributes[name] = value
        yield
    finally:
        for attributes, old in others:
            attributes[name] = old


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Put the model in evaluation mode within a `with` block; afterwards restore the mode of every part."""
    return _with(list(model.modules()), "training", False)


def attending(model: object, kernel: str) -> AbstractContextManager[None]:
    """Use one kernel in every attention of `model`, or of a part, in a `with` block.

    "fused" is the default, "eager" spells every step out, and "flex" has PyTorch's `flex_attention` attend in
    long rows of kinds that choose among keys, where it serves (`variants.blocks`). All give the same numbers.
    """
    refuse(
        kernel not in KERNELS,
        f'no attention kernel is called "{kernel}": choose from {", ".join(KERNELS)}',
    )
    parts = (model if isinstance(model, nn.Module) else unwrapped(model)).modules()
    return _with([part for part in parts if isinstance(part, Attention)], "kernel", kernel)


def initialise(model: Transformer, config: ModelConfig) -> None:
    """Draw the weights of every linear layer, convolution and table from torch's global generator.

    Biases begin at 0 and norms at 1. `config.init` names the spread of the weights.

    xavier      uniform within sqrt(6 / (in + out)); tables normal with standard deviation d_model^-1/2
    gpt2        normal with init_std, divided by sqrt(writes) in the layers that write to the residual stream
    bert        normal with init_std
    """
    xavier, std = config.init == "xavier", config.init_std
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Conv1d):
            if xavier:
                nn.init.xavier_uniform_(part.weight)
            else:
                nn.init.normal_(part.weight, std=std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=config.d_model**-0.5 if xavier else std)
        elif isinstance(token := getattr(part, "class_token", None), nn.Parameter):  # of image patches
            nn.init.normal_(token, std=std)
    stacks = [stack for stack in model.children() if isinstance(stack, Stack) and config.init == "gpt2"]
    for stack in stacks:
        writes = stack.spec.n_layers * (3 if stack.spec.cross else 2)
        for name, part in stack.named_modules():
            if isinstance(part, nn.Linear) and name.endswith((".out", ".down")):  # of attention, feed-forward
                nn.init.normal_(part.weight, std=std / math.sqrt(writes))
