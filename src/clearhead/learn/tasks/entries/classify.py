"""The class of a text, of a pair of texts or of a picture; a number in place of a class (regression).

A regression model is a classifier with one output, as transformers has it under `problem_type: "regression"`,
and learns by squared error. As rows of text and number could be classes, ask for it: `data.task=regress`.

Shapes: N examples, B rows, T tokens of a row, C classes or channels, H height, W width, K classes of a batch.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.errors import InputError, refuse
from clearhead.hub.preprocessor import to_pixels
from clearhead.learn.batches.batch import Batch, Batches, Bucketed, FixedRows, cut_note
from clearhead.learn.batches.encoding import Columns, Encoded, Encoder, Setting, characters, flat, groups
from clearhead.learn.batches.ragged import Ints, frame_rows, share_room, tensor
from clearhead.learn.data.examples import Corpus, Images, Labelled, Picture, RowType
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.data.tables import Record, listed
from clearhead.learn.evaluation.metrics import METRICS, Judged, count_classes
from clearhead.learn.losses import Answered
from clearhead.learn.recipe import GeneratePlan, Recipe, TrainPlan
from clearhead.learn.tasks.task import VISION, Answers, ClassTask, Scored, Side, Task, sampled
from clearhead.run.api import Model
from clearhead.run.bundle import Bundle


class LabelBatches(Bucketed):
    """A text, or two, framed; the target is a class, several, or a number."""

    def __init__(self, setting: Setting) -> None:
        encoded, paired = setting.encoded, np.asarray(setting.encoded["paired"])
        self.paired, self.labels, self.frames = paired, encoded["labels"], (encoded.frame, encoded.pair_frame)
        first, second = encoded.stretches("first"), encoded.stretches("second")
        single = np.minimum(first.lengths, setting.room(encoded.frame, "a text"))
        room = setting.room(encoded.pair_frame, "two texts") if paired.any() else 0
        one, two = share_room(first.lengths, second.lengths, room)
        self.first = setting.cut(first, np.where(paired, one, single))
        self.second = setting.cut(second, np.where(paired, two, 0))
        texts = self.first.lengths + self.second.lengths
        self.notes = cut_note(texts < first.lengths + second.lengths, "examples", setting.length)
        used = zip(self.frames, (~paired, paired))
        self.typed = any(frame.typed for frame, rows in used if rows.any())
        super().__init__(setting, texts + np.where(paired, encoded.pair_frame.size, encoded.frame.size))

    def _fill(self, ids: Ints, numbers: Ints) -> dict[str, Any]:
        types = np.zeros_like(ids) if self.typed else None
        paired = self.paired[numbers]
        for frame, chosen, texts in (
            (self.frames[0], ~paired, [self.first]),
            (self.frames[1], paired, [self.first, self.second]),
        ):
            parts = [text.take(numbers[chosen]) for text in texts]
            frame_rows(frame, parts, ids, types, np.flatnonzero(chosen))
        return {"targets": self.labels[numbers], "types": types}


class LabelTask(Task):
    """A task of rows that have a text, or two, and a label."""

    head = "classifier"
    batches: ClassVar[Any] = LabelBatches
    families: ClassVar[tuple[str, ...]] = ("decoder",)
    pretrain = redraws = True
    command = "classify {folder} TEXT"

    def encode(self, rows: Iterable[Any], encoder: Encoder) -> Iterator[Columns]:
        """Encode texts, second texts, whether there is a second text, and the targets."""
        for group in groups(rows, characters):
            yield {
                "first": flat(encoder.ids(row.text for row in group)),
                "second": flat(encoder.ids(row.pair or "" for row in group)),
                "paired": np.array([row.pair is not None for row in group]),
                "labels": self.targets(group, encoder),
            }

    def targets(self, rows: Sequence[Any], encoder: Encoder) -> NDArray[Any]:
        """Return the target of each row."""
        raise NotImplementedError


class Classify(ClassTask, LabelTask):
    """The class of a text or of a pair of texts."""

    name = "classify"
    row: ClassVar[RowType] = Labelled
    metrics = ("loss", "accuracy", "macro_f1")
    metric = "accuracy"

    def targets(self, rows: Sequence[Labelled], encoder: Encoder) -> NDArray[Any]:
        """Return the number of each row's class."""
        return np.array([encoder.number(row.label, "label") for row in rows], dtype=np.int64)

    def answers(self, outputs: Tensor, batch: Batch) -> Answered:
        """Return the best class of each row, and the right one."""
        return outputs.argmax(-1)[:, None].tolist(), batch.targets[:, None].tolist()

    def score(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """Measure accuracy and the mean F1 of the classes."""
        flat, wanted = ([answer for row in rows for answer in row] for rows in (predicted, expected))
        return {name: (METRICS[name], flat, wanted) for name in ("accuracy", "macro_f1")}

    def missing(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> str:
        """Name the classes that occur and are never predicted."""
        guesses, wanted = (
            Counter(answer for row in rows for answer in row) for rows in (predicted, expected)
        )
        missing = [label for number, label in enumerate(labels) if wanted[number] and not guesses[number]]
        if not missing:
            return ""
        count = sum(wanted[number] for number, label in enumerate(labels) if label in missing)
        return (
            f"never predicted: {listed(missing)}, {count:,} of {wanted.total():,} validation examples; "
            "train.class_weights=balanced may help"
        )

    def judge(self, judged: Judged) -> list[str]:
        """Add also how often each class was taken for each."""
        super().judge(judged)
        predicted, expected = ([answer for (answer,) in rows] for rows in (judged.predicted, judged.expected))
        names = judged.loaded.class_names
        judged.classes = count_classes(predicted, expected, names)
        return [names[number] for number in predicted]

    def sample(self, loaded: Model, row: Labelled, plan: GeneratePlan, seed: int) -> str:
        """Return the predicted class and its probability."""
        best: Any = loaded.classify(row.input)
        return sampled(row.text, f"{best.label} {best.probability:.0%}", row.label)


# Pictures ---------------------------------------------------------------------------------------------------

Pixels = NDArray[np.float32]


def flip(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Mirror half of the pictures, left to right."""
    mirrored = np.asarray(random.random(len(pixels)) < 0.5)
    return np.where(mirrored[:, None, None, None], pixels[..., ::-1], pixels)


def shift(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Move each picture by up to an eighth of its size; the border becomes 0, the mean colour."""
    n, _, height, width = pixels.shape
    down, right = height // 8, width // 8
    padded = np.pad(pixels, ((0, 0), (0, 0), (down, down), (right, right)))
    views = sliding_window_view(padded, (height, width), axis=(2, 3))  # B C shifts shifts H W
    rows, columns = random.integers(2 * down + 1, size=n), random.integers(2 * right + 1, size=n)
    return np.asarray(views[np.arange(n), :, rows, columns])


def erase(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Blank a rectangle of half of the pictures, each side between a fifth and a half of the picture's."""
    chosen = np.asarray(random.random(len(pixels)) < 0.5)
    hidden = _rectangles(pixels, 0.5, random) & chosen[:, None, None]
    return np.where(hidden[:, None], np.float32(0), pixels)


def mix(pixels: Pixels, labels: NDArray[np.int64], random: np.random.Generator) -> tuple[Pixels, Pixels]:
    """Paste a rectangle of another picture over half of the pictures.

    Each side is a fifth to nine tenths of the picture's. Labels [B] become shares of classes [B, K]: the
    class of the pasted picture gets the share that it covers.
    """
    n = len(pixels)
    other = random.permutation(n)
    pasted = _rectangles(pixels, 0.9, random) & (random.random(n) < 0.5)[:, None, None]  # B H W
    covered = pasted.mean((1, 2), dtype=np.float32)
    shares = np.zeros((n, int(labels.max()) + 1), np.float32)
    np.add.at(shares, (np.arange(n), labels), 1 - covered)
    np.add.at(shares, (np.arange(n), labels[other]), covered)
    return np.where(pasted[:, None], pixels[other], pixels), shares


def _rectangles(pixels: Pixels, largest: float, random: np.random.Generator) -> NDArray[np.bool_]:
    """Return a rectangle in each picture, [B, H, W], True inside; sides are 0.2 to `largest` of its own."""
    n, _, height, width = pixels.shape

    def stretch(size: int) -> NDArray[np.bool_]:
        length = np.maximum(1, random.uniform(0.2, largest, n) * size).astype(np.int64)
        start = (random.random(n) * (size - length + 1)).astype(np.int64)
        offset = np.arange(size) - start[:, None]
        return np.asarray((offset >= 0) & (offset < length[:, None]))

    down, right = stretch(height), stretch(width)  # B H, B W
    return down[:, :, None] & right[:, None, :]


AUGMENTATIONS: dict[str, Callable[[Pixels, np.random.Generator], Pixels]] = {
    "flip": flip,
    "shift": shift,
    "erase": erase,
}


def augment(pixels: Pixels, names: Iterable[str], random: np.random.Generator) -> Pixels:
    """Change normalised pictures [B, C, H, W] in each of the named ways that keep labels."""
    for name in names:
        if name in AUGMENTATIONS:
            pixels = AUGMENTATIONS[name](pixels, random)
    return pixels


class PictureBatches(FixedRows):
    """Pictures and their classes: pixels scaled to 0-1, normalised by mean and deviation of each channel."""

    def __init__(self, setting: Setting) -> None:
        encoded = setting.encoded
        self.pixels, self.labels = encoded["pixels"], encoded["labels"]
        self.scale = (1 / (255 * encoded["std"])).astype(np.float32)[:, None, None]  # C 1 1
        self.shift = (encoded["mean"] / encoded["std"]).astype(np.float32)[:, None, None]
        self.changes = setting.plan.augment if setting.training else ()
        super().__init__(len(self.labels), setting.plan.batch_size, setting.seed, setting.training)

    def _build(self, starts: Ints, random: np.random.Generator) -> Batch:
        pixels = np.ascontiguousarray(self.pixels[starts].transpose(0, 3, 1, 2)).astype(np.float32)  # B C H W
        pixels *= self.scale
        pixels -= self.shift
        pixels = augment(pixels, self.changes, random)
        targets = tensor(self.labels[starts])
        if "mix" in self.changes:
            pixels, shares = mix(pixels, self.labels[starts], random)
            targets = torch.from_numpy(shares)
        return Batch(torch.from_numpy(np.ascontiguousarray(pixels)), targets, numbers=tensor(starts))


class PreparedPictures(FixedRows):
    """Pictures as the model's own settings prepare them."""

    def __init__(self, loaded: Model, images: Images, rows: int) -> None:
        self.loaded, self.images = loaded, images
        super().__init__(len(images), rows, seed=0, training=False)

    def _build(self, starts: Ints, random: np.random.Generator) -> Batch:
        config, settings = self.loaded.config, self.loaded.images
        images = [to_pixels(self.images.pixels[number], config, settings) for number in starts]
        pixels = torch.stack(images).to(next(self.loaded.model.parameters()).dtype)
        return Batch(pixels, tensor(self.images.labels[starts]), numbers=tensor(starts))


class Image(Classify):
    """The class of a picture."""

    name = "image"
    row = Picture
    batches = PictureBatches
    tokens = None
    one_shape = True
    usual = VISION
    families = ()
    pretrain = redraws = False
    command = "classify {folder} IMAGE"

    def encode_corpus(self, corpus: Corpus, side: Any, *args: Any, **options: Any) -> Encoded:
        """Return pictures as they are, with mean and deviation of each channel of the training side."""
        if not isinstance(corpus.train, Images):
            return super().encode_corpus(corpus, side, *args, **options)
        levels = np.arange(256) / 255
        channels = np.moveaxis(np.asarray(corpus.train.pixels), -1, 0)  # C N H W
        counts = np.stack([np.bincount(channel.reshape(-1), minlength=256) for channel in channels])
        weights = counts / np.maximum(1, counts.sum(1, keepdims=True))  # C 256
        mean = weights @ levels
        deviation = np.sqrt(weights @ levels**2 - mean**2)
        std = np.where(deviation > 1e-6, deviation, 1.0)  # a channel of one colour is only shifted
        scale = {"mean": mean.astype(np.float32), "std": std.astype(np.float32)}
        images = cast(Images, getattr(corpus, side))
        return Encoded(self.name, {"pixels": np.asarray(images.pixels), "labels": images.labels, **scale})

    def direct_batches(
        self, loaded: Model, corpus: Corpus, side: Side, plan: DataPlan, seed: int, training: bool = True
    ) -> Batches | None:
        """See `Task.direct_batches`: a trained model prepares pictures by its own settings."""
        rows = cast(Images, corpus.validation)
        return None if training else PreparedPictures(loaded, rows, plan.batch_size)

    def sample(self, loaded: Model, row: Any, plan: GeneratePlan, seed: int) -> str:
        """Return the predicted class of a `Picture` and its probability."""
        best: Any = loaded.classify(row.pixels)
        shown = f"{best.label} {best.probability:.0%}"
        return sampled(f"image {row.number}", shown, loaded.labels[row.label])


# Numbers ----------------------------------------------------------------------------------------------------


STATED = {"problem_type": "regression"}


def predict(
    loaded: Model, texts: str | tuple[str, str] | Sequence[Any], batch_size: int = 32
) -> float | list[float]:
    """Return the number that a model gives to a text or a pair of texts; a list gives a list."""
    theirs = loaded.description.theirs if loaded.description is not None else {}
    refuse(
        loaded.config.n_classes != 1 or not STATED.items() <= theirs.items(),
        "predict needs a model that gives a number, with one output and problem_type regression in "
        "config.json: train one with --set data.task=regress",
    )
    inputs: Any = texts
    results: Any = loaded.classify(inputs, batch_size=batch_size)
    return (
        [float(row.probability) for row in results]
        if isinstance(results, list)
        else float(results.probability)
    )


@dataclass(frozen=True, slots=True)
class Rated(Labelled):
    """A text, or two texts that are read together, and a number written as its label."""

    PLURAL, NAMED = "numbers", ""  # a number is not the name of a class

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`."""
        row, column = Labelled.read(record, roles), roles["label"]
        if row is None:
            return None
        try:
            finite = math.isfinite(float(row.label))
        except ValueError:
            finite = False
        if not finite:
            raise InputError(f"{record.place}: the label in `{column}` must be a number, not {row.label:.40}")
        return cls(row.text, row.label, row.pair)


def mean_and_deviation(corpus: Corpus) -> tuple[float, float]:
    """Return the mean of the numbers to learn, and their deviation from it; 1 where all are the same."""
    rows: Any = corpus.train
    numbers = np.array([float(row.label) for row in rows])
    return float(numbers.mean()), float(numbers.std()) or 1.0


class Regress(LabelTask):
    """A number for a text or a pair of texts."""

    name = "regress"
    unit = 1.0  # errors are divided by it in training
    row = Rated
    guessed = False  # rows of text and number could also be classes
    outputs = 1
    stated = STATED  # in config.json, so that transformers knows it too
    metrics = ("loss", "pearson", "spearman")
    command = "predict {folder} TEXT"

    def targets(self, rows: Sequence[Rated], encoder: Encoder) -> NDArray[Any]:
        """Return the number of each row."""
        return np.array([float(row.label) for row in rows], dtype=np.float32)

    def ready(self, loaded: Bundle, recipe: Recipe, corpus: Corpus) -> str:
        """Let a fresh output layer begin at the mean of the numbers, with their deviation as its unit."""
        if not recipe.train.standardise or loaded.folder is not None:
            return ""
        mean, deviation = mean_and_deviation(corpus)
        out: Any = loaded.model.head.out
        with torch.no_grad():
            out.weight *= deviation
            out.bias.fill_(mean)
        return f"numbers are learned in units of {deviation:.4g}, their deviation from a mean of {mean:.4g}"

    def settled(self, plan: TrainPlan, loaded: Bundle, corpus: Corpus) -> Self:
        """Divide errors by the deviation of the numbers, where the recipe asks for it."""
        task = super().settled(plan, loaded, corpus)
        return task.with_values(unit=mean_and_deviation(corpus)[1]) if plan.standardise else task

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the summed squared error: [B, 1] -> []."""
        return ((wide(outputs)[:, 0] - batch.targets) / self.unit).square().sum()

    def row_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """See `Task.row_losses`; they are in the unit of the data."""
        return Task.row_losses(self.with_values(unit=1.0), outputs, batch)

    def answers(self, outputs: Tensor, batch: Batch) -> Answered:
        """Return the number of each row, and the right one."""
        return outputs[:, :1].tolist(), batch.targets[:, None].tolist()

    def score(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """Measure Pearson's and Spearman's correlation."""
        return {name: (METRICS[name], predicted, expected) for name in ("pearson", "spearman")}

    def judge(self, judged: Judged) -> list[str]:
        """Add also the mean squared error."""
        judged.derive("mse", "loss", float)
        super().judge(judged)
        return [f"{number:.6g}" for (number,) in judged.predicted]

    def sample(self, loaded: Model, row: Rated, plan: GeneratePlan, seed: int) -> str:
        """Return the predicted number."""
        number = predict(loaded, row.input)
        return sampled(row.text, f"{number:.4g}", row.label)
