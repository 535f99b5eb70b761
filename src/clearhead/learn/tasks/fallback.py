"""Windows of sound as they are read: which temperature a transcript is taken at, and which window is silent.

Temperature fallback: a window whose transcript repeats itself or is improbable is drawn again, warmer. A
transcript is taken when it passes both thresholds, and in any case at the last temperature. A window that is
improbable and in which the model hears no speech is skipped, at one temperature too. The measures and the
decisions are those of transformers' long-form generation; to skip a window, OpenAI's program measures and
decides the same.

Shapes: B windows read together, T frames of a window, M mel bands, V vocabulary.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.learn.tasks.results import WindowReading
from clearhead.run.generate import sequence
from clearhead.run.generate.decode import decode
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Ends, Prompts, Rule
from clearhead.run.kernels.steps import Steps

USUAL = {"compression_ratio_threshold": 1.35, "logprob_threshold": -1.0, "no_speech_threshold": 0.6}


@dataclass(frozen=True)
class Fallback:
    """The temperatures to try in order, and what makes the next one be tried."""

    temperatures: tuple[float, ...] = (0.0,)
    compression_ratio_threshold: float = math.inf
    logprob_threshold: float = -math.inf
    no_speech_threshold: float = math.inf

    @property
    def judges(self) -> bool:
        """Whether any transcript can fail."""
        return self.compression_ratio_threshold < math.inf or self.logprob_threshold > -math.inf


def make_fallback(
    temperature: float | Sequence[float], thresholds: Mapping[str, float | None], stated: Mapping[str, Any]
) -> Fallback:
    """Return the temperatures to try in order, and the thresholds by name.

    A threshold that is None is what generation_config.json (`stated`) says, else the usual one.
    """
    single = isinstance(temperature, int | float)
    temperatures = (temperature,) if isinstance(temperature, int | float) else tuple(temperature)
    refuse(not temperatures, "temperature names none: give one number, or several to try in order")
    for number in temperatures:
        refuse(
            isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf,
            f"temperature {number!r} must be a number, 0 (the best token each time) or more",
        )
    named = {name: stated.get(name) if thresholds.get(name) is None else thresholds[name] for name in USUAL}
    for name, value in named.items():
        refuse(
            value is not None and (not isinstance(value, int | float) or math.isnan(value)),
            f"{name} {value!r} must be a number; {getattr(Fallback, name)} switches it off",
        )
    used = {name: USUAL[name] if value is None else float(value) for name, value in named.items()}
    fallback = Fallback(tuple(map(float, temperatures)), **used)
    refuse(
        not single and len(temperatures) > 1 and not fallback.judges,
        f"{len(temperatures)} temperatures with no threshold: the second would never be tried, so leave the "
        "others out, or give compression_ratio_threshold or logprob_threshold",
    )
    return fallback


@dataclass
class Likelihood:
    """A rule of decoding that adds up how probable the chosen tokens were, after all rules that came before.

    Temperature comes later and does not count. A row is known by its list of new tokens, which grows.
    """

    rule: Rule | None
    sums: dict[int, float] = field(default_factory=dict)
    last: dict[int, Tensor] = field(default_factory=dict)  # log-probabilities at the row's last step: V

    def __call__(self, logits: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """Apply the rule, and note the distribution: [B, V] -> [B, V]."""
        logits = logits if self.rule is None else self.rule(logits, rows)
        for values, ids in zip(logits.float().log_softmax(-1), rows):
            if ids:
                self.sums[id(ids)] = self.sums.get(id(ids), 0.0) + float(self.last[id(ids)][ids[-1]])
            self.last[id(ids)] = values
        return logits

    def mean(self, row: sequence.Sequence, tokens: Sequence[int]) -> float:
        """Return the mean log-probability of a row's tokens, the one that ended it among them."""
        return (self.sums.get(id(row.ids), 0.0) + float(self.last[id(row.ids)][tokens[-1]])) / len(tokens)


def compression_ratio(tokens: Sequence[int], vocab_size: int) -> float:
    """Return how much shorter zlib makes the ids, as bytes: text that repeats itself shrinks most."""
    width = int(math.log2(vocab_size) / 8) + 1
    raw = b"".join(token.to_bytes(width, "little") for token in tokens)
    return len(raw) / len(zlib.compress(raw))


@dataclass(frozen=True)
class WindowBatch:
    """Windows that are read together, B of them, and how."""

    model: Transformer  # the one that says how probable silence is
    runner: Transformer  # the same, as it decodes
    steps: Steps | None
    request: Request
    ends: Ends
    prompts: Prompts  # what each transcript begins with, and the windows B T M
    starts: Sequence[float]  # seconds from the beginning of each sound
    silence: int | None  # id of the token that says that nothing is said, after the one that begins
    begin: int = 0  # place of the token that begins a transcript, after a prompt of text

    def read(
        self, numbers: Sequence[int], temperature: float, likely: Likelihood | None = None
    ) -> list[sequence.Sequence]:
        """Transcribe some of the windows, by their numbers."""
        ids, source = [self.prompts.ids[number] for number in numbers], self.prompts.source
        prompts = Prompts(ids, None if source is None else source[list(numbers)])
        request = replace(self.request, temperature=temperature)
        ends = self.ends if likely is None else replace(self.ends, rule=likely)
        return decode(self.runner, request, prompts, ends, steps=self.steps)

    def no_speech(self, number: int) -> float | None:
        """Return the probability that nothing is said in a window; None: the model has no token for it."""
        if self.silence is None or self.prompts.source is None:
            return None
        source = self.prompts.source[number : number + 1]
        first = torch.tensor([self.prompts.ids[number][: self.begin + 1]], device=source.device)
        return self.silence_in(self.model(first, source=source).logits[0, -1])

    def silence_in(self, logits: Tensor) -> float | None:
        """Return the probability of silence by the logits [V] after the token that begins a transcript."""
        return None if self.silence is None else float(logits.float().softmax(-1)[self.silence])


def read_windows(
    windows: WindowBatch, fallback: Fallback, judged_always: bool = False
) -> list[tuple[sequence.Sequence | None, WindowReading | None]]:
    """Return of each window what was written, None of a skipped one, and how it was judged, if it was."""
    left = list(range(len(windows.starts)))
    if not (fallback.judges or judged_always):
        return [(row, None) for row in windows.read(left, fallback.temperatures[0])]
    size, end = windows.model.config.vocab_size, min(windows.ends.stop_ids, default=0)
    readings: dict[int, tuple[sequence.Sequence | None, WindowReading]] = {}
    quiet: dict[int, float | None] = {}
    for temperature in fallback.temperatures:
        likely, again = Likelihood(windows.ends.rule), []
        for number, row in zip(left, windows.read(left, temperature, likely)):
            tokens = [*row.ids, end] if row.stop_reason == "eos" else row.ids
            ratio, logprob = compression_ratio(tokens, size), likely.mean(row, tokens)
            improbable = logprob < fallback.logprob_threshold
            if improbable and number not in quiet:
                quiet[number] = windows.no_speech(number)
            unheard = quiet.get(number)
            skipped = improbable and unheard is not None and unheard > fallback.no_speech_threshold
            if not skipped and (improbable or ratio > fallback.compression_ratio_threshold):
                again.append(number)
            judged = WindowReading(
                round(windows.starts[number], 3), temperature, logprob, ratio, unheard, skipped
            )
            readings[number] = None if skipped else row, judged
        left = again
        if not left:
            break
    return [readings[number] for number in range(len(windows.starts))]
