"""Small models that learn: kinds of attention as their papers show them, and diffusion."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
import statistics
import tempfile
import textwrap
import time
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
import torch.nn.functional as nnf
from benchmarks.common import KeptParts, alternate, case_parser, device_name, save
from torch import Tensor

import clearhead as ch
from clearhead.app.plot import name as entitle
from clearhead.app.plot import new, single
from clearhead.app.plot import save as save_picture
from clearhead.core.config.kinds import KINDS
from clearhead.inside.long_text import peak_bytes
from clearhead.variants.kinds import shortened
from clearhead.variants.linear import attend_linear, favor, orthogonal_features

ROOT = Path(__file__).resolve().parents[1]
Batch = tuple[Tensor, Tensor]  # ids [B, T], and what is wanted [B, T], -100 where nothing is
NOTHING = -100
SIZES = (0.5, 1.0)  # standard deviations of queries and keys
PAINTED = 16  # pictures drawn at once
ROW, BATCH, MOST = 256, 4, 32  # of text: characters of a row, rows of a batch, tokens that a kind sees
FIXED = 7  # seed of what is held out or drawn to judge


def model_of(attention: str, vocabulary: int, length: int, **more: Any) -> ch.Transformer:
    """A model of two layers of width 64, the same weights for every kind as far as they share them."""
    torch.manual_seed(0)
    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 256, **more}
    config = ch.ModelConfig(vocab_size=vocabulary, max_positions=length, attention=attention, **sizes)
    return ch.Transformer(config)


def loss_of(model: ch.Transformer, batch: Batch) -> Tensor:
    ids, wanted = batch
    return nnf.cross_entropy(model(ids).logits.flatten(0, 1), wanted.flatten(), ignore_index=NOTHING)


@torch.no_grad()
def judged(model: ch.Transformer, batches: list[Batch]) -> dict[str, float]:
    """Mean loss, and the share of tokens whose most probable guess is right."""
    model.eval()
    losses, hits, count = 0.0, 0, 0
    for ids, wanted in batches:
        logits, asked = model(ids).logits, wanted != NOTHING
        losses += float(nnf.cross_entropy(logits[asked], wanted[asked], reduction="sum"))
        hits, count = hits + int((logits[asked].argmax(-1) == wanted[asked]).sum()), count + int(asked.sum())
    return {"loss": round(losses / count, 4), "accuracy": round(hits / count, 4)}


def learn(
    model: ch.Transformer, drawn: Iterator[Batch], held: list[Batch], steps: int, lr: float, every: int
) -> dict[str, Any]:
    """Train, and judge every so many steps; return the last figures, their history, time and memory."""
    device = next(model.parameters()).device
    gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=gpu or None
    )
    warm = min(100, steps // 3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    history, times = [], []
    clock = time.perf_counter if gpu else time.process_time
    drawn = ((ids.to(device), wanted.to(device)) for ids, wanted in drawn)
    held = [(ids.to(device), wanted.to(device)) for ids, wanted in held]

    def pass_once() -> None:
        loss_of(model.train(), next(drawn)).backward()

    if gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        pass_once()
        memory = torch.cuda.max_memory_allocated() - before
    else:
        memory = peak_bytes(model, pass_once)
    for step in range(1, steps + 1):
        model.train()
        batch = next(drawn)
        if gpu:
            torch.cuda.synchronize()
        start = clock()
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if gpu:
            torch.cuda.synchronize()
        times.append(clock() - start)
        if step % every == 0 or step == steps:
            history.append({"step": step, **judged(model, held)})
    figures = {"loss": history[-1]["loss"], "accuracy": history[-1]["accuracy"]}
    figures |= {"ms_a_step": round(1e3 * statistics.median(times), 1), "peak_mib": round(memory / 2**20, 1)}
    print(f"{model.config.attention or 'full':<32} {figures}", flush=True)
    return {**figures, "steps": steps, "seed": 0, "history": history}


# Random features


def features(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Relative error of the matrix of attention weights with random features, median over seeds."""
    length, width, seeds, counts = 512, 16, range(25), [16 << power for power in range(6)]
    eye, rows = torch.eye(length, dtype=torch.float64)[None, None], []  # as values: the weights come out
    for size, kind, independent in itertools.product(SIZES, ("positive", "trigonometric"), (False, True)):
        generator = torch.Generator().manual_seed(0)
        q, k = size * torch.randn(2, 1, 1, length, width, dtype=torch.float64, generator=generator)
        exact, medians = torch.softmax(q @ k.mT / width**0.5, dim=-1), []
        for count in counts:
            errors = []
            for seed in seeds:
                # A sine and a cosine of each row are two features.
                drawn = orthogonal_features(count // (1 + (kind != "positive")), width, seed, independent)
                fq, fk = favor(q, drawn, kind=kind), favor(k, drawn, kind=kind)
                found, _ = attend_linear(fq.values, fk.values, eye, log_scale=fk.log_scale, causal=False)
                errors.append(float((found - exact).norm() / exact.norm()))
            medians.append(round(statistics.median(errors), 4))
        name = f"{kind}, {'independent' if independent else 'orthogonal'}"
        rows.append({"size": size, "features": name, "medians": medians})
        print(f"{size:<6}{name:<28}{medians}", flush=True)
    if options.save:
        figure = new(11, 4)
        for place, size in enumerate(SIZES):
            axes = figure.add_subplot(1, len(SIZES), place + 1)
            for row in rows:
                if row["size"] == size:
                    axes.plot(counts, row["medians"], marker="o", label=row["features"])
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.legend()
            entitle(
                axes, f"queries and keys of deviation {size}", "features", "relative error of the weights"
            )
        save_picture(figure, ROOT / "docs" / "images" / "kinds_features.png")
    return [{"tokens": length, "d_head": width, "seeds": len(seeds), "counts": counts, "rows": rows}]


# Copying


def copies(seed: int, symbols: int = 10, length: int = 15, batch: int = 16) -> Iterator[Batch]:
    """Rows `0 w 0 w` of random symbols; what is wanted is the second half."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        half = nnf.pad(torch.randint(1, symbols + 1, (batch, length), generator=generator), (1, 0))
        row = torch.cat([half, half], dim=1)
        wanted = row[:, 1:].clone()
        wanted[:, : length + 1] = NOTHING
        yield row[:, :-1], wanted


def copying(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows, steps = [], options.steps or 1200
    for kind in options.kinds:
        model = model_of(kind, 11, 32, positions="learned", n_heads=2)
        held = list(itertools.islice(copies(FIXED), 8))
        rows.append({"kind": kind, **learn(model, copies(0), held, steps, 3e-3, steps // 20)})
    if options.save:
        figure, axes = single(7, 4, "Copying 15 symbols", "steps", "loss of a copied symbol", grid="both")
        for row in rows:
            places = [point["step"] for point in row["history"]]
            axes.plot(places, [point["loss"] for point in row["history"]], label=row["kind"])
        axes.set_yscale("log")
        axes.legend()
        save_picture(figure, ROOT / "docs" / "images" / "kinds_copying.png")
    return rows


# Digits


def pictures() -> Tensor:
    """1,797 digits as 64 pixels of 17 greys: [N, 64]."""
    from sklearn.datasets import load_digits

    return torch.tensor(load_digits().images, dtype=torch.long).flatten(1)


def pixels(rows: Tensor, batch: int = 16) -> Iterator[Batch]:
    """Batches of digits: the pixels before each one, after a sign that begins, and the pixel itself."""
    generator = torch.Generator().manual_seed(0)
    while True:
        wanted = rows[torch.randint(len(rows), (batch,), generator=generator)]
        yield nnf.pad(wanted, (1, 0), value=17)[:, :-1], wanted


def digits(options: argparse.Namespace) -> list[dict[str, Any]]:
    data = pictures()
    data = data[torch.randperm(len(data), generator=torch.Generator().manual_seed(FIXED))]
    train, test = data[:1437], data[1437:]
    held = [(nnf.pad(part, (1, 0), value=17)[:, :-1], part) for part in test.split(90)]
    rows, painters = [], {}
    for kind in options.kinds:
        model = model_of(kind, 18, 64, positions="learned")
        row = learn(model, pixels(train), held, options.steps or 400, 3e-3, 50)
        rows.append({"kind": kind, "bits_a_pixel": round(row["loss"] / math.log(2), 4), **row})
        painters[kind] = ch.Model(model_of(kind, 256, 785, positions="learned", n_layers=4).eval())
    seconds = alternate({kind: partial(paint, m) for kind, m in painters.items()}, rounds=2, warm=0)
    for row in rows:
        row["pictures_a_second"] = round(PAINTED / seconds[row["kind"]], 3)
        print(row["kind"], row["bits_a_pixel"], row["pictures_a_second"], flush=True)
    return rows


def paint(m: ch.Model) -> None:
    """Draw pictures of 784 pixels, all at once, a pixel at a time."""
    m.generate([[0]] * PAINTED, 784, temperature=1.0, seed=0)


# Text


def registered(most: int) -> Iterator[str]:
    """Every kind in the registry, with sizes of at most `most` tokens, and each of its named choices."""
    for kind in KINDS.values():
        named = {name: get_args(hint) for name, hint in get_type_hints(kind).items()}
        fields = [entry.name for entry in dataclasses.fields(kind) if named.get(entry.name)]
        for values in itertools.product(*(named[name] for name in fields)):
            yield str(shortened(kind(**dict(zip(fields, values))), most))


def windows(
    text: Tensor, family: str, symbols: int, length: int, seed: int, batch: int = BATCH
) -> Iterator[Batch]:
    """Batches of a text: each next character for a decoder, a share of masked ones for an encoder."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length, (batch,), generator=generator)
        rows = text[starts[:, None] + torch.arange(length + 1)]
        if family == "decoder":
            yield rows[:, :-1], rows[:, 1:]
        else:
            masked = torch.rand(batch, length, generator=generator) < 0.15
            rows = rows[:, :-1]
            yield rows.masked_fill(masked, symbols), rows.masked_fill(~masked, NOTHING)


def text(options: argparse.Namespace) -> list[dict[str, Any]]:
    said = (options.data / "tinyshakespeare" / "input.txt").read_text()
    symbols = sorted(set(said))
    ids = torch.tensor([symbols.index(line) for line in said])
    train, test = ids.tensor_split((len(ids) * 9 // 10,))
    length, steps, rows = ROW, options.steps or 150, []

    def row(kind: str, family: str) -> dict[str, Any]:
        model = model_of(kind, len(symbols) + 1, length, positions="rope", family=family).to(options.device)
        held = list(itertools.islice(windows(test, family, len(symbols), length, FIXED), 16))
        drawn = windows(train, family, len(symbols), length, 0)
        count = sum(part.numel() for part in model.parameters())
        return {"kind": kind, "family": family, "parameters": count} | learn(
            model, drawn, held, steps, 3e-3, max(50, steps // 10)
        )

    def trained(kinds: list[str], family: str) -> list[str]:
        """Add a row for each kind; return those that the family refuses."""
        refused = []
        for kind in kinds:
            if options.limit and time.perf_counter() - began > options.limit:
                print(f"{kind} ({family}) left out: time is up", flush=True)
                continue
            try:
                rows.append(row(kind, family))
                written(options, rows)
            except ch.ConfigError as error:
                refused.append(kind)
                print(f"as an encoder, on masked characters, since {error}", flush=True)
        return refused

    began = time.perf_counter()
    refused = trained(options.kinds if options.given else list(registered(MOST)), "decoder")
    trained(["full", *refused] if refused else [], "encoder")
    return rows


def written(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the figures to `--out`."""
    if options.out is not None:
        given = {"steps": options.steps, "device": options.device}  # what the figures depend on
        named = " ".join(f"--{name} {value}" for name, value in given.items() if value)
        command = f"python benchmarks/run.py kinds_learn {options.part} {named}"
        about = {"command": command, "date": date.today().isoformat(), "device": device_name()}
        body = {**about, "torch": torch.__version__, "rows": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(body, indent=2) + "\n")


def table(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the section on text of docs/attention.md from its record; `--out` becomes the record."""
    record = ROOT / "benchmarks" / "results" / "kinds_text.json"
    if options.out is not None:
        found = json.loads(options.out.read_text())
        head = {name: found.pop(name) for name in ("command", "date")}
        record.write_text(json.dumps({**head, "results": [found]}, indent=2) + "\n")
    body = json.loads(record.read_text())
    found = body["results"][0]
    rows, steps = found["rows"], found["rows"][0]["steps"]
    gpu = not found["device"].startswith("CPU")
    clock = "milliseconds are those of the clock" if gpu else "milliseconds are CPU time"
    lead = (
        f"A character model of two layers, width 64, rows of {ROW} characters of Shakespeare, {steps:,} "
        f"steps of {BATCH} rows, the same seed and batches: `{body['command']}`, on "
        f"{found['device']}; {clock}. Kinds come from the registry, with sizes of at most {MOST} tokens, so "
        "that a new one joins by itself. Memory is the most that a training step holds at once."
    )
    lines = [
        "| attention | trained as | parameters | loss | right | ms a step | MiB of a step |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| `{row['kind']}` | {row['family']} | {row['parameters']:,} | {row['loss']:.3f} | "
            f"{100 * row['accuracy']:.1f} % | {row['ms_a_step']} | {row['peak_mib']} |"
            for row in rows
        ),
    ]
    said = []
    for family in dict.fromkeys(row["family"] for row in rows):
        order = sorted((row for row in rows if row["family"] == family), key=lambda row: row["loss"])
        full = next(row["loss"] for row in order if row["kind"] == "full")
        said.append(
            f"Of the {family}s, `{order[0]['kind']}` has the lowest loss, {order[0]['loss']:.3f}, and "
            f"`{order[-1]['kind']}` the highest, {order[-1]['loss']:.3f}."
        )
        said += [] if "full" in (order[0]["kind"], order[-1]["kind"]) else [f"`full` has {full:.3f}."]
    said.append(
        "Encoders learn masked characters, decoders the next one. Rows this short save no time: what a kind "
        "saves in long ones is in [Cost of attention kinds](#cost-of-attention-kinds-by-length)."
    )
    page = ROOT / "docs" / "attention.md"
    title, following = (
        "### Language modelling with each attention kind\n",
        "\n### Decoding one million tokens with linear attention",
    )
    before, rest = page.read_text().split(title)
    wrapped = partial(textwrap.fill, width=110, break_long_words=False, break_on_hyphens=False)
    section = "\n\n".join([wrapped(lead), "\n".join(lines), wrapped(" ".join(said))])
    page.write_text(f"{before}{title}\n{section}\n{rest[rest.index(following) :]}")
    return rows


PARTS = {"features": features, "copying": copying, "digits": digits, "text": text, "table": table}


def run_kinds_learn() -> None:
    """What the papers on kinds of attention show, small: each part takes minutes on one thread of a CPU.

        python benchmarks/run.py kinds_learn features [--save]
        python benchmarks/run.py kinds_learn copying [--steps 1200] [--kinds full linear] [--save]
        python benchmarks/run.py kinds_learn digits [--steps 400] [--kinds full linear] [--save]
        python benchmarks/run.py kinds_learn text [--steps 150] [--data ../shared/data]
            [--device cuda] [--save]
        python benchmarks/run.py kinds_learn table [--out PATH]

    features: error of FAVOR+ against the exact softmax in float64, by number of random features; orthogonal
    or independent, positive or trigonometric (Performer, figure 2).
    copying: a row of symbols, and the same once more (Linear Transformers, figure 2).
    digits: handwritten digits of scikit-learn, one pixel after the other, then the pictures per second that a
    model of this size draws at 28 x 28 pixels (Linear Transformers, table 1).
    text: a character model with every kind of attention in the registry, on the same batches of the same
    text. A kind that a decoder refuses is trained as an encoder on masked characters, and full attention
    beside it.
    table: writes that section of docs/attention.md from its record. Figures at `--out` become the record
    first.

    Seconds are CPU time; with `--device cuda`, those of the clock. `--save` writes
    benchmarks/results/kinds_PART.json, and pictures of features and copying into docs/images. `--out` writes
    the figures to a path, after each row of text. `--limit` seconds stop the series of text before the next
    kind.
    """
    parser = case_parser(run_kinds_learn)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kinds", nargs="+", help="default: full and the feature maps; of text, all")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--device", default="cpu", help="of text: cpu or cuda")
    parser.add_argument("--out", type=Path, help="a file for the figures of text, JSON")
    parser.add_argument("--limit", type=float, help="seconds after which no kind of text begins")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.given = options.kinds is not None
    options.kinds = options.kinds or ["full", "linear", "linear(favor)"]
    results = PARTS[options.part](options)
    if options.save and options.part != "table":
        about = {"device": device_name(), "torch": torch.__version__}
        save(f"kinds_{options.part}", [{**about, "rows": results}])


# diffusion --------------------------------------------------------------------------------------------------


TEXT = Path("../shared/data/tinyshakespeare/input.txt")
SHAPE = {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "d_ff": 176, "max_positions": 64}
MODELS: dict[str, dict[str, Any]] = {
    "autoregressive": {"data.task": "lm", "model.base": "llama-1b-like"},
    "blocks of 8": {"model.attention": "block-causal(8)"},
    "masked": {},
    "blocks of 1": {"model.attention": "block-causal(1)"},
}
STEPS: dict[str, tuple[int | None, ...]] = {
    "autoregressive": (None,),
    "blocks of 1": (None,),
    "blocks of 8": (1, 2, 4, 8),
    "masked": (4, 14, 56),
}
PROMPT, NEW, ROWS = "ROMEO:\n", 56, 8


def trained(name: str, text: Path, steps: int, folder: Path) -> tuple[ch.Model, float]:
    """Train one of the models; return it with the seconds it took."""
    settings = {f"model.{key}": value for key, value in SHAPE.items()} | MODELS[name]
    settings |= {"train.steps": steps, "train.validate_every": steps, "train.warmup": steps // 20}
    start = time.perf_counter()
    ch.train(text, recipe="diffusion-gpt", out=folder, settings={**settings, "model.tie_embeddings": True})
    return ch.load(folder), time.perf_counter() - start


def sampled(m: ch.Model, judge: ch.Model, words: set[str], steps: int | None) -> dict[str, object]:
    """Generate some texts; return how long one takes, and how the judge finds them."""
    options: dict[str, Any] = {"temperature": 1.0} | ({} if steps is None else {"denoising_steps": steps})
    m.generate(PROMPT, NEW, seed=ROWS, **options)
    texts, seconds, runs = [], [], []
    for seed in range(ROWS):
        start = time.perf_counter()
        generation: Any = m.generate(PROMPT, NEW, seed=seed, **options)
        seconds.append(time.perf_counter() - start)
        texts.append(generation.text)
        runs.append(generation.steps)
    total = [judge.score(PROMPT + text).total - judge.score(PROMPT).total for text in texts]
    found = [word in words for text in texts for word in re.findall(r"\b\w+\b", text)[:-1]]
    return {
        "denoising_steps": steps,
        "runs_of_the_model": statistics.mean(runs),
        "characters_per_second": round(NEW / statistics.median(seconds), 1),
        "bits_under_the_autoregressive_model": round(-sum(total) / math.log(2) / sum(map(len, texts)), 3),
        "words_of_the_text": round(sum(found) / max(1, len(found)), 3),
        "sample": texts[0],
    }


def run_diffusion() -> None:
    """Diffusion and autoregressive language models of one text: bits a byte, samples, speed by steps.

    Four models of one shape (LLaDA's, which is Llama's) learn the characters of a text for the same number of
    steps: autoregressive, block diffusion with blocks of 8 and of 1, masked diffusion. Bits are of held-out
    text: exact for the first and for blocks of 1, upper bounds for the others. Samples are judged by the
    autoregressive model: bits a character of what was generated, and the share of its words that the text
    has.

    python benchmarks/run.py diffusion [FILE] [--steps N] [--save]
    """
    parser = case_parser(run_diffusion)
    parser.add_argument("file", nargs="?", type=Path, default=TEXT)
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    whole = given.file.read_text(encoding="utf-8")
    cut, words = len(whole) * 9 // 10, set(re.findall(r"\b\w+\b", whole))
    keep, judge = KeptParts(given.save), None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.txt").write_text(whole[:cut], encoding="utf-8")
        (folder / "test.txt").write_text(whole[cut : cut + 20_000], encoding="utf-8")
        for model in MODELS:
            m, seconds = trained(model, folder / "train.txt", given.steps, folder / model)
            judge = judge or m
            result = ch.evaluate(m, folder / "test.txt")
            bits, interval = result.metrics["bits_per_byte"], result.intervals["bits_per_byte"]
            part: dict[str, object] = {
                "title": model,
                "training_steps": given.steps,
                "parameters": ch.cost(m.config).parameters.total,
                "training_seconds": round(seconds, 1),
                "bits_per_byte": round(bits, 4),
                "interval": [round(end, 4) for end in interval],
                "bound": any("upper bounds" in note for note in result.notes),
                "samples": [sampled(m, judge, words, steps) for steps in STEPS[model]],
            }
            keep("cpu_diffusion", part)
