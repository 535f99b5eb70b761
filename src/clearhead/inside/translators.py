"""Translators: what takes the stream after a layer to what the last layer would make of it, for the lens.

    tuned = fit_tuned(m, "corpus.txt")                 # an affine map per layer, trained by KL divergence
    tuned.divergence, tuned.plain                      # bits by layer on held-out text; the logit lens's
    jacobian = fit_jacobian(m, "corpus.txt")           # the mean derivative of the last layer by each layer
    tuned.save("tuned.safetensors")
    lens(m, "Once upon a time", translators=Translators.load("tuned.safetensors"))

The tuned lens (Belrose et al. 2023) begins at the logit lens, and a layer keeps its map only where that is
better on held-out text: so it is never worse there. The Jacobian lens (Gurnee et al. 2026) reads J h, where
J is the derivative of the last layer's states at this and all later tokens by a state, its mean over tokens
and texts. The last layer has no map: every lens ends in the model's own answer.

Shapes: L layers, B rows, T tokens, N targets, D model, V vocabulary.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.core.heads import LanguageHead
from clearhead.errors import InputError, refuse
from clearhead.inside import names
from clearhead.inside.ablation import examples_from
from clearhead.inside.inputs import AnyModel, as_model, device_of
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.losses import arguments_for
from clearhead.run.api import Model
from clearhead.run.generate.exits import stop_at
from clearhead.variants.contexts import edit, evaluating, record

HELD_OUT = 0.2  # of the batches
AT_ONCE = 256  # targets of a step
ROWS = 64  # rows of a pass with one derivative each
OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class Translators:
    """A map of the stream for each layer but the last: h to matrix h + bias."""

    kind: str  # tuned, jacobian
    matrix: Tensor  # [L, D, D]
    bias: Tensor  # [L, D]
    plain: tuple[float, ...] = ()  # bits that the logit lens of each layer is from the model, held-out text
    divergence: tuple[float, ...] = ()  # and this lens

    def __call__(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Return the states [..., D] after each layer, the embedding's first, as the lens reads them."""
        refuse(
            len(states) != len(self.matrix) + 1 or states[0].shape[-1] != self.matrix.shape[-1],
            f"this lens has {len(self.matrix)} layers of width {self.matrix.shape[-1]}, and the model "
            f"{len(states) - 1} of {states[0].shape[-1]}: fit one for this model",
        )
        read = []
        for state, matrix, bias in zip(states, self.matrix, self.bias):
            x = wide(state)
            read.append((x @ matrix.T.to(x) + bias.to(x)).to(state))
        return [*read, states[-1]]

    def save(self, path: str | Path) -> None:
        """Write them as safetensors."""
        facts = {
            "kind": self.kind,
            "plain": json.dumps(self.plain),
            "divergence": json.dumps(self.divergence),
        }
        tensors = {"matrix": self.matrix.contiguous().cpu(), "bias": self.bias.contiguous().cpu()}
        safetensors.torch.save_file(tensors, path, facts)

    @classmethod
    def load(cls, path: str | Path) -> "Translators":
        """Return those of a file."""
        try:
            with safe_open(path, "pt") as file:
                facts = file.metadata() or {}
                bits = (tuple(json.loads(facts[name])) for name in ("plain", "divergence"))
                return cls(facts["kind"], file.get_tensor("matrix"), file.get_tensor("bias"), *bits)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InputError(f"{path} is no lens: {str(error).splitlines()[0]}") from None


def fit_tuned(
    m: AnyModel,
    data: Any,
    *,
    steps: int = 300,
    lr: float = 1e-3,
    texts: bool = False,
    seed: int = 0,
    on_step: OnStep = lambda done, total: None,
) -> Translators:
    """Train a tuned lens on text.

    Args:
        m: what `load` gave.
        data: what `examples_from` takes: files, an embedded corpus, or with `texts` the texts themselves.
        steps: of Adam.
        lr: its rate at the start; it falls to 0.
        texts: are `data` texts and not names of files?
        seed: of the targets that are drawn.
        on_step: told how many steps are done.
    """
    m = _read(m)
    train, held_out = _split(m, data, texts)
    layers, width = m.config.main.n_layers, m.config.d_model
    where, generator = device_of(m.model), torch.Generator().manual_seed(seed)
    matrix = torch.eye(width, device=where).repeat(layers, 1, 1).requires_grad_()
    bias = torch.zeros(layers, width, device=where, requires_grad=True)
    optimizer = torch.optim.Adam([matrix, bias], lr)
    for step in range(steps):
        states, final = _targets(m, train[step % len(train)])
        some = torch.randperm(len(final), generator=generator)[:AT_ONCE].to(where)
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        with torch.enable_grad():
            for layer, state in enumerate(states[:-1]):  # one at a time: logits are large
                moved = state[some].float() @ matrix[layer].T + bias[layer]
                _kl(m, moved.to(state), final[some]).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        on_step(step + 1, steps)
    tuned = Translators("tuned", matrix.detach(), bias.detach())
    plain, translated = divergences(m, held_out, None), divergences(m, held_out, tuned)
    kept = torch.tensor([b < a for a, b in zip(plain, translated)], device=where)[:, None]
    best = tuple(min(pair) for pair in zip(plain, translated))
    whole = torch.where(kept[..., None], tuned.matrix, torch.eye(width, device=where))
    return Translators("tuned", whole, torch.where(kept, tuned.bias, 0.0), plain, best)


def fit_jacobian(
    m: AnyModel,
    data: Any,
    *,
    most: int = 100,
    texts: bool = False,
    on_step: OnStep = lambda done, total: None,
) -> Translators:
    """Measure a Jacobian lens on rows of text, `most` of them; the arguments are `fit_tuned`'s."""
    m = _read(m)
    train, held_out = _split(m, data, texts)
    taps, width = names.states(m.model.main.spec), m.config.d_model
    rows = [(batch, row) for batch in train for row in range(len(batch))][:most]
    total = torch.zeros(len(taps) - 1, width, width, dtype=torch.float64, device=device_of(m.model))
    begin = {taps[0]: lambda x: x.detach().requires_grad_()}  # where weights have no gradients, too
    for done, (batch, row) in enumerate(rows, 1):
        arguments = arguments_for(m.model, batch.rows(slice(row, row + 1)).to(device_of(m.model)))
        real = arguments.get("mask", torch.ones(1, 1, dtype=torch.bool, device=total.device))[
            ..., None
        ]  # 1 T 1
        for start in range(0, width, ROWS):
            count = min(ROWS, width - start)
            listening = record(m.model, *taps, detach=False)
            repeated = {name: x.expand(count, *x.shape[1:]) for name, x in arguments.items()}
            with torch.enable_grad(), evaluating(m.model), edit(m.model, begin), listening as seen:
                m.model(**repeated, logits="none")
                ends = seen[taps[-1]] * real
                outputs = ends[torch.arange(count), :, start + torch.arange(count)].sum()
                slopes = torch.autograd.grad(outputs, [seen[tap] for tap in taps[:-1]])
            weight = real.sum() if real.shape[1] > 1 else slopes[0].shape[1]
            total[:, start : start + count] += torch.stack(
                [(x * real).sum(1).double() / weight for x in slopes]
            )
        on_step(done, len(rows))
    translators = Translators(
        "jacobian", (total / len(rows)).float(), total.new_zeros(total.shape[:2]).float()
    )
    plain, bits = divergences(m, held_out, None), divergences(m, held_out, translators)
    return Translators("jacobian", translators.matrix, translators.bias, plain, bits)


def divergences(m: Model, batches: Sequence[Batch], translators: Translators | None) -> tuple[float, ...]:
    """Return the bits that each layer's lens but the last's is from the model, the mean over targets."""
    total, count = torch.zeros(m.config.main.n_layers, dtype=torch.float64), 0
    with torch.no_grad():
        for batch in batches:
            states, final = _targets(m, batch)
            for some in torch.split(torch.arange(len(final)), AT_ONCE):
                read = [state[some] for state in states]
                read = read if translators is None else translators(read)
                total += torch.stack([_kl(m, state, final[some]).sum().double().cpu() for state in read[:-1]])
            count += len(final)
    return tuple((total / count / math.log(2)).tolist())


def _kl(m: Model, states: Tensor, final: Tensor) -> Tensor:
    """Return how far states [N, D], read by the head, are from the model's log-probabilities [N, V]: [N]."""
    with evaluating(m.model):
        logs = wide(stop_at(m.model, states[None])[0]).log_softmax(-1)
    return (final.exp() * (final - logs)).sum(-1)


def _targets(m: Model, batch: Batch) -> tuple[list[Tensor], Tensor]:
    """Return the states [N, D] after each layer where a batch has targets, and final log-probabilities."""
    batch = batch.to(device_of(m.model))
    taps, counted = names.states(m.model.main.spec), batch.targets != IGNORE
    with torch.no_grad(), evaluating(m.model), record(m.model, *taps) as seen:
        hidden = m.model(**arguments_for(m.model, batch), logits="none").hidden
        final = wide(m.model.head(hidden[counted][None], None)[0]).log_softmax(-1).clamp(min=-1e30)
    return [seen[tap][counted] for tap in taps], final


def _read(m: AnyModel) -> Model:
    m = as_model(m)
    refuse(
        not isinstance(m.model.head, LanguageHead),
        f'a lens is fitted by what a model says of each token, and this one has head "{m.config.head}"',
    )
    return m


def _split(m: Model, data: Any, texts: bool) -> tuple[list[Batch], list[Batch]]:
    """Return batches to fit on, and those held out."""
    batches = list(_smaller(examples_from(m, data, texts=texts).batches))
    apart = max(1, round(HELD_OUT * len(batches)))
    refuse(len(batches) < 2, "the data has one row: give more, so that some can be held out")
    return batches[:-apart], batches[-apart:]


def _smaller(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Yield batches of few rows, so that there are several."""
    for batch in batches:
        for start in range(0, len(batch), 4):
            yield batch.rows(slice(start, start + 4))
