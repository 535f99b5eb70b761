"""Conditional depth: mixture of depths at equal training FLOPs, and early exit against the whole model.

    python benchmarks/depth.py --text input.txt [--weights stories260K/hf] [--steps 600] [--save]

Routed: character models of the text, all with the FLOPs of `--steps` steps of the plain one, as `ch.cost`
counts them; the loss of the last tenth of the text. Left: every token of a text is given, one at a time, and
the answers of a model that leaves early are held against those of all its layers. The plain character model
is tried as it is, and again after a quarter of the steps more with a loss at every layer. Times are processor
seconds. Everything is seeded with 0.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as nnf
from torch import Tensor

import clearhead as ch
from clearhead.learn.batches.batch import Batch
from clearhead.learn.losses import batch_loss
from clearhead.run.generate.decode import prefill
from clearhead.run.generate.exits import ExitStep, stop_at
from clearhead.run.generate.request import Request
from clearhead.run.kernels.prepare import prepared
from clearhead.variants.routing import Router
from common import device_name, save

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="a text to learn, such as tinyshakespeare")
    parser.add_argument("--weights", type=Path, help="the directory of a trained decoder")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--picture", type=Path, help="where to draw early exit")
    parser.add_argument("--save", action="store_true")
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


if __name__ == "__main__":
    main()
