"""What somebody types, as a model's inputs with a label for every token: the beginning of all that looks inside.

    prepared = prepare(m, "The cat sat")                 # any model of one stack: text, or token ids
    prepared = prepare(m, "Ein Hund", target="A dog")    # two stacks; without `target` the model writes its own
    prepared = prepare(m, "photo.png")                   # patches of an image: a path, an array or pixels
    output, seen = prepared.record("blocks.*.attention.pattern")

Shapes: B batch (one row), T tokens of the stack that feeds the head, S tokens of the encoder before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.bundle import Model
from clearhead.errors import InputError
from clearhead.hub.encodings import framed
from clearhead.hub.pixels import Image, to_pixels
from clearhead.model.taps import Recording, record
from clearhead.model.transformer import Output, Transformer, evaluating
from clearhead.tokens.labels import labels

Span = tuple[int, int]
LONGEST_ANSWER = 64  # tokens that an encoder-decoder writes where no target is given


@dataclass(frozen=True)
class Tokens:
    """What one stack reads, token by token."""

    labels: tuple[str, ...]  # as people read them; patches are called "row,column"
    ids: tuple[int, ...] = ()  # none for an image
    spans: tuple[
        Span, ...
    ] = ()  # characters of `text` behind each token; (0, 0): none. Empty where ids were given
    text: str = ""
    special: tuple[bool, ...] = ()  # put there by the tokenizer, not by the text

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Prepared:
    """One row of inputs for one model."""

    m: Model
    main: Tensor  # [1, T] ids, or pixels [1, C, H, W]
    tokens: Tokens  # T of them
    source: Tensor | None = None  # [1, S]
    source_tokens: Tokens | None = None
    types: Tensor | None = None  # [1, T] segments, where the model has them

    @property
    def model(self) -> Transformer:
        """The model itself."""
        return self.m.model

    @property
    def given(self) -> dict[str, Any]:
        """What the model is called with beside `main`."""
        more = {"source": self.source, "types": self.types}
        return {name: value for name, value in more.items() if value is not None}

    def tokens_of(self, stack: str) -> Tokens:
        """Of the stack whose activations have the prefix `stack`: "encoder." where an encoder feeds a decoder, "" otherwise."""
        if stack and self.source_tokens is not None:
            return self.source_tokens
        return self.tokens

    def run(self, **options: Any) -> Output:
        """One forward pass; dropout is off. Gradients follow torch's own switch."""
        with evaluating(self.model):
            output: Output = self.model(self.main, **self.given, **options)
            return output

    def record(self, *patterns: str) -> tuple[Output, Recording]:
        """One forward pass without gradients, and the activations whose names match."""
        with torch.no_grad(), record(self.model, *patterns) as seen:
            return self.run(), seen


def prepare(
    m: Model | Transformer,
    given: str | Sequence[int] | Tensor | Image,
    target: str | Sequence[int] | None = None,
    pair: str | None = None,
) -> Prepared:
    """Inputs of one row.

    Args:
        m: what `load` gave, or a bare model, which takes ids or pixels.
        given: text or token ids; for a model of patches an image. The encoder reads it where there are two stacks.
        target: what the decoder of two stacks has written so far; None: what it writes greedily by itself.
        pair: the second text of a pair, for an encoder.
    """
    m = m if isinstance(m, Model) else Model(m)
    device = next(m.model.parameters()).device
    plan = m.model.main.spec
    both = m.model.encoder is not None and m.model.decoder is not None
    if target is not None and not both:
        raise InputError("target is for a model with an encoder and a decoder: leave it out")
    first = m.model.encoder.spec if both and m.model.encoder is not None else plan
    if first.input == "patches":
        pixels, patches = _image(m, given)
        if not both:
            return Prepared(m, pixels, patches)
        raise InputError(
            "an image encoder that feeds a decoder cannot be looked into yet: give a model of one stack"
        )
    if first.input != "tokens":
        raise InputError(
            f"this model reads {first.input}, which have no tokens to show: looking inside takes a model of text or images"
        )
    tokens, types = _text(m, given, pair)
    if not tokens.ids:
        raise InputError("the text is empty: give at least one token")
    ids = torch.tensor([tokens.ids], device=device)
    kinds = torch.tensor([types], device=device) if m.config.n_types > 1 and types else None
    if not both:
        return Prepared(m, ids, tokens, types=kinds)
    written = _target(m, given, tokens, target)
    return Prepared(m, torch.tensor([written.ids], device=device), written, ids, tokens)


def _text(m: Model, given: Any, pair: str | None) -> tuple[Tokens, list[int]]:
    """Tokens of a text, as the model reads texts, and their segments."""
    if not isinstance(given, str):
        ids = m._prompt(given)
        return Tokens(labels(m.tokenizer, ids), tuple(ids)), []
    encoding = framed(m.text_tokenizer, m.max_length, given, pair)
    ids = list(encoding.ids)
    if m.config.family == "decoder" and pair is None:
        ids = m._prompt(given)[: m.max_length]  # what ends a text is not read by a model that goes on
    rows = list(zip(encoding.offsets, encoding.special_tokens_mask, encoding.type_ids))[: len(ids)]
    rows += [((0, 0), 1, 0)] * (
        len(ids) - len(rows)
    )  # a text without a token of its own begins with the first special one
    spans: tuple[Span, ...] = tuple(span for span, _, _ in rows)
    special = tuple(bool(mark) for _, mark, _ in rows)
    return Tokens(labels(m.tokenizer, ids), tuple(ids), spans, given, special), [kind for _, _, kind in rows]


def _target(m: Model, given: Any, source: Tokens, target: str | Sequence[int] | None) -> Tokens:
    """What the decoder reads: its beginning, and what it has written."""
    start, text = m._start(), target if isinstance(target, str) else ""
    if target is None:
        room = max(1, m.config.max_positions - len(start))
        made: Any = m.generate(list(source.ids), min(LONGEST_ANSWER, room))
        ids = [*start, *made.ids]
    elif isinstance(target, str):
        ids = [*start, *(token for token in m._prompt(target) if token not in m.stops and token not in start)]
    else:
        ids = list(target)
    return Tokens(labels(m.tokenizer, ids), tuple(ids), text=text)


def _image(m: Model, given: Any) -> tuple[Tensor, Tokens]:
    """Pixels, and a name for every patch."""
    config, weight = m.config, next(m.model.parameters())
    assert config.image_size is not None
    if isinstance(given, Tensor) and given.ndim == 4:
        if given.shape[0] != 1:
            raise InputError(f"{given.shape[0]} images were given: look into one at a time")
        given = given[0]
    pixels = to_pixels(given, config, m.images)[None].to(weight)
    rows, columns = (side // config.patch_size for side in config.image_size)
    names = ["[CLS]"] * config.class_token + [
        f"{row},{column}" for row in range(rows) for column in range(columns)
    ]
    return pixels, Tokens(tuple(names), special=tuple(name == "[CLS]" for name in names))
