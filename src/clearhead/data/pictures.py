"""Pictures: a folder for each class, idx files, npz files. All of one size, as bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead.data.files import bare, read_bytes
from clearhead.data.guess import IDX, PICTURES, Source
from clearhead.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

HELD = ("validation", "valid", "val", "dev", "test", "t10k")  # names of parts to validate on, the best first
_PICTURES_NAMES = ("x", "images", "image", "data", "pixels", "arr_0")
_LABELS_NAMES = ("y", "labels", "label", "target", "targets", "arr_1")


class Pictures(NamedTuple):
    """Pictures and the name of the class of each."""

    pixels: NDArray[np.uint8]  # N H W C
    names: list[str]
    places: list[str]  # where each came from, for messages


def read_pictures(source: Source, limit: int | None) -> tuple[Pictures, Pictures | None, list[str]]:
    """Pictures to train on, those to validate on if the files hold such a part, and what was guessed."""
    match source.format:
        case "folders":
            return _read_folders(source.files, limit)
        case "idx":
            return _read_idx(source.files, limit)
        case _:
            return _read_npz(source.files, limit)


def spaced(count: int, limit: int | None) -> list[int]:
    """At most `limit` of `count` numbers at even distances: pictures are often sorted by class."""
    return (
        list(range(count)) if limit is None or limit >= count else [i * count // limit for i in range(limit)]
    )


# Folders ----------------------------------------------------------------------------------------------------------------


def _read_folders(files: Sequence[Path], limit: int | None) -> tuple[Pictures, Pictures | None, list[str]]:
    strange = next((path for path in files if path.suffix.lower() not in PICTURES), None)
    if strange is not None:
        raise InputError(f"{strange} is no picture: {', '.join(PICTURES)} are read")
    above = {path.parent.parent.name.lower() for path in files}
    held = next((name for name in HELD if name in above), None) if "train" in above else None
    if held is None:
        return _load(files, limit), None, []
    parts = [[path for path in files if path.parent.parent.name.lower() == name] for name in ("train", held)]
    return (
        _load(parts[0], limit),
        _load(parts[1], limit),
        [f"trained on the folder train, validated on the folder {held}"],
    )


def _load(files: Sequence[Path], limit: int | None) -> Pictures:
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("pictures need Pillow: pip install 'clearhead[train]'") from None

    def grey(path: Path) -> bool:
        with Image.open(path) as image:
            return image.mode in ("1", "L") or _is_deep(image)

    files = [files[i] for i in spaced(len(files), limit)]
    path = files[0]
    try:
        mode = "L" if all(grey(path := file) for file in files) else "RGB"
        pixels: NDArray[np.uint8] | None = None
        for number, path in enumerate(files):
            with Image.open(path) as image:
                own = pixels_of(image, mode)
            if pixels is None:
                pixels = np.empty((len(files), *own.shape), np.uint8)
            if own.shape != pixels.shape[1:]:
                first, second = (f"{size[1]}x{size[0]}" for size in (pixels.shape[1:], own.shape))
                raise InputError(
                    f"{files[0]} is {first} and {path} is {second}: bring all pictures to one size first"
                )
            pixels[number] = own
    except InputError:
        raise
    except Exception as error:  # decoders of broken pictures raise almost anything
        raise InputError(
            f"{path} cannot be read as a picture: {str(error).splitlines()[0][:120] if str(error) else 'damaged'}"
        ) from None
    assert pixels is not None
    return Pictures(
        pixels if pixels.ndim == 4 else pixels[..., None],
        [file.parent.name for file in files],
        [str(file) for file in files],
    )


def pixels_of(image: Image, mode: str) -> NDArray[np.uint8]:
    """A picture of Pillow's as bytes of mode "L", [H, W], or "RGB", [H, W, 3]."""
    if _is_deep(image):  # `convert` would cut off what is above 255
        shades = (np.asarray(image) >> 8).astype(np.uint8)
        return shades if mode == "L" else np.repeat(shades[..., None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError("its numbers have 32 bits, and their scale is not known; convert it to 8 or 16 bits")
    if "transparency" in image.info:  # of a palette it is a warning to convert it at once
        image = image.convert("RGBA")
    return np.asarray(image.convert(mode))


def _is_deep(image: Image) -> bool:
    """Is a picture of 16 bits? Older versions of Pillow read such a PNG as mode I."""
    return image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG")


# idx --------------------------------------------------------------------------------------------------------------------


def _read_idx(files: Sequence[Path], limit: int | None) -> tuple[Pictures, Pictures | None, list[str]]:
    parts: dict[str, dict[str, Path]] = {}
    for path in files:
        found = _idx_name(path)
        if found is None:
            raise InputError(f"{path} is not named like an idx file, such as train-images-idx3-ubyte.gz")
        part, kind = found
        other = "labels" if kind == "images" else "images"
        beside = next(
            (file for file in sorted(path.parent.iterdir()) if _idx_name(file) == (part, other)), None
        )
        if beside is None:
            raise InputError(f"{path} stands alone: the file of its {other} is missing")
        same = parts.setdefault(part, {}).get(kind, path)
        if same.parent != path.parent:
            raise InputError(f"{same} and {path} are the same part of two sets: name the files of one")
        parts[part] |= {kind: path, other: beside}
    held = (
        next((name for wanted in HELD for name in parts if name.strip("-._") == wanted), None)
        if len(parts) > 1
        else None
    )
    rest = [name for name in parts if name != held]
    if len(rest) > 1:
        raise InputError(
            f"the idx files have several parts: {', '.join(name.strip('-.') for name in rest)}; name the files of one"
        )
    train = _load_idx(parts[rest[0]], limit)
    if held is None:
        return train, None, []
    return (
        train,
        _load_idx(parts[held], limit),
        [f"trained on {rest[0].strip('-.')}, validated on {held.strip('-.')}"],
    )


def _idx_name(path: Path) -> tuple[str, str] | None:
    match = IDX.fullmatch(bare(path).name.lower())
    return (match[1], match[2]) if match else None


def _load_idx(part: dict[str, Path], limit: int | None) -> Pictures:
    pixels, labels = _idx_array(part["images"]), _idx_array(part["labels"])
    return _pictures(pixels, labels, str(part["images"]), str(part["labels"]), limit)


def _idx_array(path: Path) -> NDArray[np.uint8]:
    data = read_bytes(path)
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise InputError(
            f"{path} is no idx file of bytes: it begins with {data[:4].hex() or 'nothing'}, not with 000008"
        )
    shape = tuple(int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3]))
    body = data[4 + 4 * data[3] :]
    if math.prod(shape) != len(body):
        raise InputError(
            f"{path} claims {' x '.join(map(str, shape))} bytes and holds {len(body):,}: it is damaged"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


# npz --------------------------------------------------------------------------------------------------------------------


def _read_npz(files: Sequence[Path], limit: int | None) -> tuple[Pictures, Pictures | None, list[str]]:
    if len(files) != 1:
        raise InputError(f"{len(files)} npz files: name one, and others under validation")
    path = files[0]
    try:
        with np.load(path, allow_pickle=False) as whole:
            arrays: dict[str, NDArray[Any]] = {name: whole[name] for name in whole.files}
    except Exception:  # a damaged archive raises almost anything
        raise InputError(
            f"{path} cannot be read as npz: it is another kind of file, damaged, or holds Python objects; "
            "write it with numpy.savez(path, x=pictures, y=labels)"
        ) from None
    train, held = _npz_names(arrays, ("", "train")), _npz_names(arrays, HELD)
    if train is None:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise InputError(
            f"{path} must hold arrays named like x and y, or x_train, y_train, x_test, y_test; it holds {shapes}"
        )

    def part(names: tuple[str, str]) -> Pictures:
        return _pictures(
            arrays[names[0]],
            arrays[names[1]],
            f"{path}, array {names[0]}",
            f"{path}, array {names[1]}",
            limit,
        )

    said = [f"pictures from `{train[0]}`, labels from `{train[1]}`"]
    if held is None:
        return part(train), None, said
    return part(train), part(held), [*said, f"validated on `{held[0]}`"]


def _npz_names(arrays: dict[str, NDArray[Any]], parts: Sequence[str]) -> tuple[str, str] | None:
    """The arrays of pictures and of labels of one part: `x_train`, `train_images`, `x`."""
    plain = {re.sub("[^a-z0-9]+", "_", name.lower()): name for name in arrays}
    for part in parts:
        for form in (f"{{}}_{part}", f"{part}_{{}}") if part else ("{}",):
            pixels, labels = (
                next((plain[form.format(name)] for name in names if form.format(name) in plain), None)
                for names in (_PICTURES_NAMES, _LABELS_NAMES)
            )
            if pixels is not None and labels is not None:
                return pixels, labels
    return None


def _pictures(
    pixels: NDArray[Any], labels: NDArray[Any], where: str, whose: str, limit: int | None
) -> Pictures:
    """Arrays as they come, brought to N H W C bytes."""
    if pixels.ndim == 4 and pixels.shape[1] in (1, 3) and pixels.shape[3] not in (1, 3):
        pixels = pixels.transpose(0, 2, 3, 1)
    pixels = pixels[..., None] if pixels.ndim == 3 else pixels
    if pixels.ndim != 4 or 0 in pixels.shape or pixels.shape[3] not in (1, 3):
        raise InputError(
            f"{where} has the shape {pixels.shape}: pictures are N x height x width, with or without 1 or 3 channels"
        )
    labels = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    labels = (
        labels.astype(np.int64) if labels.dtype.kind == "f" and (labels == np.rint(labels)).all() else labels
    )  # 1.0 is 1
    if labels.ndim != 1 or labels.dtype.kind not in "iubUS" or len(labels) != len(pixels):
        raise InputError(
            f"{whose} has the shape {labels.shape} of {labels.dtype}: it must hold one class for each of {len(pixels):,} pictures"
        )
    chosen = spaced(len(pixels), limit)
    pixels, labels = (pixels, labels) if len(chosen) == len(pixels) else (pixels[chosen], labels[chosen])
    names = [
        name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in labels.tolist()
    ]
    if "" in names:
        raise InputError(
            f"{whose}, number {chosen[names.index('')]} is empty: it must name the class of a picture"
        )
    return Pictures(
        np.ascontiguousarray(_as_bytes(pixels, where)), names, [f"{whose}, number {i}" for i in chosen]
    )


def _as_bytes(pixels: NDArray[Any], where: str) -> NDArray[np.uint8]:
    if pixels.dtype == np.uint8:
        return pixels
    low, high = (
        (float(pixels.min()), float(pixels.max())) if pixels.dtype.kind in "iufb" else (math.nan, math.nan)
    )
    if pixels.dtype.kind == "f" and low >= 0 and high <= 1:
        pixels = pixels * 255.0
    elif not (low >= 0 and high <= 255):
        raise InputError(
            f"{where} holds {pixels.dtype} from {low:g} to {high:g}: pixels go from 0 to 255, or as fractions from 0 to 1"
        )
    rounded: NDArray[np.uint8] = np.rint(pixels).astype(np.uint8)
    return rounded
