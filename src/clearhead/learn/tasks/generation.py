"""Text in, text out: generate, translate, and score what is already written.

Shapes: B rows, S source length, T length, V vocabulary.
"""

import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from clearhead.core.checks import check_stack_input
from clearhead.core.config import TABLES
from clearhead.core.transformer import Transformer, evaluating
from clearhead.errors import InputError, nearest, refuse
from clearhead.learn.batches.padding import padded, real_tokens
from clearhead.learn.parallel.shards import is_split
from clearhead.learn.tasks.reading import fitting
from clearhead.learn.tasks.results import Generation, Score
from clearhead.run.bundle import Bundle
from clearhead.run.generate import beam, engine, speculate
from clearhead.run.generate.decode import Continuation, Ends, Prompts, check_options, decode
from clearhead.run.generate.request import Request, RequestOptions, make_request, with_own
from clearhead.run.generate.stream import TextStream

Prompt = str | Sequence[int]
OnText = Callable[[int, str], None]  # called with the row's number and the text that is new and final
Cancel = Callable[[], bool] | threading.Event
LONGEST, BEAMS = 256, 4  # new tokens at most, and beams, where generation_config.json does not say


class TranslateOptions(RequestOptions, total=False):
    """Keywords of `translate` that it does not name itself."""

    on_text: OnText | None
    cancel: Cancel | None
    draft: Bundle | None


class GenerateOptions(TranslateOptions, total=False):
    """Keywords of `generate` that it does not name itself."""

    num_beams: int
    length_penalty: float


@dataclass(frozen=True)
class Hooks:
    """What a generation calls or runs beside the model; apart from the request, since none of it is data."""

    on_text: OnText | None = None
    cancel: Cancel | None = None  # set, or True: every row ends with what it has
    draft: Bundle | None = None  # a smaller model with the same vocabulary that guesses tokens

    @property
    def cancelled(self) -> Callable[[], bool] | None:
        """The function that says whether to end."""
        return self.cancel.is_set if isinstance(self.cancel, threading.Event) else self.cancel


NO_HOOKS = Hooks()


def generate(
    m: Bundle, prompts: Sequence[Prompt], options: Mapping[str, Any], hooks: Hooks = NO_HOOKS
) -> list[list[Generation]]:
    """Continue each prompt, or, with an encoder, answer it: its `num_return` best results.

    `options` are fields of a request; where they say nothing, the model's own rules hold.
    """
    request, texts, ends = asked_for(m, prompts, options, hooks)
    if not texts:
        return []
    draft = hooks.draft
    with evaluating(m.model), nullcontext() if draft is None else evaluating(draft.model):
        runner, read = m.engine.runner(), prompts_of(m, texts)
        if request.num_beams > 1:
            found = _search(m, runner, request, read, ends)
        else:
            smaller = None if draft is None else draft.engine.runner()
            drafters = speculate.drafters_for(runner, request, read, texts, smaller)
            rows = _continue(m, runner, request, read, ends, drafters, hooks.on_text)
            found = [[made] for made in rows]
    _warn_of_length(m, texts, request, found)
    return found


def asked_for(
    m: Bundle, prompts: Sequence[Prompt], options: Mapping[str, Any], hooks: Hooks = NO_HOOKS
) -> tuple[Request, list[list[int]], Ends]:
    """Return the request, the ids of each prompt and what ends a text, all of them checked."""
    refuse(
        m.config.input != "tokens",
        f"a prompt is text, and this model reads {m.config.input}: {fitting(m)}",
    )
    hooked = hooks != NO_HOOKS
    request = make_request(with_own(m.own_options, options, hooked))
    request.check_hooks(on_text=hooks.on_text, cancel=hooks.cancel, draft=hooks.draft)
    texts = [_fitted(m, m.prompt_ids(prompt), request) for prompt in prompts]
    stop_ids = _stop_ids(m, request.stop_tokens)
    refuse(
        (request.stop or hooks.on_text) and m.tokenizer is None,
        "stop strings and streaming need text, and the model has no tokenizer: leave them out",
    )
    refuse(
        request.reuse and (len(texts) != 1 or m.config.family != "decoder"),
        f"reuse with {len(texts)} prompts of a {m.config.family}: it takes one prompt of a decoder at a time",
    )
    apart = {"seconds": request.seconds, "cancel": hooks.cancel, "compile": request.compile}
    asked = [name for name, value in apart.items() if value]
    refuse(
        asked and is_split(m.model),
        f"{', '.join(asked)} with a model that is split over processes, which must go on together: "
        "leave it out",
    )
    draft = hooks.draft
    refuse(
        draft is not None
        and None not in (m.tokenizer, draft.tokenizer)
        and m.text_tokenizer.get_vocab() != draft.text_tokenizer.get_vocab(),
        "the draft's tokenizer has another vocabulary than the model's: choose a draft that shares it",
    )
    deadline = None if request.seconds is None else time.monotonic() + request.seconds
    grammars, constraint = None, request.constraint
    if constraint is not None:
        refuse(not stop_ids, f"{constraint[0]} needs a token that ends a text: name one (stop_tokens)")
        grammars = m.engine.grammars_of(m.text_tokenizer)
        grammars.begin(constraint, stop_ids)  # a wrong one is refused before the prompt is computed
    ends = Ends(stop_ids, cancel=hooks.cancelled, deadline=deadline, grammars=grammars)
    check_options(m.model, request, ends)
    return request, texts, ends


def _search(
    m: Bundle, runner: Transformer, request: Request, prompts: Prompts, ends: Ends
) -> list[list[Generation]]:
    def made(number: int, found: beam.Hypothesis) -> Generation:
        stream = stream_of(m, prompts, number)
        if stream is not None:
            stream.add(found.ids)
        return Generation(
            None if stream is None else stream.text, found.ids, found.stop_reason, score=found.score
        )

    rows = beam.beam_search(runner, request, prompts, ends)
    return [[made(number, found) for found in row] for number, row in enumerate(rows)]


def _continue(
    m: Bundle,
    runner: Transformer,
    request: Request,
    prompts: Prompts,
    ends: Ends,
    drafters: list[speculate.Drafter],
    on_text: OnText | None,
) -> list[Generation]:
    """Continue each prompt token by token, and tell `on_text` of text as soon as it is final."""
    streams = [stream_of(m, prompts, number, request.stop) for number in range(len(prompts.ids))]

    def tell(number: int, new: str) -> None:
        if on_text is not None and new:
            on_text(number, new)

    def on_token(number: int, row: Continuation) -> str | None:
        stream = streams[number]
        assert stream is not None
        tell(number, stream.push(row.ids[-1]))
        return "stop" if stream.stopped_by is not None else None

    watched = bool(request.stop) or on_text is not None
    if watched:
        ends = dataclasses.replace(ends, on_token=on_token)
    made = []
    for number, row in enumerate(_decode(m, runner, request, prompts, ends, drafters)):
        stream = streams[number]
        if stream is not None:
            stream.add(() if watched else row.ids)
            tell(number, stream.finish())
        made.append(generation_of(row, request, stream))
    return made


def generation_of(row: Continuation, request: Request, stream: TextStream | None) -> Generation:
    """Return a row that has ended as the caller sees it."""
    return Generation(
        None if stream is None else stream.text,
        row.ids,
        row.stop_reason,
        row.logprobs if request.reports else None,
        row.alternatives if request.alternatives else None,
        steps=row.steps,
        layers=row.layers if request.early_exit is not None else None,
    )


def _decode(
    m: Bundle,
    runner: Transformer,
    request: Request,
    prompts: Prompts,
    ends: Ends,
    drafters: list[speculate.Drafter],
) -> list[Continuation]:
    prefix = m.engine.take_prefix(runner) if request.reuse else None
    slots = prompts.longest + request.max_new_tokens
    cache = None if prefix is None else prefix.begin(prompts.ids[0], slots)
    steps = m.engine.steps_for(runner, request.compile)
    if drafters:
        rows = speculate.speculate(runner, request, prompts, ends, cache, drafters=drafters)
    elif steps is not None:
        rows = engine.decode_compiled(runner, request, prompts, ends, cache, steps=steps)
    else:
        rows = decode(runner, request, prompts, ends, cache)
    if prefix is not None:
        prefix.end(rows[0])
        m.engine.prefix = prefix
    return rows


def stream_of(m: Bundle, prompts: Prompts, number: int, stop: Sequence[str] = ()) -> TextStream | None:
    """Return the text of one row as it grows; None without a tokenizer."""
    before = prompts.ids[number] if prompts.source is None else ()
    return None if m.tokenizer is None else TextStream(m.tokenizer, before, stop)


def prompts_of(m: Bundle, texts: list[list[int]]) -> Prompts:
    """Return what the model reads: the texts are its prompts, or, with an encoder, its sources."""
    if m.config.family != "encoder-decoder":
        return Prompts(texts)
    refuse(not all(texts), "a prompt is empty: give one token at least")
    device = next(m.model.parameters()).device
    mask = real_tokens(texts, device) if len({*map(len, texts)}) > 1 else None
    start = m.start_ids[:1]  # what else is forced is written
    return Prompts([start] * len(texts), padded(texts, device=device), mask)


def _fitted(m: Bundle, prompt: list[int], request: Request) -> list[int]:
    """Return the last tokens of a prompt that fit into the context, beside new ones in a decoder."""
    if request.overflow in ("refuse", "stream"):
        return prompt
    beside = request.overflow == "window" and m.config.family == "decoder"
    room = m.max_length - (request.max_new_tokens - 1 if beside else 0)
    refuse(
        room < 1,
        f"{request.max_new_tokens} new tokens leave no room for a prompt: "
        f"the model reads {m.max_length} at most",
    )
    return prompt[-room:]


def _warn_of_length(
    m: Bundle, texts: list[list[int]], request: Request, found: list[list[Generation]]
) -> None:
    """Warn, once in a process, of texts that grew longer than those the model was trained on."""
    known, read = m.config.max_positions, [len(text) - 1 for text in texts]
    longest = max((count + len(one.ids) for count, row in zip(read, found) for one in row), default=0)
    if m.config.family != "decoder" or longest <= known:
        return
    if request.overflow == "slide":
        message = f"texts passed the model's {known} positions: past them, it read the last {known} tokens"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    elif m.config.positions == "rope" and request.overflow != "stream":
        message = f"texts passed the {known} tokens of the model's training: past them, expect worse"
        warnings.warn(f'{message}; overflow="slide" reads the last {known}', RuntimeWarning, stacklevel=2)


def _stop_ids(m: Bundle, tokens: Sequence[int | str]) -> frozenset[int]:
    """Return every id that ends a row, with those given as ids or names."""
    size = m.config.vocab_size
    ids = {token for token in m.stops if token < size}
    for token in tokens:
        found = m.text_tokenizer.token_to_id(token) if isinstance(token, str) else token
        if type(found) is not int or not 0 <= found < size:
            near = f": ids go from 0 to {size - 1}"
            if isinstance(token, str):
                near = nearest(token, map(str, m.text_tokenizer.get_added_tokens_decoder().values()))
            raise InputError(
                f"stop token {token!r} is not in the vocabulary{near}; text that is no token goes into stop"
            )
        ids.add(found)
    return frozenset(ids)


def translate(
    m: Bundle, texts: Sequence[Prompt], options: dict[str, Any], hooks: Hooks = NO_HOOKS
) -> list[list[Generation]]:
    """Return what an encoder-decoder makes of each text; see `Model.translate`.

    `options` are fields of a request. Those that are missing or None are the model's own.
    """
    refuse(
        m.config.family != "encoder-decoder",
        f"translate needs an encoder-decoder, and this is a model of family {m.config.family}: {fitting(m)}",
    )
    stated, given = m.generation, {name: value for name, value in options.items() if value is not None}
    room = m.config.max_positions - len(m.start_ids)
    limit = stated.get("max_new_tokens") or (stated.get("max_length") or min(LONGEST, room) + 1) - 1
    usual = {"max_new_tokens": max(1, min(limit, room) if m.config.positions in TABLES else limit)}
    if "num_beams" not in m.own_options and not given.get("temperature"):
        usual["num_beams"] = BEAMS
    return generate(m, texts, usual | given, hooks)


def check_scores(m: Bundle) -> None:
    """Refuse a model that scores no text."""
    refuse(
        m.config.head != "lm",
        f"this model's head is {m.config.head}: only a language model (head lm) scores a text",
    )


@torch.inference_mode()
def score(m: Bundle, text: str | Sequence[int], source: str | Sequence[int] | None = None) -> Score:
    """Return the log-probability of each token given those before it; see `Model.score`."""
    check_scores(m)
    both = m.config.family == "encoder-decoder"
    refuse(both and source is None, "score needs a source for this encoder-decoder")
    refuse(source is not None and not both, "score takes a source only with an encoder")
    ids, first, forced = m.prompt_ids(text), m.start_ids[:1], m.start_ids[1:]
    if forced and ids[:1] != forced:
        ids = [*forced, *ids]  # what every answer begins with is part of it
    refuse(len(first + ids) < 2, "a score needs two tokens at least: the first has nothing before it")
    device = next(m.model.parameters()).device
    row = torch.tensor([[*first, *ids]], device=device)
    check_stack_input(row, m.model.main.spec, "ids")  # the last id is asked about, and not fed
    more = {} if source is None else {"source": torch.tensor([m.prompt_ids(source)], device=device)}
    with evaluating(m.model):
        logits = m.engine.reader()(row[:, :-1], **more).logits[0].float()  # T-1 V
    values = logits.log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0].tolist()
    return Score(ids, values if first else [None, *values])
