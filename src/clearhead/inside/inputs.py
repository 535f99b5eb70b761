"""What somebody types, as a model's inputs with a label for every token, and what its head chooses among.

    prepared = prepare(m, "The cat sat")                 # any model of one stack: text, or token ids
    prepared = prepare(m, "Ein Hund", target="A dog")    # two stacks; else the model writes its own target
    prepared = prepare(m, "photo.png")                   # patches of an image: a path, an array or pixels
    prepared = prepare(m, ch.ImagePrompt("<image> A cat?", ["photo.png"]))  # images among the tokens
    prepared = prepare(m, "clip.wav")                    # the first window of a sound, and its transcript
    prepared = prepare(m, frames, target, numbers=True)  # also vectors and frames, which have no text
    output, seen = prepared.record("blocks.*.attention.pattern")
    prepared = cached_pass(prepared)                     # one forward pass for several analyses
    paths(m, prepared), lens(m, prepared, columns=[4]), attention(m, prepared)

A cached pass keeps its activations. Gradients run one pass more, whose graph is kept too. Edits and traces
still run the model: they need more than its activations.

A head's scores are a table of columns and choices. A language model has one column for each token that it
reads; a classifier has one for the whole input; a span head has two, "begins" and "ends", and chooses among
the tokens.

Shapes: B batch (one row), T tokens of the stack that feeds the head, S tokens of the encoder before it,
C columns, N choices, D model.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from clearhead.core.dtypes import wide
from clearhead.core.transformer import Output, Transformer
from clearhead.errors import InputError, refuse, refuse_unknown
from clearhead.hub import preprocessor, tokenizer
from clearhead.hub.tokens.text import label, labels, visible
from clearhead.inside.names import patterned
from clearhead.learn.batches.ragged import padded, real_tokens
from clearhead.learn.data.conll import Span
from clearhead.learn.tasks.images import ImagePrompt, ids_of, patch_names, token_names, vectors_of
from clearhead.learn.tasks.speech import first_window
from clearhead.run.api import Model
from clearhead.run.generate.vectors import Span as Stretch
from clearhead.run.generate.vectors import embedded
from clearhead.variants.contexts import Recording, edit, evaluating, matching, record, tap_names

AnyModel = Model | Transformer
Given = str | Sequence[int] | Tensor | preprocessor.Image | ImagePrompt
Target = str | Sequence[int] | None
LONGEST_ANSWER = 64  # tokens that an encoder-decoder writes where no target is given


@dataclass(frozen=True)
class InputTokens:
    """What one stack reads, token by token."""

    labels: tuple[str, ...]  # as people read them; patches are called "row,column"
    ids: tuple[int, ...] = ()  # none for an image
    # Characters of `text` that each token covers, (0, 0): none; () where ids were given.
    spans: tuple[Span, ...] = ()
    text: str = ""
    special: tuple[bool, ...] = ()  # put there by the tokenizer, not by the text

    @classmethod
    def of(cls, m: Model, ids: Iterable[int], **more: Any) -> Self:
        """Return the tokens of some ids; `more` are other fields."""
        ids = list(ids)
        return cls(labels(m.tokenizer, ids), tuple(ids), **more)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def text_spans(self) -> list[Span]:
        """The characters of each token of the text itself; (0, 0) for special tokens."""
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
    vectors: Tensor | None = None  # [1, T, D] embeddings, where images stand among the tokens
    axes: Tensor | None = None  # [1, T, A] positions on each axis, where images have several

    @property
    def model(self) -> Transformer:
        """The model itself."""
        return self.m.model

    @property
    def arguments(self) -> dict[str, Tensor]:
        """What the model is called with."""
        vectors = self.vectors
        if vectors is not None and torch.is_grad_enabled():  # as a table that learns
            vectors = vectors.detach().requires_grad_()
        arguments = {"ids": self.main, "source": self.source, "types": self.types, "vectors": vectors}
        return {name: x for name, x in (arguments | {"axes": self.axes}).items() if x is not None}

    @property
    def first_tokens(self) -> InputTokens:
        """The tokens of the first stack: the source's where there are two."""
        return self.source_tokens or self.tokens

    def tokens_of(self, stack: str) -> InputTokens:
        """Return the tokens of a stack by the prefix of its activations: "encoder." or ""."""
        return self.first_tokens if stack else self.tokens

    def queries_and_keys(self, kind: str) -> tuple[InputTokens, InputTokens]:
        """Return the tokens that the queries and the keys of a kind of attention are of."""
        queries = self.first_tokens if kind == "encoder" else self.tokens
        return queries, self.tokens if kind == "self" else self.first_tokens

    def run(self, **options: Any) -> Output:
        """Run one forward pass without dropout; gradients follow torch's own switch."""
        with evaluating(self.model):
            output: Output = self.model(**self.arguments, **options)
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
        target: as for `prepare`.
        pair: as for `prepare`.
    """
    m, patterns = as_model(m), (names,) if isinstance(names, str) else tuple(names)
    several = isinstance(given, Tensor) and given.ndim == 2 and len(given) != 1
    several |= isinstance(given, list | tuple) and len(given) > 0 and not isinstance(given[0], int)
    if not several or m.config.input != "tokens":
        return prepare(m, given, target, pair, numbers=True).record(*patterns)
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


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's weights."""
    return next(model.parameters()).device


def prepare(
    m: AnyModel,
    given: Given | Prepared | Any,
    target: Target = None,
    pair: str | None = None,
    *,
    numbers: bool = False,
) -> Prepared:
    """Return inputs of one row; those that are prepared already stay what they are.

    Args:
        m: what `load` gave, or a bare model, which takes ids or pixels.
        given: text or token ids; for a model of patches an image, for a model of speech a sound. The encoder
            reads it where there are two stacks.
        target: what the decoder of two stacks has written so far; None: what it writes greedily by itself.
        pair: the second text of a pair, for an encoder.
        numbers: take vectors, frames, and images that a decoder describes, too; their tokens are numbered.
    """
    if isinstance(given, Prepared):
        return given
    m = as_model(m)
    kind, both = m.config.stacks[0].input, len(m.config.stacks) == 2
    refuse(
        target is not None and not both, "target is for a model with an encoder and a decoder: leave it out"
    )
    refuse(
        pair is not None and (kind != "tokens" or not isinstance(given, str) or (both and numbers)),
        "pair is the second text of two, for a model of one stack that reads text: leave it out",
    )
    if kind == "tokens":
        return _prepare_text(m, given, target, pair)
    if kind == "patches" and not both:
        names = patch_names(m.config)
        tokens = InputTokens(names, special=tuple(name == "[CLS]" for name in names))
        return Prepared(m, _pixels(m, given), tokens)
    is_sound = isinstance(given, str | Path | BytesIO) or getattr(given, "ndim", 2) == 1
    if kind == "frames" and both and (is_sound or not numbers):
        return _sound(m, given, target)
    refuse(
        not numbers,
        f"this model reads {kind}{' for a decoder' if both else ''}, which have no tokens to show: "
        "looking inside takes a model of text, or of images and one stack",
    )
    rows = _pixels(m, given) if kind == "patches" else _vectors(m, given)
    numbered = InputTokens(tuple(map(str, range(m.config.stacks[0].n_tokens(rows.shape[1])))))
    if not both:
        return Prepared(m, rows, numbered)
    refuse(
        target is None,
        f"the encoder reads {kind}: give target, what the decoder has written so far, as text or ids",
    )
    ids = [*m.start_ids, *m.prompt_ids(target)] if isinstance(target, str) else list(target or ())
    return Prepared(m, torch.tensor([ids], device=rows.device), InputTokens.of(m, ids), rows, numbered)


def prepare_first(m: Model, given: Given, pair: str | None = None) -> Prepared:
    """Return inputs for the first stack; the decoder after an encoder reads its start alone."""
    return prepare(m, given, m.start_ids or None, pair)


def _prepare_text(m: Model, given: Any, target: Target, pair: str | None) -> Prepared:
    """Return a text or its ids as the model reads them, and what the decoder of two stacks has written."""
    if isinstance(given, Tensor) and given.ndim == 2 and len(given) == 1:
        given = given[0]
    if isinstance(given, ImagePrompt):
        refuse(pair is not None, "pair with images: leave one of them out")
        return _with_images(m, given)
    tokens, types = _text(m, given, pair)
    refuse(not tokens.ids, "the text is empty: give at least one token")
    device = device_of(m.model)
    ids = torch.tensor([tokens.ids], device=device)
    if len(m.config.stacks) == 1:
        segments = torch.tensor([types], device=device) if m.config.n_types > 1 and types else None
        return Prepared(m, ids, tokens, types=segments)
    start = m.start_ids
    if target is None:
        most = max(1, min(LONGEST_ANSWER, m.config.max_positions - len(start)))
        generation: Any = m.generate(list(tokens.ids), most, num_beams=1)
        written = InputTokens.of(m, [*start[:1], *generation.ids])
    elif isinstance(target, str):
        own = (token for token in m.prompt_ids(target) if token not in (*m.stops, *start))
        written = InputTokens.of(m, [*start, *own], text=target)
    else:
        written = InputTokens.of(m, target)
    return Prepared(m, torch.tensor([written.ids], device=device), written, ids, tokens)


def _with_images(m: Model, given: ImagePrompt) -> Prepared:
    """Return a prompt with images; their tokens are called by row and column, of several by number too."""
    ids = ids_of(m, given)
    own = vectors_of(m, ids, given)
    main = torch.tensor([ids], device=device_of(m.model))
    with torch.no_grad():
        vectors = embedded(m.model, main, [Stretch(own, 0, len(ids))])
    axes = None if own is None or own.axes is None else own.axes[None].to(main.device)
    names, text = token_names(m, ids, given.images), given.prompt if isinstance(given.prompt, str) else ""
    return Prepared(m, main, InputTokens(names, tuple(ids), text=text), vectors=vectors, axes=axes)


def _sound(m: Model, given: Any, target: Target) -> Prepared:
    """Return the first window of a sound, and what the decoder has written of it."""
    frames, start, written, seconds = first_window(m, given)
    if isinstance(target, str):
        written = m.text_tokenizer.encode(target, add_special_tokens=False).ids
    ids = [*start, *written] if target is None or isinstance(target, str) else list(target)
    positions = range(m.config.stacks[0].n_tokens(frames.shape[1]))
    times = InputTokens(
        tuple(f"{place * seconds:.2f} s" for place in positions), special=(False,) * len(positions)
    )
    special = {
        number for number, token in m.text_tokenizer.get_added_tokens_decoder().items() if token.special
    }
    tokens = InputTokens.of(m, ids, special=tuple(token in special for token in ids))
    return Prepared(m, torch.tensor([ids], device=frames.device), tokens, frames, times)


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
        return InputTokens.of(m, m.prompt_ids(given)), []
    goes_on = m.config.family == "decoder" and pair is None
    encoding = tokenizer.framed(m.text_tokenizer, m.max_length, given) if goes_on else m.framed(given, pair)
    ids = list(encoding.ids)
    if goes_on:
        ids = m.prompt_ids(given)[: m.max_length]  # without the token that ends a text
    begun = [True] * (len(ids) - len(encoding.ids))  # an empty text is read as the token that begins one
    spans: tuple[Span, ...] = (*encoding.offsets, *((0, 0) for _ in begun))[: len(ids)]
    special = (*map(bool, encoding.special_tokens_mask), *begun)[: len(ids)]
    types = [*encoding.type_ids, *(0 for _ in begun)][: len(ids)]
    return InputTokens.of(m, ids, spans=spans, text=given, special=special), types


def _pixels(m: Model, given: Any) -> Tensor:
    """Return the pixels of an image: [1, C, height, width]."""
    if isinstance(given, Tensor) and given.ndim == 4:
        refuse(given.shape[0] != 1, f"{given.shape[0]} images were given: look into one at a time")
        given = given[0]
    return preprocessor.to_pixels(given, m.config, m.images)[None].to(next(m.model.parameters()))


def padded_rows(
    m: Model, rows: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] = ()
) -> dict[str, Tensor]:
    """Return what a model is called with for rows of ids, and for their sources, padded at the right."""
    device, pad, arguments = device_of(m.model), m.special.get("pad", 0), dict[str, Tensor]()
    for ids, name, mask in ((rows, "ids", "mask"), (sources, "source", "source_mask")):
        if ids:
            arguments |= {name: padded(ids, pad, device), mask: real_tokens(ids, device)}
    return arguments


def recorded(model: Transformer, patterns: Iterable[str], *main: Tensor, **given: Any) -> Recording:
    """Run a batch without dropout, gradients and head, and record the activations whose names match."""
    with torch.no_grad(), evaluating(model), record(model, *patterns) as seen:
        model(*main, **given, logits="none")
    return seen


# A pass recorded once ---------------------------------------------------------------------------------------


LARGEST = 2**28  # numbers of all patterns together; where there would be more, none is kept
LARGEST_GRAPH = 2**24  # numbers of all patterns, of a pass that is kept with its gradients
SLOPED = (".z", ".pattern", ".v", ".scores", "embedding", "feedforward.out")
UNSEEN = (".pre", ".in", "resid_mid", "logits")


@dataclass(frozen=True)
class CachedPass(Prepared):
    """Inputs whose activations are recorded in one pass, at the first question about them."""

    @cached_property
    def _pass(self) -> tuple[Output, Recording]:
        """The hidden states, and every activation that is kept."""
        unseen = UNSEEN if self.holds_patterns else (*UNSEEN, ".pattern", ".scores")
        kept = [name for name in tap_names(self.model) if not name.endswith(unseen)]
        return super().record(*kept, logits="none")

    @cached_property
    def _graph(self) -> Recording:
        """What gradients are taken of."""
        kept = [name for name in tap_names(self.model) if name.endswith(SLOPED)]
        with torch.enable_grad(), record(self.model, *kept, detach=False) as seen:
            self.run(logits="none")
        return seen

    @cached_property
    def log_sums(self) -> dict[int, Tensor]:
        """By column, [L + 1]: log-sum-exp of all logits, by which `lens.followed` normalises one choice."""
        return {}

    @property
    def holds_patterns(self) -> bool:
        """Whether all patterns fit."""
        return self._pattern_numbers <= LARGEST

    @property
    def keeps_graph(self) -> bool:
        """Whether gradients share one pass; for a long text each takes its own."""
        return self._pattern_numbers <= LARGEST_GRAPH

    @property
    def _pattern_numbers(self) -> int:
        return sum(
            attention.n_heads * math.prod(map(len, self.queries_and_keys(attention.kind)))
            for attention in patterned(self.model.config, required=False)
        )

    def forget(self) -> None:
        """Free what was recorded; the next question runs the model again."""
        for name in ("_pass", "log_sums"):
            self.__dict__.pop(name, None)
        self.forget_graph()

    def forget_graph(self) -> None:
        """Free what gradients are taken of, which is most of the memory."""
        for name in ("_graph", "_cut"):
            self.__dict__.pop(name, None)

    def record_graph(self, last: str, *patterns: str) -> Recording:
        """Return activations with their autograd graph; for a long text, only those before `last`."""
        return self._graph if self.keeps_graph else super().record_graph(last, *patterns)

    def record(self, *patterns: str, logits: Literal["all", "none"] = "all") -> tuple[Output, Recording]:
        """Return what was recorded; run a pass only for activations that are not kept."""
        output, seen = self._pass
        wanted = {
            name
            for pattern in patterns
            for name in ((pattern,) if pattern in seen else matching(self.model.config, pattern))
        }
        if not wanted <= seen.keys():
            return super().record(*patterns, logits=logits)
        if logits == "none":
            return output, seen
        with torch.no_grad(), evaluating(self.model):
            return replace(output, logits=self.model.head(output.hidden, None)), seen

    def hand_out(self, takers: Mapping[str, Callable[[Tensor], None]]) -> None:
        """Hand each named activation to its taker."""
        _, seen = self._pass
        if not takers.keys() <= seen.keys():
            return super().hand_out(takers)
        for name, take in takers.items():
            take(seen[name])


def cached_pass(prepared: Prepared) -> CachedPass:
    """Return the same inputs, whose pass is recorded once."""
    return CachedPass(**{field.name: getattr(prepared, field.name) for field in fields(prepared)})


# What the head chooses among --------------------------------------------------------------------------------


KINDS = {"lm": "token", "mlm": "token", "classifier": "class", "tagger": "class", "span": "place"}


@dataclass(frozen=True)
class Choices:
    """The columns and the choices of one prepared input."""

    prepared: Prepared
    kind: str  # token, class or place
    columns: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Every class, or every position; tokens are too many, see `name`."""
        if self.kind == "place":
            return tuple(f"{place}:{token}" for place, token in enumerate(self.prepared.tokens.labels))
        return self.prepared.m.class_names

    @property
    def count(self) -> int:
        """How many choices there are."""
        return self.prepared.m.config.vocab_size if self.kind == "token" else len(self.names)

    @property
    def problem(self) -> str | None:
        """What a classifier says of its classes: several may hold, or they are numbers; None: one holds."""
        description = self.prepared.m.description
        return None if self.kind != "class" or description is None else description.theirs.get("problem_type")

    @property
    def exclusive(self) -> bool:
        """Whether a softmax over all choices follows: what every score gains alike changes nothing."""
        return self.count > 1 and self.problem not in ("multi_label_classification", "regression")

    def probability(self, scores: Tensor, number: int) -> float | None:
        """Return the probability of one choice, of scores [N]; None where the model gives numbers."""
        if self.problem == "regression":
            return None
        scores = wide(scores)
        return float((scores.softmax(-1) if self.exclusive else scores.sigmoid())[number])

    def name(self, number: int) -> str:
        """Return one choice, as people read it."""
        return label(self.prepared.m.tokenizer, number) if self.kind == "token" else self.names[number]

    def find(self, wanted: str | int) -> int:
        """Return the number of a choice, given its name or its number."""
        if self.kind == "token":
            return find_token(self.prepared.m, wanted)
        return find_name(wanted, self.names, self.kind)

    def scores(self, logits: Tensor) -> Tensor:
        """Return what the head says as a table for each row: [B, ...] -> [B, C, N]."""
        if self.kind == "place":
            return logits.transpose(1, 2)
        return logits[:, None] if logits.ndim == 2 else logits

    def column_scores(self, hidden: Tensor, column: int) -> Tensor:
        """Return the scores of one column, and compute no other of a vocabulary: [B, T, D] -> [B, N]."""
        head = self.prepared.model.head
        if self.kind == "token":
            return self.scores(head(hidden[:, column : column + 1], None))[:, 0]
        return self.scores(head(hidden, None))[:, column]


def choices_of(prepared: Prepared) -> Choices:
    """Return what the head of a model chooses among for this input."""
    head = prepared.m.config.head or "none"
    refuse(
        head not in KINDS,
        f'head "{head}" gives vectors, not choices: '
        f"this takes a model whose head is one of {', '.join(KINDS)}",
    )
    whole = ("whole image" if prepared.main.is_floating_point() else "whole text",)
    columns = {"classifier": whole, "span": ("begins", "ends")}.get(head, prepared.tokens.labels)
    return Choices(prepared, KINDS[head], columns)


def find_name(wanted: str | int, names: Sequence[str], kind: str) -> int:
    """Return the number of a class or a position, given its name or its number, perhaps written out."""
    if wanted in names:
        return names.index(str(wanted))
    if isinstance(wanted, str) and not wanted.lstrip("-").isdecimal():
        refuse_unknown(kind, wanted, names)
    number, last = int(wanted), len(names) - 1
    refuse(not 0 <= number <= last, f"there is no {kind} {wanted}: they go from 0 to {last}")
    return number


def find_token(m: Model, wanted: str | int) -> int:
    """Return a token of the vocabulary.

    `wanted` is its number, its own writing, its label (· is a space), or a text that it is, perhaps after a
    space.
    """
    refuse(wanted == "", "the token is empty: name one of the vocabulary, such as · for a space")
    size, tokenizer = m.config.vocab_size, m.tokenizer
    if isinstance(wanted, str) and tokenizer is not None:
        number: int | None = tokenizer.token_to_id(wanted)
        if number is None:
            shown = visible(wanted)
            number = next((token for token in range(size) if label(tokenizer, token) == shown), None)
        if number is not None:
            return number
    if isinstance(wanted, int) or wanted.lstrip("-").isdecimal():
        number = int(wanted)
        refuse(not 0 <= number < size, f"there is no token {wanted}: ids go from 0 to {size - 1}")
        return number
    if tokenizer is None:
        raise InputError(f'"{wanted}" is not a token id, and this model has no tokenizer: give a number')
    whole, spaced = (tokenizer.encode(text, add_special_tokens=False).ids for text in (wanted, " " + wanted))
    known = [ids[0] for ids in (whole, spaced) if len(ids) == 1 and ids[0] != m.special.get("unk")]
    listed = ", ".join(labels(tokenizer, whole[:8])) or "none"
    refuse(not known, f'"{wanted}" is {len(whole)} tokens ({listed}): name one token of the vocabulary')
    return int(known[0])


def find_column(position: int, columns: Sequence[str]) -> int:
    """Return a column by its number; negative ones count from the end."""
    count = len(columns)
    refuse(
        not -count <= position < count,
        f"there is no position {position}: there are {count}, from 0 to {count - 1}, "
        f"or from the end, -1 to -{count}",
    )
    return position % count
