"""Conditional depth, scaling laws, and curves of tuning."""

from __future__ import annotations

import gzip
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from benchmarks.common import case_parser, device_name, processor_name, save
from torch import Tensor

import clearhead as ch
from clearhead.app import plot
from clearhead.app.plot import save as save_picture
from clearhead.labs.lab.scaling import (
    LARGER,
    RUNGS,
    draw_budgets,
    draw_law,
    embedded,
    ladder,
    predict,
    train_ladder,
)
from clearhead.learn.batches.batch import Batch
from clearhead.learn.losses import batch_loss
from clearhead.run.generate.decode import prefill
from clearhead.run.generate.exits import ExitStep, stop_at
from clearhead.run.generate.request import Request
from clearhead.run.kernels.prepare import prepared
from clearhead.variants.routing import Router

# depth ----------------------------------------------------------------------------------------------------


LENGTH, ROWS, WIDTH, RATE, SHARE = 64, 8, 64, 3e-3, 0.125
CASES = {
    "plain, 6 layers": {"n_layers": 6},
    "plain, 3 layers": {"n_layers": 3},
    "routed, 6 layers": {"n_layers": 6, "depth_capacity": SHARE},
    "routed, 10 layers": {"n_layers": 10, "depth_capacity": SHARE},
}
THRESHOLDS = (1.0, 0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
TEXTS, TOKENS, READ = 3, 100, 8  # texts of so many tokens, of which the first are the prompt


def learn(model: ch.Transformer, ids: Tensor, steps: int, every_layer: bool = False) -> float:
    """Train on rows drawn from `ids`; return the median processor seconds of a step.

    With `every_layer` the loss is the mean over the lens of each layer, deeper layers weighing more (CALM).
    """
    generator, seconds, layers = torch.Generator().manual_seed(0), [], range(1, model.config.n_layers + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        start = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        places = torch.randint(len(ids) - LENGTH, (ROWS,), generator=generator).tolist()
        rows = torch.stack([ids[place : place + LENGTH + 1] for place in places])
        if every_layer:
            with ch.record(model, "blocks.*.resid_post", detach=False) as seen:
                model(rows[:, :-1], logits="none")
            lens = [stop_at(model, state).transpose(1, 2) for state in seen.values()]
            losses = [layer * nnf.cross_entropy(said, rows[:, 1:]) for layer, said in zip(layers, lens)]
            loss, count = torch.stack(losses).sum(), sum(layers)
        else:
            loss, count = batch_loss(model.train(), Batch(rows[:, :-1], rows[:, 1:]))
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    model.eval()
    return sorted(seconds)[len(seconds) // 2]


@torch.no_grad()
def validate(model: ch.Transformer, ids: Tensor, by_rank: bool = False) -> tuple[float, float]:
    """Return the loss per character, and the share of tokens that went through the routed layers."""
    routers = [part for part in model.modules() if isinstance(part, Router)]
    for router in routers:
        router.training = by_rank
    rows = ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)[:512]
    loss, count = batch_loss(model, Batch(rows[:, :-1], rows[:, 1:]))
    with ch.record(model, *(["*.passed"] if routers else ["logits"])) as seen:
        model(rows[:64, :-1])
    passed = [float(x.float().mean()) for name, x in seen.items() if name.endswith("passed")]
    for router in routers:
        router.training = False
    return float(loss) / count, sum(passed) / len(passed) if passed else 1.0


def routed(text: str, steps: int) -> tuple[list[dict[str, object]], ch.Transformer, Tensor, Tensor]:
    """Train each case; return its figures, the plain model, and the ids trained on and held out."""
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(letter) for letter in text])
    trained, held_out = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
    rows: list[dict[str, object]] = []
    models, budget = [], 0
    for name, choices in CASES.items():
        config = ch.ModelConfig(
            vocab_size=len(letters), d_model=WIDTH, n_heads=4, positions="rope", max_positions=256, **choices
        )
        flops = ch.cost(config, LENGTH, ROWS).flops.training
        budget = budget or flops * steps
        torch.manual_seed(0)
        model = ch.Transformer(config)
        seconds = learn(model, trained, round(budget / flops))
        loss, share = validate(model, held_out)
        ahead, _ = validate(model, held_out, by_rank=True)
        models.append(model)
        rows.append(
            {
                "model": name,
                "parameters": sum(weight.numel() for weight in model.parameters()),
                "flops_per_step": flops,
                "steps": round(budget / flops),
                "seconds_per_step": round(seconds, 4),
                "loss": round(loss, 4),
                "loss_by_rank": round(ahead, 4),
                "share_by_score": round(share, 3),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows, models[0], trained, held_out


@torch.inference_mode()
def leave(name: str, model: ch.Transformer, texts: Tensor) -> list[dict[str, object]]:
    """Give texts [B, T] to the model token by token, once for each threshold, and once whole."""
    runner, rows = prepared(model), []
    whole: list[Tensor] = []
    seconds_whole = 0.0
    for threshold in (None, *THRESHOLDS):
        said, used, seconds = [], [], 0.0
        for text in texts:
            cache = ch.Cache(reserve=len(text))
            step = None if threshold is None else ExitStep(runner, Request(early_exit=threshold))
            prefill(runner, [text[:READ].tolist()], cache)
            for token in text[READ:-1]:
                start = time.process_time()
                if step is None:
                    logits = runner(token.view(1, 1), cache=cache, logits="last").logits[:, -1]
                else:
                    logits = step(token.view(1), cache)
                seconds += time.process_time() - start
                said.append(logits[0])
                used.append(model.config.n_layers if step is None else int(step.used))
        logits, wanted = torch.stack(said), torch.cat([text[READ + 1 :] for text in texts])
        if threshold is None:
            whole, seconds_whole = said, seconds
        loss = float(nnf.cross_entropy(logits, wanted))
        rows.append(
            {
                "model": name,
                "threshold": threshold,
                "layers": round(sum(used) / len(used), 2),
                "agreement": round(
                    float((logits.argmax(-1) == torch.stack(whole).argmax(-1)).float().mean()), 4
                ),
                "perplexity": round(math.exp(loss), 3),
                "milliseconds": round(1000 * seconds / len(used), 3),
                "time": round(seconds / seconds_whole, 3),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


@torch.inference_mode()
def saved_time() -> list[dict[str, object]]:
    """Time a token of 12 layers of width 512 and random weights that leaves after some, asked once."""
    torch.manual_seed(0)
    config = ch.ModelConfig(vocab_size=65, d_model=512, n_layers=12, n_heads=8, positions="rope")
    runner, rows = prepared(ch.Transformer(config).eval()), []
    for layers in (None, 9, 6, 3):
        cache, seconds = ch.Cache(reserve=64), []
        step = None if layers is None else ExitStep(runner, Request(early_exit=1e-9, exit_from=layers))
        prefill(runner, [[1] * READ], cache)
        for token in torch.ones(40, 1, dtype=torch.long):
            start = time.process_time()
            runner(token[None], cache=cache, logits="last") if step is None else step(token, cache)
            seconds.append(time.process_time() - start)
        took = sorted(seconds)[len(seconds) // 4]
        rows.append({"layers": layers or 12, "milliseconds": round(1000 * took, 2)})
        rows[-1]["time"] = round(took * 1000 / float(rows[0]["milliseconds"]), 3)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def picture(rows: list[dict[str, object]], path: Path) -> None:
    """Draw agreement with the whole model against layers used and against time."""
    from matplotlib import pyplot

    figure, sides = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for side, across in zip(sides, ("layers", "time")):
        for name in dict.fromkeys(row["model"] for row in rows):
            own = [row for row in rows if row["model"] == name and row["threshold"] is not None]
            side.plot([row[across] for row in own], [row["agreement"] for row in own], "o-", label=name)
        side.set_xlabel({"layers": "layers used, mean", "time": "time of a token, all layers = 1"}[across])
        side.grid(alpha=0.3)
    sides[0].set_ylabel("tokens as from all layers")
    sides[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run_depth() -> None:
    """Conditional depth: mixture of depths at equal training FLOPs, and early exit against the whole model.

        python benchmarks/run.py depth --text input.txt [--weights stories260K/hf] [--steps 600] [--save]

    Routed: character models of the text, all with the FLOPs of `--steps` steps of the plain one, as
    `ch.cost` counts them; the loss of the last tenth of the text. Left: every token of a text is given, one
    at a time, and the answers of a model that leaves early are held against those of all its layers. The
    plain character model is tried as it is, and again after a quarter of the steps more with a loss at
    every layer. Times are processor seconds. Everything is seeded with 0.
    """
    parser = case_parser(run_depth)
    parser.add_argument("--text", type=Path, required=True, help="a text to learn, such as tinyshakespeare")
    parser.add_argument("--weights", type=Path, help="the directory of a trained decoder")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--picture", type=Path, help="where to draw early exit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, plain, trained, held_out = routed(options.text.read_text(), options.steps)
    texts = held_out[: TEXTS * (TOKENS + READ)].view(TEXTS, -1)
    left = leave("characters", plain, texts)
    learn(plain, trained, options.steps // 4, every_layer=True)
    left += leave("characters, every layer taught", plain, texts)
    if options.weights is not None:
        m = ch.load(options.weights)
        made = [m.generate([1], TOKENS + READ, temperature=1.0, seed=seed).ids for seed in range(TEXTS)]
        size = min(map(len, made))
        left += leave(options.weights.parent.name, m.model, torch.tensor([ids[:size] for ids in made]))
    timed = saved_time()
    if options.picture is not None:
        picture(left, options.picture)
    if options.save:
        save("depth", [{"device": device_name(), "routed": rows, "left": left, "time": timed}])


# scaling --------------------------------------------------------------------------------------------------


IMAGES = Path(__file__).parents[1] / "docs" / "images"
LARGE = ladder(
    sizes=((2, 48), (2, 64), (3, 80), (3, 112), (4, 144)),
    tokens=(1_850_000, 3_700_000, 7_400_000, 14_800_000),
    beyond=(6, 240),
    rows=32,
)


def read(path: Path) -> torch.Tensor:
    """Return the bytes of a file."""
    return torch.from_numpy(np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8).copy())


def run_scaling() -> None:
    """Train a ladder of language models on books, predict a model four times as large, then train it.

        python benchmarks/run.py scaling DATA [--seeds 1] [--device cuda] [--workers 4] [--save]
        python benchmarks/run.py scaling --small [--workers 2] [--save]

    DATA is a folder with train.txt.gz and test.txt.gz. The text is read as bytes, each of them once. With
    --small the text is the corpus that comes with clearhead and the ladder one for two cores. The
    prediction is printed before the larger model is trained. With --save the numbers go to
    results/scaling_NAME.json and the pictures to docs/images/.
    """
    parser = case_parser(run_scaling)
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=4, help="models trained at a time")
    given = parser.parse_args()
    if not given.small and given.data is None:
        parser.error("name the folder of the text, or --small")
    device = "cpu" if given.small else given.device
    rungs, beyond = (RUNGS, LARGER) if given.small else LARGE
    if given.small:
        text, unseen = embedded()
    else:
        text, unseen = read(given.data / "train.txt.gz"), read(given.data / "test.txt.gz")
    start, points = time.perf_counter(), []
    for rung, point in train_ladder(rungs, text, unseen, 256, given.seeds, device, given.workers):
        points.append(point)
        took = time.perf_counter() - start
        shape = f"{rung.n_layers} x {rung.d_model}"
        print(
            f"{took:6.0f} s  {shape:>8}  N {point.weights:>9,}  D {point.tokens:>10,}  loss {point.loss:.4f}",
            flush=True,
        )
    weights, tokens = beyond.weights(256), points[-1].tokens
    before = predict(points, weights, tokens)
    print(before.law, before.by_size, f"the law of both: {before.law.loss(weights, tokens):.4f}", sep="\n")
    print(
        f"predicted at N {weights:,}, D {tokens:,}: {before.loss:.4f} ({before.low:.4f} to {before.high:.4f})"
    )
    ((_, trained),) = train_ladder([beyond], text, unseen, 256, given.seeds, device)
    error = trained.loss / before.loss - 1
    took = time.perf_counter() - start
    print(f"trained: {trained.loss:.4f}, {error:+.2%} of the prediction; {took:.0f} s in all")
    if given.save:
        name = "small" if given.small else "books"
        found = {
            "device": processor_name() if device == "cpu" else device_name(),
            "torch": torch.__version__,
            "seeds": given.seeds,
            "seconds": round(took),
            "points": [asdict(one) for one in points],
            "law": asdict(before.law),
            "by_size": None if before.by_size is None else asdict(before.by_size),
            "by_law": before.law.loss(weights, tokens),
            "predicted": {"loss": before.loss, "low": before.low, "high": before.high},
            "trained": asdict(trained),
            "error": error,
            "times_beyond": weights / max(one.weights for one in points),
        }
        save(f"scaling_{name}", [found])
        save_picture(draw_law(points, before, trained), IMAGES / f"scaling_{name}.png")
        save_picture(draw_budgets(points, before.law), IMAGES / f"scaling_{name}_budgets.png")


# tuning_curves --------------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[1]


def record(part: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"tune_{part}.json").read_text())["results"][0]


def points(curve: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Steps, and what held-out data gave there."""
    seen = [event for event in curve if event["event"] == "validated"]
    return [event["step"] for event in seen], [event["metrics"][metric] for event in seen]


def run_tuning_curves() -> None:
    """Draw the curves of instruction, preference and embedding tuning from their records.

        python benchmarks/run.py tuning_curves

    Reads benchmarks/results/tune_sft.json, tune_dpo.json and tune_embed.json (`sft.py`, `dpo.py`,
    `embed.py`) and writes docs/images/tuning.png: what held-out data say, by step.
    """
    sft, dpo, sts = record("sft"), record("dpo"), record("embed")["results"]["sts"]
    figure = plot.new(11, 3.2)
    left, middle, right = figure.subplots(1, 3)
    steps, losses = points(sft["curve"], "loss")
    left.plot([0, *steps], [sft["before"]["loss"], *losses], "o-", color=plot.BLUE)
    plot.name(left, "Instruction tuning, Dolly", "steps", "loss of held-out answers")
    middle.plot(*points(dpo["curve"], "accuracy"), "o-", color=plot.BLUE, label="DPO")
    middle.axhline(dpo["longer"]["pandalm"], color=plot.RED, linestyle="--", label="the longer answer")
    middle.axhline(0.5, color="gray", linestyle=":", label="chance")
    middle.legend(fontsize=8)
    plot.name(middle, "Preferences, PandaLM", "steps", "share of held-out pairs")
    right.plot(*points(sts["curve"], "spearman"), "o-", color=plot.BLUE)
    plot.name(right, "Embeddings, STS Benchmark", "steps", "Spearman on the dev part")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    plot.save(figure, ROOT / "docs" / "images" / "tuning.png")
