"""Classification: the class of a text, of a pair of texts or of a picture.

Shapes: N examples, B rows, T tokens of a row, C classes or channels, H height, W width, K classes of a batch.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from clearhead.hub.preprocessor import to_pixels
from clearhead.learn.batches.batch import Batch, Batches
from clearhead.learn.batches.buckets import Bucketed, cut_note
from clearhead.learn.batches.encoding import Columns, Encoded, Encoder, Setting, characters, flat, groups
from clearhead.learn.batches.ragged import Ints, blank, frame_rows, share_room, tensor
from clearhead.learn.batches.windows import FixedRows
from clearhead.learn.data.examples import IMAGES, LABELS, Corpus, Images, Labelled
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.data.tables import listed
from clearhead.learn.evaluation.metrics import METRICS, Judged, count_classes
from clearhead.learn.recipe import GeneratePlan
from clearhead.learn.tasks.task import VISION, Answers, ClassTask, Scored, Task, sampled
from clearhead.run.api import Model


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

    def _build(self, numbers: Ints) -> Batch:
        ids, mask = blank(self.sizes[0][numbers], self.setting.pad)
        types = np.zeros_like(ids) if self.typed else None
        paired = self.paired[numbers]
        for frame, chosen, texts in (
            (self.frames[0], ~paired, [self.first]),
            (self.frames[1], paired, [self.first, self.second]),
        ):
            parts = [text.take(numbers[chosen]) for text in texts]
            frame_rows(frame, parts, ids, types, np.flatnonzero(chosen))
        more = {} if types is None else {"types": tensor(types)}
        return Batch(tensor(ids), tensor(self.labels[numbers]), mask, numbers=tensor(numbers), **more)


class LabelTask(Task):
    """A task of rows that have a text, or two, and a label."""

    head = "classifier"
    families: ClassVar[tuple[str, ...]] = ("decoder",)
    pretrain = True
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

    def batch(self, setting: Setting) -> Batches:
        """See `Task.batch`."""
        return LabelBatches(setting)


class Classify(ClassTask, LabelTask):
    """The class of a text or of a pair of texts."""

    name = "classify"
    shape = LABELS
    metrics = ("loss", "accuracy", "macro_f1")
    metric = "accuracy"

    def targets(self, rows: Sequence[Labelled], encoder: Encoder) -> NDArray[Any]:
        """Return the number of each row's class."""
        return np.array([encoder.number(row.label, "label") for row in rows], dtype=np.int64)

    def score(self, said: Answers, meant: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """Measure accuracy and the mean F1 of the classes."""
        predicted, wanted = ([answer for row in rows for answer in row] for rows in (said, meant))
        return {name: (METRICS[name], predicted, wanted) for name in ("accuracy", "macro_f1")}

    def missing(self, said: Answers, meant: Answers, labels: Sequence[str]) -> str:
        """Name the classes that occur and are never predicted."""
        predicted, wanted = (Counter(answer for row in rows for answer in row) for rows in (said, meant))
        missing = [label for number, label in enumerate(labels) if wanted[number] and not predicted[number]]
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
        said, meant = ([answer for (answer,) in rows] for rows in (judged.said, judged.meant))
        names = judged.loaded.class_names
        judged.classes = count_classes(said, meant, names)
        return [names[number] for number in said]

    def sample(self, loaded: Model, row: Labelled, plan: GeneratePlan, seed: int) -> str:
        """Return the predicted class and its probability."""
        made: Any = loaded.classify(row.text if row.pair is None else (row.text, row.pair))
        return sampled(row.text, f"{made.label} {made.probability:.0%}", row.label)


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
        made = [to_pixels(self.images.pixels[number], config, settings) for number in starts]
        pixels = torch.stack(made).to(next(self.loaded.model.parameters()).dtype)
        return Batch(pixels, tensor(self.images.labels[starts]), numbers=tensor(starts))


class Image(Classify):
    """The class of a picture."""

    name = "image"
    shape = IMAGES
    tokens = None
    one_shape = True
    usual = VISION
    families = ()
    pretrain = False
    command = "classify {folder} IMAGE"

    def encode_corpus(self, corpus: Corpus, side: Any, *args: Any, **options: Any) -> Encoded:
        """Return pictures as they are, with mean and deviation of each channel of the training side."""
        if not isinstance(corpus.train, Images):
            return super().encode_corpus(corpus, side, *args, **options)
        levels, channels = (
            np.arange(256) / 255,
            np.moveaxis(np.asarray(corpus.train.pixels), -1, 0),
        )  # C N H W
        counts = np.stack([np.bincount(channel.reshape(-1), minlength=256) for channel in channels])
        weights = counts / np.maximum(1, counts.sum(1, keepdims=True))  # C 256
        mean = weights @ levels
        deviation = np.sqrt(weights @ levels**2 - mean**2)
        std = np.where(deviation > 1e-6, deviation, 1.0)  # a channel of one colour is only shifted
        scale = {"mean": mean.astype(np.float32), "std": std.astype(np.float32)}
        images = cast(Images, getattr(corpus, side))
        return Encoded(self.name, {"pixels": np.asarray(images.pixels), "labels": images.labels, **scale})

    def batch(self, setting: Setting) -> Batches:
        """See `Task.batch`."""
        return PictureBatches(setting)

    def judged_batches(self, loaded: Model, corpus: Corpus, plan: DataPlan) -> Batches:
        """See `Task.judged_batches`."""
        return PreparedPictures(loaded, cast(Images, corpus.validation), plan.batch_size)

    def sample(self, loaded: Model, row: Any, plan: GeneratePlan, seed: int) -> str:
        """Return the predicted class of (number, pixels, label) and its probability."""
        number, pixels, label = row
        made: Any = loaded.classify(pixels)
        return sampled(f"image {number}", f"{made.label} {made.probability:.0%}", loaded.labels[label])
