"""Tokenizers trained from the user's text: the kind and size that suit it, special tokens by task, what stands around a text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import sqrt

from tokenizers import AddedToken, Tokenizer, processors

from clearhead.data.plan import Task
from clearhead.errors import InputError
from clearhead.tokens.kinds import KINDS, Order
from clearhead.tokens.plan import TokenKind, TokensPlan

BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
SEQ2SEQ = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
SPECIALS: dict[Task, dict[str, str]] = {
    "lm": {"eos": "<|endoftext|>", "bos": "<|endoftext|>", "pad": "<|pad|>", "unk": "<|unk|>"},
    "seq2seq": SEQ2SEQ,
    "denoise": SEQ2SEQ,
    "mlm": BERT,
    "classify": BERT,
    "tag": BERT,
    "answer": BERT,
}
SENTINELS = tuple(
    f"<extra_id_{number}>" for number in range(100)
)  # denoise: what stands for a span that was taken out
FRAMES = {  # what encoding puts around a text, and around two; :1 marks the tokens of the second
    **dict.fromkeys(("mlm", "classify", "tag", "answer"), ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")),
    **dict.fromkeys(("seq2seq", "denoise"), ("$A </s>", "$A </s> $B </s>")),
}
SPELLS_ALL = ("byte", "bpe")  # kinds that can spell any text, and need no token for what is unknown

SMALL = 1_500_000  # bytes: below this, a text that is to be written is best learned character by character
SCALE = {
    "bpe": 2,
    "wordpiece": 2,
    "unigram": 2,
    "word": 8,
}  # the vocabulary grows with the square root of the text
STEP, LEAST, MOST, LIMIT = (
    256,
    1024,
    32768,
    1 << 20,
)  # LIMIT: no vocabulary is larger, and trainers reserve memory for it


def roles(task: Task, kind: TokenKind) -> dict[str, str]:
    """The special tokens of a task by role: pad, bos, eos, unk, cls, sep, mask, as far as it has them."""
    if task not in SPECIALS:
        raise InputError(f'task "{task}" has no tokens: tokenizers are for {", ".join(SPECIALS)}')
    return {role: token for role, token in SPECIALS[task].items() if role != "unk" or kind not in SPELLS_ALL}


def special_tokens(task: Task, kind: TokenKind) -> list[str]:
    """The special tokens of a task in the order of their ids."""
    return [*dict.fromkeys(roles(task, kind).values()), *(SENTINELS if task == "denoise" else ())]


def choose(plan: TokensPlan, task: Task, size: int) -> tuple[TokensPlan, str]:
    """The plan with kind and vocab_size filled in for `size` bytes of text, and a sentence that says what was chosen and why.

    `vocab_size` stays None for characters and bytes: there are as many as there are.
    """
    amount = (
        f"{size / 1e6:.1f} MB of text"
        if size >= 1e5
        else f"{size / 1e3:.1f} kB of text"
        if size >= 100
        else f"{size} bytes of text"
    )
    kind, why = plan.kind, "as asked"
    if kind is None:
        if plan.pattern is not None:
            kind, why = "word", "as a pattern says what a word is"
        elif SPECIALS.get(task) is BERT:
            kind, why = "wordpiece", "as an encoder reads words"
        elif size < SMALL:
            kind, why = "char", f"as {amount} is little"
        else:
            kind, why = "bpe", f"as it spells anything, and {amount} is enough to learn it"
    if kind not in SCALE:
        return replace(plan, kind=kind), f"tokens: {kind}, {why}"
    fitting = min(max(round(SCALE[kind] * sqrt(size) / STEP) * STEP, LEAST), MOST)
    vocab_size = plan.vocab_size if plan.vocab_size is not None else fitting
    how = "as asked" if plan.vocab_size is not None else f"for {amount}"
    return replace(
        plan, kind=kind, vocab_size=vocab_size
    ), f"tokens: {kind}, {why}; at most {vocab_size:,} of them, {how}"


def train_tokenizer(texts: Iterable[str], plan: TokensPlan, task: Task, size: int) -> Tokenizer:
    """Train the tokenizer that a plan asks for.

    Args:
        texts: documents, lines or pieces of any length; read once or more, never held.
        plan: kind and vocab_size where they are None are chosen as `choose` does. A vocab_size that was asked for is met
            exactly or is an error; one that was chosen is a limit, and the vocabulary may come out smaller.
        task: decides the special tokens and what stands around a text.
        size: bytes of the texts, about.

    The result needs nothing but its tokenizer.json, and is the same for the same texts.
    """
    _check(texts, plan)
    chosen, _ = choose(plan, task, size)
    assert chosen.kind is not None
    usual, _ = choose(replace(plan, vocab_size=None), task, size)
    asked = (
        plan.vocab_size is not None and plan.vocab_size != usual.vocab_size
    )  # so that a plan filled in by `choose` is as good
    special, named = special_tokens(task, chosen.kind), roles(task, chosen.kind)
    order = Order(texts, special, named.get("unk"), chosen.vocab_size, asked, plan.lowercase, plan.pattern)
    tokenizer = _framed(KINDS[chosen.kind](order), special, task)
    reached = tokenizer.get_vocab_size()
    if asked and chosen.vocab_size is not None and reached < chosen.vocab_size:
        raise InputError(
            f"vocab_size {chosen.vocab_size} is more than the data allows: kind {chosen.kind} finds {reached} tokens in it, "
            f"special ones included: set it to {reached} or less, or leave it out"
            + ("" if chosen.kind in SCALE else ", or set tokens.kind to bpe")
        )
    return tokenizer


def byte_tokenizer(task: Task = "lm") -> Tokenizer:
    """The tokenizer of kind byte, which needs no text to learn from."""
    special = special_tokens(task, "byte")
    return _framed(KINDS["byte"](Order((), special, None, None)), special, task)


def _framed(tokenizer: Tokenizer, special: list[str], task: Task) -> Tokenizer:
    """Special tokens that are never split, and what encoding puts around a text."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if task in FRAMES:
        single, pair = FRAMES[task]
        around = [(token, tokenizer.token_to_id(token)) for token in special if token in single.split()]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single.split(), pair=pair.split(), special_tokens=around
        )
    return tokenizer


def _check(texts: Iterable[str], plan: TokensPlan) -> None:
    if plan.pattern is not None and plan.kind not in (None, "word"):
        raise InputError(
            f"tokens.pattern says what a word is, and kind is {plan.kind}: set kind to word, or leave pattern out"
        )
    if plan.vocab_size is not None and not 0 < plan.vocab_size <= LIMIT:
        raise InputError(f"vocab_size {plan.vocab_size} must lie between 1 and {LIMIT}")
    if iter(texts) is texts:
        raise InputError(
            "the texts can be read only once, and training may read them twice: give a list, or an object with __iter__"
        )
    seen: set[str] = set()
    for text in texts:
        seen.update(text[:1000].strip())
        if len(seen) > 1:
            return
    found = f'only the character "{seen.pop()}"' if seen else "nothing"
    raise InputError(
        f"there is {found} to train a tokenizer on: give text of two different characters at least, better of some thousands"
    )
