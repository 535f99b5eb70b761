"""Read pictures from a folder for each class, idx files or npz files, as bytes.

Pictures of several sizes are brought to one: the shorter side is resized, and the middle is cropped.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import InputError, MissingExtraError, refuse
from clearhead.learn.data.files import bare, read_bytes
from clearhead.learn.data.formats import IDX, PICTURES, Source
from clearhead.learn.data.split import key_of

# Names of validation parts, the best first.
VALIDATION = ("validation", "valid", "val", "dev", "test", "t10k")
LARGEST = 224  # pixels of a side that pictures of several sizes are brought to
ORIENTATION, LYING = 0x0112, (5, 6, 7, 8)  # the tag of EXIF, and its values for a picture on its side
_PIXELS_NAMES = ("x", "images", "image", "data", "pixels", "arr_0")
_LABELS_NAMES = ("y", "labels", "label", "target", "targets", "arr_1")


class Pictures(NamedTuple):
    """Pictures and the class name of each."""

    pixels: NDArray[np.uint8] | list[Path]  # N H W C; or the files, of pictures that a model prepares itself
    names: list[str]
    sources: list[str]  # where each came from, for messages
    cropped: bool = False  # whether they were brought to one size

    def take(self, chosen: Sequence[int] | NDArray[np.int64]) -> Self:
        """Return the pictures with these numbers."""
        names, sources = ([every[i] for i in chosen] for every in (self.names, self.sources))
        own = self.pixels
        pixels = [own[i] for i in chosen] if isinstance(own, list) else own[np.asarray(chosen, np.int64)]
        return self._replace(pixels=pixels, names=names, sources=sources)

    def keys(self) -> list[int]:
        """Return a number for each picture that depends on its content alone."""
        return [key_of(content(picture)) for picture in self.pixels]

    def sided(self, side: int | None) -> Self:
        """Return the pictures brought to a square of this side; None: as they are."""
        if side is None or isinstance(self.pixels, list) or self.pixels.shape[1:3] == (side, side):
            return self
        return self._replace(pixels=np.stack([crop(picture, side) for picture in self.pixels]), cropped=True)


def content(picture: NDArray[np.uint8] | Path) -> bytes:
    """Return the bytes of a picture, or of its file."""
    return picture.read_bytes() if isinstance(picture, Path) else picture.tobytes()


Parts = tuple[Pictures, Pictures | None, list[str]]


def read_pictures(source: Source, limit: int | None, side: int | None = None, files: bool = False) -> Parts:
    """Return pictures to train on, those to validate on where the files have such a part, and notes.

    `limit`: read no more than this. `side`: of the square that pictures are brought to; None: they stay as
    they are, unless they differ. `files`: leave pictures that differ in size in their files, for a model that
    prepares them itself.
    """
    if source.format == "folders":
        return _read_folders(source.files, limit, side, files)
    train, validation, notes = {"idx": _read_idx, "npz": _read_npz}[source.format](source.files, limit)
    return train.sided(side), validation and validation.sided(side), notes


def crop(picture: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Resize the shorter side of a picture [H, W, C] and take the middle -> [side, side, C].

    `hub.pixels` does the same for a model whose settings say `shortest_edge` and `do_center_crop`.
    """
    from PIL import Image

    short = min(picture.shape[:2])
    height, width = (side if size == short else int(side * size / short) for size in picture.shape[:2])
    if picture.shape[:2] != (height, width):
        channels = (Image.fromarray(np.ascontiguousarray(channel)) for channel in np.moveaxis(picture, -1, 0))
        resized = [channel.resize((width, height), Image.Resampling.BILINEAR) for channel in channels]
        picture = np.stack([np.asarray(channel) for channel in resized], -1)
    top, left = (height - side) // 2, (width - side) // 2
    return picture[top : top + side, left : left + side]


def common_side(sizes: Sequence[tuple[int, int]]) -> int:
    """Return the side of the square that pictures of these sizes are brought to.

    The median of the shorter sides, at most 224, rounded down so that patches of the usual size fill it.
    """
    side = min(LARGEST, int(median(map(min, sizes))))
    step = 16 if side > 64 else 4
    return max(side // step, 1) * step


def spaced(count: int, limit: int | None) -> list[int]:
    """Return at most `limit` of `count` numbers at even distances: pictures are often sorted by class."""
    kept = count if limit is None else min(limit, count)
    return [number * count // kept for number in range(kept)]


# Folders ---------------------------------------------------------------------------------------------------


def _read_folders(files: Sequence[Path], limit: int | None, side: int | None, in_files: bool) -> Parts:
    strange = next((path for path in files if path.suffix.lower() not in PICTURES), None)
    refuse(strange is not None, f"{strange} is no picture: {', '.join(PICTURES)} are read")
    above = [path.parent.parent.name.lower() for path in files]
    part = next((name for name in VALIDATION if name in above), None) if "train" in above else None
    kept = [
        [path for path, own in zip(files, above) if part is None or own == name] for name in ("train", part)
    ]
    parts = [[some[i] for i in spaced(len(some), limit)] for some in (kept if part else kept[:1])]
    notes = [f"trained on the folder train, validated on the folder {part}"] if part else []
    mode, sizes = _look([path for some in parts for path in some])
    alike = len(set(sizes)) == 1
    if not alike and side is None and not in_files:
        side = common_side(sizes)
    if not alike and in_files:
        sides = [Pictures(list(some), *_named_by_folder(some)) for some in parts]
    else:
        sides = [_load(some, mode, side) for some in parts]
    if any(part.cropped for part in sides):
        low, high = (" x ".join(map(str, size)) for size in (min(sizes), max(sizes)))
        which = f"pictures of {high}" if alike else f"pictures of {len(set(sizes)):,} sizes, {low} to {high}"
        notes.append(f"{which}: shorter side resized to {side}, and the middle cropped (data.image_size)")
    train, validation = (*sides, None)[:2]
    assert train is not None
    return train, validation, notes


@contextmanager
def _decoding(place: list[Path]) -> Iterator[Any]:
    """Yield Pillow's module; what it raises is one line that names the last file of `place`."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("pictures need Pillow: pip install 'clearhead[train]'") from None
    try:
        yield Image
    except Exception as error:  # decoders of broken pictures raise almost anything
        why = str(error).splitlines()[0][:120] if str(error) else "damaged"
        raise InputError(f"{place[-1]} cannot be read as a picture: {why}") from None


def _look(files: Sequence[Path]) -> tuple[str, list[tuple[int, int]]]:
    """Return the mode that all pictures are read in, "L" or "RGB", and height and width of each."""
    grey, sizes, place = True, list[tuple[int, int]](), list[Path]()
    with _decoding(place) as pillow:
        for path in files:
            place.append(path)
            with pillow.open(path) as image:
                grey = grey and (image.mode in ("1", "L") or _is_deep(image))
                lying = image.getexif().get(ORIENTATION, 1) in LYING
                sizes.append(image.size if lying else image.size[::-1])
    return "L" if grey else "RGB", sizes


def _load(files: Sequence[Path], mode: str, side: int | None) -> Pictures:
    """Read pictures of one size, or bring them to a square; all are kept in memory."""
    place, changed, pixels = list[Path](), False, np.empty(0, np.uint8)
    with _decoding(place) as pillow:
        for number, path in enumerate(files):
            place.append(path)
            with pillow.open(path) as image:
                own = pixels_of(image, mode)
            own = own if own.ndim == 3 else own[..., None]
            if side is not None and own.shape[:2] != (side, side):
                own, changed = crop(own, side), True
            pixels = pixels if number else np.empty((len(files), *own.shape), np.uint8)
            pixels[number] = own
    return Pictures(pixels, *_named_by_folder(files), changed)


def _named_by_folder(files: Sequence[Path]) -> tuple[list[str], list[str]]:
    return [file.parent.name for file in files], list(map(str, files))


def pixels_of(image: Any, mode: str) -> NDArray[np.uint8]:
    """Return a picture of Pillow's, upright, as bytes of mode "L", [H, W], or "RGB", [H, W, 3]."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)  # a camera that was held upright says so next to the pixels
    if _is_deep(image):  # `convert` would clip what is above 255
        shades: NDArray[np.uint8] = (np.asarray(image) >> 8).astype(np.uint8)
        return shades if mode == "L" else np.repeat(shades[..., None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError("its numbers have 32 bits, and their scale is not known; convert it to 8 or 16 bits")
    if "transparency" in image.info:  # Pillow warns where a palette with transparency is converted at once
        image = image.convert("RGBA")
    return np.asarray(image.convert(mode))


def _is_deep(image: Any) -> bool:
    """Return True for a picture of 16 bits; older versions of Pillow read such a PNG as mode I."""
    return bool(image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG"))


# idx -------------------------------------------------------------------------------------------------------


def _read_idx(files: Sequence[Path], limit: int | None) -> Parts:
    parts: dict[str, dict[str, Path]] = {}
    for path in files:
        part, kind = _idx_name(path)
        refuse(not kind, f"{path} is not named like an idx file, such as train-images-idx3-ubyte.gz")
        other = "labels" if kind == "images" else "images"
        matches = [file for file in sorted(path.parent.iterdir()) if _idx_name(file) == (part, other)]
        refuse(not matches, f"{path} stands alone: the file of its {other} is missing")
        same = parts.setdefault(part, {}).get(kind, path)
        refuse(
            same.parent != path.parent,
            f"{same} and {path} are the same part of two sets: name the files of one",
        )
        parts[part] |= {kind: path, other: matches[0]}
    likely = (name for wanted in VALIDATION for name in parts if name.strip("-._") == wanted)
    validation = next(likely, None) if len(parts) > 1 else None
    train, *others = (name for name in parts if name != validation)
    several = ", ".join(name.strip("-.") for name in (train, *others))
    refuse(others, f"the idx files have several parts: {several}; name the files of one")
    pictures = _load_idx(parts[train], limit)
    if validation is None:
        return pictures, None, []
    note = f"trained on {train.strip('-.')}, validated on {validation.strip('-.')}"
    return pictures, _load_idx(parts[validation], limit), [note]


def _idx_name(path: Path) -> tuple[str, str]:
    """Return the part that an idx file is of, and "images" or "labels"; ("", "") for another file."""
    match = IDX.fullmatch(bare(path).name.lower())
    return (match[1], match[2]) if match else ("", "")


def _load_idx(part: dict[str, Path], limit: int | None) -> Pictures:
    arrays = []
    for path in (part["images"], part["labels"]):
        data = read_bytes(path)
        refuse(
            len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3],
            f"{path} is no idx file of bytes: it begins with {data[:4].hex() or 'nothing'}, not with 000008",
        )
        shape = tuple(int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3]))
        body = data[4 + 4 * data[3] :]
        refuse(
            math.prod(shape) != len(body),
            f"{path} claims {' x '.join(map(str, shape))} bytes and holds {len(body):,}: it is damaged",
        )
        arrays.append(np.frombuffer(body, np.uint8).reshape(shape))
    return _pictures(arrays[0], arrays[1], str(part["images"]), str(part["labels"]), limit)


# npz -------------------------------------------------------------------------------------------------------


def _read_npz(files: Sequence[Path], limit: int | None) -> Parts:
    refuse(len(files) != 1, f"{len(files)} npz files: name one, and others under validation")
    path = files[0]
    try:
        with np.load(path, allow_pickle=False) as whole:
            arrays: dict[str, NDArray[Any]] = {name: whole[name] for name in whole.files}
    except Exception:  # a damaged archive raises almost anything
        raise InputError(
            f"{path} cannot be read as npz: it is another kind of file, damaged, or holds Python objects; "
            "write it with numpy.savez(path, x=pictures, y=labels)"
        ) from None
    train, validation = _npz_names(arrays, ("", "train")), _npz_names(arrays, VALIDATION)
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
    if train is None:
        raise InputError(
            f"{path} must hold arrays named like x and y, or x_train, y_train, x_test, y_test; "
            f"it holds {shapes}"
        )

    def part(x: str, y: str) -> Pictures:
        return _pictures(arrays[x], arrays[y], f"{path}, array {x}", f"{path}, array {y}", limit)

    notes = [f"pictures from `{train[0]}`, labels from `{train[1]}`"]
    if validation is None:
        return part(*train), None, notes
    return part(*train), part(*validation), [*notes, f"validated on `{validation[0]}`"]


def _npz_names(arrays: dict[str, NDArray[Any]], parts: Sequence[str]) -> tuple[str, str] | None:
    """Return the arrays of pictures and of labels of one part: `x_train`, `train_images`, `x`."""
    plain = {re.sub("[^a-z0-9]+", "_", name.lower()): name for name in arrays}
    for part in parts:
        for form in (f"{{}}_{part}", f"{part}_{{}}") if part else ("{}",):
            pixels, labels = (
                next((plain[form.format(name)] for name in names if form.format(name) in plain), None)
                for names in (_PIXELS_NAMES, _LABELS_NAMES)
            )
            if pixels is not None and labels is not None:
                return pixels, labels
    return None


def _pictures(
    pixels: NDArray[Any], labels: NDArray[Any], where: str, whose: str, limit: int | None
) -> Pictures:
    """Convert arrays as they come to N H W C bytes and class names."""
    if pixels.ndim == 4 and pixels.shape[1] in (1, 3) and pixels.shape[3] not in (1, 3):
        pixels = pixels.transpose(0, 2, 3, 1)
    pixels = pixels[..., None] if pixels.ndim == 3 else pixels
    refuse(
        pixels.ndim != 4 or 0 in pixels.shape or pixels.shape[3] not in (1, 3),
        f"{where} has the shape {pixels.shape}: "
        "pictures are N x height x width, with or without 1 or 3 channels",
    )
    labels = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.dtype.kind == "f" and (labels == np.rint(labels)).all():
        labels = labels.astype(np.int64)  # 1.0 is 1
    refuse(
        labels.ndim != 1 or labels.dtype.kind not in "iubUS" or len(labels) != len(pixels),
        f"{whose} has the shape {labels.shape} of {labels.dtype}: "
        f"it must hold one class for each of {len(pixels):,} pictures",
    )
    chosen = spaced(len(pixels), limit)
    if len(chosen) < len(pixels):
        pixels, labels = pixels[chosen], labels[chosen]
    sources = [f"{whose}, number {number}" for number in chosen]
    names = [
        name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in labels.tolist()
    ]
    for place, name in zip(sources, names):
        refuse(not name, f"{place} is empty: it must name the class of a picture")
    return Pictures(np.ascontiguousarray(_as_bytes(pixels, where)), names, sources)


def _as_bytes(pixels: NDArray[Any], where: str) -> NDArray[np.uint8]:
    if pixels.dtype == np.uint8:
        return pixels
    numbers = pixels.dtype.kind in "iufb"
    low, high = (float(pixels.min()), float(pixels.max())) if numbers else (math.nan, math.nan)
    fractions = pixels.dtype.kind == "f" and low >= 0 and high <= 1
    refuse(
        not fractions and not (low >= 0 and high <= 255),
        f"{where} holds {pixels.dtype} from {low:g} to {high:g}: "
        "pixels go from 0 to 255, or as fractions from 0 to 1",
    )
    rounded: NDArray[np.uint8] = np.rint(pixels * 255.0 if fractions else pixels).astype(np.uint8)
    return rounded
