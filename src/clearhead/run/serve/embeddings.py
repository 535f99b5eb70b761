"""Embeddings over HTTP: dense, sparse and one vector for each token, in OpenAI's format and in vLLM's."""

import base64
import json
import time
import uuid
from collections import abc
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch.nn.functional as nnf
from torch import Tensor

from clearhead.errors import RequestError, refuse
from clearhead.hub.retrievers import SparseVector
from clearhead.learn.tasks import vectors
from clearhead.run.bundle import Bundle

TOGETHER = 64  # vectors that are written at once
SPECIAL = 8  # tokens that are put around a text at most

Embedded = tuple[Tensor | SparseVector, int]  # what a text became, and how many tokens were read of it


@lru_cache(maxsize=64)
def embedding(prompt: str | None) -> Any:
    """Return the function for the name of a prompt: requests with the same function share a call."""
    return partial(_embed, prompt)


def _embed(prompt: str | None, m: Bundle, texts: abc.Sequence[str | list[int]]) -> list[Embedded]:
    embedded, counts = vectors.embed_counted(m, texts, prompt=prompt)
    numbers = [vector.weights if isinstance(vector, SparseVector) else vector for vector in embedded]
    refuse(
        not all(number.isfinite().all() for number in numbers),
        "the model gave a vector with NaN or infinite numbers: its weights are broken",
    )
    if m.sentences is None:  # a model of sentences says itself whether its vectors have length 1
        embedded = nnf.normalize(embedded, dim=-1)
    return list(zip(embedded, counts))


def check_dimensions(m: Bundle, dimensions: int | None) -> None:
    """Refuse to cut vectors to more numbers than they have."""
    how = vectors.embeds(m)
    if dimensions is not None and how.kind == "sparse":
        line = "dimensions: the vectors of this model are sparse: leave it out"
        raise RequestError(line, None, param="dimensions")
    width = how.width(m.config.d_model)
    if dimensions is not None and dimensions > width:
        line = f"dimensions {dimensions}: a vector of this model has {width} numbers: choose 1 to {width}"
        raise RequestError(line, None, param="dimensions")


def cut(embedded: abc.Sequence[Embedded], dimensions: int | None) -> abc.Sequence[Embedded]:
    """Return the first numbers of each vector, scaled to length 1 (Matryoshka); None: vectors as they are."""
    if dimensions is None:
        return embedded
    dense = ((vector, count) for vector, count in embedded if isinstance(vector, Tensor))
    return [(nnf.normalize(vector[..., :dimensions], dim=-1), count) for vector, count in dense]


def check_lengths(m: Bundle, texts: abc.Sequence[str | list[int]], prompt: str | None) -> None:
    """Refuse a text that the model cannot read whole."""
    before, room = vectors.embeds(m).before(prompt), vectors.room_of(m, prompt)
    for number, text in enumerate(texts):
        if isinstance(text, str) and len((before + text).encode("utf-8", "replace")) + SPECIAL <= room:
            continue  # no token is shorter than a byte
        (ids,) = vectors.rows_of(m, [text], prompt, cut=False)
        if len(ids) > room:
            raise RequestError(
                f"this model's maximum context length is {room} tokens, and input {number} has "
                f"{len(ids)}: shorten it, or send truncate: true",
                "context_length_exceeded",
                param="input",
            )


def check_format(m: Bundle, pooling: bool, as_base64: bool) -> None:
    """Refuse a format that has no place for what the model makes of a text; OpenAI's has one vector."""
    kind = vectors.embeds(m).kind
    kinds = {"sparse": "a sparse vector (SPLADE)", "tokens": "a vector for each token (ColBERT)"}
    refuse(
        kind != "dense" and not pooling,
        f"this model makes {kinds.get(kind)} of a text, and an embedding is one vector: ask POST /pooling",
    )
    refuse(
        kind == "sparse" and as_base64,
        "encoding_format base64 is for dense vectors, and this model's are sparse: leave it out",
    )


def written(
    model: str, embedded: abc.Sequence[Embedded], as_base64: bool, pooling: bool = False
) -> Iterator[str]:
    """Yield the answer chunk by chunk, so that no copy of all vectors is ever held.

    `pooling`: in the format of vLLM's /pooling, whose rows may be matrices too, or sparse vectors as
    {"indices": [...], "values": [...]}.
    """
    kind, name = ("pooling", "data") if pooling else ("embedding", "embedding")
    one = all(isinstance(row, Tensor) and row.ndim == 1 for row, _ in embedded)
    step = TOGETHER if one else 1
    head = {"id": f"pool-{uuid.uuid4().hex}", "created": int(time.time())} if pooling else {}
    yield json.dumps({**head, "object": "list"})[:-1] + ', "data": ['
    for at in range(0, len(embedded), step):
        rows = [
            json.dumps({"object": kind, "index": at + n, **_packed(name, row, as_base64)})
            for n, (row, _) in enumerate(embedded[at : at + step])
        ]
        yield (", " if at else "") + ", ".join(rows)
    read = sum(count for _, count in embedded)
    usage = {"prompt_tokens": read, "total_tokens": read}
    yield f'], "model": {json.dumps(model)}, "usage": {json.dumps(usage)}}}'


def _packed(name: str, row: Tensor | SparseVector, as_base64: bool) -> dict[str, Any]:
    """Return a vector under its name; of a matrix in base64, the shape too."""
    if isinstance(row, SparseVector):
        return {name: {"indices": row.ids.tolist(), "values": row.weights.tolist()}}
    if not as_base64:
        return {name: row.tolist()}
    return {name: _base64(row), **({"shape": list(row.shape)} if row.ndim > 1 else {})}


def _base64(row: Tensor) -> str:
    return base64.b64encode(row.numpy().astype("<f4", copy=False).tobytes()).decode()
