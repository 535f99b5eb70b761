"""Processes: start, loading of weights, memory of tokenizers, and another version of clearhead."""

from __future__ import annotations

import argparse
import atexit
import http.client
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common import ask_worker, by_processor, case_command, case_parser, save

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
    parser = case_parser(run_startup)
    parser.add_argument("--rounds", type=int, default=9)
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
    parser = case_parser(run_load)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
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
    parser = case_parser(run_tokenizer_memory)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", default=["bpe", "wordpiece", "unigram", "word", "char"])
    parser.add_argument("--shape", choices=("zipf", "distinct"), default="zipf")
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


# versions ---------------------------------------------------------------------------------------------------


HERE = Path(__file__).resolve().parents[1]
# By device: the jobs, with the rows of a batch.
JOBS = {
    "cpu": {"decode, batch 1": 1, "decode, batch 8": 8, "train": 8, "serve": 8, "serve, a small model": 8},
    "cuda": {"decode, batch 1": 1, "decode, batch 32": 32, "train": 32},
}
GPT = {"vocab_size": 50257, "d_model": 768, "n_layers": 12, "n_heads": 12, "activation": "gelu_tanh"}
LLAMA = {
    **{"vocab_size": 32000, "d_model": 2048, "n_layers": 22, "n_heads": 32, "n_kv_heads": 4, "d_ff": 5632},
    **{"positions": "rope", "norm": "rmsnorm", "activation": "silu", "gated": True, "bias": False},
    **{"tie_embeddings": False, "max_positions": 2048},
}


def decode_job(batch: int, device: str, tokens: int) -> Callable[[], float]:
    """Time decoding: on a CPU the 124M GPT-2 shape, on a GPU a 1.1B Llama shape in bfloat16, compiled."""
    import torch

    import clearhead as ch

    torch.manual_seed(0)
    gpu = device == "cuda"
    config = ch.ModelConfig(**(LLAMA if gpu else GPT))
    whole = getattr(ch, "Model", None) or ch.Loaded
    with torch.device(device):
        model = ch.Transformer(config)
    m = whole(model.bfloat16() if gpu else model)
    prompts = torch.randint(config.vocab_size, (batch, 128 if gpu else 16)).tolist()

    def run() -> float:
        start = time.perf_counter()
        m.generate(prompts, 256 if gpu else tokens, compile=True if gpu else None)
        return time.perf_counter() - start

    return run


def train_job(batch: int, device: str) -> Callable[[], float]:
    """Time a step of `ch.train` on characters: 10.7M parameters on a CPU, the 124M shape on a GPU."""
    import torch

    import clearhead as ch

    gpu = device == "cuda"
    folder = Path(tempfile.mkdtemp())
    text = folder / "text.txt"
    text.write_text(Path(torch.__file__).parent.joinpath("functional.py").read_text() * (20 if gpu else 1))
    width, depth = (768, 12) if gpu else (384, 6)
    sizes = {"d_model": width, "n_layers": depth, "n_heads": depth}
    model = {**sizes, "max_positions": 1024 if gpu else 256, "dropout": 0.0}
    warm, steps = (20, 60) if gpu else (2, 8)
    settings = [f"model.{name}={value}" for name, value in model.items()]
    settings += [
        "tokens.kind=char",
        f"data.batch_size={batch}",
        f"train.steps={steps}",
        f"train.device={device}",
    ]
    settings += [
        f"train.log_every={10 if gpu else 1}",
        "train.validate_every=1000",
        "train.save_every=1000",
        f"train.compile={str(gpu).lower()}",
    ]
    count = 0

    def run() -> float:
        nonlocal count
        count += 1
        times: dict[int, float] = {}  # by step; on a GPU not every step is reported

        def on_event(event: Any) -> None:
            if type(event).__name__ == "Stepped":
                times[event.step] = time.perf_counter()

        ch.train(str(text), out=str(folder / str(count)), settings=settings, on_event=on_event)
        first, last = min(step for step in times if step >= warm), max(times)
        return (times[last] - times[first]) / (last - first)

    return run


def serve_job(streams: int, tokens: int, small: bool) -> Callable[[], tuple[float, float]]:
    """Time streams over HTTP: processor seconds of the server, and the 99th percentile between events."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    import clearhead as ch

    torch.manual_seed(0)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    shape = {**GPT, **({"d_model": 64, "n_layers": 4, "n_heads": 4} if small else {}), "vocab_size": 256}
    folder = tempfile.mkdtemp()
    ch.Model(ch.Transformer(ch.ModelConfig(**shape)), tokenizer).save(folder)
    command = [sys.executable, "-m", "clearhead", "serve", folder, "--port", "0", "--drain", "1"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    atexit.register(server.terminate)
    assert server.stderr is not None
    port = next(int(found[1]) for line in server.stderr if (found := re.search(r"127.0.0.1:(\d+)/", line)))
    body = {"max_tokens": tokens, "min_tokens": tokens, "temperature": 0.8, "stream": True}

    def busy() -> float:
        threads = Path(f"/proc/{server.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def events(seed: int) -> list[float]:
        """Return when the events of one stream came."""
        connection = http.client.HTTPConnection("127.0.0.1", port)
        given = {**body, "prompt": f"{seed} once upon a time", "seed": seed}
        connection.request("POST", "/v1/completions", json.dumps(given), {"Content-Type": "application/json"})
        return [time.perf_counter() for line in connection.getresponse() if line.startswith(b"data: {")]

    def run() -> tuple[float, float]:
        start = busy()
        with ThreadPoolExecutor(streams) as several:
            times = list(several.map(events, range(streams)))
        gaps = sorted(after - one for row in times for one, after in pairwise(row))
        return busy() - start, 1000 * gaps[round(0.99 * (len(gaps) - 1))]

    return run


def worker(job: str, device: str, tokens: int) -> None:
    """Run the job once for each line that comes in, and answer with what it measures, seconds first."""
    rows = JOBS[device][job]
    if job.startswith("serve"):
        serving = serve_job(rows, tokens, small=job != "serve")
        for _ in sys.stdin:
            print("seconds {} {}".format(*serving()), flush=True)
    else:
        run = train_job(rows, device) if job == "train" else decode_job(rows, device, tokens)
        for _ in sys.stdin:
            print(f"seconds {run()}", flush=True)


def run_versions() -> None:
    """Two versions of clearhead side by side: is the one in this checkout as fast as the one in another?

        git worktree add ../before COMMIT
        python benchmarks/run.py versions ../before [--rounds 9] [--device cuda] [--save]

    Each version runs in a process of its own; they take turns round by round, so that noise falls on both
    alike. Only names that are public in both are used: decoding through `generate`, training through
    `ch.train`, serving through `clearhead serve`. Of serving, the seconds are the server's processor seconds,
    and `p99` is the 99th percentile of the milliseconds between the events of eight streams.
    """
    parser = case_parser(run_versions)
    parser.add_argument("before", type=Path, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", nargs="+")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a decoding on a CPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, options.device, options.tokens)
    results: list[dict[str, object]] = []
    for job in options.jobs or JOBS[options.device]:
        command = [
            *case_command("versions"),
            str(options.before),
            "--device",
            options.device,
            "--tokens",
            str(options.tokens),
            "--worker",
            job,
        ]
        workers = {
            name: subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(folder.resolve() / "src")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, folder in (("before", options.before), ("now", HERE))
        }
        times: dict[str, list[float]] = {"before": [], "now": []}
        gaps: dict[str, list[float]] = {"before": [], "now": []}
        for turn in range(options.rounds + 1):
            for name in list(workers) if turn % 2 else list(workers)[::-1]:
                seconds, *gap = ask_worker(workers[name])
                if turn:  # the first round is for warming up
                    times[name].append(seconds)
                    gaps[name] += gap
        for process in workers.values():
            process.communicate()
        before, now = statistics.median(times["before"]), statistics.median(times["now"])
        pairs = sorted(old / new for old, new in zip(times["before"], times["now"]))
        ratio = statistics.median(pairs)
        print(f"{job:<18} before {before:.3f} s   now {now:.3f} s   now is {ratio:.3f} x as fast "
              f"({pairs[0]:.3f} to {pairs[-1]:.3f})", flush=True)  # fmt: skip
        results.append({"job": job, "seconds": times, "now_over_before": round(ratio, 4)})
        if gaps["now"]:
            of_gaps = statistics.median(old / new for old, new in zip(gaps["before"], gaps["now"]))
            print(f"{'':<18} p99 between events: now is {of_gaps:.3f} x as fast", flush=True)
            results[-1] |= {"p99_ms": gaps, "p99_now_over_before": round(of_gaps, 4)}
    if options.save:
        from benchmarks.common import device_name, save

        serving = all(str(row["job"]).startswith("serve") for row in results)
        save(
            f"versions_{'serve' if serving else options.device}", [{"device": device_name(), "jobs": results}]
        )
