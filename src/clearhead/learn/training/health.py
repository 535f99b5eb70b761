"""Early warnings of a training run, in plain words, from the lines of its log alone."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

WINDOW = 20  # reports before the one that is looked at
JUMP = 0.25  # of the usual loss: a rise by more, and three times as far up as any of the window, is a spike
STEEP = 10  # times the usual gradient norm
WORSE = 0.03  # of the best validation loss
PATIENCE = 3  # validations after the best
SLOW, FALL = 0.2, 0.01  # a loss that fell by less than this share in this share of the steps


class Warned(NamedTuple):
    """A warning: the step at which it was noticed, its kind, and the sentence."""

    step: int
    kind: str
    text: str


def warnings_of(log: Sequence[Mapping[str, Any]]) -> list[Warned]:
    """Return the warnings of a log (the lines of log.jsonl, oldest first), by step."""
    stepped = [line for line in log if line["event"] == "stepped" and line["loss"] is not None]
    validated = [
        line for line in log if line["event"] == "validated" and line["metrics"].get("loss") is not None
    ]
    found = [*_spikes(stepped), *_steep(stepped), *_stuck(stepped), *_memorised(stepped, validated)]
    skipped = [line for line in log if line["event"] == "skipped"]
    if skipped:
        many = f"{skipped[-1]['skipped']:,} steps were skipped: their loss or gradient was not finite"
        found.append(
            Warned(skipped[-1]["step"], "skipped", f"{many}. Lower train.lr, or use train.precision=float32.")
        )
    return sorted(found)


def _spikes(stepped: Sequence[Mapping[str, Any]]) -> Iterator[Warned]:
    """Yield where the training loss jumped; the reports until it is back count as one spike."""
    losses, high = [line["loss"] for line in stepped], False
    for at in range(WINDOW, len(losses)):
        before = losses[at - WINDOW : at]
        usual = statistics.median(before)
        jumped = losses[at] > usual + max(3 * (max(before) - usual), JUMP * abs(usual))
        if jumped and not high:
            text = f"the training loss jumped from {usual:.3g} to {losses[at]:.3g}"
            advice = "If it does not come back, lower train.lr, or raise train.warmup."
            yield Warned(stepped[at]["step"], "spike", f"{text}. {advice}")
        high = jumped or (high and losses[at] > usual + JUMP * abs(usual))


def _steep(stepped: Sequence[Mapping[str, Any]]) -> Iterator[Warned]:
    """Yield the first gradient that is much larger than those before it."""
    norms = [line.get("norm") or 0.0 for line in stepped]
    for at in range(WINDOW, len(norms)):
        usual = statistics.median(norms[at - WINDOW : at])
        if usual > 0 and norms[at] > STEEP * usual:
            text = (
                f"the gradient norm is {norms[at]:.3g}, {norms[at] / usual:.0f} times its usual {usual:.3g}"
            )
            advice = "A smaller train.clip or train.lr makes such steps harmless."
            yield Warned(stepped[at]["step"], "gradient", f"{text}. {advice}")
            return


def _stuck(stepped: Sequence[Mapping[str, Any]]) -> Iterator[Warned]:
    """Yield where the loss has not fallen since the start."""
    if len(stepped) <= WINDOW or stepped[-1]["step"] < SLOW * stepped[-1]["steps"]:
        return
    first = stepped[0]["loss"]
    late = statistics.median(line["loss"] for line in stepped[-WINDOW:])
    if late > first - FALL * abs(first):
        text = f"the training loss has not fallen since the start ({first:.3g}, now {late:.3g})"
        advice = "Try train.lr ten times lower and higher, and look at the data: clearhead train --dry-run."
        yield Warned(stepped[-1]["step"], "stuck", f"{text}. {advice}")


def _memorised(
    stepped: Sequence[Mapping[str, Any]], validated: Sequence[Mapping[str, Any]]
) -> Iterator[Warned]:
    """Yield where validation has become worse while the training loss went on falling."""
    if not validated or not stepped:
        return
    best = min(validated, key=lambda line: line["metrics"]["loss"])
    after = [line for line in validated if line["step"] > best["step"]]
    low, now = best["metrics"]["loss"], validated[-1]["metrics"]["loss"]
    near = [line["loss"] for line in stepped if line["step"] <= best["step"]][-WINDOW:]
    late = [line["loss"] for line in stepped if line["step"] > best["step"]][-WINDOW:]
    falls = bool(near and late) and statistics.median(late) < statistics.median(near)
    if len(after) >= PATIENCE and now > low + WORSE * abs(low) and falls:
        since = f"validation is worse than at step {best['step']:,} ({low:.4g}, now {now:.4g})"
        advice = "More data, more model.dropout or train.patience=3 help; the best weights are kept."
        text = f"{since} while the training loss falls: the model memorises. {advice}"
        yield Warned(validated[-1]["step"], "overfitting", text)
