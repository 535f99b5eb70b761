"""Vectors of texts: one each, a sparse one (SPLADE) or one of every token (ColBERT); texts ranked by them.

Shapes: N texts, B rows, T tokens, D model, W width of a vector, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.errors import refuse
from clearhead.hub.retrievers import SparseVector
from clearhead.hub.sentences import Sentences
from clearhead.hub.tokenizer import truncation_side
from clearhead.learn.batches.ragged import padded
from clearhead.learn.tasks.reading import check_head, classify, outputs_of
from clearhead.learn.tasks.results import Ranked
from clearhead.run.bundle import Bundle

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
            places, counts = torch.unique_consecutive(own, return_counts=True)
            logits = torch.split(head(part[None], None)[0], counts.tolist())
            for place, its in zip(places.tolist(), logits):
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
    asked, answering = sides(m)
    if asked == answering:
        first, *others = embed(m, [query, *texts], batch_size)
    else:
        (first,), others = embed(m, [query], batch_size, asked), embed(m, texts, batch_size, answering)
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
