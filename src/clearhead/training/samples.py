"""What a model says, shown at each validation: a continuation, a translation, a label beside the true one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from clearhead.api import Model
from clearhead.data.examples import Chunk, Corpus, Images, Labelled, Pair, Question, Tagged
from clearhead.data.plan import Task
from clearhead.errors import InputError
from clearhead.training.plan import GeneratePlan

PROMPT = 32  # characters of the validation text that a language model goes on from


def sampler(
    task: Task, corpus: Corpus, plan: GeneratePlan, count: int, seed: int
) -> Callable[[Model], tuple[str, ...]]:
    """A function from a model to what it says of a few validation examples, the same ones each time."""
    if not count:
        return lambda loaded: ()
    if isinstance(corpus.validation, Images):
        return lambda loaded: _images(loaded, corpus.validation, count)  # type: ignore[arg-type]
    rows: list[Any] = list(itertools.islice(corpus.validation, count))

    def said(loaded: Model, place: int) -> str:
        try:
            return _sample(loaded, task, rows[place], plan, seed + place)
        except InputError as error:  # no run ends for something that is only shown
            return f"({error})"

    return lambda loaded: tuple(said(loaded, place) for place in range(len(rows)))


def _sample(loaded: Model, task: Task, row: Any, plan: GeneratePlan, seed: int) -> str:
    match row:
        case Chunk(text, _) if task == "mlm":
            return _masked(loaded, text)
        case Chunk(text, _) if task == "denoise":
            return ""
        case Chunk(text, _):
            prompt = text.strip()[:PROMPT].rsplit(" ", 1)[0]
            ids = loaded.encode([prompt], max(1, loaded.max_length // 2))[0]
            room = max(1, loaded.max_length - len(ids))
            made: Any = loaded.generate(
                ids, min(plan.max_new_tokens, room), seed=seed, temperature=plan.temperature, top_p=plan.top_p
            )
            return f"{loaded.text_tokenizer.decode(ids)}|{made.text}"
        case Pair(source, target):
            ids = loaded.encode([source], loaded.max_length)[0]
            made = loaded.generate(ids, max(1, min(plan.max_new_tokens, loaded.config.max_positions - 2)))
            return f"{source} -> {made.text}  ({target})"
        case Labelled(text, label, pair):
            said: Any = loaded.classify(text if pair is None else (text, pair))
            return f"{text} -> {said.label} {said.probability:.0%}  ({label})"
        case Tagged(words, tags):
            found: Any = loaded.tag(list(words))
            named = [f"{word}/{tag}" for word, tag in zip(words, (one.label for one in found.words))]
            return f"{' '.join(named)}  ({' '.join(tags)})"
        case Question(question, context, answer, _):
            answered: Any = loaded.answer(question, context)
            return f"{question} -> {answered.text}  ({answer})"
    raise AssertionError(row)


def _masked(loaded: Model, text: str) -> str:
    """A word of the text, guessed."""
    words = text.split()[:12]
    if len(words) < 2 or loaded.tokenizer is None:
        return ""
    hidden, place = words[len(words) // 2], len(words) // 2
    masked = [*words[:place], str(loaded.tokenizer.id_to_token(loaded.special["mask"])), *words[place + 1 :]]
    best: Any = loaded.fill(" ".join(masked), k=1)
    return f"{best[0].text}  ({hidden})"


def _images(loaded: Model, images: Images, count: int) -> tuple[str, ...]:
    said: Any = loaded.classify(list(images.pixels[:count]))
    pairs = zip(said, images.labels[:count].tolist())
    return tuple(
        f"image {place} -> {one.label} {one.probability:.0%}  ({loaded.labels[label]})"
        for place, (one, label) in enumerate(pairs)
    )
