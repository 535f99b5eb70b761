"""Multi-token prediction, as in DeepSeek-V3 (arXiv 2412.19437): layers for tokens after the next one.

Layer k reads the state that layer k - 1 gave the head (the model's own state for k = 1) and the embedding of
the token k positions later. One block makes of them a state from which the model's own head predicts the
token k + 1 positions later. Training adds their cross-entropy; generation takes their tokens as drafts, or
leaves the layers out.

Shapes: B batch, T length, D model.
"""

import dataclasses
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.core.cache import Cache
from clearhead.core.config import TABLES, ModelConfig, StackSpec
from clearhead.core.config.fields import Fields
from clearhead.core.config.kinds import Mistakes
from clearhead.core.heads import HEADS
from clearhead.core.masks import TokenInfo
from clearhead.core.norms import make_norm
from clearhead.core.positions import POSITIONS
from clearhead.core.stack import Inputs, Stack
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.variants.steps import Pass, Step, block_steps, linear_step, norm_step, steps_of


class MTPFront(nn.Module):
    """The projection of a token's embedding and a state, each normed, side by side."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        D = spec.d_model
        self.token_norm, self.hidden_norm = make_norm(spec.norm, D), make_norm(spec.norm, D)
        self.project = nn.Linear(2 * D, D, bias=False)

    def forward(self, pairs: Tensor, real: Tensor | None = None, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, 2D] -> [B, T, D]. The paper has the state first; released weights, the embedding."""
        token, hidden = pairs.chunk(2, -1)
        return tap.step(
            "project", self.project(torch.cat([self.token_norm(token), self.hidden_norm(hidden)], -1))
        )


class MTPLayer(Stack):
    """One layer: the front above, a block like the model's last one, and a norm before the head."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__(spec, MTPFront(spec))


def states_after(
    model: Transformer,
    layer: nn.Module,
    hidden: Tensor,
    inputs: Inputs,
    tokens: TokenInfo,
    cache: Cache | None = None,
    tap: Tap = SILENT,
) -> Tensor:
    """Return the states [B, T, D] that a layer makes of `hidden` [B, T, D] and a later id for each."""
    # Positions are known from the state: no table of them is added to the embedding.
    embedded = model.main.embedding(inputs.ids, None, lambda: None, inputs.mask)
    pairs = torch.cat([embedded, hidden], -1)
    return cast(Tensor, layer(inputs._replace(ids=pairs), tokens, None, cache, tap))


class MTPLayers(nn.ModuleList):
    """All layers of a model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(MTPLayer(spec) for spec in mtp_specs(config))

    @staticmethod
    def states(
        model: Transformer, hidden: Tensor, inputs: Inputs, tokens: TokenInfo, cache: Cache | None, tap: Tap
    ) -> tuple[Tensor, ...]:
        """Return the states of each layer [B, T, D]; those of the last k tokens of a row say nothing."""
        refuse(model.mtp is None, "mtp runs MTP layers, and this model has none: set n_mtp_layers")
        refuse(cache is not None, "mtp is for whole rows: leave cache out")
        refuse(inputs.vectors is not None, "mtp predicts from tokens alone: leave vectors out")
        found = []
        for number, layer in enumerate(model.mtp or ()):
            later = inputs._replace(ids=inputs.ids.roll(-1 - number, 1))
            hidden = states_after(model, layer, hidden, later, tokens, tap=tap.part(f"mtp.{number}"))
            found.append(hidden)
        return tuple(found)

    @staticmethod
    def steps(config: ModelConfig, run: Pass, tokens: int) -> Iterator[Step]:
        """Yield the steps of these layers, each with the head once more; no token needs their weights."""
        for spec in mtp_specs(config):
            for step in _layer_steps(config, spec, run, tokens):
                step = dataclasses.replace(step, idle=step.parameters)
                yield step if run.mtp else dataclasses.replace(step, count=0, kept=0, weights=0)


def mtp_specs(config: ModelConfig) -> Iterator[StackSpec]:
    """Yield the specification of each layer: the model's own, with a block like its last one."""
    spec, last = config.main, config.n_layers - 1

    def alone(layers: tuple[int, ...]) -> tuple[int, ...]:
        return (0,) if last in layers else ()

    for number in range(config.n_mtp_layers):
        yield dataclasses.replace(
            spec,
            prefix=f"mtp.{number}.",
            n_layers=1,
            block_of=(0,),
            kinds=spec.kinds[-1:],
            capacities=(1.0,),
            pruned_heads={},
            rope_skips=alone(spec.rope_skips),
            dense_layers=alone(spec.dense_layers),
            feedforward_skips=alone(spec.feedforward_skips),
            positions="none" if spec.positions in (*TABLES, "sinusoidal") else spec.positions,
            input="vectors",
            d_input=2 * spec.d_model,
            d_embedding=spec.d_model,
            embedding_norm=False,
            embedding_projection=False,
            project_tokens=False,
            n_types=0,
            embedding_dropout=0.0,
            first_norm=True,
            final_norm=True,
        )


def _layer_steps(config: ModelConfig, spec: StackSpec, run: Pass, tokens: int) -> Iterator[Step]:
    name, rows, D = f"{spec.prefix}embedding.front", run.batch * tokens, spec.d_model
    for part in ("token_norm", "hidden_norm"):
        yield norm_step(f"{name}.{part}", spec.norm, run, rows, D)
    yield linear_step(f"{name}.project", "embedding", rows, 2 * D, D, False, kept=2 * rows * D * run.size)
    yield from steps_of(POSITIONS[spec.positions])(spec, run, f"{spec.prefix}positions", tokens)
    yield from block_steps(spec, run, 0, tokens, 0)
    yield norm_step(f"{spec.prefix}norm", spec.norm, run, rows, D)
    for step in steps_of(HEADS[config.readout.head])(config.readout, run, tokens):
        yield dataclasses.replace(step.reused(), name=f"{spec.prefix}{step.name}")


def mtp_mistakes(config: Fields, stacks: tuple[StackSpec, ...]) -> Mistakes:
    """Yield what multi-token prediction does not go with."""
    if config.family != "decoder" or config.head != "lm" or config.input != "tokens":
        yield (
            f"n_mtp_layers {config.n_mtp_layers} is for family decoder, input tokens, head lm, and here are "
            f"{config.family}, {config.input} and {config.head}: leave it out"
        )
    if config.n_types > 0:
        yield (
            f"n_mtp_layers {config.n_mtp_layers} with n_types {config.n_types}: MTP layers read no segments: "
            "leave one of them out"
        )
