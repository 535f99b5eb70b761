"""What each word, or each patch of an image, is worth to an answer: left out, and by gradient x input.

    found = occlusion(m, "a dull film", token="bad")
    found.units, found.dropped          # "a", "dull", "film"; what the logit loses without each
    found.gradient                      # the first-order guess at the same, from one backward pass

A word is left out by putting the model's mask token in the place of its tokens, or the unknown or padding
token where it has no mask; a patch by the image's mean colour. Gradient x input is the slope of the logit
with respect to what the first block reads, times that; it is first order, and the two need not agree.

Shapes: U units, T tokens, N choices.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.core.taps import record
from clearhead.core.transformer import evaluating
from clearhead.errors import refuse
from clearhead.hub.tokens.text import labels
from clearhead.inside import inputs, results
from clearhead.inside.choices import choices_of, find_column
from clearhead.inside.heads.alignments import positions

ROWS = 32  # inputs that are run at once
STANDS_FOR_NOTHING = ("mask", "unk", "pad")


@dataclass(frozen=True)
class Occlusion(results.Result):
    """What each part of an input is worth to one logit."""

    units: tuple[str, ...]  # words, single tokens where only ids are known, or patches
    places: tuple[tuple[int, ...], ...]  # the tokens of each
    column: int
    choice: str
    logit: float
    without: str  # what stands in their place
    dropped: Tensor  # [U] the logit less the one without the unit
    gradient: Tensor  # [U] slope x input, added up over the unit's tokens


def occlusion(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    token: str | int | None = None,
    position: int = -1,
    pair: str | None = None,
) -> Occlusion:
    """Leave out each unit of an input in turn; `token` and `position` are as for `contributions`."""
    config = given.m.config if isinstance(given, inputs.Prepared) else inputs.as_model(m).config
    refuse(
        len(config.stacks) == 2,
        "occlusion is for a model of one stack: patch the two texts of an encoder-decoder instead",
    )
    prepared = inputs.prepare(m, given, pair=pair)
    choices = choices_of(prepared)
    column = find_column(position, choices.columns)
    output, _ = prepared.record(logits="none")
    with torch.no_grad(), evaluating(prepared.model):
        scores = choices.column_scores(output.hidden, column)[0]
    choice = int(scores.argmax()) if token is None else choices.find(token)
    units = _units(prepared)
    rows, without = _left_out(prepared, [places for _, places in units])
    after = []
    with torch.no_grad(), evaluating(prepared.model):
        for some in torch.split(rows, ROWS):
            given_more = {name: x.expand(len(some), *x.shape[1:]) for name, x in prepared.given.items()}
            hidden = prepared.model(some, **given_more, logits="none").hidden
            after.append(choices.column_scores(hidden, column)[:, choice].double().cpu())
    slopes = _gradient(prepared, column, choice)
    return Occlusion(
        units=tuple(name for name, _ in units),
        places=tuple(places for _, places in units),
        column=column,
        choice=choices.name(choice),
        logit=float(scores[choice]),
        without=without,
        dropped=(float(scores[choice]) - torch.cat(after)).float(),
        gradient=torch.stack([slopes[list(places)].sum() for _, places in units]).float(),
    )


Unit = tuple[str, tuple[int, ...]]


def _units(prepared: inputs.Prepared) -> list[Unit]:
    """Return words with their tokens; without a text each token by itself. Marks of the model are left in."""
    tokens = prepared.tokens
    special = tokens.special or (False,) * len(tokens)
    alone: list[Unit] = [(name, (place,)) for place, name in enumerate(tokens.labels) if not special[place]]
    if not tokens.text or not tokens.spans or (prepared.types is not None and bool(prepared.types.any())):
        return alone
    words = [(match[0], match.span()) for match in re.finditer(r"\w+|[^\w\s]", tokens.text)]
    found = positions([span for _, span in words], tokens.text_spans)
    units: dict[tuple[int, ...], str] = {}
    for (word, _), places in zip(words, found):
        if places:
            units[places] = units.get(places, "") + word
    return [(name, places) for places, name in units.items()] or alone


def _left_out(prepared: inputs.Prepared, units: list[tuple[int, ...]]) -> tuple[Tensor, str]:
    """Return the input without each unit, [U, T] or [U, C, height, width], and what stands in its place."""
    rows = prepared.main.repeat(len(units), *[1] * (prepared.main.ndim - 1))
    if prepared.main.is_floating_point():
        spec = prepared.m.config.stacks[0]
        side, across = spec.patch_size, spec.image_size[1] // spec.patch_size
        mean = prepared.main.mean((0, 2, 3))[:, None, None]
        for row, (place,) in zip(rows, units):
            y, x = divmod(place - int(spec.class_token), across)
            row[:, y * side : (y + 1) * side, x * side : (x + 1) * side] = mean
        return rows, "the mean colour"
    known = [name for name in STANDS_FOR_NOTHING if prepared.m.special.get(name) is not None]
    refuse(not known, "this model has no mask, unknown or padding token to put in the place of a word")
    nothing = prepared.m.special[known[0]]
    for row, places in zip(rows, units):
        row[list(places)] = nothing
    return rows, labels(prepared.m.tokenizer, [nothing])[0]


def _gradient(prepared: inputs.Prepared, column: int, choice: int) -> Tensor:
    """Return slope x input of each token, [T]."""
    with torch.enable_grad(), record(prepared.model, "embedding", detach=False) as seen:
        output = prepared.run(logits="none")
        logit = choices_of(prepared).column_scores(output.hidden, column)[0, choice]
        (slope,) = torch.autograd.grad(logit, seen["embedding"])
    return (slope * seen["embedding"].detach())[0].double().sum(-1).cpu()
