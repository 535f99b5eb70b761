"""One vector for each text.

Shapes: B batch, T length, D model.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.bundle import Bundle
from clearhead.errors import refuse
from clearhead.hub.sentences import Sentences
from clearhead.model.heads import pool
from clearhead.tasks.run import check_head, outputs_of


@torch.inference_mode()
def embed(m: Bundle, texts: Sequence[str], batch_size: int = 32, prompt: str | None = None) -> Tensor:
    """Return one vector for each text, [N, D]; see `Model.embed`."""
    check_head(m, "embed")
    how = m.sentences or Sentences(normalise=m.config.head == "embedding" and m.config.normalise)
    refuse(
        prompt is not None and m.sentences is None,
        f"prompt {prompt!r} was asked for, and this model has no prompts (config_sentence_transformers.json)",
    )
    read = texts if m.sentences is None else [how.read(text, prompt) for text in texts]
    rows = m.encode(list(read), m.max_length)
    vectors = torch.empty(len(rows), m.config.d_model)
    for places, output, mask in outputs_of(m, rows, (), batch_size, "none"):
        pooled = pool(output.hidden, mask, how.pooling).float()  # B D
        vectors[places] = (nnf.normalize(pooled, dim=-1) if how.normalise else pooled).cpu()
    return vectors
