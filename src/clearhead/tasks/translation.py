"""Translation: generation with an encoder-decoder, and the defaults for it."""

from collections.abc import Sequence
from typing import Any

from clearhead.bundle import Bundle
from clearhead.errors import InputError
from clearhead.generate.request import make_request
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
    stated, options = m.generation, {name: value for name, value in options.items() if value is not None}
    if "max_new_tokens" not in options:
        room = min(LONGEST, m.config.max_positions - len(m.start_ids))
        options["max_new_tokens"] = stated.get("max_new_tokens") or max(
            1, stated.get("max_length", room + 1) - 1
        )
    if "num_beams" not in options:
        options["num_beams"] = 1 if options.get("temperature") else stated.get("num_beams") or BEAMS
    if "length_penalty" not in options:
        options["length_penalty"] = stated.get("length_penalty") or 1.0
    return generate(m, texts, make_request(options), hooks)
