"""Neurons of a model that reads dates: what fires them, what they promote, and what their silence costs.

    python benchmarks/memories.py  # trains for a minute or two, writes results/memories.json

A date reader is trained on the embedded corpus `dates`; neurons are then read over dates it has not seen. For
the neurons of highest agreement, each is silenced and the logit of the token it promotes most is read again
at the places that fire it.
"""

from __future__ import annotations

import tempfile

import torch

import clearhead as ch
from clearhead.inside.memories import Memories, memories, token_id
from clearhead.inside.neurons import WINDOW
from clearhead.learn.data.corpora import CORPORA
from common import device_name, save

SETTINGS = [
    "data.max_examples=4000",
    "train.steps=600",
    "train.validate_every=300",
    "generate.max_new_tokens=12",
]
UNSEEN = slice(10_000, 12_000)  # beyond what training reads


def change_without(found: Memories, name: str, pairs: list[tuple[str, str]], count: int = 10) -> float:
    """Return how much logit a neuron's first promoted token gains at its contexts once the neuron is silent.

    This is the mean change of the logit above the mean of all logits.
    """
    m, memory = found.m, found.neuron(name)
    layer, unit = map(int, name.split("."))
    token = token_id(m, memory.promoted[0][0])

    def silence(post: torch.Tensor) -> torch.Tensor:
        post = post.clone()
        post[..., unit] = 0
        return post

    changes = []
    for context in memory.contexts[:count]:
        source, target = pairs[context.text]
        ids = torch.tensor([[*m.start_ids, *(t for t in m.prompt_ids(target) if t not in m.stops)]])
        given = torch.tensor([m.prompt_ids(source)])
        with torch.no_grad():
            before = m.model(ids, source=given).logits[0, context.place]
            with ch.edit(m.model, {f"blocks.{layer}.feedforward.post": silence}):
                after = m.model(ids, source=given).logits[0, context.place]
        changes.append(float((after - after.mean())[token] - (before - before.mean())[token]))
    return sum(changes) / len(changes)


def always_with_others(found: Memories) -> float:
    """Count the neurons whose contexts would all agree with what another neuron of their layer promotes.

    This is the mean over all others.
    """
    total = 0.0
    for shelf in found.shelves:
        if shelf.promoted is None:
            continue
        answers = shelf.notes[:, :, WINDOW]  # N K
        for turn in range(1, len(shelf.units)):
            other = shelf.promoted[0][:, : found.depth].roll(turn, 0)  # N P
            total += int((answers[:, :, None] == other[:, None]).any(-1).all(-1).sum()) / (
                len(shelf.units) - 1
            )
    return total


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = ch.train("dates", recipe="seq2seq-dates", out=folder, settings=SETTINGS)
    pairs = [(pair.source, pair.target) for pair in CORPORA["dates"].load()[UNSEEN]]  # type: ignore[index, union-attr]
    found = memories(result.model, pairs)
    written = [memory for memory in found.ranked(count=None) if memory.agreement is not None]
    always = [memory for memory in written if memory.agreement == 1.0]
    shown = []
    for memory in found.ranked(count=12):
        change = change_without(found, memory.name, pairs)
        places = [f"{context.before}[{context.token}]{context.after}" for context in memory.contexts[:5]]
        row = {"neuron": memory.name, "agreement": memory.agreement, "chance": round(memory.chance or 0, 4)}
        promoted = [[token, round(score, 3)] for token, score in memory.promoted[:3]]
        shown.append(
            {**row, "promotes": promoted, "fired_by": places, "logit_change_when_silent": round(change, 3)}
        )
        line = (
            f"{memory.name:>6}  {memory.agreement:.0%} (chance {memory.chance:.0%})  "
            f"{promoted[0][0]:>5}  {change:+.2f}"
        )
        print(line, *places[:3], sep="  ")
    others = always_with_others(found)
    print(
        f"{len(always)} of {len(written)} decoder neurons agree in all {found.top} contexts; "
        f"{others:.0f} would with another's tokens"
    )
    about = {
        "device": device_name(),
        "torch": torch.__version__,
        "settings": SETTINGS,
        "exact": result.metrics["exact"],
    }
    read = {
        "tokens": found.tokens,
        "depth": found.depth,
        "top": found.top,
        "decoder_neurons": len(written),
        "agree_always": len(always),
    }
    read |= {"agree_always_with_anothers_tokens": round(others, 1)}
    save("memories", [{**about, **read, "neurons": shown}])


if __name__ == "__main__":
    main()
