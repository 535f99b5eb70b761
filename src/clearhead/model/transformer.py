"""The Transformer: an optional encoder stack, an optional decoder stack, a head.

Shapes: B batch, T query length, S source length, D model, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig, StackSpec
from clearhead.errors import InputError
from clearhead.model import checks
from clearhead.model.attend import KERNELS
from clearhead.model.attention import Attention
from clearhead.model.cache import Cache
from clearhead.model.heads import HEADS, LanguageHead, pool
from clearhead.model.initialise import initialise
from clearhead.model.masks import tokens_from
from clearhead.model.stack import Memory, Stack, stack_steps
from clearhead.model.steps import Pass, Step
from clearhead.model.taps import Tap, tap_for


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


class Transformer(nn.Module):
    """Any model the config can describe. See `forward` for what goes in and `Output` for what comes out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        encoder, decoder = config.encoder, config.decoder
        self.encoder = Stack(encoder) if encoder is not None else None
        shared = self.encoder.embedding.front if self.encoder is not None and shares_front(config) else None
        self.decoder = Stack(decoder, shared) if decoder is not None else None
        self.head = HEADS[config.readout.head](config.readout)
        initialise(self, config)
        self.tie()

    def tie(self) -> None:
        """Make shared weights one tensor: the output layer and the token table of the stack that feeds it."""
        if isinstance(self.head, LanguageHead) and self.config.tie_embeddings:
            self.head.out.weight = cast(nn.Embedding, self.main.embedding.front.tokens).weight

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
            logits: for which positions the head is run; "none" gives None in place of logits.
        """
        tap, memory, spec = tap_for(self), None, self.main.spec
        if not torch.compiler.is_compiling():
            checks.check_call(spec, ids, mask, positions, cache, types, documents, prefix)
            if logits not in ("all", "last", "none"):
                raise InputError(f'logits "{logits}" is not known: choose all, last or none')
        if self.encoder is not None and self.decoder is not None:
            read = (source, source_mask, source_documents)
            memory = self._encode(self.encoder, *read, cache, ids.shape[0], tap)
        elif source is not None:
            raise InputError("source is for a model with an encoder and a decoder: give ids alone")
        input_mask, mask = _masks(spec, mask)
        length, before = spec.n_tokens(ids.shape[1]), cache.tokens if cache is not None else None
        tokens = tokens_from(ids.shape[0], length, ids.device, mask, positions, documents, before)
        if not torch.compiler.is_compiling():
            checks.check_length(tokens, cache, spec, "ids")
            checks.check_bias(bias, spec, ids.shape[0], length, cache)
        hidden = self.main(ids, tokens, memory, cache, types, prefix, bias, input_mask, tap)
        answer = None
        if logits == "last" and isinstance(self.head, LanguageHead):
            answer = self.head(pool(hidden, tokens.real, "last")[:, None], None, tap.part("head"))
        elif logits != "none":
            answer = self.head(hidden, tokens.real, tap.part("head"))
        answer = tap("logits", answer) if answer is not None else None
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
        spec = encoder.spec
        if not torch.compiler.is_compiling():
            checks.check_tokens(spec, source, mask, None, documents, "source")
            if source.shape[0] != batch:
                raise InputError(
                    f"source has {source.shape[0]} rows and ids {batch}: give one source per row"
                )
        input_mask, mask = _masks(spec, mask)
        tokens = tokens_from(batch, spec.n_tokens(source.shape[1]), source.device, mask, None, documents)
        if not torch.compiler.is_compiling():
            checks.check_length(tokens, None, spec, "source tokens")
        hidden = encoder(source, tokens, input_mask=input_mask, tap=tap.part("encoder"))
        if cache is not None:
            cache.source = tokens
        return Memory(hidden, tokens)

    def extra_repr(self) -> str:
        """Return the line that `print(model)` shows."""
        count = sum(p.numel() for p in self.parameters())
        return f"{count:,} parameters"


def _masks(spec: StackSpec, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask of the inputs, where the front needs it, and the mask of the tokens it makes."""
    if spec.input == "frames" and mask is not None:
        return mask, mask[:, :: spec.conv_stride]
    return None, mask


def shares_front(config: ModelConfig) -> bool:
    """Return True if both stacks read one token table."""
    both = config.encoder is not None and config.decoder is not None
    return both and config.stacks[0].input == "tokens" and config.share_embeddings


def model_steps(config: ModelConfig, run: Pass, length: int, source_length: int) -> Iterator[Step]:
    """Yield every step of one forward pass, in order, from the config alone."""
    lengths, memory = [source_length, length][-len(config.stacks) :], 0
    for stack, inputs in zip(config.stacks, lengths):
        shared = stack is config.decoder and shares_front(config)
        yield from stack_steps(stack, run, inputs, memory, shared)
        memory = stack.n_tokens(inputs)
    yield from HEADS[config.readout.head].steps(config.readout, run, memory)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode within a `with` block; afterwards restore the mode of every part."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def attending(model: nn.Module, kernel: str) -> Iterator[None]:
    """Use one kernel, "eager" or "fused", in every attention of `model` within a `with` block."""
    if kernel not in KERNELS:
        raise InputError(f'no attention kernel is called "{kernel}": choose from {", ".join(KERNELS)}')
    parts = [part for part in model.modules() if isinstance(part, Attention)]
    before = [part.kernel for part in parts]
    try:
        for part in parts:
            part.kernel = kernel
        yield
    finally:
        for part, old in zip(parts, before):
            part.kernel = old
