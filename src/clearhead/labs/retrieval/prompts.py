"""Passages before a prompt: as many as fit, numbered, and cited."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from clearhead.errors import refuse

if TYPE_CHECKING:
    from clearhead.labs.retrieval.index import Hit


def cited(hit: "Hit") -> dict[str, Any]:
    """Return a passage that was found as JSON has it."""
    return {"score": hit.score, **vars(hit.passage)}


def before_prompt(
    prompt: str, hits: "list[Hit]", tokens: Callable[[str], int], most: int
) -> "tuple[str, list[Hit]]":
    """Return a prompt after as many numbered passages as there is room for, the nearest last, and these.

    Args:
        prompt: what the passages stand before.
        hits: the passages, nearest first.
        tokens: counts those that the model reads for a prompt.
        most: how many it may read, so that there is room for its answer.
    """
    for count in range(len(hits), 0, -1):
        shown = [f"[{number}] {hit.passage.text}\n\n" for number, hit in enumerate(hits[:count], start=1)]
        whole = "".join([*reversed(shown), prompt])
        if tokens(whole) <= most:
            return whole, hits[:count]
    refuse(
        hits,
        f"no passage fits before the prompt: there is room for {max(most, 0)} tokens beside the answer: "
        "shorten the prompt or the answer (max new tokens), or index with fewer --words",
    )
    return prompt, []
