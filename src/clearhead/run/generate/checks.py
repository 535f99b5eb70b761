"""What a model can do with a request: what depends on the length of a text, and what is refused."""

from clearhead.core.config import TABLES
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.run.generate.request import SINKS, Request
from clearhead.run.generate.sequence import Ends, Prompts
from clearhead.variants.caches import check_stream


def steps_back(model: Transformer) -> bool:
    """Return True if a cache of the model can forget its last tokens: it holds keys alone, and no state."""
    return all(kind.masked for kind in model.config.main.kinds)


def slides(model: Transformer, request: Request, prompts: Prompts) -> bool:
    """Return True where a text may pass the model's positions, and its last tokens are to be read alone."""
    longest = prompts.longest + request.max_new_tokens - 1
    return request.overflow == "slide" and prompts.source is None and longest > model.config.max_positions


def stream_room(model: Transformer, request: Request) -> tuple[int, int]:
    """Return how many tokens a text that streams keeps, and how many of them are sinks."""
    sinks = SINKS if request.sinks is None else request.sinks
    return request.stream_window or model.config.max_positions, sinks


def streams(model: Transformer, request: Request, prompts: Prompts) -> bool:
    """Return True where a text may pass what is kept of it, and its first and last tokens are kept alone."""
    longest = prompts.longest + request.max_new_tokens - 1
    return request.overflow == "stream" and longest > stream_room(model, request)[0]


def is_stretched(model: Transformer, length: int) -> bool:
    """Return True where longrope takes its long divisors, which turn even the first tokens otherwise."""
    scaling = model.config.rope_scaling
    if scaling is None or scaling.kind != "longrope":
        return False
    return length > (scaling.original_positions or model.config.max_positions)


def check_request(model: Transformer, request: Request, prompts: Prompts, ends: Ends) -> None:
    """Raise `InputError` where the model cannot do what is asked."""
    check_options(model, request, ends)
    config = model.config
    refuse(
        not prompts.ids or not all(map(len, prompts.ids)),
        "a prompt is empty: give one token at least, such as the beginning-of-text token",
    )
    sliding = slides(model, request, prompts)
    refuse(
        sliding and (request.num_beams > 1 or prompts.longest > config.max_positions),
        f"beams and prompts of more than {config.max_positions} tokens, the model's positions, do not slide: "
        "leave beams out, shorten the prompt, or ask for fewer new tokens",
    )
    refuse(
        sliding and request.early_exit is not None,
        f"early_exit with a text that slides past the model's {config.max_positions} positions, and is read "
        "anew for each token: leave early_exit out, or ask for fewer new tokens",
    )
    needed = prompts.longest + request.max_new_tokens - 1
    refuse(
        config.positions in TABLES and needed > config.max_positions and not sliding,
        f"a prompt of {prompts.longest} tokens and {request.max_new_tokens} new ones need {needed} "
        f"positions and the model has {config.max_positions}: shorten one of them, or choose "
        "overflow slide, which keeps the last tokens of the text as it grows, or window, those of the prompt",
    )


def check_options(model: Transformer, request: Request, ends: Ends) -> None:
    """Raise `InputError` where the model cannot do what is asked, whatever the prompts are."""
    config, size = model.config, model.config.vocab_size
    refuse(
        config.head != "lm", f"this model's head is {config.head}: only a language model (head lm) generates"
    )
    if request.overflow == "stream":
        check_stream(config, *stream_room(model, request))
    named = {
        "allowed": request.allowed or (),
        "banned": request.banned,
        "banned_first": request.banned_first,
        "banned_sequences": [token for ids in request.banned_sequences for token in ids],
        "logit_bias": [token for token, _ in request.logit_bias],
        "forced_first": () if request.forced_first is None else (request.forced_first,),
        "forced_last": request.forced_last,
        "stop_ids": ends.stop_ids,
    }
    for name, tokens in named.items():
        refuse(
            any(not 0 <= token < size for token in tokens),
            f"{name} names a token outside the vocabulary: ids go from 0 to {size - 1}",
        )
    refuse(
        not 0 <= request.alternatives <= size,
        f"alternatives {request.alternatives} must lie between 0 and vocab_size {size}",
    )
