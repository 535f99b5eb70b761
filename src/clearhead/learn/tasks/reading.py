"""Tasks that read: the class of a text or image, tags, tokens for masks, answers in a context.

Shapes: B batch, T length, C classes, D model.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict, TypeVar

import torch
from tokenizers import Encoding
from torch import Tensor

from clearhead.core.config.fields import HeadName
from clearhead.core.transformer import Output
from clearhead.errors import InputError, refuse
from clearhead.hub import preprocessor
from clearhead.hub.tokenizer import encoding_of, windows
from clearhead.hub.tokens.text import decoded
from clearhead.learn.batches.ragged import Rows, for_device, padded, real_tokens
from clearhead.learn.data.conll import Tagging, by_labels
from clearhead.learn.tasks.images import ImagePrompt
from clearhead.learn.tasks.results import Answer, Candidate, Classification, Generation, Span, Tags, Word
from clearhead.run.bundle import Bundle
from clearhead.variants.contexts import evaluating

# What a model is used for, by its head; every model also embeds.
USES: dict[HeadName, tuple[str, ...]] = {
    "lm": ("generate", "score"),
    "mlm": ("fill",),
    "classifier": ("classify",),
    "tagger": ("tag",),
    "span": ("answer",),
    "embedding": (),
    "none": (),
}
WINDOW, STRIDE = 384, 128  # tokens of a window over a long context, and of the overlap of two
Result = TypeVar("Result")


def check_head(m: Bundle, task: str) -> None:
    """Raise `InputError` where the model lacks what the task needs."""
    needed = next((head for head, uses in USES.items() if task in uses), m.config.head)
    refuse(
        needed != m.config.head,
        f"{task} needs a model with head {needed}, and this one's head is {m.config.head}: {fitting(m)}",
    )
    refuse(
        m.config.family == "encoder-decoder",
        f"{task} needs a model of one stack, and this is an encoder-decoder: choose an encoder or a decoder",
    )


def fitting(m: Bundle) -> str:
    """Return what the model is good for, as part of a message."""
    if m.config.family == "encoder-decoder" and m.config.head == "lm":
        heard = m.config.input == "frames"
        return "it is for transcribe" if heard else "it is for translate, generate and score"
    uses = USES[m.config.head or "none"]
    return f"it is for {', '.join(uses)} and embed" if uses else "it is for embed"


@torch.inference_mode()
def outputs_of(
    m: Bundle, rows: Rows, types: Rows, batch_size: int | None, logits: str, seen: Sequence[int] | None = None
) -> Iterator[tuple[list[int], Output, Tensor]]:
    """Run the model on rows of like length: yield the numbers of a batch, the output and the mask [B, T].

    `seen`: how many tokens of each row, the first ones, may be attended to; None: all.
    """
    refuse(batch_size is not None and batch_size < 1, f"batch_size {batch_size} must be 1 or more")
    device, typed = next(m.model.parameters()).device, types and m.config.n_types > 1
    model = m.engine.reader()
    for numbers in for_device([len(row) for row in rows], batch_size, device):
        some = [rows[place] for place in numbers]
        ids, mask = padded(some, m.special.get("pad", 0)).to(device), real_tokens(some).to(device)
        whole = len({*map(len, some)}) == 1  # nothing is padded, so attention needs no mask
        more = {"types": padded([types[place] for place in numbers]).to(device)} if typed else {}
        keys = None if whole else mask
        if seen is not None:
            slots = torch.arange(ids.shape[1], device=device)
            keys = slots < torch.tensor([[max(1, seen[place])] for place in numbers], device=device)
            more["positions"] = slots.expand_as(ids)
        with evaluating(model):
            output = model(ids, keys, logits=logits, **more)
        yield numbers, output, mask


def logits_of(m: Bundle, rows: Sequence[Encoding], batch_size: int) -> list[Tensor]:
    """Return what the head says of each row: [C], or [T, C] of its own tokens; float32, on the CPU."""
    results: list[Tensor] = [torch.empty(0)] * len(rows)
    ids, types = [row.ids for row in rows], [row.type_ids for row in rows]
    for numbers, output, _ in outputs_of(m, ids, types, batch_size, "all"):
        logits = output.required_logits.float().cpu()
        for place, row in zip(numbers, logits):
            results[place] = row if logits.ndim == 2 else row[: len(ids[place])]
    return results


# Classes ---------------------------------------------------------------------------------------------------


def classify(m: Bundle, inputs: Sequence[Any], batch_size: int = 32) -> list[Classification]:
    """Return the class of each text, pair of texts or image; see `Model.classify`."""
    check_head(m, "classify")
    scores = (_of_images if m.config.input == "patches" else _of_texts)(m, inputs, batch_size)
    kind = m.description.theirs.get("problem_type") if m.description is not None else None
    single = kind == "multi_label_classification" or m.config.n_classes == 1  # each class on its own
    if kind != "regression":
        scores = [row.sigmoid() if single else row.softmax(-1) for row in scores]
    names = m.class_names
    return [
        Classification(names[int(row.argmax())], float(row.max()), dict(zip(names, row.tolist())))
        for row in scores
    ]


def _of_texts(m: Bundle, inputs: Sequence[Any], batch_size: int) -> list[Tensor]:
    rows = []
    for item in inputs:
        pair = isinstance(item, tuple | list)
        texts = item if pair else [item]
        if not all(isinstance(text, str) for text in texts) or (pair and len(texts) != 2):
            raise InputError(
                f"classify was given {item!r:.60}: it takes a text, a pair of texts, or a list of either"
            )
        rows.append(m.framed(*texts))
    return logits_of(m, rows, batch_size)


def _of_images(m: Bundle, inputs: Sequence[Any], batch_size: int) -> list[Tensor]:
    images = [preprocessor.to_pixels(image, m.config, m.images) for image in inputs]
    weight, starts, model = next(m.model.parameters()), range(0, len(images), batch_size), m.engine.reader()
    with evaluating(model), torch.inference_mode():
        batches = [model(torch.stack(images[at : at + batch_size]).to(weight)).logits for at in starts]
    return [row for logits in batches for row in logits.float().cpu()]


# Tags ------------------------------------------------------------------------------------------------------


def tag(m: Bundle, texts: Sequence[str | Sequence[str]], batch_size: int = 32) -> list[Tags]:
    """Tag the words of each text, or of each list of words; see `Model.tag`."""
    check_head(m, "tag")
    tokenizer, room = m.text_tokenizer, m.max_length
    inputs = [text if isinstance(text, str) else list(text) for text in texts]
    whole = [encoding_of(tokenizer, text) for text in inputs]
    rows = [
        (number, *window)
        for number, text in enumerate(inputs)
        for window in windows(tokenizer, room, text, STRIDE)
    ]
    # Of each token: how far it is from a cut, and its probabilities [C].
    scores: list[dict[int, tuple[int, Tensor]]] = [{} for _ in texts]
    all_logits = logits_of(m, [window for _, _, window in rows], batch_size)
    for (number, start, window), logits in zip(rows, all_logits):
        inner = [at for at, part in enumerate(window.sequence_ids) if part == 0]
        for token, at in enumerate(inner, start):
            left = token - start  # tokens to its left in the window
            right = len(inner) - 1 - left
            cut = start + len(inner) < len(whole[number])
            depth = min(left if start else room, right if cut else room)
            # Of two windows, take the one that shows more on both sides.
            if depth >= scores[number].get(token, (0,))[0]:
                scores[number][token] = (depth, _shares(logits[at]))
    return [_tags(m, *text) for text in zip(inputs, whole, scores)]


def _shares(logits: Tensor) -> Tensor:
    """Return the probability of each class [C]; of one class, that it is so and that it is not [2]."""
    return torch.cat([logits, -logits]).sigmoid() if len(logits) == 1 else logits.softmax(-1)


def _tags(
    m: Bundle, text: str | list[str], encoding: Encoding, scores: dict[int, tuple[int, Tensor]]
) -> Tags:
    of_word: dict[int, tuple[int, int, int]] = {}  # of each word: its first token, where it starts and ends
    for token, (number, (start, end)) in enumerate(zip(encoding.word_ids, encoding.offsets)):
        if number is not None:
            first, start, _ = of_word.get(number, (token, start, end))
            of_word[number] = (first, start, end)
    spans = list(of_word.values())
    if not isinstance(text, str):
        ends = list(itertools.accumulate(len(word) + 1 for word in text))
        spans = [
            (of_word.get(n, (-1,))[0], ends[n] - 1 - len(word), ends[n] - 1) for n, word in enumerate(text)
        ]
        text = " ".join(text)
    words = []
    for first, start, end in spans:
        label, score = "O", 0.0  # for a word of which normalisation leaves nothing
        if first >= 0:
            best = int(scores[first][1].argmax())
            label, score = (*m.class_names, "O")[best], float(scores[first][1][best])
        words.append(Word(text[start:end], label, start, end, score))
    return Tags(words, spans_of(words, text, by_labels(m.class_names)))


def spans_of(words: Sequence[Word], text: str, tagging: Tagging) -> list[Span]:
    """Join words into the spans that their tags spell; labels are types, without prefixes."""
    return [
        Span(
            label=kind,
            text=text[words[first].start : words[last].end],
            start=words[first].start,
            end=words[last].end,
            score=sum(word.score for word in words[first : last + 1]) / (last + 1 - first),
        )
        for kind, first, last in tagging.joined([word.label for word in words])
    ]


# Masks -----------------------------------------------------------------------------------------------------


def fill(m: Bundle, texts: Sequence[str], k: int = 5, batch_size: int = 32) -> list[list[list[Candidate]]]:
    """Return the k best tokens for each mask of each text; see `Model.fill`."""
    check_head(m, "fill")
    refuse(
        "mask" not in m.special,
        "fill needs a tokenizer with a mask token, and this model has none: "
        "add mask_token to tokenizer_config.json",
    )
    refuse(
        not 1 <= k <= m.config.vocab_size, f"k {k} must lie between 1 and vocab_size {m.config.vocab_size}"
    )
    mask = m.special["mask"]
    rows = [encoding_of(m.text_tokenizer, text, special=True) for text in texts]
    for row in rows:
        refuse(
            mask not in row.ids,
            f"a text has no {m.text_tokenizer.id_to_token(mask)}, the mask of this model: "
            "put one where a word is wanted",
        )
        refuse(
            len(row.ids) > m.max_length,
            f"a text has {len(row.ids)} tokens and the model takes {m.max_length}: shorten it",
        )
    return [
        [
            _candidates(m, text, row, at, logits[at].softmax(-1), k)
            for at, token in enumerate(row.ids)
            if token == mask
        ]
        for text, row, logits in zip(texts, rows, logits_of(m, rows, batch_size))
    ]


def _candidates(m: Bundle, text: str, row: Encoding, at: int, probability: Tensor, k: int) -> list[Candidate]:
    tokenizer, (start, end) = m.text_tokenizer, row.offsets[at]
    best = probability.topk(k)
    before = [token for token, added in zip(row.ids[:at], row.special_tokens_mask) if not added][-1:]
    prefix = decoded(tokenizer, before, special=True)
    candidates = []
    for token, value in zip(best.indices.tolist(), best.values.tolist()):
        word = decoded(tokenizer, [*before, token], special=True).removeprefix(prefix)
        left = text[:start]
        if not word.startswith(" ") and before:
            left = left.rstrip()  # it goes on with the word before
        elif left and not left[-1].isspace():
            left += " "  # the mask took the space before it along
        filled = left + word.lstrip(" ") + text[end:]
        candidates.append(Candidate(str(tokenizer.id_to_token(token)), token, value, filled))
    return candidates


# Answers ---------------------------------------------------------------------------------------------------


class AnswerOptions(TypedDict, total=False):
    """Keywords of `answer`."""

    none: bool
    max_tokens: int
    stride: int
    batch_size: int


def answer(
    m: Bundle,
    questions: Sequence[str],
    contexts: Sequence[str],
    *,
    none: bool = False,
    max_tokens: int = 30,
    stride: int = STRIDE,
    batch_size: int = 32,
) -> list[Answer]:
    """Find the part of each context that answers its question; see `Model.answer`."""
    check_head(m, "answer")
    refuse(
        isinstance(contexts, str) or len(questions) != len(contexts),
        "answer needs one context for each question: give two texts, or two lists of one length",
    )
    refuse(
        not all(str(text).strip() for text in (*questions, *contexts)),
        "a question or its context is empty: give both",
    )
    tokenizer, room = m.text_tokenizer, min(m.max_length, WINDOW)
    rows = [
        (number, window)
        for number, (question, context) in enumerate(zip(questions, contexts))
        for _, window in windows(tokenizer, room, str(context), stride, str(question))
    ]
    best: list[Answer] = [Answer("", 0, 0, -1.0)] * len(questions)
    nothing = [1.0] * len(questions)  # the least probability of "no answer" over the windows
    for (number, row), logits in zip(rows, logits_of(m, [row for _, row in rows], batch_size)):
        span, empty = _best_span(row, logits, str(contexts[number]), max_tokens)
        best[number] = max(best[number], span, key=lambda each: each.score)
        nothing[number] = min(nothing[number], empty)
    pairs = zip(best, nothing)
    return [Answer("", 0, 0, empty) if none and span.score <= empty else span for span, empty in pairs]


def _best_span(row: Encoding, logits: Tensor, context: str, max_tokens: int) -> tuple[Answer, float]:
    """Return the best answer of one window, and the probability of none: logits [T, 2]."""
    tokens = zip(row.sequence_ids, row.offsets)
    inside = torch.tensor([part == 1 and end > start for part, (start, end) in tokens])  # T
    allowed = inside.clone()
    allowed[0] = True  # the first token stands for "no answer"
    begins, ends = logits.masked_fill(~allowed[:, None], float("-inf")).softmax(0).unbind(-1)  # T
    both = begins[:, None] * ends  # T T
    valid = (inside[:, None] & inside).triu().tril(max_tokens - 1)
    first, last = divmod(int(both.masked_fill(~valid, -1).argmax()), len(row.ids))
    start, end = row.offsets[first][0], row.offsets[last][1]
    return Answer(context[start:end], start, end, float(both[first, last])), float(both[0, 0])


# One input or a list ----------------------------------------------------------------------------------------


def as_prompts(prompts: Any) -> tuple[bool, list[Any]]:
    """Return whether one prompt was given, and a list of all; tensors and arrays of ids count as lists."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    # What is no list of anything is one prompt, which will be refused.
    first = prompts[0] if isinstance(prompts, Sequence) and prompts else None
    several = isinstance(first, Sequence | ImagePrompt) or getattr(first, "ndim", 0) > 0
    single = (
        isinstance(prompts, str) or not isinstance(prompts, Sequence) or (len(prompts) > 0 and not several)
    )
    return single, [prompts] if single else list(prompts)


def best_of_each(
    results: list[list[Generation]], num_return: int, single: bool
) -> Generation | list[Generation] | list[list[Generation]]:
    """Return one generation of each prompt, or a list where several were asked for."""
    kept: list[Any] = results if num_return > 1 else [row[0] for row in results]
    return kept[0] if single else kept


def unwrapped(results: list[Result], single: bool) -> Result | list[Result]:
    """Return the only result of one input, or the list of several."""
    return results[0] if single else results
