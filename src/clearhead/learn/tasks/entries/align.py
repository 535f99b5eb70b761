"""Alignment of two towers, CLIP or SigLIP: a picture and its caption come to lie near each other.

Rows are an image file and its caption. The loss is the model's own: each pair is told from the other pairs of
its batch. `model.base` is a directory of two towers, or "clip" or "siglip" for a new model whose vocabulary
comes from the captions.

Shapes: B pairs of a batch, P width of the common space.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.errors import ConfigError, refuse
from clearhead.hub.preprocessor import read_image
from clearhead.hub.tokenizer import encode
from clearhead.hub.tokens import TokensPlan
from clearhead.hub.tokens.training import SpecialTokens, train_tokenizer
from clearhead.hub.towers import JoinedTowers
from clearhead.learn.batches.batch import Batch, Batches
from clearhead.learn.data.examples import Corpus, Example
from clearhead.learn.data.files import digest
from clearhead.learn.data.formats import rows_of
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.data.tables import Record
from clearhead.learn.evaluation.metrics import METRICS
from clearhead.learn.losses import NO_TERMS, Answered, Terms
from clearhead.learn.recipe import BASE, GeneratePlan, Recipe, TrainPlan
from clearhead.learn.tasks.task import Answers, Scored, Side, Task, sampled
from clearhead.learn.tasks.vectors import image_pixels, text_inputs, towers_of
from clearhead.run.api import Model
from clearhead.run.bundle import Bundle
from clearhead.variants.towers import TowersConfig, pair_loss

KINDS = ("clip", "siglip")  # of new models
CAPTIONS = ("caption", "text")  # names of the column, the first that is there
CAPTION = SpecialTokens({"pad": "<pad>", "eos": "</s>"}, "$A </s>", "$A </s> $B </s>")
LARGEST_SCALE = 4.6052  # of the logits, as a logarithm: 100, beyond which CLIP found training unstable
LONGEST_TEXT, LARGEST_IMAGE, SMALL_IMAGE = 64, 224, 64  # tokens; pixels of a side
IMAGE_LAYERS = 2  # for each layer of texts, which are simpler
D_MODEL, N_LAYERS, N_HEADS = 128, 2, 4  # of a new model, where the recipe does not say


@dataclass(frozen=True, slots=True)
class Captioned(Example):
    """An image file and the text that describes it."""

    PLURAL, NEEDED = "captions", ("image", "caption")
    TEXTS = KEY = ("caption",)
    image: Path
    caption: str

    def asked(self) -> tuple[str, ...]:
        """Return the path of the image."""
        return (str(self.image),)


def read_captions(path: str | Path) -> list[Captioned]:
    """Read rows of image and caption: TSV or CSV with a header, or JSON lines.

    The columns are `image`, a path from the folder of the file on, and `caption` or `text`.
    """
    return rows_of(
        path,
        _captioned,
        absent="give rows of image and caption, TSV, CSV or JSON lines",
        other="give rows of image and caption as TSV, CSV or JSON lines",
        empty="no row of image and caption",
    )


def _captioned(record: Record, folder: Path) -> Captioned:
    column = next((name for name in CAPTIONS if name in record.cells), CAPTIONS[0])
    image, caption = folder / record.text("image"), record.text(column).strip()
    refuse(not image.is_file(), f"{record.place}: the image {image} is not there")
    refuse(not caption, f"{record.place}: the {column} is empty")
    return Captioned(image, caption)


def _sides(corpus: Corpus) -> tuple[list[Captioned], list[Captioned]]:
    """Return the rows to train on and those to validate on."""
    return cast(list[Captioned], corpus.train), cast(list[Captioned], corpus.validation)


class CaptionBatches(Batches):
    """Pairs of a caption and the pixels of its image; the targets number the distinct captions.

    In training every epoch has whole batches alone: one that went on into the next epoch could hold a pair
    twice, and tell it from itself.
    """

    def __init__(
        self, loaded: Bundle, rows: Sequence[Captioned], size: int, seed: int, training: bool
    ) -> None:
        self.loaded, self.rows, self.size, self.seed, self.training = loaded, rows, size, seed, training
        self.per_epoch = len(rows) // size if training else math.ceil(len(rows) / size)
        distinct = dict.fromkeys(row.caption for row in rows)
        numbers = {caption: number for number, caption in enumerate(distinct)}
        self.captions = torch.tensor([numbers[row.caption] for row in rows])

    def at(self, index: int) -> Batch:
        """See `Batches.at`."""
        epoch, number = divmod(index, self.per_epoch)
        order = torch.arange(len(self.rows))
        if self.training:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.rows), generator=generator)
        chosen = order[number * self.size : (number + 1) * self.size]
        rows = [self.rows[row] for row in chosen.tolist()]
        ids, mask = text_inputs(self.loaded, [row.caption for row in rows])
        pixels = image_pixels(self.loaded, (row.image for row in rows)).float()
        return Batch(ids, self.captions[chosen], mask, pixels, numbers=chosen)


class Align(Task):
    """Tell the caption of a picture from others, and the picture of a caption."""

    name = "align"
    row = Captioned
    tokens = CAPTION
    guessed = False
    head = "none"
    metrics = ("loss", "image_to_text", "text_to_image")
    command = "classify {folder} IMAGE --labels A B"
    kind = "softmax"  # of the loss, see `pair_loss`

    def read(self, plan: DataPlan, split: bool = True) -> Corpus:
        """Read captioned pictures; those to validate on are files of the plan, or every tenth row."""
        refuse(not plan.paths, "no data is named: name a file of rows of image and caption")
        rows = [row for path in plan.paths for row in read_captions(path)]
        held_out = [row for path in plan.validation for row in read_captions(path)]
        train, validation = rows, held_out
        if not split:
            train, validation = [], rows
        elif not held_out:
            train = [row for number, row in enumerate(rows) if number % 10 != 9]
            validation = rows[9::10]
        files = tuple(Path(path) for path in (*plan.paths, *plan.validation))
        size = sum(row.size() for row in train)
        return Corpus(self.row.PLURAL, train, validation, (), f"1:{digest(files, self.name)}", (), size)

    def model_for(self, recipe: Recipe, corpus: Corpus, base: Model | None) -> Model:
        """Return the base, which must have two towers, or a new model."""
        if base is None:
            train, validation = _sides(corpus)
            rows = [*train, *(() if recipe.data.validation else validation)]
            return new_towers(recipe, [row.caption for row in rows], rows[0].image)
        towers_of(base, "training on captions")
        return base

    def module(self, loaded: Bundle) -> nn.Module:
        """Return both towers."""
        return towers_of(loaded, "training on captions")

    def direct_batches(
        self, loaded: Bundle, corpus: Corpus, side: Side, plan: DataPlan, seed: int, training: bool = True
    ) -> Batches:
        """See `Task.direct_batches`."""
        (train, validation), size = _sides(corpus), plan.batch_size
        refuse(
            size < 2,
            "the other pairs of a batch are what a pair is told from: set batch_size to 2 or more",
            ConfigError,
        )
        refuse(
            len(train) < size or not validation,
            f"{plan.paths[0]} has {len(train)} pairs to train on and {len(validation)} held out: "
            f"batch_size {size} needs more",
        )
        return CaptionBatches(loaded, train if side == "train" else validation, size, seed, side == "train")

    def settled(self, plan: TrainPlan, loaded: Bundle, corpus: Corpus) -> Self:
        """Take the loss of the model; refuse what two towers are not trained with."""
        super().settled(plan, loaded, corpus)
        unsupported = (
            *("label_smoothing", "lora", "compile", "offload", "checkpointing", "layer_decay"),
            *("z_loss", "r_drop", "future_tokens", "window_schedule"),
        )
        usual = TrainPlan()
        for name in unsupported:
            refuse(
                getattr(plan, name) not in (getattr(usual, name), False),
                f"train.{name} is not for align, whose model has two towers: leave it out",
                ConfigError,
            )
        refuse(
            plan.precision == "float8", "train.precision float8 is not for align: set bfloat16", ConfigError
        )
        return self.with_values(kind=towers_of(loaded, "training on captions").config.loss)

    def outputs_of(self, model: nn.Module, batch: Batch, chunk: int | None = None) -> Tensor:
        """Return logits and both vectors of each pair: [B, B + 2 P]."""
        out = model(batch.ids, batch.source, batch.mask)
        return torch.cat([out.logits, out.texts, out.images], 1)

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the loss summed over the pairs."""
        return pair_loss(outputs[:, : len(batch)], self.kind) * len(batch)

    def batch_loss(
        self,
        model: Any,
        batch: Batch,
        smoothing: float = 0.0,
        chunk: int | None = None,
        balance: float = 0.0,
        total: Callable[[Tensor], Tensor] = lambda value: value,
        terms: Terms = NO_TERMS,
    ) -> tuple[Tensor, int]:
        """See `Task.batch_loss`; two towers have no routers to balance."""
        return self.loss(self.outputs_of(model, batch), batch), batch.n_targets

    def row_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each pair [B]."""
        logits, own = outputs[:, : len(batch)], torch.arange(len(batch), device=outputs.device)
        if self.kind == "softmax":
            sides = (nnf.cross_entropy(side, own, reduction="none") for side in (logits, logits.t()))
            return sum(sides, torch.zeros((), device=logits.device)) / 2
        signs = 2 * torch.eye(len(logits), device=logits.device, dtype=logits.dtype) - 1
        return -nnf.logsigmoid(signs * logits).sum(1)

    def answers(self, outputs: Tensor, batch: Batch) -> Answered:
        """Return the image's vector, and the number of its caption with the caption's vector."""
        texts, images = outputs[:, len(batch) :].float().chunk(2, 1)
        expected = torch.cat([batch.targets[:, None].to(texts), texts], 1)
        return images.tolist(), expected.tolist()

    def after_step(self, model: nn.Module) -> None:
        """Keep the scale of the logits within bounds."""
        scale: Any = model.logit_scale
        with torch.no_grad():
            scale.clamp_(max=LARGEST_SCALE)

    def score(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """Measure how often the nearest caption is an image's own, and the image nearest to a caption is its.

        Captions that stand several times count as one. `chance` is what drawing a caption would give.
        """
        images, wanted = np.array(predicted, dtype=np.float64), np.array(expected, dtype=np.float64)
        own = wanted[:, 0].astype(np.int64)
        _, first = np.unique(own, return_index=True)
        cosines = images @ wanted[first, 1:].T  # rows, captions
        captions = list(range(len(first)))
        return {
            "image_to_text": (METRICS["accuracy"], cosines.argmax(1).tolist(), own.tolist()),
            "text_to_image": (METRICS["accuracy"], own[cosines.argmax(0)].tolist(), captions),
            "chance": (METRICS["accuracy"], [0] * len(captions), captions),
        }

    def judges(self, config: ModelConfig, problem: str | None) -> bool:
        """Return False: a config is of one tower."""
        return False

    def sample(self, loaded: Model, row: Captioned, plan: GeneratePlan, seed: int) -> str:
        """Return the cosine of an image and its caption."""
        image, caption = loaded.embed([row.image, row.caption])
        return sampled(row.image.name, f"{float(image @ caption):.2f}", row.caption)


def new_towers(recipe: Recipe, captions: Sequence[str], picture: Path) -> Model:
    """Return a model with random weights and a tokenizer of the captions; transformers opens what it saves.

    `recipe.model` has the kind as `base`, and may have `d_model`, the width of both towers and of the common
    space, `n_layers` of the text tower (the image tower has twice as many) and `n_heads`. The shorter side
    of `picture` is that of all images, 224 pixels at most.
    """
    model = dict(recipe.model)
    kind, d_model = model.pop(BASE, KINDS[0]), model.pop("d_model", D_MODEL)
    n_layers, n_heads = model.pop("n_layers", N_LAYERS), model.pop("n_heads", N_HEADS)
    refuse(kind not in KINDS, f'a new model is "clip" or "siglip", not "{kind}"')
    refuse(model, f"[model] {', '.join(model)} is not for new towers: set d_model, n_layers or n_heads")
    size = sum(len(caption.encode()) for caption in captions)
    tokenizer = train_tokenizer(captions, TokensPlan(kind="bpe", lowercase=True), CAPTION, size)
    known = tokenizer.get_vocab()
    special = {role: known[token] for role, token in CAPTION.tokens.items()}
    length = min(max(map(len, encode(tokenizer, set(captions)))), LONGEST_TEXT)
    side = min(*read_image(picture, 3, str(picture)).shape[:2], LARGEST_IMAGE)
    patch = 4 if side <= SMALL_IMAGE else 16
    side -= side % patch
    refuse(side < patch, f"{picture} is smaller than {patch} pixels: give larger pictures")
    clip = kind == "clip"
    shape: dict[str, Any] = {"d_model": d_model, "n_heads": n_heads, "head": "none", "init": "bert"}
    patches: dict[str, Any] = {"class_token": clip, "patch_bias": not clip, "embedding_norm": clip}
    shape |= {"activation": "quick_gelu" if clip else "gelu_tanh", "norm_eps": 1e-5 if clip else 1e-6}
    text = ModelConfig(
        family="decoder" if clip else "encoder",
        vocab_size=tokenizer.get_vocab_size(),
        max_positions=length,
        n_layers=n_layers,
        **shape,
    )
    image = ModelConfig(
        family="encoder",
        input="patches",
        image_size=(side, side),
        patch_size=patch,
        **patches,
        max_positions=(side // patch) ** 2 + clip,
        n_layers=IMAGE_LAYERS * n_layers,
        **shape,
    )
    joint: dict[str, Any] = {"loss": "softmax", "end_id": special["eos"]}
    if not clip:
        joint = {"loss": "sigmoid", "pooling": "attention"}
        joint |= {"text_projection": "bias", "image_projection": "none"}
    torch.manual_seed(recipe.train.seed)
    towers = JoinedTowers(TowersConfig(text=text, image=image, width=d_model, **joint))
    images = towers.description.table.settings(towers.config)
    settings = {} if clip else {"model_input_names": ["input_ids"]}  # padding is read
    return Model(
        towers.text, tokenizer, special=special, settings=settings, images=images, towers=towers.eval()
    )
