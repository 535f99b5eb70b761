"""Read sound: a file of any format that libsndfile knows becomes one channel of numbers at one rate.

Shapes: N samples.
"""

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import InputError, MissingExtraError, first_line, refuse

Samples = NDArray[np.float32]
FORMATS = "WAV, FLAC, OGG and MP3 are read"
SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
RATES = range(1_000, 1_000_001)  # samples a second of a file
MOST_SECONDS = 6 * 3600  # of one file; a few bytes of FLAC can hold hours of silence
BLOCK = 2**20  # numbers read at a time, of all channels
LOUDEST = 1e6  # of a sample; full scale is 1, or 32,768 where somebody forgot to divide
STREAMED = 0x7FFFF000  # a WAV of this size or more was written before its length was known


def read_sound(
    path: Path | io.BytesIO, rate: int, most: float = MOST_SECONDS, most_samples: float = math.inf
) -> Samples:
    """Return a file as one channel [N] of `rate` samples a second: the mean of its channels, resampled.

    A file of more than `most` seconds, or of more than `most_samples` before it is resampled, is refused.
    """
    name = str(path) if isinstance(path, Path) else "the sound"
    refuse(isinstance(path, Path) and not path.is_file(), f"{name} is no file: give a sound file; {FORMATS}")
    size = path.stat().st_size if isinstance(path, Path) else len(path.getbuffer())
    refuse(not size, f"{name} is empty: give a sound file; {FORMATS}")
    missing = missing_bytes(path)
    refuse(
        missing > 0,
        f"{name} is cut short: its header promises {missing:,} bytes of sound more than it holds; copy it "
        "again, or convert what is there with another program",
    )
    reader = _library("soundfile", "reading sound")
    try:
        with reader.SoundFile(path) as file:
            refuse(
                file.samplerate not in RATES,
                f"{name} has {file.samplerate:,} samples a second: {RATES[0]:,} to {RATES[-1]:,} are read",
            )
            samples = np.concatenate([np.zeros(0, np.float32), *_mixed(file, name, most, most_samples)])
            return resampled(samples, file.samplerate, rate, name)
    except InputError:
        raise
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # no sound, cut short, no such codec
        reason = first_line(error).partition(": ")[2] or first_line(error)  # after "Error opening FILE"
        raise InputError(f"{name} cannot be read as sound: {reason.rstrip('.')}; {FORMATS}") from None


def missing_bytes(path: Path | io.BytesIO) -> int:
    """Return how many bytes of sound a WAV file lacks, by its own header; 0 for anything else."""
    file = path.open("rb") if isinstance(path, Path) else io.BytesIO(path.getvalue())
    with file:
        end = file.seek(0, io.SEEK_END)
        file.seek(0)
        head = file.read(12)
        if (head[:4], head[8:]) != (b"RIFF", b"WAVE"):
            return 0
        while len(chunk := file.read(8)) == 8:
            size = int.from_bytes(chunk[4:], "little")
            if chunk[:4] == b"data":
                return 0 if size >= STREAMED else max(0, file.tell() + size - end)
            file.seek(size + size % 2, io.SEEK_CUR)
    return 0


def _mixed(file: Any, name: str, most: float, most_samples: float) -> Iterator[Samples]:
    """Yield the mean of a file's channels, block by block: whatever its header says, no more is held."""
    left = allowed = int(min(most * file.samplerate, most_samples))
    hours = allowed / file.samplerate / 3600
    while len(block := file.read(max(1, BLOCK // file.channels), dtype="float32", always_2d=True)):
        left -= len(block)
        refuse(left < 0, f"{name} holds more than {hours:g} hours of sound: cut it into several files")
        yield block.mean(axis=1)


def resampled(samples: Samples, own_rate: int, rate: int, name: str = "the sound") -> Samples:
    """Return samples [N] of one rate at another, [N * rate / given]; errors call them `name`."""
    refuse(not len(samples), f"{name} holds no sound: it has 0 samples")
    refuse(not np.isfinite(samples).all(), f"{name} holds samples that are no numbers (NaN or infinite)")
    refuse(
        float(np.abs(samples).max()) > LOUDEST,
        f"{name} holds samples as large as {float(np.abs(samples).max()):.0e}: they must be about -1 to 1",
    )
    if own_rate == rate:
        return samples
    return np.asarray(
        _library("soxr", f"resampling from {own_rate:,} to {rate:,} Hz").resample(samples, own_rate, rate),
        np.float32,
    )


def _library(name: str, action: str) -> Any:
    try:
        return __import__(name)
    except (ImportError, OSError):  # soundfile raises the latter where its library is missing
        raise MissingExtraError(f"{action} needs {name}: pip install 'clearhead[audio]'") from None
