"""Kinds of tokenizer on one text, compared by bits a byte: that does not depend on the pieces."""

import functools
import math

import torch

from clearhead.core.transformer import Transformer
from clearhead.hub.tokens import TokenKind, TokensPlan
from clearhead.hub.tokens.training import GENERATOR, train_tokenizer
from clearhead.labs.lab.experiment import Claim, Conditions, Experiment, Numbers, Picture
from clearhead.labs.lab.learning import (
    Schooling,
    Text,
    held_out_loss,
    language_model,
    next_loss,
    prose,
    school,
)

CHARACTERS = 400_000  # of the text
PLAN = Schooling(steps=300, batch=16, length=64)
KINDS: dict[str, tuple[TokenKind, int | None]] = {  # all spell any text
    "bytes": ("byte", None),
    "BPE, 512 tokens": ("bpe", 512),
    "BPE, 2,048 tokens": ("bpe", 2048),
    "Unigram, 2,048 tokens": ("unigram", 2048),
}


def run(arm: tuple[TokenKind, int | None], setting: Conditions) -> Numbers:
    """Train a tokenizer on the text before the held-out tenth, and a model on as many tokens as any other."""
    kind, size = arm
    whole = prose(characters=CHARACTERS)
    cut = whole.rindex("\n", 0, CHARACTERS * 9 // 10) + 1
    parts = whole[:cut], whole[cut:]
    tokenizer = train_tokenizer([parts[0]], TokensPlan(kind=kind, vocab_size=size), GENERATOR, len(whole))
    train, held_out = (torch.tensor(tokenizer.encode(part, add_special_tokens=False).ids) for part in parts)
    corpus = Text(train, held_out, "")
    model = Transformer(language_model(vocab_size=tokenizer.get_vocab_size()))
    draw = functools.partial(corpus.windows, batch=PLAN.batch, length=PLAN.length)
    steps = list(school(model, draw, next_loss, PLAN, setting))
    size_of = len(parts[1].encode()) / len(held_out)  # bytes of a token
    bits = held_out_loss(model, PLAN, corpus=corpus) / math.log(2)
    return {
        "bits a byte": bits / size_of,
        "bits a token": bits,
        "bytes a token": size_of,
        "parameters": sum(one.numel() for one in model.parameters()),
        "curve": [[step, loss / math.log(2) / size_of] for step, loss, _ in steps],
    }


EXPERIMENT = Experiment(
    title="Kinds of tokenizer on one text",
    question="Which pieces of text does a model learn from best, at equal steps?",
    arms=KINDS,
    run=run,
    claims=(
        Claim(
            "Larger pieces need fewer bits for the same text.", "bits a byte", "BPE, 2,048 tokens", "bytes"
        ),
        Claim(
            "The loss of a token says the opposite, which is why tokenizers are not compared by it.",
            "bits a token",
            "bytes",
            "BPE, 2,048 tokens",
        ),
        Claim("Merges cover more text with a token than bytes.", "bytes a token", "bytes", "BPE, 512 tokens"),
    ),
    figures={
        "bits a byte": "bits that the model needs for a byte of unseen text",
        "bits a token": "the same for a token",
        "bytes a token": "bytes of the text that a token stands for",
        "parameters": "weights",
    },
    pictures=(
        Picture("bits", "Bits a byte while training", "step", "bits", curve="curve"),
        Picture("final", "Bits a byte of unseen text", "", "bits", figure="bits a byte"),
    ),
    seconds=30,
    setup={"model": "2 layers of width 64, 4 heads", "text": f"{CHARACTERS:,} characters", **vars(PLAN)},
)
