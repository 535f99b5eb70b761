"""Masked and block diffusion: predict masked tokens at every share of masks, from none masked to all.

A text is a sample of a process that masks tokens one by one (MDLM, LLaDA), in blocks each by itself (BD3-LM).
With t the share of masks, the expected cross-entropy of the masked tokens over t bounds the negative
log-likelihood of the text from above:

    -log p(x) <= E over t uniform in (0, 1), each token masked with probability t, of  sum over masks CE / t

Given how many of L tokens are masked, l, which are is uniform; l is uniform too, and the weight 1 / t becomes
L / l. So each block draws t, masks l = ceil(t L) of its tokens, and weighs them by L / l: the same mean, of
less variance. With blocks of one token this is the negative log-likelihood itself.

Shapes: B rows, T tokens of a row, D model.
"""

from typing import Self

import numpy as np
import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.heads import LanguageHead
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.hub.tokens.training import DIFFUSER
from clearhead.learn import losses
from clearhead.learn.batches.batch import IGNORE, LEVEL, Batch, generator
from clearhead.learn.batches.encoding import Setting
from clearhead.learn.batches.ragged import Ints
from clearhead.learn.batches.windows import TextWindows
from clearhead.learn.evaluation.metrics import Judged
from clearhead.learn.recipe import Recipe
from clearhead.learn.tasks.entries.text import LanguageModel
from clearhead.learn.tasks.task import UsualModel
from clearhead.variants.kinds import block_length, denoises

STRATA = (5**0.5 - 1) / 2  # of consecutive multiples, taken modulo 1, each interval has its share
DENOISER = UsualModel(
    "llada-8b",
    {"tie_embeddings": True},
    {"d_model": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": None, "d_ff": 352, "max_positions": 128},
    {"d_model": 384, "n_layers": 6, "n_heads": 6, "n_kv_heads": None, "d_ff": 1024, "max_positions": 256},
)


class DiffusionWindows(TextWindows):
    """Windows over a text, all of it masked, with numbers that say which masks a pass takes off.

    `noise` [B, 2, T] has the order in which tokens are masked, and shares of masks, of which a block takes
    that at its first token. Shares are stratified: in training over the rows of a batch, in validation over
    all.
    """

    overlap = 0

    def __init__(self, setting: Setting) -> None:
        self.mask_id = setting.need("mask")
        super().__init__(setting)

    def _build(self, positions: Ints, random: np.random.Generator) -> Batch:
        rows, lengths = self.read(positions)
        real = np.arange(rows.shape[1]) < lengths[:, None]
        numbers = np.arange(len(rows)) if self.training else positions // self.step
        shift = (random if self.training else generator(self.seed, LEVEL, 0)).random(rows.shape[1])
        share = (numbers[:, None] * STRATA + shift) % 1
        return Batch.of(
            ids=np.where(real, self.mask_id, self.pad),
            targets=np.where(real, rows, IGNORE),
            mask=None if real.all() else real,
            noise=np.stack([random.random(rows.shape), share], 1),
            numbers=positions,
        )


def masked_by(noise: Tensor, real: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return which tokens are masked, and the weight L / l of each in the bound: [B, T] both.

    `noise` [B, 2, T] is that of `DiffusionWindows`, `real` [B, T] what is no padding, `size` that of a block.
    """
    order, share = noise.double().unbind(1)
    block = torch.arange(real.shape[1], device=real.device) // size  # T
    counts = real.new_zeros(len(real), int(block[-1]) + 1, dtype=torch.double)
    counts = counts.index_add(1, block, real.double())  # of each block: L
    # 1 to L masks, each as likely
    masks = (share[:, ::size] * counts).floor().add(1).minimum(counts)
    # Padding comes last in its block.
    rank = (block + torch.where(real, order / 2, 0.75)).argsort(1).argsort(1) - block * size
    masked = real & (rank < masks[:, block])
    return masked, (counts / masks.clamp(min=1))[:, block] * masked


def with_clean_copy(ids: Tensor, clean: Tensor, mask: Tensor | None, size: int) -> dict[str, Tensor]:
    """Return the inputs of one pass of block diffusion: noised rows [B, T], then clean ones.

    A noised token sees its own noised block and the clean blocks before it; a clean one, clean blocks up to
    its own.
    """
    T = ids.shape[1]
    block = torch.arange(T, device=ids.device) // size
    same, earlier = block[:, None] == block, block[:, None] > block
    hidden = ~torch.cat([torch.cat([same, earlier], 1), torch.cat([same & False, same | earlier], 1)])
    positions = torch.arange(T, device=ids.device).repeat(2)[None]
    bias = torch.zeros(2 * T, 2 * T, device=ids.device).masked_fill(hidden, -torch.inf)[None, None]
    both = {"ids": torch.cat([ids, clean], 1), "positions": positions, "bias": bias}
    return both if mask is None else {**both, "mask": torch.cat([mask, mask], 1)}


class Diffusion(LanguageModel):
    """Predict masked tokens at every share of masks."""

    name = "diffusion"
    tokens = DIFFUSER
    guessed = False
    one_shape = False
    batches = DiffusionWindows
    usual = DENOISER
    reads = "states"
    command = "generate {folder} TEXT --temperature 0.8"

    def batch(self, setting: Setting) -> DiffusionWindows:
        """Return windows over all documents."""
        refuse(
            setting.plan.packing != "stream",
            f"data.packing {setting.plan.packing} is for models that write from left to right, and this is "
            "diffusion: leave it out",
            ConfigError,
        )
        return DiffusionWindows(setting)

    def planned(self, recipe: Recipe) -> Self:
        """Refuse what the bound has no place for."""
        refuse(
            recipe.train.label_smoothing,
            "train.label_smoothing: the loss of diffusion is a bound on the likelihood: leave it out",
            ConfigError,
        )
        mesh = recipe.parallel
        refuse(
            max(mesh.context, mesh.pipeline) > 1,
            "parallel.context and parallel.pipeline divide rows or layers, and diffusion needs whole ones: "
            "use data, shard or tensor",
            ConfigError,
        )
        return super().planned(recipe)

    def outputs_of(self, model: Transformer, batch: Batch, chunk: int | None = None) -> Tensor:
        """Return what each token adds to the bound: [B, T]."""
        assert batch.noise is not None and isinstance(model.head, LanguageHead)
        real, T = batch.targets != IGNORE, batch.targets.shape[1]
        size = block_length(model.config.main)
        masked, weights = masked_by(batch.noise, real, size or T)
        clean = batch.targets.where(real, batch.ids)
        ids = batch.ids.where(masked, clean)
        arguments = {"ids": ids} if batch.mask is None else {"ids": ids, "mask": batch.mask}
        if size is not None:
            arguments = with_clean_copy(ids, clean, batch.mask, size)
        hidden = model(**arguments, logits="none").hidden[:, :T]  # B T D
        chunk = losses.default_chunk(model.config.vocab_size, hidden.device) if chunk is None else chunk
        wanted = batch.targets.where(masked, IGNORE)
        positions, each = losses.token_losses(model.head, hidden, wanted, chunk)
        laid = each.new_zeros(wanted.numel()).index_put((positions,), each)
        return laid.view(wanted.shape) * weights.to(each)

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the bound summed over the tokens: []."""
        return outputs.sum()

    def row_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the bound of each row: [B]."""
        return outputs.sum(1)

    def answers(self, outputs: Tensor, batch: Batch) -> losses.Answered:
        """Return none: the loss is all there is."""
        return [], []

    def judge(self, judged: Judged) -> list[str]:
        """Add bits per byte and per character."""
        if block_length(judged.loaded.config.main) != 1:
            judged.notes.append(
                "loss and bits are upper bounds on the negative log-likelihood, estimated from one noising "
                "of each window, with stratified shares of masks"
            )
        return super().judge(judged)

    def judges(self, config: ModelConfig, problem: str | None) -> bool:
        """Return True for a model that denoises."""
        return denoises(config)
