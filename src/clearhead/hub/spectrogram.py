"""Sound into the frames a model reads, as `preprocessor_config.json` says: a log-mel spectrogram.

Each frame holds how loud the sound is around one moment, in bands as wide as an ear tells them apart.

Shapes: N samples, T frames, M mel bands, F frequencies.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.errors import CheckpointError, refuse
from clearhead.hub.pixels import PREPROCESSOR
from clearhead.learn.data.sounds import Samples

CLASS = "WhisperFeatureExtractor"
HIGHEST = 8_000.0  # Hz, of the highest band, whatever the rate is
QUIETEST = 1e-10  # power that counts as silence
RANGE = 8.0  # powers of ten below the loudest moment that are told apart


@dataclass(frozen=True)
class Spectrogram:
    """How sound becomes frames; the fields of preprocessor_config.json by their own names."""

    feature_size: int = 80  # M: bands of a frame
    sampling_rate: int = 16_000  # samples a second
    hop_length: int = 160  # samples from one frame to the next
    chunk_length: int = 30  # seconds of one window
    n_fft: int = 400  # samples that a frame is computed from
    padding_value: float = 0.0  # of samples after the end of a sound

    @property
    def window(self) -> int:
        """Samples of one window."""
        return self.chunk_length * self.sampling_rate

    @property
    def seconds(self) -> float:
        """Seconds from one frame to the next."""
        return self.hop_length / self.sampling_rate

    def frames(self, samples: Samples) -> Tensor:
        """Map [N] -> [T, M]: a whole window of frames for a short sound, as many as it has for a long one."""
        sound = torch.from_numpy(samples)
        sound = nnf.pad(sound, (0, max(0, self.window - len(sound))), value=self.padding_value)
        waves = torch.stft(
            sound, self.n_fft, self.hop_length, window=torch.hann_window(self.n_fft), return_complex=True
        )
        power = (waves[:, :-1].abs() ** 2).contiguous()  # F T
        bands = torch.from_numpy(mel_bands(self.feature_size, self.n_fft, self.sampling_rate)).float()
        loudness = (bands @ power).clamp(min=QUIETEST).log10()  # M T
        loudness = torch.maximum(loudness, loudness.max() - RANGE)
        return ((loudness + 4) / 4).T


def spectrogram_of(settings: Mapping[str, Any], config: ModelConfig) -> Spectrogram:
    """Return how a model's sound becomes frames, as preprocessor_config.json says, else as usual."""
    kind = settings.get("feature_extractor_type") or CLASS
    refuse(kind != CLASS, f"{PREPROCESSOR} is for {kind}: sound is read by {CLASS}", CheckpointError)
    refuse(
        settings.get("dither"),
        f"{PREPROCESSOR} has dither {settings.get('dither')}: only 0 is supported, which adds no noise",
        CheckpointError,
    )
    stated = {entry.name: settings[entry.name] for entry in fields(Spectrogram) if entry.name in settings}
    for name, value in stated.items():
        whole = name == "padding_value" or (type(value) is int and 1 <= value < 2**24)
        refuse(
            not whole or not isinstance(value, int | float) or not math.isfinite(value),
            f"{PREPROCESSOR} has {name} {str(value)[:24]!r}: it must be a number, whole and 1 or more",
            CheckpointError,
        )
    made = Spectrogram(**{"feature_size": config.d_input, **stated})
    spec = config.stacks[0]
    positions = spec.n_tokens(made.window // made.hop_length)
    refuse(
        made.feature_size != config.d_input or positions != spec.max_positions,
        f"{PREPROCESSOR} makes {positions} positions of {made.feature_size} bands, and the model reads "
        f"{spec.max_positions} of {config.d_input}: change chunk_length, hop_length or feature_size",
        CheckpointError,
    )
    refuse(
        made.n_fft // 2 >= made.window,
        f"{PREPROCESSOR} has n_fft {made.n_fft}: it must be shorter than two windows",
        CheckpointError,
    )
    return made


@functools.lru_cache(maxsize=8)
def mel_bands(count: int, n_fft: int, rate: int) -> NDArray[np.float64]:
    """Return the weight of each frequency in each band: [M, F].

    A band is a triangle between the middles of its neighbours, of area one. The middles are evenly spaced on
    Slaney's mel scale.
    """
    frequencies = np.linspace(0, rate // 2, n_fft // 2 + 1)
    edges = _hertz(np.linspace(0, _mel(HIGHEST), count + 2))
    width = np.diff(edges)
    rising = (frequencies - edges[:-2, None]) / width[:-1, None]
    falling = (edges[2:, None] - frequencies) / width[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return np.asarray(triangles * 2 / (edges[2:] - edges[:-2])[:, None])


# Slaney's scale is linear up to 1,000 Hz, which is 15 mel, and logarithmic above: 6.4 times in 27 steps.
KNEE, LINEAR, LOG_STEP = 1000.0, 15.0 / 1000.0, math.log(6.4) / 27.0


def _mel(hertz: float) -> float:
    return hertz * LINEAR if hertz < KNEE else KNEE * LINEAR + math.log(hertz / KNEE) / LOG_STEP


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = KNEE * np.exp(LOG_STEP * (np.maximum(mel, KNEE * LINEAR) - KNEE * LINEAR))
    return np.where(mel < KNEE * LINEAR, mel / LINEAR, above)
