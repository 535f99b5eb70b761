"""Translation: generation with an encoder-decoder, and the defaults for it."""

from collections.abc import Sequence
from typing import Any

from clearhead.bundle import Bundle
from clearhead.errors import InputError
from clearhead.tasks.generation import NO_HOOKS, Hooks, Prompt, generate
from clearhead.tasks.results import Generation
from clearhead.tasks.run import fitting

LONGEST, BEAMS = 256, 4  # new tokens at most, and beams, where generation_config.json does not say


def translate(
    m: Bundle, texts: Sequence[Prompt], options: dict[str, Any], hooks: Hooks = NO_HOOKS
) -> list[list[Generation]]:
    """Return what an encoder-decoder makes of each text; see `Model.translate`.

    `options` are fields of a request. Those that are missing or None are the model's own.
    """
    if m.config.family != "encoder-decoder":
        raise InputError(
            f"translate needs an encoder-decoder, and this is a model of family {m.config.family}: "
            f"{fitting(m)}"
        )
    options = {name: value for name, value in options.items() if value is not None}
    options.setdefault("max_new_tokens", own_length(m))
    if "num_beams" not in m.own_options and not options.get("temperature"):
        options.setdefault("num_beams", BEAMS)
    return generate(m, texts, options, hooks)


def own_length(m: Bundle) -> int:
    """Return how many new tokens the model's own settings allow, or its positions, or `LONGEST`."""
    stated, room = m.generation, m.config.max_positions - len(m.start_ids)
    limit: int = stated.get("max_new_tokens") or stated.get("max_length", min(LONGEST, room) + 1) - 1
    return max(1, min(limit, room) if m.config.positions == "learned" else limit)
