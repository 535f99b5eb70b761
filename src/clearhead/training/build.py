"""From a recipe to a model: sizes where the recipe is silent, a new head where a loaded model has another.

Defaults are such that what is trained has an exact Hugging Face architecture: GPT-2 for language models, BERT for
encoders, mBART for pairs, ViT for images.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from clearhead.api import Model, load
from clearhead.config import ModelConfig
from clearhead.costs import cost
from clearhead.data.plan import Task
from clearhead.errors import ConfigError, InputError, nearest
from clearhead.model.transformer import Transformer
from clearhead.presets import PRESETS, preset
from clearhead.training.plan import TrainPlan
from clearhead.training.precision import best_device
from clearhead.training.recipe import BASE, Recipe
from clearhead.typed import hints_of, shaped

# What a model is when the recipe names none: a published kind, at a size that a CPU trains in minutes, or a GPU.
KIND: dict[str, tuple[str, dict[str, Any]]] = {
    "lm": ("gpt2", {}),
    "encoder": ("bert-base", {"norm_position": "post"}),
    "pairs": ("bart-base", {"norm_position": "pre"}),
    "image": ("vit-tiny", {"norm_eps": 1e-12}),
}
SMALL: dict[str, dict[str, Any]] = {
    "lm": {"d_model": 128, "n_layers": 4, "n_heads": 4, "max_positions": 128, "dropout": 0.0},
    "encoder": {"d_model": 128, "n_layers": 2, "n_heads": 4, "max_positions": 128},
    "pairs": {"d_model": 128, "n_layers": 2, "n_heads": 4, "max_positions": 128},
    "image": {"d_model": 64, "n_layers": 4, "n_heads": 4, "dropout": 0.0},
}
MIDDLE: dict[str, dict[str, Any]] = {
    "lm": {"d_model": 384, "n_layers": 6, "n_heads": 6, "max_positions": 256, "dropout": 0.2},
    "encoder": {"d_model": 256, "n_layers": 4, "n_heads": 4, "max_positions": 256},
    "pairs": {"d_model": 256, "n_layers": 3, "n_heads": 4, "max_positions": 256, "dropout": 0.2},
    "image": {"d_model": 192, "n_layers": 6, "n_heads": 6, "dropout": 0.1},
}
LEARNING = {
    "adamw": 16,
    "adafactor": 8,
}  # bytes of a parameter in float32: its value, its gradient, two moments or hardly anything
HEADS: dict[Task, str] = {
    "lm": "lm",
    "mlm": "mlm",
    "denoise": "lm",
    "seq2seq": "lm",
    "classify": "classifier",
    "tag": "tagger",
    "answer": "span",
    "image": "classifier",
}


def group_of(task: Task) -> str:
    """Which of the four kinds of model a task asks for."""
    return {"lm": "lm", "seq2seq": "pairs", "denoise": "pairs", "image": "image"}.get(task, "encoder")


def base_of(recipe: Recipe) -> Model | None:
    """The model that the recipe goes on from, where it names a directory."""
    base, rank = recipe.model.get(BASE), recipe.train.lora
    if base is None or base in PRESETS:
        if rank:
            raise ConfigError(
                f"train.lora {rank} updates a trained model, and [model] base names no directory of one: set model.base, or train.lora=0"
            )
        return None
    if not Path(base).is_dir():
        raise InputError(
            f'[model] base "{base}" is no directory and no preset{nearest(base, PRESETS)}: presets are {", ".join(PRESETS)}'
        )
    return load(base, dtype=torch.float32)


def build(
    recipe: Recipe,
    task: Task,
    tokenizer: Tokenizer | None,
    special: Mapping[str, int],
    labels: Sequence[str] = (),
    image: tuple[int, int, int] | None = None,
    base: Model | None = None,
    large: bool = False,
) -> Model:
    """A model for the task.

    Args:
        recipe: its `[model]` decides; where it is silent, the task does.
        task: what is learned.
        tokenizer: of the text; None: images.
        special: ids of its special tokens by role.
        labels: names of the classes.
        image: height, width and channels.
        base: what `base_of` gave.
        large: size for a GPU where the recipe says none.
    """
    given = {name: value for name, value in recipe.model.items() if name != BASE}
    if base is not None:
        _check_kind(base.config, recipe.model, task)
        _check_sizes(base, image, tokenizer)
        if task != "image" and base.config.head == HEADS[task] and set(labels) <= set(base.labels):
            labels = base.labels  # the classes it knows, by their numbers there
        generation = _generation(recipe, task, special, base.config.max_positions, base.generation)
        fixed = _fixed(task, tokenizer, labels, image, given)
        return _adapted(base, fixed, given, tokenizer, special, labels, generation, recipe.train.seed)
    group = group_of(task)
    kind, change = KIND[group]
    if BASE in recipe.model:
        start = preset(recipe.model[BASE])
    else:
        start = preset(kind).replace(**change, **(MIDDLE if large else SMALL)[group])
    _check_kind(start, recipe.model, task)
    fixed = _fixed(task, tokenizer, labels, image, given)
    config = _config(start, {**_usual_head(start.family, HEADS[task]), **given, **fixed}, given)
    _check_memory(config, recipe.train)
    torch.manual_seed(recipe.train.seed)
    return Model(
        Transformer(config),
        tokenizer,
        generation=_generation(recipe, task, special, config.max_positions),
        special=dict(special),
        labels=tuple(labels) if config.n_classes else (),
    )


def _check_kind(start: ModelConfig, model: Mapping[str, Any], task: Task) -> None:
    """A model of another family would see its own targets, or have no place for the source."""
    kind = KIND[group_of(task)][0]
    usual = preset(kind)
    fits = (usual.family, "decoder") if task == "classify" else (usual.family,)
    family, read = model.get("family", start.family), model.get("input", start.input)
    if family not in fits or read != usual.input:
        what = f"[model] base {model[BASE]}" if BASE in model else "[model]"
        raise ConfigError(
            f"{what} has family {family} and reads {read}, and task {task} needs family {' or '.join(fits)} and {usual.input}: "
            f"one such as {kind} fits"
        )


def _check_sizes(base: Model, image: tuple[int, int, int] | None, tokenizer: Tokenizer | None) -> None:
    """Can the base read every picture, or every token of a tokenizer that is not its own?"""
    old = base.config
    if image is not None and old.image_size is not None and image != (*old.image_size, old.n_channels):
        theirs, ours = (" x ".join(map(str, size)) for size in ((*old.image_size, old.n_channels), image))
        raise ConfigError(
            f"{base.folder} reads images of {theirs} (height, width, channels), and those of the data are {ours}: "
            "convert them, or leave model.base out"
        )
    if (
        tokenizer is not None
        and tokenizer is not base.tokenizer
        and tokenizer.get_vocab_size() > old.vocab_size
    ):
        raise ConfigError(
            f"{base.folder} has a vocabulary of {old.vocab_size}, and the tokenizer of [tokens] model {tokenizer.get_vocab_size()}: "
            "leave tokens.model out, or go on from another base"
        )


def _fixed(
    task: Task,
    tokenizer: Tokenizer | None,
    labels: Sequence[str],
    image: tuple[int, int, int] | None,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """What the task and the data leave no choice about."""
    fixed: dict[str, Any] = {
        "head": HEADS[task],
        "n_classes": len(labels) if HEADS[task] in ("classifier", "tagger") else 0,
    }
    if image is not None:
        height, width, channels = image
        patch = given.get("patch_size", 4 if max(height, width) <= 64 else 16)
        fixed |= {"image_size": (height, width), "n_channels": channels, "patch_size": patch}
        if patch > 0 and not (height % patch or width % patch):
            fixed["max_positions"] = (height // patch) * (width // patch) + 1
    if tokenizer is not None:
        fixed["vocab_size"] = max(tokenizer.get_vocab_size(), given.get("vocab_size", 0))
    if task in ("mlm", "tag", "answer"):
        fixed["pooler"] = "none"  # nothing is pooled
    return fixed


def _config(start: ModelConfig, values: Mapping[str, Any], given: Mapping[str, Any]) -> ModelConfig:
    """`start` changed; what follows from a width follows from the new one."""
    values = {**_dropout(start, given), **values}
    if given.get("d_model", 0) > 0:
        if start.embedding_scale != 1.0:
            values = {"embedding_scale": float(given["d_model"]) ** 0.5, **values}
        if start.logit_scale != 1.0:
            values = {"logit_scale": float(given["d_model"]) ** -0.5, **values}
    if start.d_ff == 4 * start.d_model:
        values = {"d_ff": None, **values}
    names = {name: value for name, value in values.items() if name != "vocab_size" or value}
    return start.replace(**_typed(names))


def _dropout(start: ModelConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The dropout that is asked for holds wherever `start` has the same."""
    same = "dropout" in given and 0 < start.feedforward_dropout == start.dropout
    return {"feedforward_dropout": given["dropout"]} if same else {}


def _usual_head(family: str, head: str, base: Model | None = None) -> dict[str, Any]:
    """What a head of this name is like where `base` comes from, so that transformers opens the result."""
    classes = (
        base.description.architecture.classes.values()
        if base is not None and base.description is not None
        else ()
    )
    published = [dict(fields) for fields in classes if fields.get("head") == head]
    return (
        published[0]
        if published
        else {"head_bias": False}
        if (family, head) == ("decoder", "classifier")
        else {}
    )


def _check_memory(config: ModelConfig, plan: TrainPlan) -> None:
    """A GPU's model is made in the machine's memory, and a CPU's learns there: refuse what cannot fit before hours go by."""
    learns = best_device(plan.device).type == "cpu"
    count = cost(config).parameters.total
    needed = count * (LEARNING[plan.optimizer] if learns else 4)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ConfigError(
            f"the model has {count:,} parameters, {'training' if learns else 'making'} it takes {needed / 1e9:,.0f} GB, and this machine "
            f"has {there / 1e9:,.0f} GB of memory: choose a smaller model.d_model, model.n_layers or tokens.vocab_size"
        )


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a TOML file as a config has them."""
    hints = hints_of(ModelConfig)
    return {name: shaped(value, hints[name]) for name, value in values.items()}


def _adapted(
    base: Model,
    fixed: Mapping[str, Any],
    given: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    special: Mapping[str, int],
    labels: Sequence[str],
    generation: dict[str, Any],
    seed: int,
) -> Model:
    """A loaded model with the head the task needs; every weight that still has a place is kept, of a class if it is the same one."""
    old = base.config
    kept = ("image_size", "n_channels", "patch_size", "max_positions", "vocab_size")
    usual = _usual_head(old.family, fixed["head"], base) if fixed["head"] != old.head else {}
    changes = (
        usual
        | _typed({**_dropout(old, given), **given})
        | {name: value for name, value in fixed.items() if name not in kept}
    )
    if changes["head"] == "classifier" and old.family == "encoder" and old.input == "tokens":
        changes.setdefault("pooler", "tanh")
    try:
        config = old.replace(**changes)
    except ConfigError as error:
        raise ConfigError(f"{base.folder} cannot be made into what the task needs: {error}") from None
    same_classes = tuple(labels) == base.labels
    if config == old and same_classes:
        return dataclasses.replace(base, tokenizer=tokenizer, special=dict(special), generation=generation)
    torch.manual_seed(seed)
    model = Transformer(config)
    weights, fresh = dict(base.model.named_parameters()), dict(model.named_parameters())
    shared = [name for name in fresh if name in weights and weights[name].shape == fresh[name].shape]
    body = [name for name in fresh if not name.startswith("head.")]
    lost = [name for name in body if name not in shared]
    if lost:
        raise ConfigError(
            f"[model] changes the shape of {lost[0]} (and {len(lost) - 1} more) of {base.folder}: leave those keys out"
        )
    with torch.no_grad():
        for name in shared:
            if same_classes or not name.startswith("head.out."):
                fresh[name].copy_(weights[name])
    return Model(
        model,
        tokenizer,
        generation=generation,
        special=dict(special),
        settings=dict(base.settings),
        labels=tuple(labels) if config.n_classes else (),
    )


def _generation(
    recipe: Recipe,
    task: Task,
    special: Mapping[str, int],
    longest: int,
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """generation_config.json: where a text begins and ends, as far as it is not `known`, and how it is made.

    An answer has no more tokens than the decoder has positions, `longest`: transformers would run past them and fail.
    """
    if HEADS[task] != "lm":
        return {}
    plan = recipe.generate
    roles = ("bos", "eos", "pad", "decoder_start")
    made: dict[str, Any] = {f"{role}_token_id": special[role] for role in roles if role in special} | dict(
        known or {}
    )
    if task == "lm":
        drawn = {
            "do_sample": plan.temperature > 0,
            "temperature": plan.temperature or 1.0,
            "top_p": plan.top_p,
        }
        return made | {"max_new_tokens": plan.max_new_tokens} | drawn
    beams = {"num_beams": plan.num_beams, "length_penalty": plan.length_penalty}
    return made | {"max_new_tokens": min(plan.max_new_tokens, longest)} | beams
