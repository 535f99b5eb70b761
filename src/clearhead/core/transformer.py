"""The Transformer: an optional encoder stack, an optional decoder stack, a head.

Shapes: B batch, T query length, S source length, D model, V vocabulary.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from clearhead.core import heads, masks
from clearhead.core.cache import Cache
from clearhead.core.config import ModelConfig, StackSpec
from clearhead.core.config.registry import Registry
from clearhead.core.stack import Inputs, Memory, Stack
from clearhead.core.taps import Tap, tap_for
from clearhead.errors import InputError, refuse


@dataclass
class Output:
    """What a forward pass returns."""

    logits: Tensor | None  # B T V, or by head: B C, B T C, B T 2, B D; None with logits="none"
    hidden: Tensor  # B T D, after the last norm
    memory: Tensor | None = None  # B S D, the encoder's output where there are two stacks
    mtp: tuple[Tensor, ...] = ()  # B T D, of each MTP layer, where a call asks for them

    @property
    def required_logits(self) -> Tensor:
        """The logits; an error where the pass computed none."""
        if self.logits is None:
            raise InputError('this pass was run with logits="none": run it with logits="all" or "last"')
        return self.logits


torch.utils._pytree.register_dataclass(Output)  # so that torch.export, vmap and the like see its tensors


class Transformer(nn.Module):
    """Any model the config can describe. See `forward` for what goes in and `Output` for what comes out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Stack(config.encoder) if config.encoder is not None else None
        shared = self.encoder.embedding.front if self.encoder is not None and shares_front(config) else None
        self.decoder = Stack(config.decoder, shared) if config.decoder is not None else None
        self.head = heads.HEADS[config.readout.head](config.readout)
        self.mtp = MTP["layers"](config) if config.n_mtp_layers else None
        if not next(self.parameters()).is_meta:
            initialise(self, config)
        self.tie()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the model; an argument that goes by another name is refused, in one line with ours."""
        for name in named:
            if name not in ARGUMENTS:
                CHECKS["name"](name, both=len(self.config.stacks) == 2)
        return super().__call__(*inputs, **named)

    def tie(self) -> None:
        """Make shared weights one tensor: the output layer and the token table of the stack that feeds it."""
        out = self.head.out if isinstance(self.head, heads.LanguageHead) else None
        if isinstance(out, nn.Linear) and self.config.tie_embeddings:  # a quantized one has no parameter
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
        vectors: Tensor | None = None,
        axes: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
        mtp: bool = False,
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
            vectors: [B, T, D] in place of those that the token table has for `ids`, as where images stand.
            axes: [B, T, A] position on each axis, with rope_sections; None: those of text, counted on.
            logits: for which positions the head is run; "none" gives None in place of logits.
            mtp: run the layers of multi-token prediction too, for their loss; without a cache.
        """
        inputs = Inputs(ids, mask, positions, documents, types, prefix, bias, global_mask, vectors, axes)
        tap, memory, spec = tap_for(self), None, self.main.spec
        if not torch.compiler.is_compiling():
            CHECKS["call"](spec, inputs, cache)
            refuse(
                logits not in ("all", "last", "none"),
                f'logits "{logits}" is not known: choose all, last or none',
            )
        if self.encoder is not None and self.decoder is not None:
            read = None if source is None else Inputs(source, source_mask, documents=source_documents)
            memory = self._encode(self.encoder, read, cache, ids.shape[0], tap)
        else:
            refuse(source is not None, "source is for a model with an encoder and a decoder: give ids alone")
        tokens = _tokens(spec, inputs, cache, "ids")
        hidden = self.main(inputs, tokens, memory, cache, tap)
        answer, states, real = None, hidden, tokens.real
        if logits == "last" and isinstance(self.head, heads.LanguageHead):
            states, real = heads.pool(hidden, real, "last")[:, None], None
        if logits != "none":
            answer = tap("logits", self.head(states, real, tap.part("head")))
        drafts = MTP["layers"].states(self, hidden, inputs, tokens, cache, tap) if mtp else ()
        return Output(answer, hidden, memory.hidden if memory is not None else None, drafts)

    def _encode(
        self, encoder: Stack, inputs: Inputs | None, cache: Cache | None, batch: int, tap: Tap
    ) -> Memory:
        """Run the encoder, unless an earlier call with this cache has."""
        if cache is not None and cache.source is not None:
            return Memory(None, cache.source)
        if inputs is None:
            raise InputError("this model has an encoder: give source, the ids the encoder reads")
        if not torch.compiler.is_compiling():
            CHECKS["tokens"](encoder.spec, inputs, "source")
            rows = inputs.ids.shape[0]
            refuse(rows != batch, f"source has {rows} rows and ids {batch}: give one source per row")
        tokens = _tokens(encoder.spec, inputs, None, "source tokens")
        hidden = encoder(inputs, tokens, tap=tap.part("encoder"))
        if cache is not None:
            cache.source = tokens
        return Memory(hidden, tokens)

    def extra_repr(self) -> str:
        """Return the line that `print(model)` shows."""
        return f"{sum(p.numel() for p in self.parameters()):,} parameters"


MTP: Registry[Any] = Registry({"layers": "clearhead.variants.mtp:MTPLayers"})
ARGUMENTS = tuple(inspect.signature(Transformer.forward).parameters)[1:]
CHECKS: Registry[Any] = Registry(  # what a call refuses before it computes: its inputs, and unknown names
    {name: f"clearhead.variants.inputs:check_{name}" for name in ("call", "tokens", "length", "name")}
)


def _tokens(spec: StackSpec, inputs: Inputs, cache: Cache | None, name: str) -> masks.TokenInfo:
    """Return the tokens that a stack makes of its inputs, which an error calls `name`."""
    mask = inputs.mask
    if spec.input == "frames" and mask is not None:
        mask = mask[:, :: spec.conv_stride]
    (rows, length), before = inputs.ids.shape[:2], cache.tokens if cache is not None else None
    given = (mask, inputs.positions, inputs.documents, before, inputs.axes)
    tokens = masks.tokens_from(rows, spec.n_tokens(length), inputs.ids.device, *given)
    if not torch.compiler.is_compiling():
        CHECKS["length"](tokens, cache, spec, name)
    return tokens


def shares_front(config: ModelConfig) -> bool:
    """Return True if both stacks read one token table."""
    return len(config.stacks) == 2 and config.stacks[0].input == "tokens" and config.share_embeddings


def initialise(model: Transformer, config: ModelConfig) -> None:
    """Draw the weights of every linear layer, convolution and table from torch's global generator.

    Biases begin at 0 and norms at 1. `config.init` names the spread of the weights.

    xavier      uniform within sqrt(6 / (in + out)); tables normal with standard deviation d_model^-1/2
    gpt2        normal with init_std, divided by sqrt(writes) in the layers that write to the residual stream
    bert        normal with init_std; with `zero_init` the layers that write begin at 0 in all three
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
    written = config.init == "gpt2" or config.zero_init
    stacks = [stack for stack in model.children() if isinstance(stack, Stack) and written]
    for stack in stacks:
        writes = stack.spec.n_layers * (3 if stack.spec.cross else 2)
        for name, part in stack.named_modules():
            if isinstance(part, nn.Linear) and name.endswith((".out", ".down")):  # of attention, feed-forward
                nn.init.normal_(part.weight, std=0.0 if config.zero_init else std / math.sqrt(writes))
