"""The inputs of a trace: those of `prepare`, and inputs without text such as vectors, frames and images.

Shapes: B batch (one row), T tokens, C channels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.api import Model
from clearhead.config import ModelConfig
from clearhead.errors import InputError, refuse
from clearhead.hub.encodings import framed
from clearhead.hub.pixels import to_pixels
from clearhead.inside.inputs import InputTokens, Prepared, prepare
from clearhead.inside.trace.steps import Recorder
from clearhead.tokens.labels import labels


def trace_inputs(m: Model, given: Any, target: str | Sequence[int] | None, pair: str | None) -> Prepared:
    """Prepare one row of inputs for any model."""
    both = m.config.family == "encoder-decoder"
    kind = m.config.input
    if kind == "tokens" or (kind == "patches" and not both):
        if isinstance(given, Tensor) and kind == "tokens" and given.ndim == 2 and given.shape[0] == 1:
            given = given[0]
        if pair is not None and (kind != "tokens" or both or not isinstance(given, str)):
            raise InputError(
                "pair is the second text of two, for a model of one stack that reads text: leave it out"
            )
        return prepare(m, given, target, pair)
    if pair is not None or (target is not None and not both):
        name = "pair" if pair is not None else "target"
        raise InputError(f"{name} is for text, and this model reads {kind}: leave it out")
    rows = _numbers(m, given)
    if not both:
        return Prepared(m, rows, _numbered(m.config, rows))
    if target is None:
        raise InputError(
            f"the encoder reads {kind}: give target, what the decoder has written so far, as text or ids"
        )
    ids = [*m.start_ids, *m.prompt_ids(target)] if isinstance(target, str) else list(target)
    tokens = InputTokens(labels(m.tokenizer, ids), tuple(ids))
    return Prepared(m, torch.tensor([ids], device=rows.device), tokens, rows, _numbered(m.config, rows))


def _numbers(m: Model, given: Any) -> Tensor:
    """Return vectors or frames [1, T, d_input], or pixels [1, C, height, width]."""
    weight, config = next(m.model.parameters()), m.config
    if config.input == "patches":
        image = given[0] if isinstance(given, Tensor) and given.ndim == 4 else given
        return to_pixels(image, config, m.images)[None].to(weight)
    wanted = f"this model reads {config.input}: give numbers [T, {config.d_input}], an array or a tensor"
    refuse(isinstance(given, str), f"text was given, and {wanted}")
    try:
        rows = torch.as_tensor(given).to(weight)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{type(given).__name__} was given, and {wanted}") from None
    rows = rows[None] if rows.ndim == 2 else rows
    refuse(
        rows.ndim != 3 or rows.shape[0] != 1 or rows.shape[2] != config.d_input or not rows.shape[1],
        f"numbers of shape {list(rows.shape)} were given, and {wanted}",
    )
    return rows


def _numbered(config: ModelConfig, rows: Tensor) -> InputTokens:
    """Label the tokens that the front makes of the inputs by their numbers."""
    return InputTokens(tuple(str(number) for number in range(config.stacks[0].n_tokens(rows.shape[1]))))


def input_steps(
    recorder: Recorder, m: Model, inputs: Tensor, tokens: InputTokens, prefix: str, pair: str | None = None
) -> None:
    """Record how the input became numbers."""
    if inputs.ndim > 2:
        name = "pixels" if inputs.ndim == 4 else "vectors"
        recorder.timed(f"{prefix}{name}", lambda: inputs)
        return
    if tokens.spans:

        def tokenized() -> Tensor:
            framed(m.text_tokenizer, m.max_length, tokens.text, pair)
            return torch.tensor(tokens.spans)

        recorder.timed(f"{prefix}tokenize", tokenized, tokens.labels)
    recorder.timed(f"{prefix}ids", lambda: inputs, tokens.labels)
