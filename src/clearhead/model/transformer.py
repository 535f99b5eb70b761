"""The Transformer: an optional encoder stack, an optional decoder stack, a head.

Shapes: B batch, T query length, S key or source length, D model, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig, StackPlan
from clearhead.errors import InputError
from clearhead.model import checks
from clearhead.model.attend import KERNELS
from clearhead.model.attention import Attention
from clearhead.model.block import Block
from clearhead.model.cache import Cache
from clearhead.model.fronts import Embedding
from clearhead.model.heads import HEADS, LanguageHead
from clearhead.model.initialise import initialise
from clearhead.model.masks import Tokens, View, compose, tokens_from
from clearhead.model.norms import make_norm
from clearhead.model.positions import POSITIONS
from clearhead.model.taps import SILENT, Tap, tap_for


@dataclass
class Output:
    """What a forward pass gives back."""

    logits: Tensor  # B T V, or what the head says: B C, B T C, B T 2, B D
    hidden: Tensor  # B T D, after the last norm
    memory: Tensor | None = None  # B S D, the encoder's answer where there are two stacks


@dataclass(frozen=True)
class Memory:
    """What cross-attention reads; `hidden` is None once its keys are in the cache."""

    hidden: Tensor | None  # B S D
    tokens: Tokens


class Stack(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, config: ModelConfig, plan: StackPlan, front: nn.Module | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.embedding = Embedding(config, plan, front)
        self.positions = POSITIONS[config.positions](config, plan)
        self.rope_skips = config.rope_skips
        own = sorted(
            {config.first_sharing(layer, plan.n_layers) for layer in range(plan.n_layers)}
        )  # layers with weights of their own
        self.blocks = nn.ModuleList(Block(config, plan, f"{plan.prefix}blocks.{layer}") for layer in own)
        self.norm = make_norm(config) if config.final_norm else None

    def layers(self) -> list[Block]:
        """The block at each depth; with shared layers, several depths have the same one."""
        blocks = list(self.blocks)
        return [
            cast(Block, blocks[layer * len(blocks) // self.plan.n_layers])
            for layer in range(self.plan.n_layers)
        ]

    def forward(
        self,
        inputs: Tensor,
        tokens: Tokens,
        memory: Memory | None = None,
        cache: Cache | None = None,
        types: Tensor | None = None,
        prefix: Tensor | None = None,
        bias: Tensor | None = None,
        input_mask: Tensor | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Inputs of B rows and their T `tokens` -> [B, T, D]."""
        dtype = self.dtype
        where = self.positions.embed(tokens.positions, dtype)
        x = tap("embedding", self.embedding(inputs, types, where, input_mask))  # B T D
        if cache is not None:
            cache.begin(tokens)
        views = self._views(tokens, cache, prefix, bias, x.dtype)
        cross_view = None
        if memory is not None:
            cross_view = View(mask=compose(tokens, memory.tokens)[0])
        for layer, (block, window) in enumerate(zip(self.layers(), self.plan.windows)):
            x = block(
                x,
                views[window] if layer not in self.rope_skips else replace(views[window], rotary=None),
                memory.hidden if memory is not None else None,
                cross_view,
                cache.layer(layer, window) if cache is not None else None,
                cache.cross_layer(layer) if cache is not None and memory is not None else None,
                tap.inside(f"blocks.{layer}"),
            )
        if cache is not None:
            cache.advance()
        return tap("hidden", self.norm(x) if self.norm is not None else x)

    def _views(
        self,
        tokens: Tokens,
        cache: Cache | None,
        prefix: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> dict[int | None, View]:
        """What attention may see, for each window that some layer has: made once, used by all of its layers."""
        scheme = self.positions
        views = {}
        for window in set(self.plan.windows):
            keys = tokens if cache is None else cache.visible(window)
            mask, causal = compose(tokens, keys, causal=self.plan.causal, window=window, prefix=prefix)
            total = scheme.bias(tokens.positions, keys.positions, dtype)
            if bias is not None:
                given = (bias if cache is None else cache.aligned(bias, window)).to(dtype)
                total = given if total is None else total + given
            views[window] = View(mask, causal, total, scheme.rotary(tokens.positions, window))
        return views

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype


class Transformer(nn.Module):
    """Any model the config can describe. See `forward` for what goes in and `Output` for what comes out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        encoder, decoder = config.encoder, config.decoder
        self.encoder = Stack(config, encoder) if encoder is not None else None
        shared = None
        if (
            self.encoder is not None
            and encoder is not None
            and encoder.input == "tokens"
            and config.share_embeddings
        ):
            shared = self.encoder.embedding.front
        self.decoder = Stack(config, decoder, shared) if decoder is not None else None
        self.head = HEADS[config.head or "none"](config)
        initialise(self, config)
        self.tie()

    def tie(self) -> None:
        """Make shared weights one tensor: the output layer and the token table of the stack that feeds it."""
        if isinstance(self.head, LanguageHead) and self.config.tie_embeddings:
            self.head.out.weight = cast(nn.Embedding, self.main.embedding.front.tokens).weight

    @property
    def main(self) -> Stack:
        """The stack that feeds the head."""
        stack = self.decoder if self.decoder is not None else self.encoder
        assert stack is not None
        return stack

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
            ids: [B, T] token ids; or pixels [B, C, H, W], vectors or frames [B, T, d_input] where the config says so.
                With an encoder and a decoder, these feed the decoder.
            mask: [B, T] boolean, True = real token; padding may stand on either side or in between.
            source: what feeds the encoder, where there is a decoder too. Read once: with a cache, later calls omit it.
            source_mask: [B, S] boolean, for `source`.
            positions: [B, T] position of each token; None: counted from the mask.
            cache: keys and values of earlier tokens, carried on by this call.
            types: [B, T] segment ids, for a model that has them.
            documents: [B, T] packed documents as runs of equal ids; a token sees its own document only.
            source_documents: [B, S] the same for `source`.
            prefix: [B] how many leading tokens of each row every token may see (prefix language model).
            bias: [B|1, H|1, T, S] added to the scores of every self-attention of the stack that feeds the head.
            logits: for which positions the head is run; "none" leaves `logits` empty.
        """
        tap = tap_for(self)
        memory = None
        if not torch.compiler.is_compiling():
            self._check(ids, mask, positions, cache, types, documents, prefix)
            if logits not in ("all", "last", "none"):
                raise InputError(f'logits "{logits}" is not known: choose all, last or none')
        if self.encoder is not None and self.decoder is not None:
            memory = self._encode(source, source_mask, source_documents, cache, ids.shape[0], tap)
        elif source is not None:
            raise InputError("source is for a model with an encoder and a decoder: give ids alone")
        batch, length, input_mask, mask = self._measure(self.main, ids, mask)
        before = cache.tokens if cache is not None else None
        tokens = tokens_from(batch, length, ids.device, mask, positions, documents, before)
        if not torch.compiler.is_compiling():
            checks.check_length(tokens, cache, self.config, "ids")
            checks.check_bias(
                bias,
                batch,
                self.main.plan.n_heads,
                length,
                length + (cache.length if cache is not None else 0),
            )
        hidden = self.main(ids, tokens, memory, cache, types, prefix, bias, input_mask, tap)
        real = tokens.real
        if logits == "last" and isinstance(self.head, LanguageHead):
            said = self.head(_last(hidden, real), None)
        else:
            said = self.head(hidden, real) if logits != "none" else hidden.new_empty(0)
        return Output(tap("logits", said), hidden, memory.hidden if memory is not None else None)

    def _encode(
        self,
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
        assert self.encoder is not None
        if not torch.compiler.is_compiling():
            self._check_tokens(self.encoder, source, mask, None, documents, "source")
            if source.shape[0] != batch:
                raise InputError(
                    f"source has {source.shape[0]} rows and ids {batch}: give one source per row"
                )
        rows, length, input_mask, mask = self._measure(self.encoder, source, mask)
        tokens = tokens_from(rows, length, source.device, mask, None, documents)
        if not torch.compiler.is_compiling():
            checks.check_length(tokens, None, self.config, "source tokens")
        hidden = self.encoder(source, tokens, input_mask=input_mask, tap=tap.inside("encoder"))
        if cache is not None:
            cache.source = tokens
        return Memory(hidden, tokens)

    def _measure(
        self, stack: Stack, inputs: Tensor, mask: Tensor | None
    ) -> tuple[int, int, Tensor | None, Tensor | None]:
        """Rows, tokens per row, the mask of the inputs and that of the tokens the front makes of them."""
        config, kind = self.config, stack.plan.input
        if kind == "patches":
            return inputs.shape[0], config.n_patches + config.class_token, None, None
        if kind == "frames":
            stride = config.conv_stride
            return (
                inputs.shape[0],
                -(-inputs.shape[1] // stride),
                mask,
                None if mask is None else mask[:, ::stride],
            )
        return inputs.shape[0], inputs.shape[1], None, mask

    def _check(
        self,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        cache: Cache | None,
        types: Tensor | None,
        documents: Tensor | None,
        prefix: Tensor | None,
    ) -> None:
        config, main = self.config, self.main
        self._check_tokens(main, ids, mask, positions, documents, "ids")
        batch, length, _, _ = self._measure(main, ids, mask)
        if types is not None and not config.n_types:
            raise InputError(
                "types were given and the model has no segment embeddings: leave them out, or build it with n_types"
            )
        checks.check_integers(types, batch, length, "types", config.n_types, "n_types")
        checks.check_prefix(prefix, batch, length, cache, main.plan.causal)
        if cache is not None and not main.plan.causal:
            raise InputError(
                "a cache was given to a model without a decoder: its tokens all see each other, so call it without"
            )
        if cache is not None and cache.rows not in (None, batch):
            raise InputError(
                f"the cache holds {cache.rows} rows and ids have {batch}: go on with the same rows, or reorder the cache"
            )
        if cache is not None and cache.packed and documents is None:
            raise InputError(
                "the cache holds packed documents and this call names none: give documents, so that it is known which goes on"
            )

    def _check_tokens(
        self,
        stack: Stack,
        x: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        documents: Tensor | None,
        name: str,
    ) -> None:
        checks.check_stack_input(x, stack.plan, self.config, name)
        batch, length, _, _ = self._measure(stack, x, None)
        if stack.plan.input == "patches" and mask is not None:
            raise InputError("a mask was given for an image: all of its patches are real, so leave it out")
        checks.check_mask(mask, batch, x.shape[1], "mask" if name == "ids" else f"{name}_mask")
        table = self.config.max_positions if self.config.positions == "learned" else None
        checks.check_integers(positions, batch, length, "positions", table, "max_positions")
        checks.check_integers(documents, batch, length, "documents", None, "")

    def extra_repr(self) -> str:
        """One line in `print(model)`."""
        count = sum(p.numel() for p in self.parameters())
        return f"{count:,} parameters"


def _last(hidden: Tensor, real: Tensor | None) -> Tensor:
    """The state of each row's last real token: [B, T, D] -> [B, 1, D]."""
    if real is None:
        return hidden[:, -1:]
    last = torch.where(real, torch.arange(hidden.shape[1], device=hidden.device), 0).amax(1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last][:, None]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off for the length of a `with` block; every part goes back to the mode it was in."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def attending(model: nn.Module, kernel: str) -> Iterator[None]:
    """Let every attention of `model` use one kernel, "eager" or "fused", for the length of a `with` block."""
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
