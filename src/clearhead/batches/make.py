"""From encoded examples to batches: `make_batches` chooses the kind that fits the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from clearhead.batches.batch import Batches
from clearhead.batches.bucketed import Answers, Labels, Pairs, Tags
from clearhead.batches.encoded import Encoded
from clearhead.batches.even import MaskedWindows, NoisyWindows, Packed, Pictures, Windows
from clearhead.data.plan import DataPlan, Task
from clearhead.errors import InputError

__all__ = ["Batches", "make_batches"]

Make = Callable[[Encoded, int, DataPlan, Mapping[str, int], int, bool], Batches]
KINDS: dict[Task, Make] = {
    "lm": Windows,
    "mlm": MaskedWindows,
    "denoise": NoisyWindows,
    "seq2seq": Pairs,
    "classify": Labels,
    "tag": Tags,
    "answer": Answers,
}


def make_batches(
    encoded: Encoded,
    task: Task,
    plan: DataPlan,
    *,
    special: Mapping[str, int],
    length: int,
    seed: int,
    training: bool,
) -> Batches:
    """The batches of one side.

    Args:
        encoded: its examples.
        task: what they are for.
        plan: batch size, packing and what else the recipe says of data.
        special: ids of special tokens by role: pad, bos, eos, cls, sep, mask.
        length: tokens of a row that the model takes; the plan may ask for fewer.
        seed: of the order of examples and of all that is drawn at random.
        training: shuffled anew each epoch; otherwise in one order, nothing left out and nothing twice.
    """
    if not any(
        len(array) - name.endswith("_offsets")
        for name, array in encoded.arrays.items()
        if name not in ("mean", "std")
    ):
        raise InputError(
            f"there are no examples for {'training' if training else 'validation'}: give more data"
        )
    if task == "image":
        return Pictures(encoded, plan, seed, training)
    make: Make = Packed if task == "lm" and plan.packing == "isolated" else KINDS[task]
    batches = make(encoded, min(length, plan.max_length or length), plan, special, seed, training)
    batches.said = encoded.said + batches.said
    return batches
