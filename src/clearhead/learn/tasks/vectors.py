"""Vectors of texts: one each, a sparse one (SPLADE) or one of every token (ColBERT); texts ranked by them.

A model of two towers has vectors of texts and images in one space, and so classes of images without training.

Shapes: N texts, M images, B rows, T tokens, D model, W width of a vector, P common space, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.errors import InputError, refuse
from clearhead.hub import preprocessor
from clearhead.hub.preprocessor import PREPROCESSOR
from clearhead.hub.retrievers import SparseVector
from clearhead.hub.sentences import Sentences
from clearhead.hub.tokenizer import truncation_side
from clearhead.hub.towers import JoinedTowers
from clearhead.learn.batches.ragged import ROWS, padded
from clearhead.learn.tasks.reading import check_head, classify, outputs_of
from clearhead.learn.tasks.results import Classification, Ranked
from clearhead.run.bundle import Bundle
from clearhead.variants.contexts import evaluating

LOGITS = 1 << 24  # numbers of a masked language model's output that are in memory at a time


def embed(
    m: Bundle, texts: Sequence[str], batch_size: int | None = None, prompt: str | None = None
) -> Tensor | Any:
    """Return the vectors of each text; see `Model.embed`."""
    return embed_counted(m, texts, batch_size, prompt)[0]


@torch.inference_mode()
def embed_counted(
    m: Bundle, texts: Sequence[str | list[int]], batch_size: int | None = None, prompt: str | None = None
) -> tuple[Tensor | Any, list[int]]:
    """Return the vectors of each text, and how many tokens were read of each."""
    check_head(m, "embed")
    refuse(
        prompt is not None and m.sentences is None,
        f"prompt {prompt!r} was asked for, and this model has no prompts (config_sentence_transformers.json)",
    )
    rows = rows_of(m, texts, prompt)
    make = {"dense": _dense, "sparse": _sparse, "tokens": _of_tokens}[embeds(m).kind]
    return make(m, rows, batch_size, prompt), [len(row) for row in rows]


def embeds(m: Bundle) -> Sentences:
    """Return how the model makes vectors of texts."""
    return m.sentences or Sentences(normalise=m.config.head == "embedding" and m.config.normalise)


def room_of(m: Bundle, prompt: str | None = None) -> int:
    """Return the most tokens that are read of a text to be embedded."""
    how, usual = embeds(m), m.max_length
    if how.late is None:
        return usual
    return how.late.room(how.role(prompt), m.config.max_positions, usual)


def rows_of(
    m: Bundle, texts: Sequence[str | list[int]], prompt: str | None = None, cut: bool = True
) -> list[list[int]]:
    """Return the tokens of texts to be embedded, with what stands before them; `cut`: those that are read.

    A list of token ids is taken as it is.
    """
    how = embeds(m)
    before = how.before(prompt)
    marker = None if how.late is None else how.late.marker(how.role(prompt), m.text_tokenizer)
    most = room_of(m, prompt) if cut else None
    room = None if most is None else most - (marker is not None)
    written = [how.read(before + text) for text in texts if isinstance(text, str)]
    encoded = iter(m.encode(written, room) if written else ())
    first = slice(-most, None) if most and truncation_side(m.settings) == "left" else slice(most)

    def row(text: str | list[int]) -> list[int]:
        if not isinstance(text, str):
            return m.prompt_ids(text)[first]
        ids = next(encoded)
        return ids if marker is None else [*ids[:1], marker, *ids[1:]]

    return [row(text) for text in texts]


def _dense(m: Bundle, rows: list[list[int]], batch_size: int | None, prompt: str | None) -> Tensor:
    """Return one vector for each row, [N, W]."""
    how = embeds(m)
    before = how.before(prompt)
    skipped = 0 if how.pools_prompt or not before else _prompt_length(m, how.read(before))
    order, pooled = list[int](), list[Tensor]()
    for numbers, output, mask in outputs_of(m, rows, (), batch_size, "none"):
        order += numbers
        counted = mask & (torch.arange(mask.shape[1], device=mask.device) >= skipped)
        pooled.append(how.vectors(output.hidden, counted).float())  # B W
    vectors = torch.empty(len(rows), how.width(m.config.d_model))
    if pooled:
        vectors[order] = torch.cat(pooled).cpu()  # brought from the device once, since each time waits for it
    return vectors


def _sparse(
    m: Bundle, rows: list[list[int]], batch_size: int | None, prompt: str | None
) -> list[SparseVector]:
    """Return a weight for each token of the vocabulary that a row has one of."""
    splade, head, width = embeds(m).splade, m.engine.reader().head, m.config.vocab_size
    assert splade is not None
    vectors: dict[int, SparseVector] = {}
    for numbers, output, mask in outputs_of(m, rows, (), batch_size, "none"):
        pooled = [torch.zeros(width, device=mask.device)] * len(numbers)  # B V
        states, owners, step = output.hidden[mask], mask.nonzero()[:, 0], max(1, LOGITS // width)
        for part, own in zip(torch.split(states, step), torch.split(owners, step)):  # of all rows' tokens
            which, counts = torch.unique_consecutive(own, return_counts=True)
            logits = torch.split(head(part[None], None)[0], counts.tolist())
            for place, its in zip(which.tolist(), logits):
                pooled[place] = splade.pool(its, pooled[place])
        vectors |= {place: splade.vector(row.cpu()) for place, row in zip(numbers, pooled)}
    return [vectors[place] for place in range(len(rows))]


def _of_tokens(m: Bundle, rows: list[list[int]], batch_size: int | None, prompt: str | None) -> list[Tensor]:
    """Return the vectors of each row's tokens, [T, W]."""
    how = embeds(m)
    late, role = how.late, how.role(prompt)
    assert late is not None
    seen = None
    if role == "query" and late.expansion is not None:
        seen = None if late.expansion.attend else list(map(len, rows))
        rows = [late.expanded(row, m.text_tokenizer, m.special) for row in rows]
    left_out = torch.tensor(late.left_out(role, m.text_tokenizer))
    vectors: dict[int, Tensor] = {}
    for numbers, output, mask in outputs_of(m, rows, (), batch_size, "none", seen):
        kept = mask.cpu() & ~torch.isin(padded([rows[place] for place in numbers]), left_out)  # B T
        states = how.finished(output.hidden[kept.to(mask.device)].float()).cpu()  # all tokens of the batch, W
        vectors |= dict(zip(numbers, torch.split(states, kept.sum(1).tolist())))
    return [vectors[place].clone() for place in range(len(rows))]


def _prompt_length(m: Bundle, prompt: str) -> int:
    """Return how many tokens a prompt has at the beginning of a text; a special one that ends it is none."""
    (ids,) = m.encode([prompt], m.max_length)
    known = m.text_tokenizer.get_added_tokens_decoder()
    special = {*m.special.values(), *(token for token, added in known.items() if added.special)}
    return len(ids) - (bool(ids) and ids[-1] in special)


# Reranking --------------------------------------------------------------------------------------------------


def reads_pairs(m: Bundle) -> bool:
    """Return whether the model reads query and text together; refuse a classifier of several classes."""
    pairs = m.config.head == "classifier"
    refuse(
        pairs and m.config.n_classes != 1,
        f"this model tells {m.config.n_classes} classes apart: one that reranks has one",
    )
    return pairs


def rerank(
    m: Bundle, query: str, texts: Sequence[str], top: int | None = None, batch_size: int = 32
) -> list[Ranked]:
    """Return the texts with their scores, the best first; see `Model.rerank`."""
    refuse(not isinstance(query, str), f"rerank was given the query {query!r:.60}: it takes one text")
    refuse(isinstance(texts, str), "rerank was given one text: give a list of texts to choose from")
    refuse(top is not None and top < 1, f"top {top} must be 1 or more")
    if reads_pairs(m):
        results = classify(m, [(query, text) for text in texts], batch_size)
        return ranked([result.probability for result in results], texts, top)
    query_prompt, text_prompt = sides(m)
    if query_prompt == text_prompt:
        first, *others = embed(m, [query, *texts], batch_size)
    else:
        (first,), others = (
            embed(m, [query], batch_size, query_prompt),
            embed(m, texts, batch_size, text_prompt),
        )
    return ranked(compare(m, first, others), texts, top)


def sides(m: Bundle) -> tuple[str | None, str | None]:
    """Return the names of the prompts for a query and for the texts it is compared with.

    A model of one vector for each text reads both alike: with its usual prompt.
    """
    how = embeds(m)
    return (None, None) if how.kind == "dense" else (how.side("query"), how.side("document"))


def compare(m: Bundle, query: Any, texts: Sequence[Any]) -> list[float]:
    """Return how alike a query and each text are, by their vectors: cosine, dot product or MaxSim."""
    how = embeds(m)
    if how.splade is not None:
        return how.splade.compare(query, texts)
    return cosines([query, *texts]) if how.late is None else how.late.compare(query, texts)


def likeness(m: Bundle, text: str, other: str) -> float:
    """Return how alike two texts are, at most 1; of vectors of tokens, the mean of the largest cosines."""
    first, second = embed(m, [text, other])
    if isinstance(first, SparseVector):
        return first.unit().dot(second.unit())
    first, second = (nnf.normalize(vectors.double(), dim=-1) for vectors in (first, second))
    return float((first @ second.T).amax(-1).mean() if first.ndim == 2 else first @ second)


def cosines(vectors: Tensor | Sequence[Tensor]) -> list[float]:
    """Return the cosine of the angle between the first vector and each other one: [1 + N, D] -> N numbers."""
    query, *others = (row / row.norm().clamp(min=1e-12) for row in vectors)
    return [float(torch.dot(query, other)) for other in others]


def ranked(scores: Sequence[float], texts: Sequence[str], top: int | None = None) -> list[Ranked]:
    """Return each text with its score, the best first; of equal ones, the first given."""
    order = sorted(range(len(scores)), key=lambda n: -scores[n])[: top or len(scores)]
    return [Ranked(n, texts[n], scores[n]) for n in order]


def towers_of(m: Bundle, task: str) -> JoinedTowers:
    """Return both towers; refuse a model that has one."""
    if m.towers is None:
        kind = m.description.kind if m.description is not None else m.config.family
        raise InputError(
            f"{task} needs two towers, one of texts and one of images, and this model has one ({kind}): "
            "load a directory of CLIP or SigLIP"
        )
    return m.towers


def text_inputs(m: Bundle, texts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """Return ids and mask of texts, two tensors [N, T], as the model takes them.

    Some models take texts of one length, the longest. They read the padding too where the tokenizer's
    settings name no attention_mask, and there is no mask then.
    """
    towers = towers_of(m, "embed")
    rows, pad = m.encode(list(texts), m.max_length), m.special.get("pad", 0)
    length = m.max_length if towers.description.table.pads else max(map(len, rows))
    ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows])
    named = m.settings.get("model_input_names")
    if isinstance(named, list) and "attention_mask" not in named:
        return ids, None
    return ids, torch.arange(length) < torch.tensor([[len(row)] for row in rows])


def image_pixels(m: Bundle, images: Iterable[Any]) -> Tensor:
    """Return the pixels of images [M, C, height, width], as the model takes them."""
    config = towers_of(m, "embed").config
    tensors = []
    for image in images:
        floating = (isinstance(image, Tensor) and image.is_floating_point()) or (
            isinstance(image, np.ndarray) and image.dtype.kind == "f"
        )
        refuse(
            not m.images and not floating,
            f"{m.folder or 'this model'} has no {PREPROCESSOR}, which says how an image becomes pixels: "
            "add it, or give pixels, floating-point numbers",
        )
        assert config.frame is not None
        tensors.append(preprocessor.pixels_for(image, config.image.n_channels, config.frame, m.images))
    return torch.stack(tensors)


@torch.inference_mode()
def embed_joined(m: Bundle, inputs: Sequence[Any], batch_size: int | None = None) -> Tensor:
    """Return one vector of length one for each text or image, [N, P]; see `Model.embed`."""
    towers = towers_of(m, "embed")
    batch_size = ROWS if batch_size is None else batch_size
    refuse(batch_size < 1, f"batch_size {batch_size} must be 1 or more")
    for item in inputs:
        refuse(
            not isinstance(item, preprocessor.Image),
            f"embed was given {item!r:.60}: it takes texts, and images as paths (pathlib), arrays or tensors",
        )
    weight = next(towers.parameters())
    vectors = torch.empty(len(inputs), towers.config.width)
    of_texts = [place for place, item in enumerate(inputs) if isinstance(item, str)]
    of_images = [place for place, item in enumerate(inputs) if not isinstance(item, str)]
    with evaluating(towers):
        for numbers in _batches(of_texts, batch_size):
            ids, mask = text_inputs(m, [inputs[place] for place in numbers])
            on = ids.to(weight.device), None if mask is None else mask.to(weight.device)
            vectors[numbers] = nnf.normalize(towers.embed_texts(*on).float(), dim=-1).cpu()
        for numbers in _batches(of_images, batch_size):
            pixels = image_pixels(m, (inputs[place] for place in numbers)).to(weight)
            vectors[numbers] = nnf.normalize(towers.embed_images(pixels).float(), dim=-1).cpu()
    return vectors


def _batches(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


@torch.inference_mode()
def zero_shot(
    m: Bundle, images: Sequence[Any], labels: Sequence[str], batch_size: int = 32
) -> list[Classification]:
    """Return which of the labels fits each image best; see `Model.classify`."""
    towers = towers_of(m, "classify with labels")
    check_labels(labels)
    paths = [Path(image) if isinstance(image, str) else image for image in images]
    texts, pictures = embed_joined(m, list(labels), batch_size), embed_joined(m, paths, batch_size)
    weight = next(towers.parameters())
    logits = towers.compare(texts.to(weight), pictures.to(weight)).logits.float().cpu()  # M N
    scores = logits.softmax(-1) if towers.config.loss == "softmax" else logits.sigmoid()
    return [
        Classification(labels[int(row.argmax())], float(row.max()), dict(zip(labels, row.tolist())))
        for row in scores
    ]


def check_labels(labels: Sequence[str]) -> None:
    """Refuse labels that are none, not texts, empty or twice the same."""
    listed = not isinstance(labels, str) and all(isinstance(label, str) for label in labels)
    refuse(not listed or not len(labels), 'labels must be a list of texts, such as ["a cat", "a dog"]')
    refuse(not all(label.strip() for label in labels), "a label is empty: give a few words for each class")
    twice = next((label for number, label in enumerate(labels) if label in labels[:number]), None)
    refuse(twice is not None, f'label "{twice}" stands twice: give each class once')
