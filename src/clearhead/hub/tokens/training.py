"""Train tokenizers on the user's text.

Choose kind and size, add special tokens, set the template around a text.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import sqrt

from tokenizers import AddedToken, Tokenizer, processors

from clearhead.errors import InputError, refuse
from clearhead.hub.tokens.kinds import KINDS, Order
from clearhead.hub.tokens.plan import TokenKind, TokensPlan

# Each stands for a span that was taken out.
SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))
SPELLS_ALL = ("byte", "bpe")  # kinds that can spell any text, and need no token for what is unknown
SMALL = 1_500_000  # bytes: below this, a text that is to be written is best learned character by character
SCALE = {"bpe": 2, "wordpiece": 2, "unigram": 2, "word": 8}  # vocabularies grow with the text's square root
STEP, LEAST, MOST = 256, 1024, 32768
LIMIT = 1 << 20  # no vocabulary is larger, and trainers reserve memory for it


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a task, and the template around a text and around two.

    `:1` marks the second text.
    """

    tokens: Mapping[str, str]  # by role: pad, bos, eos, unk, cls, sep, mask
    single: str = ""
    pair: str = ""
    sentinels: tuple[str, ...] = ()
    kind: TokenKind | None = None  # of tokenizer, where the plan names none; None: by the size of the text

    def roles(self, kind: TokenKind) -> dict[str, str]:
        """Return the special tokens by role, as far as a kind of tokenizer needs them."""
        return {role: token for role, token in self.tokens.items() if role != "unk" or kind not in SPELLS_ALL}

    def all(self, kind: TokenKind) -> list[str]:
        """Return the special tokens in the order of their ids."""
        return [*dict.fromkeys(self.roles(kind).values()), *self.sentinels]


GENERATOR = SpecialTokens(
    {"eos": "<|endoftext|>", "bos": "<|endoftext|>", "pad": "<|pad|>", "unk": "<|unk|>"}
)
READER = SpecialTokens(
    {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "[CLS] $A [SEP]",
    "[CLS] $A [SEP] $B:1 [SEP]:1",
    kind="wordpiece",
)
TRANSLATOR = SpecialTokens(
    {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}, "$A </s>", "$A </s> $B </s>"
)
DENOISER = replace(TRANSLATOR, sentinels=SENTINELS)


def choose(plan: TokensPlan, specials: SpecialTokens, size: int) -> tuple[TokensPlan, str]:
    """Fill in kind and vocab_size for `size` bytes of text -> the plan, and a note on the choice.

    `vocab_size` stays None for characters and bytes, whose number is given.
    """
    units = ((1e5, f"{size / 1e6:.1f} MB"), (100, f"{size / 1e3:.1f} kB"), (0, f"{size} bytes"))
    amount = next(f"{written} of text" for least, written in units if size >= least)
    reasons: list[tuple[TokenKind | None, str]] = [
        (plan.kind, "as asked"),
        (None if plan.pattern is None else "word", "as a pattern says what a word is"),
        (specials.kind, "as an encoder reads words"),
        ("char" if size < SMALL else None, f"as {amount} is little"),
        ("bpe", f"as it spells anything, and {amount} is enough to learn it"),
    ]
    kind, why = next((kind, why) for kind, why in reasons if kind is not None)
    if kind not in SCALE:
        return replace(plan, kind=kind), f"tokens: {kind}, {why}"
    vocab_size, how = plan.vocab_size, "as asked"
    if vocab_size is None:
        fitting = round(SCALE[kind] * sqrt(size) / STEP) * STEP
        vocab_size, how = min(max(fitting, LEAST), MOST), f"for {amount}"
    note = f"tokens: {kind}, {why}; at most {vocab_size:,} of them, {how}"
    return replace(plan, kind=kind, vocab_size=vocab_size), note


def train_tokenizer(
    texts: Iterable[str], plan: TokensPlan, specials: SpecialTokens, size: int, clamp: bool = False
) -> Tokenizer:
    """Train the tokenizer that a plan asks for.

    Args:
        texts: documents, lines or pieces of any length; read once or more, never held in memory.
        plan: kind and vocab_size where they are None are chosen as `choose` does. A vocab_size that was asked
            for is met exactly or is an error; one that was chosen is a limit, and the vocabulary may come out
            smaller.
        specials: the special tokens, and the template around a text.
        size: bytes of the texts, about.
        clamp: take as many tokens as the texts have, where fewer than a vocab_size that was asked for.

    The result needs nothing but its tokenizer.json, and is the same for the same texts.
    """
    _check(texts, plan)
    chosen, _ = choose(plan, specials, size)
    assert chosen.kind is not None
    usual, _ = choose(replace(plan, vocab_size=None), specials, size)
    # A size equal to the usual one is no demand, so that a plan filled in by `choose` gives the same
    # tokenizer.
    asked = plan.vocab_size is not None and plan.vocab_size != usual.vocab_size
    special, unk = specials.all(chosen.kind), specials.roles(chosen.kind).get("unk")
    order = Order(texts, special, unk, chosen.vocab_size, asked, plan.lowercase, plan.pattern)
    tokenizer = _framed(KINDS[chosen.kind](order), special, specials)
    reached = tokenizer.get_vocab_size()
    refuse(
        asked and not clamp and chosen.vocab_size is not None and reached < chosen.vocab_size,
        f"vocab_size {chosen.vocab_size} is more than the data allows: "
        f"kind {chosen.kind} finds {reached} tokens "
        f"in it, special ones included: set it to {reached} or less, or leave it out"
        + ("" if chosen.kind in SCALE else ", or set tokens.kind to bpe"),
    )
    return tokenizer


def byte_tokenizer(specials: SpecialTokens = GENERATOR) -> Tokenizer:
    """Return the tokenizer of kind byte, which needs no text to learn from."""
    special = specials.all("byte")
    return _framed(KINDS["byte"](Order((), special, None, None)), special, specials)


def _framed(tokenizer: Tokenizer, special: list[str], specials: SpecialTokens) -> Tokenizer:
    """Add special tokens that are never split, and the template around a text."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    single, pair = specials.single.split(), specials.pair.split()
    if single:
        around = [(token, tokenizer.token_to_id(token)) for token in special if token in single]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=around
        )
    return tokenizer


def begin_texts(tokenizer: Tokenizer, token: str) -> None:
    """Have the tokenizer put a special token before each text, beside what its template does already."""
    template = processors.TemplateProcessing(
        single=[token, "$A"],
        pair=[token, "$A", token, "$B"],
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )
    before = tokenizer.post_processor
    tokenizer.post_processor = template if before is None else processors.Sequence([before, template])


def _check(texts: Iterable[str], plan: TokensPlan) -> None:
    refuse(
        plan.pattern is not None and plan.kind not in (None, "word"),
        f"tokens.pattern says what a word is, and kind is {plan.kind}: "
        "set kind to word, or leave pattern out",
    )
    refuse(
        plan.vocab_size is not None and not 0 < plan.vocab_size <= LIMIT,
        f"vocab_size {plan.vocab_size} must lie between 1 and {LIMIT}",
    )
    refuse(
        iter(texts) is texts,
        "the texts can be read only once, and training may read them twice: "
        "give a list, or an object with __iter__",
    )
    seen: set[str] = set()
    for text in texts:
        seen.update(text[:1000].strip())
        if len(seen) > 1:
            return
    found = f'only the character "{seen.pop()}"' if seen else "nothing"
    raise InputError(
        f"there is {found} to train a tokenizer on: "
        "give text of two different characters at least, better of some thousands"
    )
