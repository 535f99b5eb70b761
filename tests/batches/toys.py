"""Small corpora, tokenizers and models for the tests of batches."""

from __future__ import annotations

import dataclasses
import random
from functools import cache

import numpy as np
import torch

import clearhead as ch
from clearhead.hub.tokens import TokensPlan
from clearhead.hub.tokens.training import train_tokenizer
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.data.examples import Chunk, Corpus, Images, Labelled, Pair, Question, Tagged
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import TASKS

TEXT = (
    "the cat sat on a mat and saw seven old dogs run over green hills "
    "while rain fell slowly against windows unbelievably often"
)
WORDS = TEXT.split()


def sentence(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def text_corpus(n: int = 20, low: int = 3, high: int = 60, seed: int = 0) -> Corpus:
    """`n` documents to train on and half as many to validate on, cut into chunks in odd places."""
    rng = random.Random(seed)

    def side(count: int) -> list[Chunk]:
        made = []
        for _ in range(count):
            text = sentence(rng, low, high)
            at = rng.randint(0, len(text))
            made += [Chunk(text[:at], False), Chunk(text[at:], True)]
        return made

    train, validation = side(n), side(max(1, n // 2))
    return Corpus(
        "text",
        train,
        validation,
        (),
        f"text {n} {low} {high} {seed}",
        (),
        sum(len(chunk.text) for chunk in train),
    )


def corpus_of(task: str, n: int = 200, seed: int = 0) -> Corpus:
    rng = random.Random(seed)
    if task in ("lm", "mlm", "denoise"):
        return text_corpus(n // 10, seed=seed)
    makers = {"seq2seq": pair, "classify": labelled, "tag": tagged, "answer": question}
    shapes = {"seq2seq": "pairs", "classify": "labels", "tag": "tags", "answer": "questions"}
    train, validation = ([makers[task](rng) for _ in range(count)] for count in (n, n // 4))
    labels = {"classify": ("even", "odd"), "tag": ("O", "LONG")}.get(task, ())
    return Corpus(shapes[task], train, validation, labels, f"{task} {n} {seed}", (), 1000)


def pair(rng: random.Random) -> Pair:
    source = sentence(rng, 1, 30)
    return Pair(source, " ".join(reversed(source.split()[: rng.randint(1, 30)])))


def labelled(rng: random.Random) -> Labelled:
    text = sentence(rng, 1, 40)
    other = sentence(rng, 1, 40) if rng.random() < 0.5 else None
    return Labelled(text, "odd" if len(text) % 2 else "even", other)


def tagged(rng: random.Random) -> Tagged:
    words = tuple(sentence(rng, 1, 40).split())
    return Tagged(words, tuple("LONG" if len(word) > 4 else "O" for word in words))


def question(rng: random.Random) -> Question:
    words = sentence(rng, 5, 120).split()
    if rng.random() < 0.2:
        return Question(sentence(rng, 2, 8), " ".join(words), "", 0)
    first = rng.randrange(len(words))
    answer = " ".join(words[first : first + rng.randint(1, 4)])
    return Question(sentence(rng, 2, 8), " ".join(words), answer, len(" ".join([*words[:first], ""])))


def image_corpus(n: int = 50, size: tuple[int, int] = (8, 8), channels: int = 3) -> Corpus:
    rng = np.random.default_rng(0)
    sides = [
        Images(rng.integers(0, 256, (count, *size, channels), dtype=np.uint8), rng.integers(0, 3, count))
        for count in (n, n // 5)
    ]
    return Corpus("images", *sides, ("a", "b", "c"), "images", (), 0)


@cache
def tokenizer_for(task: str, kind: str = "wordpiece"):
    size = {"wordpiece": 60, "bpe": 300, "unigram": 290, "word": 20}.get(kind)
    if task == "denoise" and size is not None:
        size += 110
    rng = random.Random(1)
    texts = [sentence(rng, 5, 40) for _ in range(200)]
    return train_tokenizer(
        texts, TokensPlan(kind=kind, vocab_size=size), TASKS[task].specials, sum(map(len, texts))
    )


def special_of(task: str, kind: str = "wordpiece") -> dict[str, int]:
    tokenizer = tokenizer_for(task, kind)
    return {role: tokenizer.token_to_id(token) for role, token in TASKS[task].specials.roles(kind).items()}


def encoded_of(task: str, folder, side: str = "train", kind: str = "wordpiece", corpus: Corpus | None = None):
    corpus = corpus or (image_corpus() if task == "image" else corpus_of(task))
    if task == "image":
        return TASKS[task].encode_corpus(corpus, side, None, corpus.labels, folder, special={})
    return TASKS[task].encode_corpus(
        corpus,
        side,
        tokenizer_for(task, kind),
        corpus.labels,
        folder,
        special=special_of(task, kind),
    )


def batches_of(
    task: str,
    folder,
    training: bool = True,
    length: int = 32,
    seed: int = 0,
    kind: str = "wordpiece",
    corpus=None,
    **plan,
):
    encoded = encoded_of(task, folder, "train" if training else "validation", kind, corpus)
    special = {} if task == "image" else special_of(task, kind)
    return TASKS[task].make_batches(
        encoded,
        DataPlan(task=task, **plan),
        special=special,
        length=length,
        seed=seed,
        training=training,
    )


def same(a: Batch, b: Batch) -> bool:
    for field in dataclasses.fields(Batch):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if (x is None) != (y is None) or (x is not None and not torch.equal(x, y)):
            return False
    return True


def model_for(task: str, vocab_size: int, length: int = 64) -> ch.Transformer:
    families = {"lm": "decoder", "seq2seq": "encoder-decoder", "denoise": "encoder-decoder"}
    heads = {"mlm": "mlm", "classify": "classifier", "tag": "tagger", "answer": "span"}
    more = {"head": heads[task], "n_types": 2} if task in heads else {}
    if task in ("classify", "tag"):
        more["n_classes"] = 2
    config = ch.ModelConfig(
        family=families.get(task, "encoder"),
        vocab_size=vocab_size,
        d_model=32,
        n_layers=2,
        n_heads=4,
        max_positions=length,
        **more,
    )
    return ch.Transformer(config).double().eval()


def loss_of(model: ch.Transformer, batch: Batch) -> torch.Tensor:
    """The sum of the losses of a batch, written down independently of the trainer."""
    logits = model(**batch.arguments()).logits
    # Targets of this shape are the first and last token of an answer.
    if batch.targets.ndim == 2 and batch.targets.shape != batch.ids.shape:
        logits = logits if batch.mask is None else logits.masked_fill(~batch.mask[..., None], float("-inf"))
        logits, targets = logits.transpose(1, 2).reshape(-1, logits.shape[1]), batch.targets.reshape(-1)
    else:
        logits, targets = logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1)
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
