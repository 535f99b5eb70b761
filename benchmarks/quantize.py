"""Measure what rounding the weights of SmolLM2-135M-Instruct costs on WikiText-2: perplexity and KL.

    python benchmarks/quantize.py MODEL --data WIKITEXT2 [--tokens 4096] [--device cuda] [--save]

MODEL is a directory in Hugging Face's layout or the GGUF file itself. The weights that can be had here come
from a file that is rounded to 4 bits in groups of 32 already (Q4_1), so rounding them to the same grid costs
next to nothing. They are moved off that grid first, unless `--as-stored`, without changing what the model
computes, nor any weight: channels of the residual stream, of values and of feed-forwards are put in another
order, in all layers alike. A new group then has weights of many old ones, each with its own scale, and is as
wide as groups are. The first lines say that this is so: the share of groups of 32 weights that have at most
16 different numbers, and perplexity, before and after. Calibration is on valid.txt and figures are on
test.txt, rows of 512, all of them with `--tokens 0`.

Each variant is printed, and with `--save` kept, as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.inside.quantize import (
    TextFigures,
    log_probabilities,
    text_figures,
    text_sums,
    weight_bytes,
)
from clearhead.run.quant.apply import QuantPlan, linear_names, quantize_model
from clearhead.run.quant.calibrate import moments
from clearhead.run.quant.layers import QuantizedLinear, quantized_parts
from clearhead.run.quant.methods import CALIBRATED
from common import save

LENGTH = 512
BATCH = 4
MEMORY = 4e9  # bytes of log-probabilities to keep
VARIANTS = {
    "int8 rtn": QuantPlan(8, method="rtn"),
    "int8 hqq": QuantPlan(8, method="hqq"),
    "int4 rtn": QuantPlan(4, method="rtn"),
    "int4 rtn, symmetric": QuantPlan(4, symmetric=True, method="rtn"),
    "int4 hqq": QuantPlan(4, method="hqq"),
    "int4 hqq, symmetric": QuantPlan(4, symmetric=True, method="hqq"),
    "int4 imatrix": QuantPlan(4),
    "int4 awq": QuantPlan(4, method="awq"),
    "int4 gptq": QuantPlan(4, method="gptq"),
    "int4 gptq, symmetric": QuantPlan(4, symmetric=True, method="gptq"),
}
RESULT = Path(__file__).parent / "results" / "quantize.json"


@torch.no_grad()
def reorder(model: ch.Transformer, seed: int = 0) -> None:
    """Put channels in another order, in all layers alike: no weight changes, nor what the model computes."""
    generator = torch.Generator().manual_seed(seed)

    def order(size: int) -> Tensor:
        return torch.randperm(size, generator=generator).to(next(model.parameters()).device)

    def put(rows: Tensor | None, columns: Tensor | None, *weights: Tensor) -> None:
        for weight in weights:
            moved = weight if rows is None else weight[rows]
            weight.copy_(moved if columns is None else moved[:, columns])

    stream = order(model.config.d_model)  # the residual stream, which most layers read or write
    tables = [model.main.embedding.front.tokens.weight, model.head.out.weight]
    put(None, stream, *(tables[:1] if tables[0] is tables[1] else tables))
    put(stream, None, model.main.norm.weight)
    for block in model.main.blocks:
        attention, feedforward = block.attention, block.feedforward
        reading = attention.q, attention.k, attention.v, feedforward.gate, feedforward.up
        put(None, stream, *(layer.weight for layer in reading))
        put(stream, None, attention.out.weight, feedforward.down.weight)
        put(stream, None, block.attention_residual.before.weight, block.feedforward_residual.before.weight)
        inner = order(feedforward.up.out_features)
        put(inner, None, feedforward.gate.weight, feedforward.up.weight)
        put(None, inner, feedforward.down.weight)
        width = attention.d_value  # values keep to their head, and several query heads read one
        values = torch.stack([order(width) + width * head for head in range(attention.n_kv_heads)])
        put(values.flatten(), None, attention.v.weight)
        shared = attention.n_heads // attention.n_kv_heads
        starts = width * torch.arange(attention.n_heads, device=values.device)[:, None]
        put(None, ((values % width).repeat_interleave(shared, 0) + starts).flatten(), attention.out.weight)


@torch.no_grad()
def share_on_grid(model: ch.Transformer) -> float:
    """Return the share of groups of 32 weights of the blocks that have at most 16 different numbers."""
    found, count = 0, 0
    for name in linear_names(model):
        weight = model.get_submodule(name).weight
        if "blocks" in name and weight.shape[1] % 32 == 0:
            groups = weight.reshape(-1, 32).sort(-1).values
            steps = groups.diff(dim=-1) > 1e-6 * groups.abs().amax(-1, keepdim=True)
            found, count = found + int((steps.sum(-1) < 16).sum()), count + len(groups)
    return found / count


def widened(model: ch.Transformer) -> ch.Transformer:
    """Put the numbers that codes stand for in their place, once: the same arithmetic, in less time."""
    for name, part in quantized_parts(model).items():
        wide: nn.Module
        if isinstance(part, QuantizedLinear):
            with torch.device("meta"):
                wide = nn.Linear(part.in_features, part.out_features, bias=part.bias is not None)
            wide.bias = part.bias
        else:
            with torch.device("meta"):
                wide = nn.Embedding(part.out_features, part.in_features)
        wide.weight = nn.Parameter(part.weight, requires_grad=False)
        model.set_submodule(name, wide)
    return model


def rows(m: ch.Model, path: Path, tokens: int, device: torch.device) -> list[Tensor]:
    """Return the first tokens of a file, 0: all, in batches of rows [B, 512]."""
    text = path.read_text(encoding="utf-8")
    text, most = (text[: 8 * tokens], tokens) if tokens else (text, None)
    ids = m.text_tokenizer.encode(text, add_special_tokens=False).ids[:most]
    count = len(ids) // LENGTH
    return list(torch.tensor(ids[: count * LENGTH], device=device).view(count, LENGTH).split(BATCH))


class Reference:
    """What the model in float32 says of the test rows: kept where memory allows, else computed again."""

    def __init__(self, model: ch.Transformer, test: list[Tensor]) -> None:
        self.model, self.test = model, test
        self.kept: list[Tensor] | None = None
        if 4 * model.config.vocab_size * sum(one.numel() for one in test) <= MEMORY:
            with torch.no_grad():
                self.kept = [log_probabilities(model, ids) for ids in test]

    @torch.no_grad()
    def measured(self, model: ch.Transformer) -> TextFigures:
        """Return the figures of a model beside this one; logits of a batch are held at a time."""
        sums = torch.zeros(4, dtype=torch.float64)
        for number, ids in enumerate(self.test):
            log = log_probabilities(self.model, ids) if self.kept is None else self.kept[number]
            sums += text_sums(log, log if model is self.model else log_probabilities(model, ids), ids)
        return text_figures(sums)


def keep(title: str, name: str, line: dict[str, object]) -> None:
    """Add one variant to what earlier runs saved."""
    before = json.loads(RESULT.read_text())["results"] if RESULT.exists() else []
    earlier = next((one for one in before if one["title"] == title), {"title": title, "rows": {}})
    earlier["rows"][name] = line
    save("quantize", [*(one for one in before if one["title"] != title), earlier])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--tokens", type=int, default=4096, help="of test.txt; 0: all")
    parser.add_argument("--calibration", type=int, default=8192, help="tokens of valid.txt; 0: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--as-stored", action="store_true", help="keep the weights on the grid of their file")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    m = ch.load(options.folder, "float32", options.device)
    device = next(m.model.parameters()).device
    test = rows(m, options.data / "test.txt", options.tokens, device)
    valid = rows(m, options.data / "valid.txt", options.calibration, device)
    stored = Reference(m.model, test).measured(m.model)
    print(
        f"as stored: perplexity {stored.perplexity:.3f}, on a grid {share_on_grid(m.model):.1%}", flush=True
    )
    if not options.as_stored:
        reorder(m.model)
    title = "weights as stored (Q4_1)" if options.as_stored else "channels in another order"
    count, seen_tokens = sum(map(len, test)), sum(one.numel() for one in valid)
    title += f", {count} rows of {LENGTH} tokens, calibrated on {seen_tokens:,}, on {device.type}"
    reference = Reference(m.model, test)
    float32, size = reference.measured(m.model), weight_bytes(m.model)
    grid = share_on_grid(m.model)
    print(f"{title}\nfloat32: perplexity {float32.perplexity:.3f}, on a grid {grid:.1%}", flush=True)
    if options.save:
        keep(title, "float32", {**float32.to_dict(), "bytes": size, "change": 0.0})
    needed = any(VARIANTS[name].method in CALIBRATED for name in options.variants)
    seen = moments(m.model, valid, linear_names(m.model)) if needed else None
    for name in options.variants:
        start = time.perf_counter()
        given = seen if VARIANTS[name].method in CALIBRATED else None
        model = quantize_model(m.model, VARIANTS[name], seen=given).model
        size = weight_bytes(model)
        found = reference.measured(widened(model))
        change = found.perplexity / float32.perplexity - 1
        print(f"{name}: {found.perplexity:.3f} ({change:+.2%}), KL {found.divergence:.4f}, "
              f"{size / 1e6:.0f} MB, {time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
        if options.save:
            keep(title, name, {**found.to_dict(), "bytes": size, "change": round(change, 5)})


if __name__ == "__main__":
    main()
