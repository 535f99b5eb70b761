"""The data of a run: a tokenizer for the examples, and batches made of them."""

from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from clearhead.api import Model
from clearhead.batches.batch import Batches
from clearhead.batches.batching import make_batches
from clearhead.batches.encoded import encode_corpus
from clearhead.config import ModelConfig
from clearhead.data.examples import Corpus
from clearhead.errors import refuse
from clearhead.evaluation.examples import begun
from clearhead.hub.tokenizer import load_tokenizer, read_settings, special_ids
from clearhead.tasks.corpus import Texts
from clearhead.tasks.spec import ENCODER_DECODER, TaskSpec
from clearhead.tokens.training import choose, train_tokenizer
from clearhead.training.events import Note, OnEvent
from clearhead.training.folder import CACHE
from clearhead.training.recipe import Recipe

SIDES: tuple[Literal["train", "validation"], ...] = ("train", "validation")


def find_tokenizer(
    recipe: Recipe, task: TaskSpec, corpus: Corpus, base: Model | None, on_event: OnEvent
) -> tuple[Tokenizer | None, dict[str, int]]:
    """Return tokenizer and special ids: of a directory, of the base model, or trained on this data."""
    plan = recipe.tokens
    if task.tokens is None:
        return None, {}
    if plan.model is not None:
        folder = Path(plan.model)
        tokenizer = load_tokenizer(folder) if folder.is_dir() else None
        refuse(tokenizer is None, f'[tokens] model "{plan.model}" is no directory with a tokenizer')
        return tokenizer, special_ids(tokenizer, read_settings(folder), {}, {})
    if base is not None:
        refuse(base.tokenizer is None, f"{base.folder} has no tokenizer: add tokenizer.json to it")
        return base.tokenizer, base.special
    chosen, sentence = choose(plan, task.tokens, corpus.size)
    on_event(Note(sentence))
    assert chosen.kind is not None
    tokenizer = train_tokenizer(Texts(corpus.train), plan, task.tokens, corpus.size)
    named = {role: tokenizer.token_to_id(token) for role, token in task.tokens.roles(chosen.kind).items()}
    special = {role: index for role, index in named.items() if index is not None}
    if task.usual is ENCODER_DECODER:
        special["decoder_start"] = special["bos"]
    return tokenizer, special


def encode_batches(
    recipe: Recipe, task: TaskSpec, corpus: Corpus, loaded: Model, folder: Path, on_event: OnEvent
) -> tuple[Batches, Batches]:
    """Encode the examples, cache them beside the run, and return the batches to train and to validate on."""
    length = min(recipe.data.max_length or loaded.max_length, loaded.max_length)
    cache = Path(recipe.data.cache) if recipe.data.cache is not None else folder / CACHE
    made = []
    for side in SIDES:
        encoded = encode_corpus(
            corpus, side, task.batching, loaded.tokenizer, loaded.labels, cache, special=loaded.special
        )
        encoded, special = begun(encoded, loaded)
        batches = make_batches(
            task.batching,
            encoded,
            recipe.data,
            special=special,
            length=length,
            seed=recipe.train.seed,
            training=side == "train",
        )
        for line in batches.notes:
            on_event(Note(f"{side}: {line}"))
        made.append(batches)
        if task.tokens is None and side == "train":
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
