"""A quantized model, and what rounding cost: errors by layer, perplexity and divergence on a text.

    result = quantize(m, bits=4, text="book.txt", method="gptq")
    result.model.save("small")
    result.after.perplexity / result.before.perplexity

One half of the text is for calibration and for finding sensitive parts. What is reported is measured on the
other half.

Shapes: T tokens of a row, V vocabulary.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.inside.inputs import device_of
from clearhead.inside.long_text import LongText, read_text
from clearhead.inside.results import Result
from clearhead.learn.evaluation.metrics import OnProgress, perplexity
from clearhead.run.api import Model
from clearhead.run.quant.apply import (
    LayerError,
    MethodName,
    QuantPlan,
    linear_names,
    moments,
    quantize_model,
    shared_copy,
)
from clearhead.run.quant.layers import quantized_parts
from clearhead.run.quant.methods import CALIBRATED
from clearhead.variants.contexts import evaluating

LENGTH = 512  # tokens of a row, at most


@dataclass(frozen=True)
class TextFigures(Result):
    """What a model says of a text."""

    json_names = ("tokens", "loss", "perplexity", "divergence", "agreement")

    tokens: int
    loss: float  # nats a token
    divergence: float  # KL from the model before, nats a token
    agreement: float  # share of tokens after which both models hold the same token most probable

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return perplexity(self.loss)


@dataclass(frozen=True)
class Sensitivity(Result):
    """The KL divergence from the model, in nats a token, when one part alone is rounded."""

    part: str
    divergence: float


@dataclass(frozen=True, eq=False)
class QuantReport(Result):
    """A quantized model, and what rounding cost; None without a text."""

    json_names = (
        *("bits", "group", "symmetric", "method", "wide", "bytes_before", "bytes_after", "before", "after"),
        *("sensitivity", "layers"),
    )

    model: Model
    plan: QuantPlan
    layers: tuple[LayerError, ...]
    bits: int  # of a weight
    group: int  # weights that share a scale
    symmetric: bool  # the scales of layers of `bits` have no offset
    method: str  # how codes were chosen
    wide: tuple[str, ...]  # layers that keep more bits
    bytes_before: int  # of all weights
    bytes_after: int
    before: TextFigures | None
    after: TextFigures | None
    sensitivity: tuple[Sensitivity, ...] = ()  # most sensitive first; only where parts were to be chosen


def quantize(
    m: Model,
    bits: int = 4,
    group: int = 32,
    *,
    method: MethodName | None = None,
    symmetric: bool | None = None,
    text: str | Path | Sequence[str | Path] | Sequence[int] = (),
    wide: int | Sequence[str] = (),
    calibration: int = 8192,
    evaluation: int = 4096,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> QuantReport:
    """Return a copy of a model whose weights have 8 or 4 bits, and what rounding cost. The model stays.

    Args:
        m: what `load` gave, in floating point.
        bits: 8 or 4; the output layer and token tables keep 8.
        group: weights of a row that share a scale: 32, 64, 128 or 256.
        method: rtn (to the nearest), hqq or imatrix, which need no text, gptq or awq, which do; None: gptq
            with a text; without, imatrix for 4 bits of a decoder, hqq for other models, rtn for 8 bits.
        symmetric: True: scales alone; False: each group has an offset too; None: 4 bits have one, 8 have not.
        text: files, an embedded corpus or token ids, for a decoder language model: one half calibrates, and
            the other is what perplexity and divergence are measured on.
        wide: names of layers, with `*` for anything, that keep 8 bits (of 8: floating point); or how many
            attentions and feed-forwards to choose for that, by what rounding each alone costs on the text.
        calibration: tokens of the text to calibrate on, at most.
        evaluation: tokens of the text to measure on, at most.
        on_progress: told what is being done, and how much of how much is.
    """
    has_text = isinstance(text, str | Path) or len(text) > 0
    named = () if isinstance(wide, int) else (wide,) if isinstance(wide, str) else tuple(wide)
    plan = QuantPlan(bits, group, symmetric, method or ("gptq" if has_text else "imatrix"), named)
    refuse(m.towers is not None, f"{m.folder} has two towers: quantize one of them, {m.folder}/text")
    refuse(
        not has_text and (plan.method in CALIBRATED or isinstance(wide, int)),
        f"{'wide ' + str(wide) if isinstance(wide, int) else 'method ' + plan.method} needs a text: "
        "give text (on the command line --data FILE), or choose imatrix, rtn or hqq, and wide layers by name",
    )
    for name, value in (("calibration", calibration), ("evaluation", evaluation)):
        refuse(value < 2, f"{name} {value} must be 2 tokens or more")
    read = _Rows(m, text, calibration, evaluation) if has_text else None
    names = [name for name in linear_names(m.model) if plan.grid(name) is not None]
    seen = None if read is None else moments(m.model, read.rows(0, on_progress, "calibrating"), names)
    tried: tuple[Sensitivity, ...] = ()
    if isinstance(wide, int) and read is not None:
        refuse(wide < 1, f"wide {wide} must be 1 part or more, or names of layers")
        tried = _sensitivity(m.model, plan, read, on_progress)
        chosen = tuple(f"{part.part}.*" for part in tried[:wide])
        plan = dataclasses.replace(plan, wide=chosen)
    done = quantize_model(m.model, plan, None, lambda n, i, total: on_progress("rounding", i, total), seen)
    quantized = dataclasses.replace(m, model=done.model, description=None)
    before = after = None
    if read is not None:
        before, after = read.compare(m.model, done.model, on_progress)
    return QuantReport(
        quantized,
        done.plan,
        tuple(done.layers),
        bits=done.plan.bits,
        group=done.plan.group,
        symmetric=done.plan.grid_of(done.plan.bits).symmetric,
        method=done.plan.method,
        wide=done.plan.wide,
        bytes_before=weight_bytes(m.model),
        bytes_after=weight_bytes(done.model),
        before=before,
        after=after,
        sensitivity=tried,
    )


def weight_bytes(model: Transformer) -> int:
    """Return the bytes of all weights of a model, shared ones once."""
    parts = quantized_parts(model).values()
    codes = (tensor for part in parts for tensor in part.buffers() if tensor.numel())
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *codes)}.values())


class _Rows:
    """The two halves of a text, as rows of ids."""

    def __init__(self, m: Model, text: object, calibration: int, evaluation: int) -> None:
        config = m.config
        refuse(
            config.family != "decoder" or config.head != "lm",
            f"a text calibrates a decoder language model, and this is a model of family {config.family} with "
            f"head {config.head}: leave the text out, and choose rtn or hqq",
        )
        read, self.device = read_text(m, text), device_of(m.model)
        half = len(read.ids) // 2
        halves = [dataclasses.replace(read, ids=part) for part in (read.ids[:half], read.ids[half:])]
        self.length = min(LENGTH, config.max_positions, calibration, evaluation, halves[0].room)
        refuse(self.length < 2, f"{read.name} has {read.room} tokens: give a longer text")
        self.halves = halves
        self.counts = [max(1, most // self.length) for most in (calibration, evaluation)]

    def rows(self, half: int, on_progress: OnProgress, stage: str) -> Iterator[Tensor]:
        """Yield rows of one half: ids [1, T]."""
        text: LongText = self.halves[half]
        rows = list(text.rows(self.length, self.counts[half]))
        for number, row in enumerate(rows):
            on_progress(stage, number, len(rows))
            yield torch.tensor([row], device=self.device)
        on_progress(stage, len(rows), len(rows))

    @torch.no_grad()
    def compare(
        self, before: Transformer, after: Transformer, on_progress: OnProgress
    ) -> tuple[TextFigures, TextFigures]:
        """Return what two models say of the second half."""
        sums = [torch.zeros(4, dtype=torch.float64) for _ in range(2)]
        with evaluating(before), evaluating(after):
            for ids in self.rows(1, on_progress, "measuring"):
                logs = [log_probabilities(model, ids) for model in (before, after)]
                for total, log in zip(sums, logs):
                    total += text_sums(logs[0], log, ids)
        return text_figures(sums[0]), text_figures(sums[1])


def log_probabilities(model: Transformer, ids: Tensor) -> Tensor:
    """Return the log-probabilities of the next token after each: [B, T] -> [B, T, V]."""
    logits: Tensor = model(ids).required_logits
    return logits.float().log_softmax(-1)


def text_sums(reference: Tensor, log: Tensor, ids: Tensor) -> Tensor:
    """Return tokens, and sums over them of loss, divergence and agreement: [B, T, V] twice, [B, T] -> [4]."""
    reference, log, targets = reference[:, :-1], log[:, :-1], ids[:, 1:]
    loss = -log.gather(-1, targets[..., None]).sum()
    divergence = (reference.exp() * (reference - log)).sum()
    agreement = (reference.argmax(-1) == log.argmax(-1)).sum()
    sums = [targets.numel(), float(loss), float(divergence), float(agreement)]
    return torch.tensor(sums, dtype=torch.float64)


def text_figures(sums: Tensor) -> TextFigures:
    """Return means from sums [4]."""
    tokens, loss, divergence, agreement = sums.tolist()
    return TextFigures(int(tokens), loss / tokens, divergence / tokens, agreement / tokens)


@torch.no_grad()
def _sensitivity(
    model: Transformer, plan: QuantPlan, read: _Rows, on_progress: OnProgress
) -> tuple[Sensitivity, ...]:
    """Round each attention and feed-forward alone, to the nearest; return divergences, largest first."""
    plain = dataclasses.replace(plan, method="rtn", wide=())
    rounded, model = quantize_model(model, plain).model, shared_copy(model)
    ids = next(read.rows(0, lambda *told: None, ""))
    names = list(dict.fromkeys(name.rpartition(".")[0] for name in linear_names(model) if "." in name))
    parts = [name for name in names if name != "head"]
    tried_layers = []
    with evaluating(model):
        reference = log_probabilities(model, ids)
        for number, part in enumerate(parts):
            on_progress("finding sensitive parts", number, len(parts))
            before = model.get_submodule(part)
            try:
                model.set_submodule(part, rounded.get_submodule(part))
                log = log_probabilities(model, ids)
            finally:
                model.set_submodule(part, before)
            divergence = (reference.exp() * (reference - log)).sum() / ids.numel()
            tried_layers.append(Sensitivity(part, float(divergence)))
    return tuple(sorted(tried_layers, key=lambda tried: -tried.divergence))
