"""What somebody types, as a model's inputs with a label for every token.

    prepared = prepare(m, "The cat sat")                 # any model of one stack: text, or token ids
    prepared = prepare(m, "Ein Hund", target="A dog")    # two stacks; else the model writes its own target
    prepared = prepare(m, "photo.png")                   # patches of an image: a path, an array or pixels
    prepared = prepare(m, "clip.wav")                    # the first window of a sound, and its transcript
    prepared = prepare_any(m, frames, target, None)      # also vectors and frames, which have no text
    output, seen = prepared.record("blocks.*.attention.pattern")

Shapes: B batch (one row), T tokens of the stack that feeds the head, S tokens of the encoder before it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.taps import Recording, edit, record
from clearhead.core.transformer import Output, Transformer, evaluating
from clearhead.errors import InputError, refuse
from clearhead.hub import preprocessor, tokenizer
from clearhead.hub.tokens.text import labels
from clearhead.learn.data.treebank import Span
from clearhead.learn.tasks.speech import first_window
from clearhead.run.api import Model

AnyModel = Model | Transformer
Given = str | Sequence[int] | Tensor | preprocessor.Image
Target = str | Sequence[int] | None
LONGEST_ANSWER = 64  # tokens that an encoder-decoder writes where no target is given


@dataclass(frozen=True)
class InputTokens:
    """What one stack reads, token by token."""

    labels: tuple[str, ...]  # as people read them; patches are called "row,column"
    ids: tuple[int, ...] = ()  # none for an image
    # Characters of `text` behind each token, (0, 0): none; () where ids were given.
    spans: tuple[Span, ...] = ()
    text: str = ""
    special: tuple[bool, ...] = ()  # put there by the tokenizer, not by the text

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def text_spans(self) -> list[Span]:
        """The characters behind each token of the text itself; (0, 0) for special tokens."""
        return [(0, 0) if special else span for span, special in zip(self.spans, self.special)]


@dataclass(frozen=True)
class Prepared:
    """One row of inputs for one model."""

    m: Model
    main: Tensor  # [1, T] ids, or pixels [1, C, H, W]
    tokens: InputTokens  # T of them
    source: Tensor | None = None  # [1, S]
    source_tokens: InputTokens | None = None
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

    @property
    def first_tokens(self) -> InputTokens:
        """The tokens of the first stack: the source's where there are two."""
        return self.source_tokens or self.tokens

    def tokens_of(self, stack: str) -> InputTokens:
        """Return the tokens of a stack by the prefix of its activations: "encoder." or ""."""
        return self.first_tokens if stack else self.tokens

    def run(self, **options: Any) -> Output:
        """Run one forward pass without dropout; gradients follow torch's own switch."""
        with evaluating(self.model):
            output: Output = self.model(self.main, **self.given, **options)
            return output

    def record(self, *patterns: str, logits: Literal["all", "none"] = "all") -> tuple[Output, Recording]:
        """Run one forward pass without gradients, and record the activations whose names match."""
        with torch.no_grad(), record(self.model, *patterns) as seen:
            return self.run(logits=logits), seen

    def record_graph(self, last: str, *patterns: str) -> Recording:
        """Run a pass with gradients as far as the activation `last`; record those that match, undetached."""
        recording = record(self.model, last, *patterns, detach=False)
        stopping = edit(self.model, {last: _stop_here})
        with torch.enable_grad(), recording as seen, suppress(_ReachedError), stopping:
            self.run(logits="none")
        return seen

    def hand_out(self, takers: Mapping[str, Callable[[Tensor], None]]) -> None:
        """Run one forward pass without its head, and hand each named activation to its taker."""
        with torch.no_grad(), edit(self.model, takers):
            self.run(logits="none")


class _ReachedError(Exception):
    """A pass that has shown what it was run for."""


def _stop_here(x: Tensor) -> None:
    raise _ReachedError


def as_model(m: AnyModel) -> Model:
    """Return a model with what belongs to it; a bare one has no tokenizer."""
    return m if isinstance(m, Model) else Model(m)


def run_with_cache(
    m: AnyModel,
    given: Given | Sequence[str] | Sequence[Sequence[int]],
    names: str | Sequence[str] = "*",
    target: Target = None,
    pair: str | None = None,
) -> tuple[Output, Recording]:
    """Run one forward pass, and return its output and the activations whose names match, by name.

    Neither dropout nor gradients; `record` leaves both as they are.

    Args:
        m: what `load` gave, a bare model, which takes ids or pixels, or a compiled wrapper.
        given: a text or its token ids, as one row; several texts or rows of ids, which are padded at the
            right; ids [B, T]; or what else the model reads, such as an image.
        names: of activations, `*` for anything; see `tap_names`.
        target: what the decoder of an encoder-decoder has written; None: what it writes greedily by itself.
        pair: the second text of a pair, for an encoder.
    """
    m, patterns = as_model(m), (names,) if isinstance(names, str) else tuple(names)
    several = isinstance(given, Tensor) and given.ndim == 2 and len(given) != 1
    several |= isinstance(given, list | tuple) and len(given) > 0 and not isinstance(given[0], int)
    if not several or m.config.input != "tokens":
        return prepare_any(m, given, target, pair).record(*patterns)
    refuse(
        len(m.config.stacks) == 2 or pair is not None,
        "several rows are for a model of one stack, without a pair: call the model itself within ch.record",
    )
    if isinstance(given, Tensor):
        ids, mask = given.to(device_of(m.model)), None
    else:
        ids, mask = m.batch(cast(Any, given))
    with torch.no_grad(), evaluating(m.model), record(m.model, *patterns) as seen:
        return m.model(ids, mask), seen


def device_of(model: Transformer) -> torch.device:
    """Return the device of a model's weights."""
    return next(model.parameters()).device


def prepare(m: AnyModel, given: Given | Prepared, target: Target = None, pair: str | None = None) -> Prepared:
    """Return inputs of one row; those that are prepared already stay what they are.

    Args:
        m: what `load` gave, or a bare model, which takes ids or pixels.
        given: text or token ids; for a model of patches an image. The encoder reads it where there are two
            stacks.
        target: what the decoder of two stacks has written so far; None: what it writes greedily by itself.
        pair: the second text of a pair, for an encoder.
    """
    if isinstance(given, Prepared):
        return given
    m = as_model(m)
    device = device_of(m.model)
    first, both = m.config.stacks[0], len(m.config.stacks) == 2
    refuse(
        target is not None and not both, "target is for a model with an encoder and a decoder: leave it out"
    )
    if first.input == "patches":
        refuse(
            both, "an image encoder that feeds a decoder cannot be looked into yet: give a model of one stack"
        )
        names = patch_names(m.config)
        tokens = InputTokens(names, special=tuple(name == "[CLS]" for name in names))
        return Prepared(m, _pixels(m, given), tokens)
    if first.input == "frames" and both:
        return _sound(m, given, target)
    refuse(
        first.input != "tokens",
        f"this model reads {first.input}, which have no tokens to show: "
        "looking inside takes a model of text or images",
    )
    tokens, types = _text(m, given, pair)
    refuse(not tokens.ids, "the text is empty: give at least one token")
    ids = torch.tensor([tokens.ids], device=device)
    if not both:
        segments = torch.tensor([types], device=device) if m.config.n_types > 1 and types else None
        return Prepared(m, ids, tokens, types=segments)
    written = _target(m, tokens, target)
    return Prepared(m, torch.tensor([written.ids], device=device), written, ids, tokens)


def prepare_first(m: Model, given: Given, pair: str | None = None) -> Prepared:
    """Return inputs for the first stack; the decoder after an encoder reads its start alone."""
    return prepare(m, given, m.start_ids or None, pair)


def prepare_any(m: Model, given: Any, target: Target, pair: str | None) -> Prepared:
    """Return inputs of one row for any model: also vectors, frames, and images that a decoder describes."""
    if isinstance(given, Prepared):
        return given
    kind, both = m.config.input, len(m.config.stacks) == 2
    if kind == "tokens" or (kind == "patches" and not both):
        if isinstance(given, Tensor) and kind == "tokens" and given.ndim == 2 and given.shape[0] == 1:
            given = given[0]
        refuse(
            pair is not None and (kind != "tokens" or both or not isinstance(given, str)),
            "pair is the second text of two, for a model of one stack that reads text: leave it out",
        )
        return prepare(m, given, target, pair)
    refuse(pair is not None, f"pair is for text, and this model reads {kind}: leave it out")
    heard = isinstance(given, str | Path | BytesIO) or getattr(given, "ndim", 2) == 1
    if kind == "frames" and both and heard:
        return _sound(m, given, target)
    refuse(target is not None and not both, f"target is for text, and this model reads {kind}: leave it out")
    rows = _pixels(m, given) if kind == "patches" else _vectors(m, given)
    numbered = InputTokens(tuple(map(str, range(m.config.stacks[0].n_tokens(rows.shape[1])))))
    if not both:
        return Prepared(m, rows, numbered)
    refuse(
        target is None,
        f"the encoder reads {kind}: give target, what the decoder has written so far, as text or ids",
    )
    ids = [*m.start_ids, *m.prompt_ids(target)] if isinstance(target, str) else list(target or ())
    written = InputTokens(labels(m.tokenizer, ids), tuple(ids))
    return Prepared(m, torch.tensor([ids], device=rows.device), written, rows, numbered)


def _sound(m: Model, given: Any, target: Target) -> Prepared:
    """Return the first window of a sound, and what the decoder writes of it or is said to have written."""
    frames, start, said, seconds = first_window(m, given)
    if isinstance(target, str):
        said = m.text_tokenizer.encode(target, add_special_tokens=False).ids
    ids = [*start, *said] if target is None or isinstance(target, str) else list(target)
    places = range(m.config.stacks[0].n_tokens(frames.shape[1]))
    times = InputTokens(tuple(f"{place * seconds:.2f} s" for place in places), special=(False,) * len(places))
    special = {
        number for number, token in m.text_tokenizer.get_added_tokens_decoder().items() if token.special
    }
    marked = tuple(token in special for token in ids)
    written = InputTokens(labels(m.tokenizer, ids), tuple(ids), special=marked)
    return Prepared(m, torch.tensor([ids], device=frames.device), written, frames, times)


def _vectors(m: Model, given: Any) -> Tensor:
    """Return vectors or frames [1, T, d_input]."""
    config = m.config
    wanted = f"this model reads {config.input}: give numbers [T, {config.d_input}], an array or a tensor"
    refuse(isinstance(given, str), f"text was given, and {wanted}")
    try:
        rows = torch.as_tensor(given).to(next(m.model.parameters()))
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{type(given).__name__} was given, and {wanted}") from None
    rows = rows[None] if rows.ndim == 2 else rows
    refuse(
        rows.ndim != 3 or rows.shape[0] != 1 or rows.shape[2] != config.d_input or not rows.shape[1],
        f"numbers of shape {list(rows.shape)} were given, and {wanted}",
    )
    return rows


def _text(m: Model, given: Any, pair: str | None) -> tuple[InputTokens, list[int]]:
    """Return the tokens of a text, as the model reads texts, and their segments."""
    if not isinstance(given, str):
        ids = m.prompt_ids(given)
        return InputTokens(labels(m.tokenizer, ids), tuple(ids)), []
    goes_on = m.config.family == "decoder" and pair is None
    encoding = tokenizer.framed(m.text_tokenizer, m.max_length, given) if goes_on else m.framed(given, pair)
    ids = list(encoding.ids)
    if goes_on:
        ids = m.prompt_ids(given)[: m.max_length]  # without the token that ends a text
    begun = [True] * (len(ids) - len(encoding.ids))  # an empty text is read as the token that begins one
    spans: tuple[Span, ...] = (*encoding.offsets, *((0, 0) for _ in begun))[: len(ids)]
    special = (*map(bool, encoding.special_tokens_mask), *begun)[: len(ids)]
    types = [*encoding.type_ids, *(0 for _ in begun)][: len(ids)]
    return InputTokens(labels(m.tokenizer, ids), tuple(ids), spans, given, special), types


def _target(m: Model, source: InputTokens, target: Target) -> InputTokens:
    """Return what the decoder reads: its start, and what it has written."""
    start = m.start_ids
    if target is None:
        most = max(1, min(LONGEST_ANSWER, m.config.max_positions - len(start)))
        made: Any = m.generate(list(source.ids), most, num_beams=1)
        ids = [*start[:1], *made.ids]
    elif isinstance(target, str):
        ids = [*start, *(token for token in m.prompt_ids(target) if token not in (*m.stops, *start))]
    else:
        ids = list(target)
    return InputTokens(labels(m.tokenizer, ids), tuple(ids), text=target if isinstance(target, str) else "")


def _pixels(m: Model, given: Any) -> Tensor:
    """Return the pixels of an image: [1, C, height, width]."""
    if isinstance(given, Tensor) and given.ndim == 4:
        refuse(given.shape[0] != 1, f"{given.shape[0]} images were given: look into one at a time")
        given = given[0]
    return preprocessor.to_pixels(given, m.config, m.images)[None].to(next(m.model.parameters()))


def patch_names(config: ModelConfig) -> tuple[str, ...]:
    """Return a name for every token of an image: its patches by row and column, after the class token."""
    spec = config.stacks[0]
    rows, columns = (side // spec.patch_size for side in spec.image_size)
    patches = (f"{row},{column}" for row in range(rows) for column in range(columns))
    return ("[CLS]", *patches) if spec.class_token else tuple(patches)


def recorded(model: Transformer, patterns: Iterable[str], *main: Tensor, **given: Any) -> Recording:
    """Run a batch without dropout, gradients and head, and record the activations whose names match."""
    with torch.no_grad(), evaluating(model), record(model, *patterns) as seen:
        model(*main, **given, logits="none")
    return seen
