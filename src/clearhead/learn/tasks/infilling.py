"""Fill-in-the-middle: a prompt of what stands before and after the text that is asked for.

A model of code is trained on files whose parts are told apart by tokens of its own. A prompt for it has these
tokens in the order of its model card, mostly prefix, suffix, middle (PSM); the text ends with a token of its
own, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from clearhead.errors import RequestError
from clearhead.hub.tokenizer import check_infilling, encoding_of
from clearhead.run.bundle import Bundle

BEFORE, AFTER = 0, 1  # the two texts, in the order of a prompt
MARK = "\u263a"  # a sign that merges with nothing: a text after it gets no space in front


@dataclass(frozen=True)
class Infilling:
    """The prompt of a family of models: its tokens, with the two texts among them."""

    order: tuple[str | int, ...]
    ends: tuple[str, ...] = ()  # tokens that end the text, besides those that end any text of the model


FORMATS = (
    Infilling(  # StarCoder, StarCoder2, Granite, StableCode
        ("<fim_prefix>", BEFORE, "<fim_suffix>", AFTER, "<fim_middle>"),
        ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>"),
    ),
    Infilling(  # SantaCoder
        ("<fim-prefix>", BEFORE, "<fim-suffix>", AFTER, "<fim-middle>"), ("<|endoftext|>", "<fim-pad>")
    ),
    Infilling(  # Qwen2.5-Coder, CodeGemma
        ("<|fim_prefix|>", BEFORE, "<|fim_suffix|>", AFTER, "<|fim_middle|>"),
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<eos>"),
    ),
    Infilling(  # DeepSeek-Coder
        ("<｜fim▁begin｜>", BEFORE, "<｜fim▁hole｜>", AFTER, "<｜fim▁end｜>"),
        ("<｜end▁of▁sentence｜>", "<|EOT|>"),
    ),
    Infilling(("▁<PRE>", BEFORE, "▁<SUF>", AFTER, "▁<MID>"), ("▁<EOT>",)),  # CodeLlama
    Infilling(("[SUFFIX]", AFTER, "[PREFIX]", BEFORE)),  # Codestral
)


def infilling_of(m: Bundle) -> Infilling:
    """Return how a model is asked to fill in; refuse one whose tokenizer has no tokens for it."""
    tokenizer, size = m.text_tokenizer, m.config.vocab_size
    for known in FORMATS:
        ids = [tokenizer.token_to_id(part) for part in known.order if isinstance(part, str)]
        if m.config.family == "decoder" and all(token is not None and token < size for token in ids):
            return known
    raise RequestError(
        "suffix with a model that does not fill in: its tokenizer has none of the tokens for it, such as "
        "<fim_prefix>: leave suffix out",
        "unsupported_parameter",
        param="suffix",
    )


def infilled(m: Bundle, prompt: str | Sequence[int], suffix: str) -> list[int]:
    """Return the ids of a prompt that is asked to be continued up to `suffix`."""
    tokenizer, front = m.text_tokenizer, _front(m.text_tokenizer)
    if isinstance(prompt, str):
        check_infilling(m.settings, [prompt, suffix])
        before = _inner(tokenizer, f" {prompt}" if prompt and _spaced(tokenizer) else prompt)
    else:
        before = m.prompt_ids(prompt)
        before = before[len(front) :] if before[: len(front)] == front else before
    texts = {BEFORE: before, AFTER: _inner(tokenizer, suffix)}
    ids = front
    for part in infilling_of(m).order:
        ids = [*ids, *([tokenizer.token_to_id(part)] if isinstance(part, str) else texts[part])]
    return ids


def infilling_ends(m: Bundle) -> set[int]:
    """Return the tokens that end a text which fills in."""
    ids = {m.text_tokenizer.token_to_id(end) for end in infilling_of(m).ends}
    return {token for token in ids if token is not None and token < m.config.vocab_size}


def _front(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text."""
    encoding = encoding_of(tokenizer, "x", special=True)
    count = next((n for n, special in enumerate(encoding.special_tokens_mask) if not special), 0)
    return list(encoding.ids[:count])


def _spaced(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer puts a space before a text, as SentencePiece does."""
    return encoding_of(tokenizer, "x").tokens[0].startswith("▁")


def _inner(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text as they are after another one: no space is put before it."""
    if _spaced(tokenizer):
        mark, marked = encoding_of(tokenizer, MARK).ids, encoding_of(tokenizer, MARK + text).ids
        if marked[: len(mark)] == mark:
            return list(marked[len(mark) :])
    return list(encoding_of(tokenizer, text).ids)
