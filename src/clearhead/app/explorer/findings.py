"""Example inputs for any model, each with something that was found in it, on this very model."""

import base64
import io
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, cast

import numpy as np

from clearhead.app.explorer.views import TASKS
from clearhead.core.config import ModelConfig
from clearhead.errors import ClearheadError
from clearhead.inside.attention import attention
from clearhead.inside.attribution import occlusion, paths
from clearhead.inside.geometry import similarity
from clearhead.inside.inputs import Prepared, cached_pass, choices_of, prepare
from clearhead.inside.lens import contributions
from clearhead.inside.results import Array
from clearhead.inside.story import estimated_effects
from clearhead.learn.evaluation.evaluate import run_recipe
from clearhead.learn.recipe import read_recipe
from clearhead.learn.tasks.table import open_examples
from clearhead.run.api import Model

WRITES = (
    "When Mary and John went to the store, John gave a drink to",
    'There was a cat named Tom. Tom liked to run. "Hello,',
    "one two three four one two three",
    "Paris is the capital of France, and Rome is the capital of",
    "It was not good. It was not bad. It was",
)
FILLS = (
    "The cat {} on the mat.",
    "Paris is the {} of France.",
    "She opened the {} and walked in.",
    "The keys to the cabinet {} lost.",
    "Two and two make {}.",
)
READS = (
    "A warm, funny film that I would gladly see again.",
    "The plot is dull and the ending is worse.",
    "Angela Merkel visited Paris in 2017.",
    "The service was slow, but the food was not bad at all.",
    "Nothing in this story surprised me.",
)
PAIRS = (
    ("A man is playing a guitar.", "Somebody plays music."),
    ("The bank of the river was muddy.", "The bank raised its rates."),
    ("The cat sat on the mat.", "On the mat sat the cat."),
    ("He did like the film.", "He did not like the film."),
    ("It rains in London.", "The recipe needs two eggs."),
)
TRANSLATES = (
    "The house is small.",
    "A dog and a cat sleep.",
    "She reads the old book.",
    "We shall speak tomorrow.",
    "Two men play music.",
)


LONGEST = 200  # characters of an example
OWN = 5  # examples of a run's own data
RANKED = 8  # inputs of which the best is looked for


def best_example(m: Model) -> dict[str, Any] | None:
    """Return the input, as the page sends it, whose answer single heads move most; None: the model has none.

    An answer with a letter or digit goes before marks and spaces. The measure is the largest gradient ×
    activation of a head, one backward pass for each input.
    """
    best, most = None, (False, -1.0)
    for sent, given, pair in inputs_for(m)[:RANKED]:
        if TASKS.get(m.config.head or "") is None:
            return sent
        with suppress(ClearheadError):
            prepared = cached_pass(prepare(m, given, None, pair))
            ids, mask = prepared.tokens.ids, m.special.get("mask")
            columns = choices_of(prepared).columns
            column = ids.index(mask) if m.config.head == "mlm" and mask in ids else len(columns) - 1
            scores = choices_of(prepared).column_scores(prepared.record(logits="none")[0].hidden, column)
            answer = int(scores[0].argmax())
            worth = estimated_effects(prepared, column, answer)
            value = max((x for name, x in worth.items() if ":" not in name), default=0.0)
            rank = any(map(str.isalnum, choices_of(prepared).name(answer))), value
            best, most = (sent, rank) if rank > most else (best, most)
    return best


def own_texts(m: Model) -> list[str]:
    """Return texts of the validation side of the data that a run in the model's folder learned from."""
    recipe = run_recipe(m.folder)
    if recipe is None:
        return []
    with suppress(Exception):  # the data may have gone, or be of pictures
        corpus, _ = open_examples(read_recipe(recipe).data)
        rows = islice(cast(Iterable[Any], corpus.validation), OWN)
        texts = [getattr(row, "source", None) or getattr(row, "text", None) for row in rows]
        return [str(text)[:LONGEST] for text in texts if text]
    return []


def findings(m: Model) -> list[dict[str, Any]]:
    """Return up to five inputs as the page sends them, each with what was found in it under "says"."""
    examples = []
    for sent, given, pair in inputs_for(m):
        try:
            examples.append({**sent, "says": _says(m, given, pair)})
        except ClearheadError:
            continue
    return examples


def shapes(config: ModelConfig) -> dict[str, Array]:
    """Return five drawings in white on black, [height, width, channels] of bytes, by name."""
    assert config.image_size is not None
    height, width = config.image_size
    y, x = np.mgrid[0:height, 0:width]
    y, x = (y - height / 2) / min(height, width), (x - width / 2) / min(height, width)
    drawn = {
        "a ring": np.abs(np.hypot(y, x) - 0.31) < 0.1,
        "an upright bar": (np.abs(x) < 0.08) & (np.abs(y) < 0.36),
        "a cross": (np.minimum(np.abs(x), np.abs(y)) < 0.07) & (np.maximum(np.abs(x), np.abs(y)) < 0.36),
        "a square": np.maximum(np.abs(x), np.abs(y)) < 0.28,
        "a seven": ((np.abs(y + 0.28) < 0.07) & (np.abs(x) < 0.25))
        | ((np.abs(x - 0.18 + (y + 0.28) * 0.5) < 0.07) & (np.abs(y) < 0.35)),
    }
    return {
        name: np.repeat((shape * 255).astype(np.uint8)[:, :, None], config.n_channels, axis=2)
        for name, shape in drawn.items()
    }


def inputs_for(m: Model) -> list[tuple[dict[str, Any], Any, str | None]]:
    """Return what the page sends, what the model reads, and a second text."""
    config = m.config
    if config.input == "patches":
        return [({"image": _png(image), "name": name}, image, None) for name, image in shapes(config).items()]
    if m.tokenizer is None:
        last = max(config.vocab_size - 1, 1)
        rows = ([0, 1] * 4, list(range(8)), [3, 1, 4, 1, 5, 3, 1, 4], [2] * 6, list(range(8, 0, -1)))
        return [({"ids": ids}, ids, None) for ids in ([number % last for number in row] for row in rows)]
    own = own_texts(m)
    if own:
        return [({"text": text}, text, None) for text in own]
    if config.family == "encoder-decoder":
        return [({"text": text}, text, None) for text in TRANSLATES]
    task = TASKS.get(config.head or "", "embed")
    if task == "embed":
        return [({"text": text, "pair": other}, text, other) for text, other in PAIRS]
    texts = {"next": WRITES, "fill": FILLS}.get(task, READS)
    mask = (m.tokenizer.id_to_token(m.special["mask"]) if "mask" in m.special else None) or ""
    return [({"text": text}, text, None) for text in (template.replace("{}", mask) for template in texts)]


def _says(m: Model, given: Any, pair: str | None) -> str:
    """Return one sentence on what was found in an input."""
    if pair is not None:
        return f"cosine {similarity(m, given, pair).cosine:.2f}"
    prepared = cached_pass(prepare(m, given))
    if prepared.source is not None:
        return _aligned(prepared)
    ids, mask = prepared.tokens.ids, m.special.get("mask")
    position = ids.index(mask) if m.config.head == "mlm" and mask in ids else -1
    if m.config.head in ("classifier", "tagger"):
        try:
            return _missed(prepared)
        except ClearheadError:  # without a token that stands for nothing, the path says it
            position = -1
    return _carried(prepared, position)


def _carried(prepared: Prepared, position: int) -> str:
    """Say which head brought most to the answer, and from which token."""
    carried = paths(prepared.m, prepared, position=position)
    best = carried.leading()
    if best is None:
        terms = contributions(prepared.m, prepared, position=position).largest(1)
        return f"“{carried.choice}” is made at its own token, mostly by {terms[0].name}"
    source = carried.tokens[best.source] if not best.part.startswith("cross") else ""
    if source.strip("·▁ ").lower() == carried.choice.strip("·▁ ").lower():
        return f"head {best.part} copies “{source}”"
    return f"head {best.part} brings “{source}” to the answer “{carried.choice}”"


def _missed(prepared: Prepared) -> str:
    """Say which word or patch the answer rests on."""
    column = 0
    if prepared.m.config.head == "tagger":
        tags = prepared.record()[0].required_logits[0].argmax(-1).tolist()
        words = [place for place, mark in enumerate(prepared.tokens.special) if not mark]
        usual = max(tags, key=tags.count)
        column = next((place for place in words if tags[place] != usual), words[0] if words else 0)
    missed = occlusion(prepared.m, prepared, position=column)
    at = int(missed.dropped.argmax())
    read = f" of “{prepared.tokens.labels[column]}”" if prepared.m.config.head == "tagger" else ""
    what = "patch " if prepared.main.is_floating_point() else ""
    worth = f"({float(missed.dropped[at]):+.2f} logits)"
    return f"“{missed.choice}”{read} rests most on {what}“{missed.units[at]}” {worth}"


def _aligned(prepared: Prepared) -> str:
    """Say which cross-attention head aligns two words most sharply."""
    assert prepared.source_tokens is not None
    heads = attention(prepared.m, prepared, kinds=["cross"]).heads()
    marks = prepared.source_tokens.special
    words = [place for place, mark in enumerate(marks) if not mark] or list(
        range(len(prepared.source_tokens))
    )
    best = max(heads, key=lambda head: float(head.pattern[1:, words].max()) if len(head.pattern) > 1 else 0.0)
    row, column = np.unravel_index(int(best.pattern[1:, words].argmax()), best.pattern[1:, words].shape)
    share = float(best.pattern[1:, words].max())
    written, read = best.queries.labels[int(row) + 1], best.keys.labels[words[int(column)]]
    return f"head {best.head} looks from “{written}” at “{read}” ({share:.0%})"


def _png(image: Array) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image[:, :, :3]).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")
