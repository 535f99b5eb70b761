"""From a recipe to a model: the task's usual sizes where the recipe is silent, a new head where a base has
another.

Defaults are such that what is trained has an exact Hugging Face architecture: GPT-2 for language models, BERT
for encoders, mBART for pairs, ViT for images.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from clearhead.core.config import ModelConfig
from clearhead.core.config.resolve import derive
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, hints_of, nearest, refuse, shaped
from clearhead.hub.checkpoint import Description, describe, exported
from clearhead.hub.gguf import is_gguf
from clearhead.hub.tokens.training import begin_texts
from clearhead.hub.towers import has_images, has_towers
from clearhead.learn.batches.encoding import Encoder
from clearhead.learn.recipe import BASE, Recipe, TrainPlan
from clearhead.learn.tasks.entries.align import KINDS
from clearhead.learn.tasks.table import task_named
from clearhead.learn.tasks.task import ENCODER_DECODER, Task
from clearhead.learn.training.machine import room
from clearhead.run.api import Model, load
from clearhead.run.bundle import best_device
from clearhead.run.kernels.transpose import lay_out_rows
from clearhead.run.quant.apply import refuse_quantized
from clearhead.variants.costs import LEARNING, cost
from clearhead.variants.presets import PRESETS, preset

ImageSize = tuple[int, int, int]  # height, width, channels
NAMED = (*PRESETS, *KINDS)  # what [model] base may name that is no directory


def base_of(recipe: Recipe) -> Model | None:
    """Return the model that the recipe continues from, where it names a directory."""
    base, rank = recipe.model.get(BASE), recipe.train.lora
    if base is None or base in NAMED:
        refuse(
            rank,
            f"train.lora {rank} updates a trained model, and [model] base names no directory of one: "
            "set model.base, or train.lora=0",
            ConfigError,
        )
        return None
    loaded = load(_folder(base), dtype=torch.float32, mapped=False)
    refuse_quantized(loaded.model, "trained")
    lay_out_rows(loaded.model)
    return loaded


def _folder(base: str) -> Path:
    """Return the directory that [model] base names, or refuse it."""
    refuse(
        not Path(base).is_dir() and not is_gguf(Path(base)),
        f'[model] base "{base}" is no directory, no GGUF file and no preset{nearest(base, PRESETS)}: '
        f"presets are {', '.join(PRESETS)}",
    )
    return Path(base)


def _decoder(recipe: Recipe) -> Path:
    """Return what [model] base names; of a model that is trained on images, its decoder."""
    folder = _folder(str(recipe.model[BASE]))
    return folder / "text" if recipe.data.task == "describe" and has_images(folder) else folder


def sized(recipe: Recipe) -> Recipe:
    """Return the recipe with pictures brought to the size that its base reads, where it names none."""
    base = recipe.model.get(BASE)
    if base is None or base in NAMED or recipe.data.image_size is not None or has_towers(Path(base)):
        return recipe
    height, width = describe(_decoder(recipe)).config.image_size or (0, 1)
    return recipe.replace("data", image_size=height) if height == width else recipe


def expected_config(recipe: Recipe) -> ModelConfig:
    """Return the config that a recipe describes, before its data is read.

    What the data decides is as in the recipe or, where it is silent, as in the base: vocabulary, classes, the
    size of images.
    """
    chosen = {name: value for name, value in recipe.model.items() if name != BASE}
    base = recipe.model.get(BASE)
    if base is None:
        start = task_named(recipe.data.task or "lm").usual.config(large=True)
    else:
        start = preset(base) if base in PRESETS else describe(_decoder(recipe)).config
    return _config(start, {"vocab_size": recipe.tokens.vocab_size, **chosen}, chosen)


def build(
    recipe: Recipe,
    task: str,
    tokenizer: Tokenizer | None,
    special: Mapping[str, int],
    labels: Sequence[str] = (),
    image: ImageSize | None = None,
    base: Model | None = None,
    large: bool = False,
) -> Model:
    """Make a model for the task of this name, as `[model]` says; where it is silent, as the task says.

    `tokenizer` is None for images. `base` is what `base_of` returned. `large`: choose a size for a GPU where
    the recipe names none.
    """
    spec = task_named(task)
    chosen = {name: value for name, value in recipe.model.items() if name != BASE}
    if base is None:
        start = preset(recipe.model[BASE]) if BASE in recipe.model else spec.usual.config(large)
    else:
        start = base.config
    _check_kind(start, recipe.model, spec)
    if base is None:
        fixed = _fixed(spec, tokenizer, labels, image, chosen)
        config = _config(start, {**_usual_head(start.family, spec.head), **chosen, **fixed}, chosen)
        _check_memory(config, recipe.train)
        torch.manual_seed(recipe.train.seed)
        model = Model(Transformer(config), labels=tuple(labels) if config.n_classes else ())
    else:
        _check_sizes(base, image, tokenizer)
        if tokenizer is not None and start.head == spec.head and set(labels) <= set(base.labels):
            labels = base.labels  # the classes it knows, by their numbers there
        fixed = _fixed(spec, tokenizer, labels, image, chosen)
        model = _adapted(base, fixed, chosen, tuple(labels), recipe.train.seed)
    if tokenizer is not None and spec.one_shape and recipe.data.packing == "isolated":
        _begin_documents(tokenizer, special)
    model = dataclasses.replace(
        model,
        tokenizer=tokenizer,
        special=dict(special),
        generation=_generation(recipe, spec, special, base or model),
    )
    if spec.stated:
        saved = exported(model.config, model.description)
        named = {f"{role}_token_id": special[role] for role in ("bos", "eos", "pad") if role in special}
        model.description = Description({**named, **saved.theirs, **spec.stated}, model.config, saved.kind)
    return model


def _begin_documents(tokenizer: Tokenizer, special: Mapping[str, int]) -> None:
    """Have the tokenizer begin every prompt with the token that begins each document in isolated packing."""
    bos = special.get("bos")  # without one, such packing is refused when batches are made
    if bos is not None and Encoder(tokenizer, {}, None).frame(pair=False).special[0] != [bos]:
        token = tokenizer.id_to_token(bos)
        if token is None:
            raise ConfigError(f"isolated packing needs a bos token, and the tokenizer has none of id {bos}")
        begin_texts(tokenizer, token)


def _check_kind(start: ModelConfig, model: Mapping[str, Any], task: Task) -> None:
    """Refuse a model of another family: it would see its own targets, or have no place for the source."""
    usual, fits = preset(task.usual.preset), task.fitting_families
    family, read = model.get("family", start.family), model.get("input", start.input)
    refuse(
        family not in fits or read != usual.input,
        f"[model]{f' base {model[BASE]}' if BASE in model else ''} has family {family} and reads {read}, "
        f"and task {task.name} needs family {' or '.join(fits)} and {usual.input}: "
        f"one such as {task.usual.preset} fits",
        ConfigError,
    )


def _check_sizes(base: Model, image: ImageSize | None, tokenizer: Tokenizer | None) -> None:
    """Refuse a base that cannot read the pictures, or every token of another tokenizer."""
    old = base.config
    if image is not None and old.image_size is not None and image != (*old.image_size, old.n_channels):
        theirs, ours = (" x ".join(map(str, size)) for size in ((*old.image_size, old.n_channels), image))
        raise ConfigError(
            f"{base.folder} reads images of {theirs} (height, width, channels), and those of the data are "
            f"{ours}: convert them, set data.image_size to its side, or leave model.base out"
        )
    size = 0 if tokenizer is None or tokenizer is base.tokenizer else tokenizer.get_vocab_size()
    refuse(
        size > old.vocab_size,
        f"{base.folder} has a vocabulary of {old.vocab_size}, and the tokenizer of [tokens] model "
        f"{size}: leave tokens.model out, or go on from another base",
        ConfigError,
    )


def _fixed(
    task: Task,
    tokenizer: Tokenizer | None,
    labels: Sequence[str],
    image: ImageSize | None,
    chosen: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what the task and the data decide."""
    fixed: dict[str, Any] = {"head": task.head, "n_classes": task.n_classes(labels)}
    if image is not None:
        height, width, channels = image
        patch = chosen.get("patch_size", 4 if max(height, width) <= 64 else 16)
        fixed |= {"image_size": (height, width), "n_channels": channels, "patch_size": patch}
        if patch > 0:
            refuse(
                height % patch or width % patch,
                f"pictures of {height} x {width} are no whole number of patches of {patch} x {patch}: "
                f"set data.image_size={max(min(height, width) // patch, 1) * patch}, or model.patch_size",
                ConfigError,
            )
            fixed["max_positions"] = (height // patch) * (width // patch) + 1
    if tokenizer is not None:
        fixed["vocab_size"] = max(tokenizer.get_vocab_size(), chosen.get("vocab_size", 0))
    if not task.pooled:
        fixed["pooler"] = "none"
    return fixed


def _config(start: ModelConfig, values: Mapping[str, Any], chosen: Mapping[str, Any]) -> ModelConfig:
    """Change a config; fields derived from a width are derived from the new one."""
    values = {**_dropout(start, chosen), **values}
    if chosen.get("d_model", 0) > 0:
        powers = {"embedding_scale": 0.5, "logit_scale": -0.5}
        scales = {name: float(chosen["d_model"]) ** power for name, power in powers.items()}
        values = {name: scale for name, scale in scales.items() if getattr(start, name) != 1.0} | values
    names = {name: value for name, value in values.items() if name != "vocab_size" or value}
    return _loosened(_loosened(start).replace(**_typed(names)))


def _loosened(config: ModelConfig) -> ModelConfig:
    """Return an equal config whose fields at their usual value count as derived, and follow a change.

    A preset, a checkpoint and a `train.toml` give every field, also those that nobody chose.
    """
    names = [name for name in derive(config) if name != "head"]
    for some in (names, *([name] for name in names)):  # nearly always it is all of them
        with suppress(ConfigError):  # a field that was chosen is needed, such as d_head
            free = config.replace(**dict.fromkeys(some))
            if free == config:
                config = free
                if some is names:
                    break
    return config


def _dropout(start: ModelConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dropout asked for, wherever `start` uses one value for all."""
    same = "dropout" in chosen and 0 < start.feedforward_dropout == start.dropout
    return {"feedforward_dropout": chosen["dropout"]} if same else {}


def _usual_head(family: str, head: str, base: Model | None = None) -> dict[str, Any]:
    """Return the fields of this head in the architecture of `base`, so that transformers opens the result."""
    described = base and base.description
    classes = described.architecture.classes.values() if described else ()
    usual = {"head_bias": False} if (family, head) == ("decoder", "classifier") else {}
    return next((dict(fields) for fields in classes if fields.get("head") == head), usual)


def _check_memory(config: ModelConfig, plan: TrainPlan) -> None:
    """Refuse a model that does not fit into memory: a GPU's is made there, and a CPU's is trained there."""
    learns = best_device(plan.device).type == "cpu"
    count = cost(config).parameters.total
    needed = count * (LEARNING[plan.optimizer] if learns else 4)
    there = room(torch.device("cpu"))
    refuse(
        needed > there,
        f"the model has {count:,} parameters, {'training' if learns else 'making'} it takes "
        f"{needed / 1e9:,.0f} GB, and this machine has {there / 1e9:,.0f} GB of memory: "
        "choose a smaller model.d_model, model.n_layers or tokens.vocab_size",
        ConfigError,
    )


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values of a TOML file to those of a config."""
    return {name: shaped(value, hints_of(ModelConfig)[name]) for name, value in values.items()}


def _adapted(
    base: Model, fixed: Mapping[str, Any], chosen: Mapping[str, Any], labels: tuple[str, ...], seed: int
) -> Model:
    """Give a loaded model the head that the task needs.

    Every weight that still has a place is kept; those of a class, where the classes are the same.
    """
    old = _loosened(base.config)
    kept = ("image_size", "n_channels", "patch_size", "max_positions", "vocab_size")
    usual = _usual_head(old.family, fixed["head"], base) if fixed["head"] != old.head else {}
    changes = (
        usual
        | _typed({**_dropout(old, chosen), **chosen})
        | {name: value for name, value in fixed.items() if name not in kept}
    )
    if changes["head"] == "classifier" and old.family == "encoder" and old.input == "tokens":
        changes.setdefault("pooler", "tanh")
    try:
        config = old.replace(**changes)
    except ConfigError as error:
        raise ConfigError(f"{base.folder} cannot be made into what the task needs: {error}") from None
    if config == old and labels == base.labels:
        return base
    torch.manual_seed(seed)
    model = Transformer(config)
    weights, fresh = dict(base.model.named_parameters()), dict(model.named_parameters())
    shared = {name for name in fresh if name in weights and weights[name].shape == fresh[name].shape}
    lost = [name for name in fresh if name not in shared and not name.startswith("head.")]
    refuse(
        lost,
        f"[model] changes the shape of {', '.join(lost[:1])} (and {len(lost) - 1} more) of {base.folder}: "
        "leave those keys out",
        ConfigError,
    )
    of_classes = set() if labels == base.labels else {name for name in fresh if name.startswith("head.out.")}
    model.load_state_dict({name: weights[name] for name in shared - of_classes}, strict=False)
    return Model(model, settings=dict(base.settings), labels=labels if config.n_classes else ())


def _generation(recipe: Recipe, task: Task, special: Mapping[str, int], known: Model) -> dict[str, Any]:
    """Return generation_config.json: special token ids, unless `known` has them, and how text is generated.

    An output has no more tokens than the decoder has positions: transformers would run past them and fail.
    """
    if task.head != "lm":
        return {}
    plan, roles = recipe.generate, ("bos", "eos", "pad", "decoder_start")
    settings = {f"{role}_token_id": special[role] for role in roles if role in special} | known.generation
    if task.usual is not ENCODER_DECODER:
        settings |= {"max_new_tokens": plan.max_new_tokens, "do_sample": plan.temperature > 0}
        return settings | {"temperature": plan.temperature or 1.0, "top_p": plan.top_p}
    most = min(plan.max_new_tokens, known.config.max_positions)
    beams = {"num_beams": plan.num_beams, "length_penalty": plan.length_penalty}
    return settings | {"max_new_tokens": most} | beams


def processor(
    mean: list[float], deviation: list[float], config: ModelConfig, cropped: bool
) -> dict[str, Any]:
    """Return preprocessor_config.json: how a picture is prepared for the model, `cropped` or only resized."""
    assert config.image_size is not None
    height, width = config.image_size
    whole = {"height": height, "width": width}
    framed: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": whole}
    if cropped:  # transformers' ViTImageProcessor crops nothing
        framed |= {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": height},
            "resample": 2,
            "do_center_crop": True,
            "crop_size": whole,
            "do_convert_rgb": config.n_channels == 3,
        }
    return {
        **framed,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": deviation,
    }
