"""Load a checkpoint of about 500 MB and run one forward pass, float32: clearhead and transformers in turn.

    python benchmarks/load.py [--megabytes 500] [--rounds 5] [--save]

Each measurement is a process of its own, so that neither inherits memory or warm caches from the other; the
file itself is in the page cache for both. Time runs from the call to the logits, imports left out. Memory is
the peak above what the process had after its imports. Products take one thread; both read with several.
Both map the file, and pay for some of it in the forward pass: the time of both together is the one to
compare, and that of the load alone stands next to it. clearhead also looks for NaN, which reads every weight.
With `mapped=False`, the second row, it reads the file into memory of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import by_processor, save

DEVICE = f"CPU {platform.machine()}, 1 thread"
MEASURE = """
import json, sys, time
import torch
kind, folder = sys.argv[1:]
# On a machine with neighbours, threads that wait for each other measure the neighbours.
torch.set_num_threads(1)
if kind.startswith("clearhead"):
    from clearhead import load as open_model
    load = lambda: open_model(folder, mapped="mapped=False" not in kind).model
else:
    import transformers
    # Import the lazy modules now, so that imports are not timed.
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    load = lambda: AutoModelForCausalLM.from_pretrained(folder).eval()
ids = torch.arange(8)[None]
torch.nn.functional.linear(torch.zeros(8, 8), torch.zeros(8, 8))
def memory(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
before = memory("VmRSS")
start = time.perf_counter()
model = load()
loaded = time.perf_counter() - start
with torch.inference_mode():
    logits = model(ids).logits
print(json.dumps({"seconds": time.perf_counter() - start, "load": loaded, "peak": memory("VmHWM") - before}))
"""


def build(folder: Path, kind: str, megabytes: int) -> int:
    """A random checkpoint of this kind, in a process of its own; returns the bytes of its weights."""
    vocab, block = 50257 if megabytes > 180 else 2000, 7_087_872  # parameters of one layer
    layers = max(1, round((megabytes * 250_000 - vocab * 768) / block))
    script = f"""
import torch, transformers
torch.manual_seed(0)
if {kind!r} == "gpt2":
    config = transformers.GPT2Config(vocab_size={vocab}, n_layer={layers})
else:
    config = transformers.LlamaConfig(
        vocab_size={vocab}, hidden_size=768, intermediate_size=2048, num_hidden_layers={layers},
        num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
transformers.AutoModelForCausalLM.from_config(config).save_pretrained({str(folder)!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    return (folder / "model.safetensors").stat().st_size


def measure(kind: str, folder: Path) -> dict[str, float]:
    """One load in a fresh process."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, kind, str(folder)], check=True, capture_output=True, text=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    results: list[dict[str, object]] = []
    for kind in ("gpt2", "llama"):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / kind
            size = build(folder, kind, options.megabytes)
            runs: dict[str, list[dict[str, float]]] = {
                "clearhead": [],
                "clearhead mapped=False": [],
                "transformers": [],
            }
            for _ in range(options.rounds + 1):  # the first warms the page cache
                for name, seen in runs.items():
                    seen.append(measure(name, folder))
        title = f"load and one forward of 8 tokens, {kind} shape, {size / 1e6:.0f} MB float32"
        print(f"\n{title}  [{DEVICE}]")
        rows = {}
        seconds, loads = (
            {name: statistics.median(run[part] for run in seen[1:]) for name, seen in runs.items()}
            for part in ("seconds", "load")
        )
        for name, seen in runs.items():
            row = {"seconds": round(seconds[name], 3), "of_which_load": round(loads[name], 3)}
            row["peak_over_weights"] = round(max(run["peak"] for run in seen[1:]) / size, 3)
            row["ours_over_this"] = round(seconds[name] / seconds["clearhead"], 2)
            row["ours_over_this_load_alone"] = round(loads[name] / loads["clearhead"], 2)
            rows[name] = row
            print(f"  {name:<24}{row['seconds']:>7.2f} s, of which load {row['of_which_load']:.2f} s", end="")
            print(
                f"   peak {row['peak_over_weights']:.2f} x the weights   "
                f"clearhead is {row['ours_over_this']:.2f} x as fast, "
                f"to load alone {row['ours_over_this_load_alone']:.2f} x"
            )
        results.append({"title": title, "device": DEVICE, "rows": rows})
    if options.save:
        save(by_processor("load"), results)


if __name__ == "__main__":
    main()
