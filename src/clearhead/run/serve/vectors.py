"""The answer of `/v1/embeddings`: vectors as the engine gives them, written as JSON in portions."""

import base64
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from torch import Tensor

from clearhead.errors import refuse
from clearhead.learn.tasks import reading
from clearhead.run.bundle import Bundle

TOGETHER = 64  # vectors that are written at once

Embedded = tuple[Tensor, int]  # the vector [D] of a text, and how many tokens were read of it


@lru_cache(maxsize=64)
def embedding(prompt: str | None) -> Any:
    """Return the function for the name of a prompt: requests with the same function share a call."""
    return partial(_embed, prompt)


def _embed(prompt: str | None, m: Bundle, texts: Sequence[str]) -> list[Embedded]:
    vectors, counts = reading.embed_counted(m, texts, prompt=prompt)
    refuse(
        not vectors.isfinite().all(),
        "the model gave a vector with NaN or infinite numbers: its weights are broken",
    )
    return list(zip(vectors, counts))


def written(model: str, found: Sequence[Embedded], as_base64: bool) -> Iterator[str]:
    """Yield the answer piece by piece, so that no copy of all vectors is ever held."""
    yield '{"object": "list", "data": ['
    for at in range(0, len(found), TOGETHER):
        rows = [
            json.dumps(
                {
                    "object": "embedding",
                    "index": at + n,
                    "embedding": _base64(row) if as_base64 else row.tolist(),
                }
            )
            for n, (row, _) in enumerate(found[at : at + TOGETHER])
        ]
        yield (", " if at else "") + ", ".join(rows)
    read = sum(count for _, count in found)
    usage = {"prompt_tokens": read, "total_tokens": read}
    yield f'], "model": {json.dumps(model)}, "usage": {json.dumps(usage)}}}'


def _base64(row: Tensor) -> str:
    return base64.b64encode(row.numpy().astype("<f4", copy=False).tobytes()).decode()
