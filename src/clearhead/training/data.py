"""The data of a run: examples opened, a tokenizer trained on them, and batches made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from clearhead.batches.encoded import encode_corpus
from clearhead.batches.make import Batches, make_batches
from clearhead.bundle import Model
from clearhead.config import ModelConfig
from clearhead.data.corpus import open_data, task_of
from clearhead.data.examples import Chunk, Corpus, Images, Labelled, Pair, Question, Rows, Tagged
from clearhead.data.plan import DataPlan, Task
from clearhead.errors import InputError
from clearhead.evaluation.examples import begun
from clearhead.hub.tokenizer import load_tokenizer, read_settings, special_ids
from clearhead.tokens.training import choose, roles, train_tokenizer
from clearhead.training.events import Note, OnEvent
from clearhead.training.folder import CACHE
from clearhead.training.recipe import Recipe

SIDES: tuple[Literal["train", "validation"], ...] = ("train", "validation")


@dataclass(frozen=True)
class Texts:
    """Every text of some examples, streamed again at each iteration."""

    rows: Rows

    def __iter__(self) -> Iterator[str]:
        for row in self.rows:  # type: ignore[union-attr]
            match row:
                case Chunk(text, _):
                    yield text
                case Pair(source, target):
                    yield from (source, target)
                case Labelled(text, _, pair):
                    yield from (text,) if pair is None else (text, pair)
                case Tagged(words, _):
                    yield " ".join(words)
                case Question(question, context, _, _):
                    yield from (question, context)


def open_examples(plan: DataPlan, split: bool = True) -> tuple[Corpus, Task]:
    """Open the data and return the examples with their task; `split`: as for `open_data`."""
    if not plan.texts_only:
        corpus = open_data(plan, split)
        return corpus, task_of(plan, corpus)
    corpus = open_data(dataclasses.replace(plan, task=None, texts_only=False), split)
    if not isinstance(corpus.train, Images) and corpus.shape != "text":
        train, validation = (
            [Chunk(text, True) for text in Texts(rows)] for rows in (corpus.train, corpus.validation)
        )
        corpus = dataclasses.replace(corpus, shape="text", labels=(), train=train, validation=validation)
    return corpus, plan.task or task_of(plan, corpus)


def find_tokenizer(
    recipe: Recipe, task: Task, corpus: Corpus, base: Model | None, on_event: OnEvent
) -> tuple[Tokenizer | None, dict[str, int]]:
    """Return tokenizer and special ids: of a directory, of the base model, or trained on this data."""
    plan = recipe.tokens
    if task == "image":
        return None, {}
    if plan.model is not None:
        folder = Path(plan.model)
        tokenizer = load_tokenizer(folder) if folder.is_dir() else None
        if tokenizer is None:
            raise InputError(f'[tokens] model "{plan.model}" is no directory with a tokenizer')
        return tokenizer, special_ids(tokenizer, read_settings(folder), {}, {})
    if base is not None:
        if base.tokenizer is None:
            raise InputError(f"{base.folder} has no tokenizer: add tokenizer.json to it")
        return base.tokenizer, base.special
    chosen, sentence = choose(plan, task, corpus.size)
    on_event(Note(sentence))
    assert chosen.kind is not None
    tokenizer = train_tokenizer(Texts(corpus.train), plan, task, corpus.size)
    named = {role: tokenizer.token_to_id(token) for role, token in roles(task, chosen.kind).items()}
    special = {role: index for role, index in named.items() if index is not None}
    if task in ("seq2seq", "denoise"):
        special["decoder_start"] = special["bos"]
    return tokenizer, special


def encode_batches(
    recipe: Recipe, task: Task, corpus: Corpus, loaded: Model, folder: Path, on_event: OnEvent
) -> tuple[Batches, Batches]:
    """Encode the examples, cache them beside the run, and return the batches to train and to validate on."""
    length = min(recipe.data.max_length or loaded.max_length, loaded.max_length)
    cache = Path(recipe.data.cache) if recipe.data.cache is not None else folder / CACHE
    made = []
    for side in SIDES:
        encoded = encode_corpus(
            corpus, side, task, loaded.tokenizer, loaded.labels, cache, special=loaded.special
        )
        encoded, special = begun(encoded, task, loaded)
        batches = make_batches(
            encoded,
            task,
            recipe.data,
            special=special,
            length=length,
            seed=recipe.train.seed,
            training=side == "train",
        )
        for line in batches.said:
            on_event(Note(f"{side}: {line}"))
        made.append(batches)
        if task == "image" and side == "train":
            mean, deviation = (encoded.arrays[name].tolist() for name in ("mean", "std"))
            loaded.images = processor(mean, deviation, loaded.config)
    train, validation = made
    if train.waste:
        count = "1 batch" if train.per_epoch == 1 else f"{train.per_epoch:,} batches"
        on_event(Note(f"{count} in an epoch; {train.waste:.1%} of their tokens are padding"))
    return train, validation


def processor(mean: list[float], deviation: list[float], config: ModelConfig) -> dict[str, Any]:
    """Return preprocessor_config.json: how a picture is prepared for the model."""
    assert config.image_size is not None
    height, width = config.image_size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": deviation,
    }
