"""Translation: generation with an encoder-decoder, and the defaults for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clearhead.errors import InputError
from clearhead.tasks.run import fitting

if TYPE_CHECKING:
    from clearhead.bundle import Model


def translate(
    loaded: Model,
    text: str | list[str],
    max_new_tokens: int | None = None,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    **options: Any,
) -> Any:
    """What an encoder-decoder makes of a text, as a `Generation`; a list gives a list.

    Beams, length penalty and length are generation_config.json's where it has them, else 4 beams and as many tokens as
    the model has positions, 256 at most. Options are `generate`'s; one that samples takes the place of the beams.
    """
    if loaded.config.family != "encoder-decoder":
        raise InputError(
            f"translate needs an encoder-decoder, and this is a model of family {loaded.config.family}: {fitting(loaded)}"
        )
    stated = loaded.generation
    if max_new_tokens is None:
        room = min(256, loaded.config.max_positions - len(loaded._start()))
        max_new_tokens = stated.get("max_new_tokens") or max(1, stated.get("max_length", room + 1) - 1)
    if num_beams is None:
        num_beams = 1 if options.get("temperature") else stated.get("num_beams") or 4
    if length_penalty is None:
        length_penalty = stated.get("length_penalty") or 1.0
    if num_beams > 1:
        options |= {"num_beams": num_beams, "length_penalty": length_penalty}
    return loaded.generate(text, max_new_tokens, **options)
