"""Text in, text out: generate, translate, chat, and score what is already written.

Shapes: B rows, S source length, T length, V vocabulary.
"""

import dataclasses
import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clearhead.core.config import TABLES
from clearhead.core.transformer import Transformer
from clearhead.errors import InputError, RequestError, nearest, refuse
from clearhead.hub.files import reading
from clearhead.hub.sentencepiece import token_text
from clearhead.hub.tokenizer import TEMPLATE, templates_of
from clearhead.hub.tokens.answers import AnswerParser, Part, ReadAnswer
from clearhead.hub.tokens.chat import ASSISTANT, KNOWN, ChatTemplate, Message
from clearhead.hub.tokens.text import clean
from clearhead.hub.tokens.tools import AUTO, CALL, NONE, RETURN, Tool, ToolFormat, tools_of
from clearhead.hub.tokens.training import SpecialTokens
from clearhead.hub.vocabularies import ROLES
from clearhead.learn.batches.ragged import padded, real_tokens
from clearhead.learn.parallel.shards import is_split
from clearhead.learn.tasks.images import ImagePrompt, expanded, ids_of, taken, vectors_of
from clearhead.learn.tasks.infilling import infilled, infilling_ends
from clearhead.learn.tasks.reading import fitting
from clearhead.learn.tasks.results import Generation, Score
from clearhead.run.bundle import Bundle
from clearhead.run.generate import beam, sequence, speculate
from clearhead.run.generate.decode import check_options, decode
from clearhead.run.generate.diffusion import check_diffusion, denoise
from clearhead.run.generate.own_rules import with_own
from clearhead.run.generate.request import ANSWER_TOKENS, Request, RequestOptions, make_request
from clearhead.run.generate.sequence import Ends, Prompts, logprobs_of
from clearhead.run.generate.stream import TextStream
from clearhead.variants.contexts import evaluating
from clearhead.variants.inputs import check_stack_input
from clearhead.variants.kinds import denoises

Prompt = str | Sequence[int] | ImagePrompt
OnText = Callable[[int, str], None]  # called with the row's number and the text that is new and final
Cancel = Callable[[], bool] | threading.Event
LONGEST, BEAMS = 256, 4  # new tokens at most, and beams, where generation_config.json does not say


class TranslateOptions(RequestOptions, total=False):
    """Keywords of `translate` that it does not name itself."""

    on_text: OnText | None
    cancel: Cancel | None
    draft: Bundle | str | None


class GenerateOptions(TranslateOptions, total=False):
    """Keywords of `generate` that it does not name itself."""

    num_beams: int
    length_penalty: float


@dataclass(frozen=True)
class Hooks:
    """Callbacks and helpers of a generation; apart from the request, which is data."""

    on_text: OnText | None = None
    cancel: Cancel | None = None  # set, or True: every row ends with what it has
    draft: Bundle | str | None = None  # what drafts tokens: a smaller model, or "mtp", its own MTP layers

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
    apart = {"seconds": request.seconds, "cancel": hooks.cancel, "compile": request.compile}
    unsupported = [name for name, value in apart.items() if value]
    refuse(
        unsupported and is_split(m.model),
        f"{', '.join(unsupported)} with a model that is split over processes, which must go on together: "
        "leave it out",
    )
    if not texts:
        return []
    draft = hooks.draft
    with evaluating(m.model), evaluating(draft.model) if isinstance(draft, Bundle) else nullcontext():
        runner, read = m.engine.runner(), prompts_of(m, texts, prompts)
        if request.num_beams > 1:
            results = _search(m, runner, request, read, ends)
        else:
            smaller = draft.engine.runner() if isinstance(draft, Bundle) else draft
            drafters = speculate.drafters_for(runner, request, read, texts, smaller)
            rows = _continue(m, runner, request, read, ends, drafters, hooks.on_text)
            results = [[generation] for generation in rows]
    _warn_of_length(m, texts, request, results)
    return results


def asked_for(
    m: Bundle, prompts: Sequence[Prompt], options: Mapping[str, Any], hooks: Hooks = NO_HOOKS
) -> tuple[Request, list[list[int]], Ends]:
    """Return the request, the ids of each prompt and what ends a text, all of them checked."""
    refuse(
        m.config.input != "tokens", f"a prompt is text, and this model reads {m.config.input}: {fitting(m)}"
    )
    hooked = hooks != NO_HOOKS
    request = make_request(with_own(m.own_options, options, hooked))
    check_diffusion(m.config, request, draft=hooks.draft)
    request.check_hooks(on_text=hooks.on_text, cancel=hooks.cancel, draft=hooks.draft)
    suffix = request.suffix
    if suffix:
        refuse(
            any(isinstance(one, ImagePrompt) for one in prompts), "suffix with images: leave one of them out"
        )
        texts = [infilled(m, prompt, suffix) for prompt in prompts if not isinstance(prompt, ImagePrompt)]
    else:
        texts = [
            _fitted(m, ids_of(m, prompt), request, isinstance(prompt, ImagePrompt)) for prompt in prompts
        ]
    stop_ids = _stop_ids(m, request.stop_tokens) | (infilling_ends(m) if suffix else set())
    refuse(
        (request.stop or hooks.on_text) and m.tokenizer is None,
        "stop strings and streaming need text, and the model has no tokenizer: leave them out",
    )
    refuse(
        request.reuse and (len(texts) != 1 or m.config.family != "decoder"),
        f"reuse with {len(texts)} prompts of a {m.config.family}: it takes one prompt of a decoder at a time",
    )
    if hooks.draft is not None:
        check_draft(m, hooks.draft)
    deadline = None if request.seconds is None else time.monotonic() + request.seconds
    grammars, constraint = None, request.constraint
    if constraint is not None:
        refuse(not stop_ids, f"{constraint[0]} needs a token that ends a text: name one (stop_tokens)")
        grammars = m.engine.grammars_of(m.text_tokenizer)
        grammars.begin(constraint, stop_ids)  # a wrong one is refused before the prompt is computed
    ends = Ends(stop_ids, cancel=hooks.cancelled, deadline=deadline, grammars=grammars)
    check_options(m.model, request, ends)
    return request, texts, ends


def check_draft(m: Bundle, draft: Bundle | str) -> None:
    """Refuse a draft model with another vocabulary, and MTP layers that are not there."""
    if not isinstance(draft, Bundle):
        return speculate.check_mtp(m.model, draft)
    refuse(
        None not in (m.tokenizer, draft.tokenizer)
        and m.text_tokenizer.get_vocab() != draft.text_tokenizer.get_vocab(),
        "the draft's tokenizer has another vocabulary than the model's: choose a draft that shares it",
    )
    speculate.check_draft(m.model, draft.model)


def _search(
    m: Bundle, runner: Transformer, request: Request, prompts: Prompts, ends: Ends
) -> list[list[Generation]]:
    def generation(number: int, best: beam.Hypothesis) -> Generation:
        text = _text_of(stream_of(m, request, prompts, number), best.ids)
        return Generation(text, best.ids, best.stop_reason, score=best.score)

    rows = beam.beam_search(runner, request, prompts, ends)
    return [[generation(number, best) for best in row] for number, row in enumerate(rows)]


def _continue(
    m: Bundle,
    runner: Transformer,
    request: Request,
    prompts: Prompts,
    ends: Ends,
    drafters: list[sequence.Drafter],
    on_text: OnText | None,
) -> list[Generation]:
    """Continue each prompt token by token, and tell `on_text` of text as soon as it is final."""

    def tell(number: int, new: str) -> None:
        if on_text is not None and new:
            on_text(number, new)

    if request.stop or on_text is not None:
        ends = dataclasses.replace(
            ends,
            on_token=lambda number, row: tell(number, row.new),
            stream=partial(stream_of, m, request, prompts),
        )
    prefix = m.engine.take_prefix(runner) if request.reuse else None
    slots = prompts.longest + request.max_new_tokens
    cache = None if prefix is None else prefix.begin(prompts.keys(0), slots)
    if denoises(m.config):
        rows = denoise(runner, request, prompts, m.mask_id, ends)
    else:
        steps = None if drafters else m.engine.steps_for(runner, request.compile)
        rows = decode(runner, request, prompts, ends, cache, steps, drafters)
    if prefix is not None:
        prefix.end(rows[0])
        m.engine.prefix = prefix
    generations = []
    for row in rows:
        if row.stream is not None:
            tell(row.number, row.stream.finish())
            text: str | None = row.stream.text
        else:
            text = _text_of(stream_of(m, request, prompts, row.number), row.ids)
        generations.append(generation_of(row, request, text))
    return generations


def _text_of(stream: TextStream | None, ids: Sequence[int]) -> str | None:
    """Return how these ids read all at once; None without a tokenizer."""
    if stream is None:
        return None
    stream.add(ids)
    return stream.text


def generation_of(row: sequence.Sequence, request: Request, text: str | None) -> Generation:
    """Return a row that has ended as the caller sees it."""
    return Generation(
        text,
        row.ids,
        row.stop_reason,
        row.logprobs if request.reports else None,
        row.alternatives if request.alternatives else None,
        steps=row.steps,
        layers=row.layers if request.early_exit is not None else None,
    )


def stream_of(m: Bundle, request: Request, prompts: Prompts, number: int) -> TextStream | None:
    """Return the text of one row as it grows; None without a tokenizer."""
    if m.tokenizer is None:
        return None
    before = prompts.ids[number] if prompts.source is None else ()
    return TextStream(m.tokenizer, before, request.stop, request.skip_special_tokens)


def prompts_of(m: Bundle, texts: list[list[int]], prompts: Sequence[Prompt] = ()) -> Prompts:
    """Return what the model reads: the texts are its prompts, or, with an encoder, its sources.

    `prompts` are what the texts were made of, with their images.
    """
    if m.config.family != "encoder-decoder":
        vectors = [vectors_of(m, ids, prompt) for ids, prompt in zip(texts, prompts)]
        return Prompts(texts, vectors=vectors if any(vectors) else None)
    refuse(not all(texts), "a prompt is empty: give one token at least")
    device = next(m.model.parameters()).device
    mask = real_tokens(texts, device) if len({*map(len, texts)}) > 1 else None
    start = m.start_ids[:1]  # what else is forced is written
    return Prompts([start] * len(texts), padded(texts, device=device), mask)


def _fitted(m: Bundle, prompt: list[int], request: Request, whole: bool = False) -> list[int]:
    """Return the last tokens of a prompt that fit into the context, next to new ones in a decoder."""
    if request.overflow in ("refuse", "stream"):
        return prompt
    shared = request.overflow == "window" and m.config.family == "decoder"
    room = m.max_length - (request.max_new_tokens - 1 if shared else 0)
    refuse(
        room < 1,
        f"{request.max_new_tokens} new tokens leave no room for a prompt: "
        f"the model reads {m.max_length} at most",
    )
    refuse(whole and len(prompt) > room, "a prompt with images is not cut: shorten it, or leave overflow out")
    return prompt[-room:]


def _warn_of_length(
    m: Bundle, texts: list[list[int]], request: Request, results: list[list[Generation]]
) -> None:
    """Warn, once in a process, of texts that grew longer than those the model was trained on."""
    known, read = m.config.max_positions, [len(text) - 1 for text in texts]
    longest = max(
        (count + len(generation.ids) for count, row in zip(read, results) for generation in row), default=0
    )
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
        number = m.text_tokenizer.token_to_id(token) if isinstance(token, str) else token
        if type(number) is not int or not 0 <= number < size:
            near = f": ids go from 0 to {size - 1}"
            if isinstance(token, str):
                near = nearest(token, map(str, m.text_tokenizer.get_added_tokens_decoder().values()))
            raise InputError(
                f"stop token {token!r} is not in the vocabulary{near}; text that is no token goes into stop"
            )
        ids.add(number)
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
    stated, chosen = m.generation, {name: value for name, value in options.items() if value is not None}
    room = m.config.max_positions - len(m.start_ids)
    limit = stated.get("max_new_tokens") or (stated.get("max_length") or min(LONGEST, room) + 1) - 1
    usual = {"max_new_tokens": max(1, min(limit, room) if m.config.positions in TABLES else limit)}
    if "num_beams" not in m.own_options and not chosen.get("temperature"):
        usual["num_beams"] = BEAMS
    return generate(m, texts, usual | chosen, hooks)


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
    check_stack_input(row, m.model.main.spec, "ids")  # the last id is scored, and is no input
    more = {} if source is None else {"source": torch.tensor([m.prompt_ids(source)], device=device)}
    with evaluating(m.model):
        logits = m.engine.reader()(row[:, :-1], **more).logits[0]  # T-1 V
    values = logprobs_of(logits, row[0, 1:], 0)[0]
    return Score(ids, [*([] if first else [None]), *values])


# Chat -------------------------------------------------------------------------------------------------------


PLAIN = "plain"  # the template of a model that has none
# To see how a turn ends; no template writes these words itself.
PROBE = ({"role": "user", "content": "xyzzy"}, {"role": ASSISTANT, "content": "plugh"})


def chat_template(m: Bundle) -> ChatTemplate:
    """Return the model's chat template: that of the tokenizer's settings, or of the file next to them."""
    templates = templates_of(m.settings)
    if "default" not in templates:
        raise InputError(
            f"this model has no chat template ({TEMPLATE}, or chat_template in tokenizer_config.json): "
            "give it plain text, as generate and /v1/completions do, or train it on conversations"
        )
    return ChatTemplate(templates["default"], named_tokens(m), templates.get("tool_use"))


def named_tokens(m: Bundle) -> dict[str, str]:
    """Return special tokens as templates name them: those of the tokenizer's settings, else by their ids."""
    stated = {f"{role}_token": token_text(m.settings.get(f"{role}_token")) for role in ROLES}
    known = {name: text for name, text in stated.items() if text is not None}
    by_id = {f"{role}_token": m.text_tokenizer.id_to_token(token) for role, token in m.special.items()}
    return known or {name: text for name, text in by_id.items() if text is not None}


def named_template(name: str) -> str:
    """Return a template by its name, or that of a file."""
    path = Path(name)
    refuse(
        name not in KNOWN and not path.is_file(),
        f'tokens.template "{name}" is no file and no known template{nearest(name, KNOWN)}: '
        f"known are {', '.join(KNOWN)}",
    )
    if name in KNOWN:
        return KNOWN[name]
    with reading(path, "is not UTF-8 text"):
        return path.read_text(encoding="utf-8")


def template_for(name: str | None, specials: SpecialTokens) -> ChatTemplate:
    """Return the template of a new model, with the special tokens that its tokenizer will have."""
    tokens = {f"{role}_token": token for role, token in specials.tokens.items()}
    return ChatTemplate(named_template(name or PLAIN), tokens)


def set_template(m: Bundle, name: str | None) -> str:
    """Give a model the template of this name or file, or keep its own, or take the plain one; return a note.

    The token that ends a turn then ends what the model generates too, here and in transformers.
    """
    own = "default" in templates_of(m.settings)
    if name is not None or not own:
        m.settings["chat_template"] = named_template(name or PLAIN)
    end = turn_end(m)
    if end is not None and end not in m.stops:
        m.generation["eos_token_id"] = [*m.stops, end]
    token = "nothing" if end is None else m.text_tokenizer.id_to_token(end)
    which = "the model's own" if own and name is None else name or PLAIN
    return f"chat template: {which}, which ends an answer with {token}"


def chat_ids(
    m: Bundle, messages: Sequence[Message], more: Mapping[str, Any], files: bool = True
) -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins.

    The template writes every special token, so the tokenizer adds none. Without `files`, images come with
    the messages alone.
    """
    messages, images = taken(m, messages, files)
    ids = ids_of_chat(m, clean(chat_template(m).render(messages, **more)))
    return expanded(m, ids, images)


def ids_of_chat(m: Bundle, text: str) -> list[int]:
    """Return the token ids of a conversation as its template writes it."""
    ids = list(m.text_tokenizer.encode(text, add_special_tokens=False).ids)
    refuse(not ids, "the chat template writes nothing for these messages")
    return ids


def turn_end(m: Bundle) -> int | None:
    """Return the special token that follows an answer in the model's template; None where none does."""
    ((text, spans),) = chat_template(m).learned(PROBE)
    answer = text[spans[-1].first :] if spans else ""
    tokens = m.text_tokenizer.encode(answer.partition("plugh")[2], add_special_tokens=False).ids
    added = m.text_tokenizer.get_added_tokens_decoder()
    return next((token for token in tokens if token in added and added[token].special), None)


@dataclass(frozen=True)
class ToolChoice:
    """The tools that an answer may call, and whether it must."""

    tools: Sequence[Tool] = ()
    choice: str = AUTO  # or required, none, or the name of a tool
    parallel: bool = True  # several calls in one answer, where the model's format has them

    @property
    def shown(self) -> dict[str, Any]:
        """What the chat template is given."""
        return {"tools": [tool.entry for tool in self.tools]} if self.tools and self.choice != NONE else {}


NO_TOOLS = ToolChoice()


@dataclass(frozen=True)
class ChatTurn:
    """An answer to come: its prompt, the options with which it ends as a turn, and how it is read."""

    ids: list[int]
    options: dict[str, Any]
    form: ToolFormat
    calls: bool = False  # the answer may have calls
    thinks: bool = False  # the prompt ends within its reasoning
    special: tuple[str, ...] = ()  # special tokens that are part of its text
    images: tuple[Any, ...] = ()  # of the prompt

    @property
    def prompt(self) -> Prompt:
        """The prompt, with its images."""
        return ImagePrompt(self.ids, self.images) if self.images else self.ids

    def parser(self) -> AnswerParser | None:
        """Return what divides the answer into its parts; None where all of it is content."""
        plain = not self.calls and self.form.thinking is None and not self.form.harmony
        return None if plain else AnswerParser(self.form, self.calls, self.thinks, self.special)


def turn_of(
    m: Bundle,
    messages: Sequence[Message],
    more: Mapping[str, Any],
    options: Mapping[str, Any],
    tools: ToolChoice = NO_TOOLS,
    files: bool = True,
) -> ChatTurn:
    """Return the answer to come in a conversation; without `files`, images come with the messages alone.

    A template that refuses to be probed for the end of a turn leaves it to the model's own tokens. An answer
    that may call tools is held to their schemas, and, in `options`, to a JSON schema where it calls none.
    """
    if options.get("suffix"):
        line = "suffix with a conversation: an answer has nothing after it: leave suffix out"
        raise RequestError(line, "unsupported_parameter", param="suffix")
    template, options = chat_template(m), dict(options)
    messages, images = taken(m, messages, files)
    text = clean(template.render(messages, **{**tools.shown, **more}))
    try:
        end = turn_end(m)
    except InputError:
        end = None
    form = template.tool_format if tools.shown else template.answer_format
    named = [m.text_tokenizer.token_to_id(name) for name in (RETURN, CALL)] if form.harmony else []
    ends = [end, *named]
    if new := [token for token in ends if token is not None and token not in m.stops]:
        options["stop_tokens"] = (*(options.get("stop_tokens") or ()), *new)
    calls = bool(tools.shown)
    if calls:
        held = next((name for name in ("regex", "grammar") if options.get(name) is not None), None)
        refuse(
            held, f"{held} with tools: an answer with calls is held to their schemas: leave one of them out"
        )
        content = options.pop("json_schema", None)
        content = json.dumps(content) if isinstance(content, Mapping) else content
        options["tool_calls"] = form.constraint(tools.tools, tools.choice, tools.parallel, text, content)
    added = m.text_tokenizer.get_added_tokens_decoder().values()
    special = tuple(token.content for token in added if token.special)
    if form.needs(special, calls):
        options["skip_special_tokens"] = False
    else:
        special = ()
    ids = ids_of_chat(m, text)
    ids = expanded(m, ids, images)
    return ChatTurn(ids, options, form, calls, form.thinks(text), special, tuple(images))


def chat(
    m: Bundle, messages: Sequence[Message], options: Mapping[str, Any], hooks: Hooks = NO_HOOKS
) -> Generation:
    """Answer a conversation: what is generated after its template, up to the end of the turn.

    `options` are fields of a request, `tools`, `tool_choice`, `parallel_tool_calls`, `template`, a mapping
    of what the template takes besides, and `on_part`, called with each new part of the answer.
    """
    own = ("template", "tools", "tool_choice", "parallel_tool_calls", "on_part")
    plain = {name: value for name, value in options.items() if name not in own}
    parallel = options.get("parallel_tool_calls", True)
    tools = ToolChoice(tools_of(options.get("tools") or []), options.get("tool_choice") or AUTO, parallel)
    turn = turn_of(m, messages, options.get("template") or {}, plain, tools)
    request = turn.options
    if "max_new_tokens" not in request:
        room = ANSWER_TOKENS if "overflow" in request else m.max_length - len(turn.ids)
        request["max_new_tokens"] = max(1, min(ANSWER_TOKENS, room))
    parser, on_part, tell = turn.parser(), options.get("on_part"), hooks.on_text
    if parser is None and on_part is None:
        return generate(m, [turn.prompt], request, hooks)[0][0]
    parser = parser or AnswerParser(turn.form, False)
    parts: list[Part] = []

    def keep(new: Sequence[Part]) -> None:
        parts.extend(new)
        for part in new:
            if tell is not None and part.kind == "content":
                tell(0, part.text)
            if on_part is not None:
                on_part(part)

    streams = tell is not None or on_part is not None
    if streams:
        hooks = dataclasses.replace(hooks, on_text=lambda _, text: keep(parser.push(text)))
    generation = generate(m, [turn.prompt], request, hooks)[0][0]
    if not streams:
        keep(parser.push(generation.text or ""))
    keep(parser.finish())
    ids: dict[int, str] = {}
    answer = ReadAnswer.of(parts, lambda call: ids.setdefault(call, turn.form.new_id()))
    return dataclasses.replace(generation, read=answer)
