"""A model's own rules of generation: generation_config.json, read as options of a request.

Rules about what may be generated (forbidden and forced tokens, penalties, lengths) and how beams search
hold for every call that does not say otherwise. What the caller chooses stays with the caller: whether to
draw (`do_sample`, `temperature`, `top_k`, ...), how many results to give, and how long a text may be.
"""

from collections.abc import Collection, Mapping
from typing import Any

from clearhead.errors import InputError, refuse
from clearhead.run.generate.request import CONSTRAINTS, DRAWING, NGRAMS, OPTIONS, SEARCH, WATCHED, Request

UNKNOWN: dict[str, object] = {  # fields that change the text in ways we do not have; the value that is none
    "constraints": None,
    "dola_layers": None,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "remove_invalid_values": False,
    "sequence_bias": None,
    "token_healing": False,
    "watermarking_config": None,
}
# Rules that a grammar has no room for: it says itself where a text ends, and may ask for one word twice.
UNLESS_CONSTRAINED = ("forced_last", "min_length", "min_new_tokens", *NGRAMS)


def own_options(
    stated: Mapping[str, Any], special: Mapping[str, int], stops: Collection[int], size: int
) -> dict[str, Any]:
    """Return the options that a model states for itself, and refuse those that we do not have.

    Args:
        stated: generation_config.json, or, without one, config.json.
        special: ids of special tokens by role; `forced_bos` goes before what is stated.
        stops: ids that end a text.
        size: tokens in the vocabulary.
    """
    for name, nothing in UNKNOWN.items():
        value = stated.get(name)
        refuse(
            value is not None and value != nothing,
            f"generation_config.json: {name} {value!r} changes what the model writes and is not known here: "
            f'remove it from the file, or by m.generation.pop("{name}")',
        )
    start = stated.get("decoder_start_token_id")
    refuse(
        isinstance(start, list),
        f"generation_config.json: decoder_start_token_id {start} is a list: every answer begins with one id",
    )
    named = {name: option.own for name, option in OPTIONS.items() if option.own}
    own = {ours: stated[theirs] for ours, theirs in named.items() if stated.get(theirs) is not None}
    if "forced_bos" in special:
        own["forced_first"] = special["forced_bos"]
    try:
        if "forced_last" in own and not isinstance(own["forced_last"], list):
            own["forced_last"] = [own["forced_last"]]
        if "banned_sequences" in own:  # a text may end all the same
            ends = [[token] for token in stops]
            own["banned_sequences"] = [ids for ids in own["banned_sequences"] if ids not in ends]
        for name in ("banned", "banned_first"):  # the reference passes over ids that no token has
            if name in own:
                own[name] = [token for token in own[name] if token in range(size)]
        Request(**own)
    except (InputError, TypeError) as error:
        raise InputError(f"generation_config.json: {error}") from None
    return own


def with_own(own: Mapping[str, Any], options: Mapping[str, Any], hooked: bool = False) -> dict[str, Any]:
    """Return the caller's options and, where they say nothing, the model's own.

    Beams of the model's own give way to what excludes them (drawing, streaming, early exit, hooks), and their
    groups to another number of beams. Rules about the length of a text and about repetition give way to a
    grammar.
    """
    left_out: Collection[str] = ()
    if "num_beams" in options:
        left_out = ("num_beam_groups", "diversity_penalty")
    elif (
        hooked
        or options.get("overflow") == "stream"
        or any(options.get(name) for name in ("early_exit", "cache", *WATCHED))
        or any(name in options for name in DRAWING)
    ):
        left_out = SEARCH
    if any(options.get(name) is not None for name in CONSTRAINTS):
        left_out = (*left_out, *UNLESS_CONSTRAINED)
    return {**{name: value for name, value in own.items() if name not in left_out}, **options}
