"""Early exit: a token leaves the model after the layer whose lens is certain of what comes next.

After each layer the final norm and the head read the state as if it were the last (the logit lens). Where
they give their best token more than a threshold, the layers that remain are skipped. Later tokens attend to
this one in these layers too, so its keys and values there are made of the state that it left with (CALM).
In a batch each row leaves by itself, as it would alone. Layers are skipped once every row has left.

Shapes: B rows, D model, V vocabulary.
"""

import torch
from torch import Tensor, nn

from clearhead.core import masks
from clearhead.core.attention import Attention
from clearhead.core.cache import Cache, LayerKV
from clearhead.core.dtypes import wide
from clearhead.core.positions import rotate
from clearhead.core.stack import Block, LayerInputs
from clearhead.core.taps import SILENT, Tap, tap_for
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.run.generate.request import Request
from clearhead.run.kernels.parts import like
from clearhead.run.quant.cache import check_no_indexer


def stop_at(model: Transformer, state: Tensor) -> Tensor:
    """Return the logits of a model that stops at this state of its stream: [B, T, D] -> [B, T, V]."""
    logits: Tensor = model.head(state if model.main.norm is None else model.main.norm(state), None)
    return logits


class ExitStep:
    """One more token for each row, through as many layers as it needs."""

    def __init__(self, model: Transformer, request: Request) -> None:
        check_exit(model, request)
        self.model, stack, self.n_layers = model, model.main, model.main.spec.n_layers
        self.threshold, self.first = request.early_exit or 1.0, first_asked(model, request)
        blocks = nn.ModuleList(LeavingBlock(block, self) for block in stack.blocks)
        name = "encoder" if model.decoder is None else "decoder"
        self.leaving = like(model, type(model), **{name: like(stack, type(stack), blocks=blocks)})

    def __call__(self, chosen: Tensor, cache: Cache) -> Tensor:
        """Run the layers that these tokens [B] need; return the logits of the next ones [B, V]."""
        self.layer = 0  # how many have been run
        self.left = torch.zeros(len(chosen), dtype=torch.bool, device=chosen.device)  # B
        self.used = torch.full_like(chosen, self.n_layers)  # B: layers of each token
        self.some_left = self.all_left = False
        logits: Tensor = self.leaving(chosen[:, None], cache=cache, logits="last").logits[:, -1]
        return logits

    def ask(self, x: Tensor) -> Tensor:
        """Let the tokens that the lens is certain of, after one more layer, leave: x [B, 1, D] stays."""
        self.layer += 1
        if self.first <= self.layer < self.n_layers:
            certain = wide(stop_at(self.model, x)[:, -1]).softmax(-1).amax(-1) > self.threshold
            if bool(certain.any()):
                self.used = torch.where(certain & ~self.left, self.layer, self.used)
                self.left = self.left | certain
                self.some_left, self.all_left = True, bool(self.left.all())
        return x


class LeavingBlock(nn.Module):
    """A layer that changes only the tokens that have not left; when all have, it keeps their keys alone."""

    router = None  # all tokens go through

    def __init__(self, block: nn.Module, step: ExitStep) -> None:
        super().__init__()
        assert isinstance(block, Block)
        self.block, self.step = block, step

    def forward(self, x: Tensor, inputs: LayerInputs, tap: Tap = SILENT) -> Tensor:
        """[B, 1, D] -> [B, 1, D]."""
        if self.step.all_left and inputs.keys is not None:
            remember(self.block, x, inputs.view, inputs.keys)
            return x
        y = self.block(x, inputs, tap)
        return self.step.ask(torch.where(self.step.left[:, None, None], x, y) if self.step.some_left else y)


def remember(block: Block, x: Tensor, view: masks.View, keys: LayerKV) -> None:
    """Write what a layer keeps of tokens [B, T, D] that skip it."""
    attention, normed = block.attention, block.attention_residual.norm_input(x)
    if not isinstance(attention, Attention) or view.tokens is not None:  # it keeps a state
        attention(normed, view, None, keys)
        return
    _, k, v = attention.project(normed, normed)
    k = attention.split("k", k, attention.n_kv_heads, attention.k_norm, SILENT)
    v = attention.split("v", v, attention.n_kv_heads, None, SILENT)
    keys.update(k if view.rotary is None else rotate(k, view.rotary, attention.layout), v)


def first_asked(model: Transformer, request: Request) -> int:
    """Return the number of layers after which the lens is first asked; it is rarely right before half."""
    return request.exit_from or (model.config.main.n_layers + 1) // 2


def check_exit(model: Transformer, request: Request) -> None:
    """Raise `InputError` where tokens cannot leave a model early."""
    layers, first = model.config.main.n_layers, first_asked(model, request)
    refuse(
        first >= layers,
        f"exit_from {first} leaves no layer to skip: this model has {layers}, so choose 1 to {layers - 1}"
        if layers > 1
        else "early_exit skips layers, and this model has one: leave it out",
    )
    refuse(
        min(model.config.main.capacities) < 1,
        f"early_exit with depth_capacity {model.config.depth_capacity}, whose routers skip layers already: "
        "leave it out",
    )
    check_no_indexer(model.config, "early_exit")
    refuse(
        model.config.main.carries,
        "early_exit stops before layers that read earlier ones (input_skips, mirror_skips, value_residual, "
        "value_embeddings): leave it out",
    )
    refuse(
        tap_for(model) is not SILENT,
        "early_exit runs layers that nobody can listen to: leave it out while recording or editing",
    )
