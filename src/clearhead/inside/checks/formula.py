"""Rows of the equality suite that hold the model against `plainly`, which shares no code with it.

A fault that strikes both sides of an equality is seen here. On the user's own weights something may be too
small to show, so two copies are made with the same code and other weights:

    lively    large random weights, norms and biases too, and windows short enough to matter
    quiet     weights so small that what every norm reads is as small as its eps, which decides the output

Shapes: B rows, T tokens.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cache as remembered
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.inside.checks.forward import cache_forms, caches, through
from clearhead.inside.checks.plainly import plainly
from clearhead.inside.checks.rows import TOLERANCE, Comparison, Inputs, gap
from clearhead.model.taps import edit
from clearhead.model.transformer import Transformer

WINDOW = 4  # in the lively copy
TABLES = ("tokens.weight", "types.weight", "table.weight", "class_token")


def formula_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows for the model itself, its lively and its quiet copy."""
    own, narrow = inputs.of(inputs.model, fewer=1), TOLERANCE[torch.float32]
    large = remembered(lambda: own.of(lively(inputs.model)))
    expected = remembered(lambda: _formula(large()))
    row = partial(own.compare, tolerance=narrow, copies=True)
    return [
        own.compare(
            "model = formula",
            "logits with those of a plain loop in float64 over the same weights",
            lambda own: gap(own.run(), _formula(own)),
        ),
        row(
            "model = formula (lively)",
            "the same with large random weights: tokens, padding, far positions, short windows",
            lambda _: _lively(large(), expected()),
        ),
        row(
            "model = formula (quiet)",
            "the same where everything is as small as norm_eps",
            lambda _: _quiet(own.of(quiet(large().model))),
        ),
        row(
            "cached = formula (lively)",
            "the same through each form of cache, in pieces of 1, 3 and 2 tokens",
            lambda _: _through_caches(large(), expected()),
            fits=caches(inputs),
        ),
    ]


def _formula(inputs: Inputs, given: Mapping[str, Tensor] | None = None, loudness: float = 1.0) -> Tensor:
    """Return the logits of the formula."""
    model = inputs.model
    return plainly(model.config, model.state_dict(), **(given or inputs.given), loudness=loudness)


def _lively(inputs: Inputs, expected: Tensor) -> float:
    """Compare plain input; where rows can be padded, gaps too, and positions beyond the trained length."""
    gaps = [gap(inputs.run(), expected)]
    if inputs.sequences:
        (padded, slots), config = inputs.padded("gaps"), inputs.model.config
        count = torch.arange(padded["ids"].shape[1], device=inputs.device)
        far = torch.where(count < inputs.length // 2, count, count + config.max_positions)
        beyond = {**padded, "positions": far.expand(inputs.rows, -1)}
        for given in [padded] if config.positions == "learned" else [padded, beyond]:
            both = inputs.model(**given).logits.cpu(), _formula(inputs, given)
            ours, theirs = (logits[:, slots.cpu()] if logits.ndim == 3 else logits for logits in both)
            gaps.append(gap(ours, theirs))
    return max(gaps)


def _through_caches(inputs: Inputs, expected: Tensor) -> float:
    model, rows, length = inputs.model, inputs.rows, inputs.length
    return max(
        gap(through(inputs, form(model, rows, length), [1, 3, 2]), expected)
        for form in cache_forms(model).values()
    )


def _quiet(inputs: Inputs) -> float:
    """Compare the quiet copy. Sinusoids are not weights: with them, both sides scale the embedding."""
    model, config = inputs.model, inputs.model.config
    loud = 1.0 if config.positions != "sinusoidal" or config.embedding_norm else math.sqrt(config.norm_eps)
    stacks = ["embedding", "encoder.embedding"] if model.encoder and model.decoder else ["embedding"]
    changes: dict[str, Callable[[Tensor], Tensor]] = dict.fromkeys(stacks, lambda x: x * loud)
    with edit(model, changes):
        return gap(inputs.run(), _formula(inputs, loudness=loud), least=0.0)


# Copies with other weights ----------------------------------------------------------------------------------


@torch.no_grad()
def lively(model: Transformer, seed: int = 0) -> Transformer:
    """Return a float32 copy with large random weights, and with windows shorter than the inputs."""
    made = copy.deepcopy(model).float()
    made.config = config = model.config.replace(window=_shorter(model.config.window))
    for stack in (made.encoder, made.decoder):
        if stack is not None:
            stack.spec = dataclasses.replace(stack.spec, windows=_shorter(stack.spec.windows))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in made.named_parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight.device)
        if name.endswith(TABLES):
            weight.copy_(noise)
        elif weight.ndim == 1:
            weight.copy_(0.3 * noise + float(name.endswith("weight") and not config.norm_unit_offset))
        else:
            weight.copy_(noise / math.sqrt(weight[0].numel()))
    return made


def _shorter(window: Any) -> Any:
    if isinstance(window, tuple):
        return tuple(_shorter(one) for one in window)
    return None if window is None else min(window, WINDOW)


@torch.no_grad()
def quiet(lively: Transformer) -> Transformer:
    """Return a copy of a lively model in which all that a norm reads is about the root of its eps.

    What enters the residual stream is made small; what a norm before a sublayer has made large again is made
    small where the sublayer answers. Gains of the norms that are read by a sublayer, or by the head, stay.
    """
    made, config, small = copy.deepcopy(lively), lively.config, math.sqrt(lively.config.norm_eps)
    queries = ("q.weight", "k.weight") if config.qk_norm != "none" else ()
    before = config.norm_position in ("pre", "sandwich")
    answers = ("out.weight", "down.weight", *queries) if before else ()
    for name, weight in made.named_parameters():
        after_a_norm = (".blocks." in name and name.endswith(answers)) or (
            name == "head.transform.weight" and config.final_norm
        )
        into_stream = ".inside." in name or ".after." in name or ".embedding.norm." in name
        if into_stream and name.endswith("weight") and config.norm_unit_offset:
            weight.copy_((1 + weight) * small - 1)
        elif into_stream or after_a_norm or name.endswith(("bias", *TABLES)) or ".front." in name:
            weight.mul_(small)
    return made
