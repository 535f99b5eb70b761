"""Processes: start, loading of weights, memory of tokenizers."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from benchmarks.common import by_processor, save

# startup --------------------------------------------------------------------------------------------------


COMMANDS = {  # name: arguments, and the most seconds that it may take
    "clearhead --help": (["--help"], 0.4),
    "a mistyped command": (["trian", "my.txt"], 0.4),
    "a wrong option": (["generate", "my-model/", "--tempreture", "1"], 0.4),
    "a missing argument": (["classify"], 0.4),
    "clearhead generate --help": (["generate", "--help"], None),
    "clearhead eval --help": (["eval", "--help"], None),
}
IMPORTS = {  # name: statement that follows `import torch`, and the most seconds
    "import clearhead, beyond torch": ("import clearhead", 0.3),
    "every public name, beyond torch": ("from clearhead import *", None),
}
IMPORT = "import time, torch; start = time.process_time(); {}; print(time.process_time() - start)"


def command_seconds(arguments: list[str]) -> float:
    """Run a command and return the user and system time of its process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "clearhead", *arguments], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def import_seconds(statement: str) -> float:
    """Return the processor time of an import statement, after `import torch`."""
    command = [sys.executable, "-c", IMPORT.format(statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def run_startup() -> None:
    """Processor time to start: the list of commands, usage errors, a command's help, imports beyond torch.

        python benchmarks/run.py startup [--rounds 9] [--save]

    Each measurement is a process of its own, and the cases take turns. Processor time is user plus system
    time, so that neighbours on the machine count for little. Each figure is the median over the rounds.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    limits = {name: limit for name, (_, limit) in (COMMANDS | IMPORTS).items()}
    times: dict[str, list[float]] = {name: [] for name in limits}
    for _ in range(options.rounds + 1):  # the first fills the caches of files and bytecode
        for name, (arguments, _) in COMMANDS.items():
            times[name].append(command_seconds(arguments))
        for name, (statement, _) in IMPORTS.items():
            times[name].append(import_seconds(statement))
    device = f"CPU {platform.machine()}"
    print(f"processor time, median of {options.rounds}  [{device}, torch {torch.__version__}]")
    rows = {}
    for name, limit in limits.items():
        rows[name] = {"processor_seconds": round(statistics.median(times[name][1:]), 3), "limit": limit}
        allowed = "" if limit is None else f"   at most {limit:.1f} s"
        print(f"  {name:<34}{rows[name]['processor_seconds']:>7.3f} s{allowed}")
    result = {"title": "processor time to start", "device": device, "torch": torch.__version__, "rows": rows}
    if options.save:
        save("startup", [result])


# load -----------------------------------------------------------------------------------------------------


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


def run_load() -> None:
    """Load a checkpoint of about 500 MB and run one forward pass, float32: versus transformers.

        python benchmarks/run.py load [--megabytes 500] [--rounds 5] [--save]

    Each measurement is a process of its own, so that neither inherits memory or warm caches from the other;
    the file itself is in the page cache for both. Time runs from the call to the logits, imports left out.
    Memory is the peak above what the process had after its imports. Products take one thread; both read
    with several. clearhead maps the file and checks every weight for NaN (the second row, `mapped=False`,
    reads it into memory of its own); transformers maps it as it is, and pays for some of it in the forward
    pass. So the time of both together is the one to compare, and that of the load alone stands
    next to it.
    """
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


# tokenizer_memory -----------------------------------------------------------------------------------------


LETTERS = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
N_WORDS = 2_000_000
BLOCK = 200_000  # words written at once
TOKENIZER_MEMORY_MEASURE = """
import json, resource, sys, time
from pathlib import Path
from clearhead.hub.tokens import TokensPlan
from clearhead.hub.tokens.training import TextFiles
from clearhead.hub.tokens.training import GENERATOR, train_tokenizer
kind, path = sys.argv[1], Path(sys.argv[2])
def peak():
    try:  # the kernel's own figure; ru_maxrss also counts what the parent process had
        lines = open("/proc/self/status")
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before, start = peak(), time.perf_counter()
made = train_tokenizer(TextFiles((path,)), TokensPlan(kind=kind), GENERATOR, path.stat().st_size)
seconds = time.perf_counter() - start
found = {"seconds": seconds, "before": before, "peak": peak(), "vocab_size": made.get_vocab_size()}
print(json.dumps(found))
"""


def words(generator: np.random.Generator, count: int) -> list[str]:
    """Random words of 2 to 12 letters, short ones more often."""
    lengths = np.minimum(2 + generator.poisson(4.5, count), 12)
    letters = "".join(generator.choice(LETTERS, int(lengths.sum())))
    ends = lengths.cumsum().tolist()
    return [letters[end - length : end] for end, length in zip(ends, lengths.tolist())]


def write(path: Path, size: int, shape: str) -> None:
    """A text of `size` bytes."""
    generator = np.random.default_rng(0)
    known = np.array(words(generator, N_WORDS), dtype=object)
    with path.open("w", encoding="ascii") as file:
        while file.tell() < size:
            if shape == "zipf":
                # Draw rank r as often as 1/r.
                drawn = known[np.exp(generator.random(BLOCK) * np.log(N_WORDS)).astype(int)]
            else:
                drawn = np.array(words(generator, BLOCK), dtype=object)
            file.write(" ".join(drawn) + " ")


def run_tokenizer_memory() -> None:
    """Peak memory and time of training a tokenizer on a large generated text, each kind in a process of its
    own.

        python benchmarks/run.py tokenizer_memory [--megabytes 1000] [--kinds bpe wordpiece unigram word char]
            [--shape zipf] [--save]

    The text is words of a fixed seed on one single line: `zipf` draws from two million of them, each as
    often as its rank says, as in written language; `distinct` hardly repeats a word, which is the worst
    case for trainers that keep each one. Memory is the peak of the whole process, imports included; the
    text lies in a file and is read in pieces.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", default=["bpe", "wordpiece", "unigram", "word", "char"])
    parser.add_argument("--shape", choices=("zipf", "distinct"), default="zipf")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    device = f"CPU {platform.machine()}, {os.cpu_count()} cores"
    title = f"train a tokenizer on {options.megabytes} MB of text, {options.shape}"
    print(f"\n{title}  [{device}]")
    rows = {}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "text.txt"
        write(path, options.megabytes * 1_000_000, options.shape)
        for kind in options.kinds:
            run = subprocess.run(
                [sys.executable, "-c", TOKENIZER_MEMORY_MEASURE, kind, str(path)],
                check=True,
                capture_output=True,
                text=True,
            )
            seen = json.loads(run.stdout.splitlines()[-1])
            row = {"peak_mb": round(seen["peak"] / 1e6), "before_mb": round(seen["before"] / 1e6)}
            rows[kind] = row | {"seconds": round(seen["seconds"], 1), "vocab_size": seen["vocab_size"]}
            print(
                f"  {kind:<10} peak {row['peak_mb']:>5} MB   {seen['seconds']:>7.1f} s   "
                f"{seen['vocab_size']:>6} tokens",
                flush=True,
            )
    if options.save:
        save(f"tokenizer_memory_{options.shape}", [{"title": title, "device": device, "rows": rows}])
