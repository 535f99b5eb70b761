"""The score of a given text.

Shapes: T length, V vocabulary.
"""

from collections.abc import Sequence

import torch

from clearhead.bundle import Bundle
from clearhead.errors import refuse
from clearhead.model.checks import check_stack_input
from clearhead.model.transformer import evaluating
from clearhead.tasks.results import Score


@torch.inference_mode()
def score(m: Bundle, text: str | Sequence[int], source: str | Sequence[int] | None = None) -> Score:
    """Return the log-probability of each token given those before it; see `Model.score`."""
    both = m.config.family == "encoder-decoder"
    refuse(both and source is None, "score needs a source for this encoder-decoder")
    refuse(source is not None and not both, "score takes a source only with an encoder")
    refuse(
        m.config.head != "lm",
        f"this model's head is {m.config.head}: only a language model (head lm) scores a text",
    )
    ids, first, forced = m.prompt_ids(text), m.start_ids[:1], m.start_ids[1:]
    if forced and ids[:1] != forced:
        ids = [*forced, *ids]  # what every answer begins with is part of it
    fed = [*first, *ids]
    refuse(len(fed) < 2, "a score needs two tokens at least: the first has nothing before it")
    device = next(m.model.parameters()).device
    row = torch.tensor([fed], device=device)
    check_stack_input(row, m.model.main.spec, "ids")  # the last id is asked about, and not fed
    more = {} if source is None else {"source": torch.tensor([m.prompt_ids(source)], device=device)}
    with evaluating(m.model):
        logits = m.model(row[:, :-1], **more).logits[0].float()  # T-1 V
    values = logits.log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0].tolist()
    return Score(ids, values if first else [None, *values])
