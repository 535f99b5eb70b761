"""Measure what rounding the weights of SmolLM2-135M-Instruct costs on WikiText-2: perplexity and KL.

    python benchmarks/quantize.py DIR --data WIKITEXT2 [--variants ...] [--tokens 4096] [--save]

DIR is the model in Hugging Face's layout. The weights that can be had here come from a file that is rounded
to 4 bits in groups of 32 already (Q4_1), so rounding them to the same grid costs next to nothing. They are
moved off that grid first, unless `--as-stored`, without changing what the model computes: what a norm, a
value or a gate's factor puts out is multiplied by random numbers near 1, and the weights that read it are
divided by them. Calibration is on valid.txt and figures are on the first tokens of test.txt, rows of 512.

Each variant is added to what an earlier run saved.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

import clearhead as ch
from clearhead.inside.quantize import log_probabilities, text_figures, text_sums, weight_bytes
from clearhead.quant.apply import QuantPlan, linear_names, quantize_model
from clearhead.quant.calibrate import moments
from common import save

LENGTH = 512
VARIANTS = {
    "int8 rtn": QuantPlan(8, method="rtn"),
    "int8 hqq": QuantPlan(8, method="hqq"),
    "int4 rtn": QuantPlan(4, method="rtn"),
    "int4 rtn, offsets": QuantPlan(4, symmetric=False, method="rtn"),
    "int4 hqq": QuantPlan(4, method="hqq"),
    "int4 hqq, offsets": QuantPlan(4, symmetric=False, method="hqq"),
    "int4 awq": QuantPlan(4, method="awq"),
    "int4 awq, offsets": QuantPlan(4, symmetric=False, method="awq"),
    "int4 gptq": QuantPlan(4, method="gptq"),
    "int4 gptq, offsets": QuantPlan(4, symmetric=False, method="gptq"),
}
RESULT = Path(__file__).parent / "results" / "quantize.json"


@torch.no_grad()
def regauge(model: ch.Transformer, spread: float = 0.2, seed: int = 0) -> None:
    """Multiply and divide weights so that the model computes the same with others."""
    generator = torch.Generator().manual_seed(seed)

    def factors(size: int) -> Tensor:
        return (spread * torch.randn(size, generator=generator)).exp()

    for block in model.main.blocks:
        attention, feedforward = block.attention, block.feedforward
        for norm, layers in (
            (block.attention_residual.before, (attention.q, attention.k, attention.v)),
            (block.feedforward_residual.before, (feedforward.gate, feedforward.up)),
        ):
            c = factors(norm.weight.shape[0])
            norm.weight.mul_(c)
            for layer in layers:
                layer.weight.div_(c)
        c = factors(attention.v.out_features)
        attention.v.weight.mul_(c[:, None])
        shared = attention.n_heads // attention.n_kv_heads
        attention.out.weight.div_(c.view(-1, attention.d_value).repeat_interleave(shared, 0).flatten())
        c = factors(feedforward.up.out_features)
        feedforward.up.weight.mul_(c[:, None])
        feedforward.down.weight.div_(c)


def rows(m: ch.Model, path: Path, tokens: int) -> list[Tensor]:
    """Return the first tokens of a file, in rows [1, 512]."""
    text = path.read_text(encoding="utf-8")[: 8 * tokens]
    ids = m.text_tokenizer.encode(text, add_special_tokens=False).ids[:tokens]
    return [torch.tensor([ids[start : start + LENGTH]]) for start in range(0, len(ids) - LENGTH + 1, LENGTH)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--calibration", type=int, default=8192)
    parser.add_argument("--as-stored", action="store_true", help="keep the weights on the grid of their file")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    m = ch.load(options.folder)
    if not options.as_stored:
        regauge(m.model)
    test = rows(m, options.data / "test.txt", options.tokens)
    title = "weights as stored (Q4_1)" if options.as_stored else "weights off their grid"
    title += f", {len(test)} rows of {LENGTH} tokens, calibrated on {options.calibration:,}"
    with torch.no_grad():
        reference = [log_probabilities(m.model, ids) for ids in test]
        needed = any(VARIANTS[name].method in ("gptq", "awq") for name in options.variants)
        valid = rows(m, options.data / "valid.txt", options.calibration)
        seen = moments(m.model, valid, linear_names(m.model)) if needed else None
        sums = sum(text_sums(log, log, ids) for log, ids in zip(reference, test))
        found = {"float32": text_figures(sums)}
        sizes = {"float32": weight_bytes(m.model)}
        print(f"{title}\nfloat32: perplexity {found['float32'].perplexity:.3f}", flush=True)
        for name in options.variants:
            start = time.perf_counter()
            model = quantize_model(m.model, VARIANTS[name], seen=seen or {}).model
            sums = sum(
                text_sums(log, log_probabilities(model, ids), ids) for log, ids in zip(reference, test)
            )
            found[name], sizes[name] = text_figures(sums), weight_bytes(model)
            change = found[name].perplexity / found["float32"].perplexity - 1
            print(f"{name}: {found[name].perplexity:.3f} ({change:+.2%}), KL {found[name].divergence:.4f}, "
                  f"{sizes[name] / 1e6:.0f} MB, {time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
    if options.save:
        before = json.loads(RESULT.read_text())["results"] if RESULT.exists() else []
        lines = {name: {**one.to_dict(), "bytes": sizes[name]} for name, one in found.items()}
        for name, line in lines.items():
            line["change"] = round(found[name].perplexity / found["float32"].perplexity - 1, 5)
        earlier = next((one for one in before if one["title"] == title), {"title": title, "rows": {}})
        earlier["rows"] |= lines
        save("quantize", [*(one for one in before if one["title"] != title), earlier])


if __name__ == "__main__":
    main()
