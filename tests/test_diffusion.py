"""Masked and block diffusion: the bound by loops and enumeration, sampling by loops, refusals, LLaDA."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import clearhead as ch
from clearhead.core.cache import Cache
from clearhead.errors import ClearheadError
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.tasks.table import TASKS
from clearhead.run.generate.diffusion import denoise, schedule
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Prompts
from clearhead.variants.kinds import denoises

MASK = 6


def tiny(attention: str = "full", **changes: Any) -> ch.Transformer:
    """A diffusion model in float64 with weights far from their beginning."""
    torch.manual_seed(0)
    config = ch.ModelConfig(
        family="encoder", head="lm", vocab_size=MASK + 1, d_model=16, n_layers=2, n_heads=2, positions="rope",
        norm="rmsnorm", bias=False, activation="silu", gated=True, max_positions=32, attention=attention,
        init_std=0.4, **changes,
    )  # fmt: skip
    return ch.Transformer(config).double().eval()


def batch_of(text: Tensor, noise: Tensor, mask: Tensor | None = None) -> Batch:
    """The batch of a text [B, T] and its noise [B, 2, T]."""
    targets = text if mask is None else text.where(mask, IGNORE)
    return Batch(torch.full_like(text, MASK), targets, mask, noise=noise)


def nll(model: ch.Transformer, ids: Tensor, wanted: Tensor, where: list[int]) -> float:
    """Minus the log-probability of the tokens at some places of one row, each by itself."""
    logprobs = model(ids[None]).logits[0].log_softmax(-1)
    return -float(logprobs[where, wanted[where]].detach().sum())


@pytest.mark.parametrize("size", [None, 1, 3, 4])
def test_loss_is_that_of_a_loop_over_blocks_and_masks(size: int | None) -> None:
    """A block masks l of its L tokens, and adds L / l of their cross-entropy, given clean blocks before."""
    model = tiny() if size is None else tiny(f"block-causal({size})")
    torch.manual_seed(1)
    text, noise = torch.randint(MASK, (3, 10)), torch.rand(3, 2, 10, dtype=torch.double)
    real = torch.arange(10) < torch.tensor([10, 10, 7])[:, None]
    batch, expected = batch_of(text, noise, real), []
    for row, length in zip(range(3), (10, 10, 7)):
        total = 0.0
        for start in range(0, length, size or length):
            places = list(range(start, min(start + (size or length), length)))
            count = min(len(places), int(noise[row, 1, start] * len(places)) + 1)
            hidden = sorted(places, key=lambda place: float(noise[row, 0, place]))[:count]
            ids = text[row, : places[-1] + 1].clone()
            ids[hidden] = MASK
            total += len(places) / count * nll(model, ids, text[row], hidden)
        expected.append(total)
    task = TASKS["diffusion"]
    with torch.no_grad():
        rows = task.row_losses(task.outputs_of(model, batch), batch)
    torch.testing.assert_close(rows, torch.tensor(expected, dtype=torch.double), rtol=1e-11, atol=0)
    total, count = task.batch_loss(model, batch)
    assert count == 27 and float(total) == pytest.approx(sum(expected), rel=1e-11)


def test_expected_loss_is_the_bound_and_above_the_exact_likelihood() -> None:
    """By all masks of a text of 4 tokens: our mean, the integral over t, and -log p in any order."""
    model, L = tiny(), 4
    text = torch.tensor([1, 4, 0, 2])
    orders, total = list(itertools.permutations(range(L))), 0.0
    with torch.no_grad():
        by_mask = {}
        for hidden in itertools.chain.from_iterable(itertools.combinations(range(L), n) for n in range(1, 5)):
            ids = text.clone()
            ids[list(hidden)] = MASK
            by_mask[hidden] = nll(model, ids, text, list(hidden))
        # E over t of t^l (1 - t)^(L - l) / t, for each mask: the Beta function B(l, L - l + 1).
        beta = {n: math.gamma(n) * math.gamma(L - n + 1) / math.gamma(L + 1) for n in range(1, L + 1)}
        bound = sum(beta[len(hidden)] * value for hidden, value in by_mask.items())
        # Our loss, over every order and every number of masks.
        task = TASKS["diffusion"]
        for order, count in itertools.product(orders, range(L)):
            rank = torch.tensor([order.index(place) / L for place in range(L)], dtype=torch.double)
            share = torch.full((L,), (count + 0.5) / L, dtype=torch.double)
            batch = batch_of(text[None], torch.stack([rank, share])[None])
            total += float(task.outputs_of(model, batch).sum())
        assert total / len(orders) / L == pytest.approx(bound, rel=1e-11)
        # The exact likelihood of unmasking one token after the other in a random order, mask logits included.
        exact = 0.0
        for order in orders:
            ids, logp = torch.full((L,), MASK), 0.0
            for place in order:
                logp -= nll(model, ids, text, [place])
                ids[place] = text[place]
            exact += math.exp(logp) / len(orders)
    assert -math.log(exact) < bound - 1e-3  # the bound is not tight: orders differ


def test_blocks_of_one_give_the_autoregressive_likelihood() -> None:
    """Whatever the noise, the loss is minus the log-probability of each token given those before it."""
    model, text = tiny("block-causal(1)"), torch.tensor([3, 1, 4, 1, 5, 2])
    before = torch.tensor([MASK])
    wanted = [nll(model, torch.cat([text[:n], before]), text, [n]) for n in range(len(text))]
    task = TASKS["diffusion"]
    for seed in range(3):
        noise = torch.rand(1, 2, 6, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            each = task.outputs_of(model, batch_of(text[None], noise))[0]
        torch.testing.assert_close(each, torch.tensor(wanted, dtype=torch.double), rtol=1e-11, atol=0)


def test_schedules_unmask_every_token_once() -> None:
    """Linear shares are even; cosine ones begin small; steps without a token are left out."""
    assert schedule(8, 4, "linear") == [2, 2, 2, 2]
    assert schedule(8, 4, "cosine") == [1, 1, 3, 3]
    assert schedule(3, 64, "linear") == [1, 1, 1]
    for masked, steps, name in itertools.product((1, 7, 64), (1, 5, 64, 100), ("linear", "cosine")):
        counts = schedule(masked, steps, name)
        assert sum(counts) == masked and min(counts) > 0 and len(counts) <= min(masked, steps)


def loop(model: ch.Transformer, prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    """The autoregressive loop: the best token given all before it, and its log-probability."""
    ids, logprobs = list(prompt), []
    for _ in range(new):
        logits = model(torch.tensor([[*ids, MASK]])).logits[0, -1]
        ids.append(int(logits[:MASK].argmax()))
        logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
    return ids[len(prompt) :], logprobs


def test_blocks_of_one_are_the_autoregressive_loop() -> None:
    """Greedy: the same tokens and log-probabilities, with a cache and without."""
    model, prompts = tiny("block-causal(1)"), [[1, 2, 3], [5], [0, 4, 4, 2, 1]]
    for use_cache in (True, False):
        rows = denoise(
            model, Request(max_new_tokens=12, logprobs=True), Prompts(prompts), MASK, use_cache=use_cache
        )
        for prompt, row in zip(prompts, rows):
            with torch.no_grad():
                ids, logprobs = loop(model, prompt, 12)
            assert row.ids == ids and row.steps == 12
            torch.testing.assert_close(row.logprobs, logprobs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("attention", ["full", "block-causal(4)"])
@pytest.mark.parametrize("unmasking", ["confidence", "random"])
def test_sampling_follows_the_plain_algorithm(attention: str, unmasking: str) -> None:
    """By a loop without a cache: draw all masks, keep the best of them or any, mask the others again."""
    model = tiny(attention)
    request = Request(
        max_new_tokens=9, temperature=0.7, seed=3, denoising_steps=3, unmasking=unmasking, logprobs=True
    )  # fmt: skip
    prompt = [1, 2, 3, 4, 5, 0]
    cached, plain = (
        denoise(model, request, Prompts([prompt]), MASK, use_cache=yes)[0] for yes in (True, False)
    )
    assert cached.ids == plain.ids and MASK not in cached.ids and len(cached.ids) == 9
    torch.testing.assert_close(cached.logprobs, plain.logprobs, rtol=0, atol=2e-6)
    generator = torch.Generator().manual_seed(3)

    def roll() -> float:
        return float(torch.rand((), generator=generator, dtype=torch.float64))

    text, blocks = [*prompt, *[MASK] * 9], [(6, 15)] if attention == "full" else [(6, 8), (8, 12), (12, 15)]
    for begin, end in blocks:
        counts = schedule(end - begin, 3, "linear")
        for count in counts:
            seen = text if attention == "full" else text[:end]
            with torch.no_grad():
                logits = model(torch.tensor([seen])).logits[0, :, :MASK]
            places, drawn = [at for at in range(begin, end) if text[at] == MASK], {}
            for at in places:
                running, goal = (logits[at] / 0.7).softmax(-1).cumsum(-1), roll()
                drawn[at] = int((running < goal).sum())
            sure = {at: float(logits[at].softmax(-1)[drawn[at]]) for at in places}
            rank = sure if unmasking == "confidence" else {at: roll() for at in places}
            for at in sorted(places, key=lambda at: -rank[at])[:count]:
                text[at] = drawn[at]
    assert cached.ids == text[6:]


def test_cache_holds_whole_blocks_alone() -> None:
    """A pass over the last block with a cache equals one over all; in the middle of a block it is refused."""
    model, ids = tiny("block-causal(4)"), torch.randint(MASK, (2, 12))
    cache, whole = Cache(), model(ids).logits
    parts = [model(part, cache=cache).logits for part in ids.split(4, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)
    cache.crop(6)
    with pytest.raises(ClearheadError, match="holds 6 tokens and blocks have 4"):
        model(ids[:, :2], cache=cache)
    with pytest.raises(ClearheadError, match="give every layer this kind"):
        ch.ModelConfig(family="encoder", vocab_size=9, n_layers=2, attention=("block-causal(4)", "full"))


REFUSED = {
    "num_beams": 2, "lookup": 3, "regex": "a+", "repetition_penalty": 1.2, "overflow": "slide", "reuse": True,
    "early_exit": 0.9, "alternatives": 3, "cache": "int8", "suffix": "x", "min_new_tokens": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_options_of_autoregressive_models_are_refused_by_name(name: str) -> None:
    """A diffusion model has no use for them."""
    m = ch.Model(tiny(), special={"mask": MASK})
    with pytest.raises(ClearheadError, match=f"{name} is for models that write from left to right"):
        m.generate([1, 2], 4, **{name: REFUSED[name]})


def test_options_of_diffusion_are_refused_by_name() -> None:
    """By models that write token by token, and where they do not fit the model."""
    decoder = ch.Model(ch.Transformer(ch.ModelConfig(vocab_size=7, d_model=16, n_layers=1, n_heads=2)))
    options = {"denoising_steps": 4, "unmasking": "random", "mask_schedule": "cosine", "block_length": 4}
    for name, value in options.items():
        with pytest.raises(ClearheadError, match=f"{name} is for diffusion models"):
            decoder.generate([1, 2], 4, **{name: value})
    with pytest.raises(ClearheadError, match="built for blocks of 4"):
        ch.Model(tiny("block-causal(4)"), special={"mask": MASK}).generate([1], 4, block_length=2)
    with pytest.raises(ClearheadError, match="names no mask token"):
        ch.Model(tiny()).generate([1], 4)


LLADA = {
    **{"model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 24, "n_layers": 3, "n_heads": 4},
    **{
        "n_kv_heads": 2,
        "mlp_hidden_size": 40,
        "activation_type": "silu",
        "block_type": "llama",
        "rope": True,
    },
    **{"layer_norm_type": "rms", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_sequence_length": 64},
    **{
        "vocab_size": 50,
        "embedding_size": 50,
        "mask_token_id": 48,
        "eos_token_id": 49,
        "weight_tying": False,
    },
    **{"include_bias": False, "include_qkv_bias": False, "attention_dropout": 0.0, "residual_dropout": 0.0},
}


def llada_logits(w: dict[str, Tensor], ids: list[int], heads: int, groups: int, theta: float) -> Tensor:
    """LLaDA's formula, written out over heads and places, in float64."""
    T = len(ids)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def rotate(x: Tensor, at: int) -> Tensor:
        half = len(x) // 2
        angle = torch.tensor([at * theta ** (-2 * i / len(x)) for i in range(half)], dtype=torch.double)
        a, b = x[:half], x[half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])

    x = w["model.transformer.wte.weight"][ids]
    for layer in range(3):
        p = {name.split(".")[4]: v for name, v in w.items() if f".blocks.{layer}." in name}
        h = norm(x, p["attn_norm"])
        E, z = h.shape[1] // heads, torch.zeros(T, h.shape[1], dtype=torch.double)
        for head in range(heads):
            own, shared = slice(head * E, head * E + E), head * groups // heads
            k, v = ((h @ p[name].T)[:, shared * E : shared * E + E] for name in ("k_proj", "v_proj"))
            keys = torch.stack([rotate(k[at], at) for at in range(T)])
            for at in range(T):
                scores = keys @ rotate((h @ p["q_proj"].T)[at, own], at) / E**0.5
                z[at, own] = scores.softmax(-1) @ v
        x = x + z @ p["attn_out"].T
        h = norm(x, p["ff_norm"])
        gate = h @ p["ff_proj"].T
        x = x + (gate * gate.sigmoid() * (h @ p["up_proj"].T)) @ p["ff_out"].T
    return norm(x, w["model.transformer.ln_f.weight"]) @ w["model.transformer.ff_out.weight"].T


def test_llada_opens_generates_and_is_written_as_it_was(tmp_path: Path) -> None:
    """Files by its names give the logits of its formula; what is written is what was read."""
    torch.manual_seed(0)
    shapes = {
        "model.transformer.wte.weight": (50, 24),
        "model.transformer.ln_f.weight": (24,),
        "model.transformer.ff_out.weight": (50, 24),
    }
    parts = {
        **{"q_proj": (24, 24), "k_proj": (12, 24), "v_proj": (12, 24), "attn_out": (24, 24)},
        **{
            "attn_norm": (24,),
            "ff_norm": (24,),
            "ff_proj": (40, 24),
            "up_proj": (40, 24),
            "ff_out": (24, 40),
        },
    }
    for layer, (name, shape) in itertools.product(range(3), parts.items()):
        shapes[f"model.transformer.blocks.{layer}.{name}.weight"] = shape
    weights = {name: torch.randn(shape, dtype=torch.double) * 0.4 for name, shape in shapes.items()}
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    save_file(weights, first / "model.safetensors")
    (first / "config.json").write_text(json.dumps(LLADA))
    m = ch.load(first)
    assert denoises(m.config) and m.special["mask"] == 48 and m.stops == (49,)
    ids = [3, 48, 7, 1, 48, 48, 0, 9, 30]
    ours = m.model.double()(torch.tensor([ids])).logits[0]
    expected = llada_logits(weights, ids, 4, 2, 500000.0)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-7)  # angles are those of float32
    out: Any = m.generate([3, 7, 1], 8, denoising_steps=4, block_length=4, mask_schedule="cosine")
    assert out.steps <= 8 and 48 not in out.ids
    m.save(second)
    written = load_file(second / "model.safetensors")
    assert written.keys() == weights.keys() and all(torch.equal(written[n], w) for n, w in weights.items())
    assert LLADA.items() <= json.loads((second / "config.json").read_text()).items()
    # A model that is built here and has its shape is written as one, with the mask's id.
    built = ch.Model(ch.Transformer(m.config.replace(n_layers=1)), special={"mask": 48, "eos": 49})
    built.save(tmp_path / "built")
    config = json.loads((tmp_path / "built" / "config.json").read_text())
    assert config["model_type"] == "llada" and (config["mask_token_id"], config["mlp_hidden_size"]) == (
        48,
        40,
    )
    again = ch.load(tmp_path / "built")
    assert again.config == built.config and again.special["mask"] == 48
    for key, value in {"alibi": True, "embedding_size": 64, "block_type": "sequential"}.items():
        (first / "config.json").write_text(json.dumps({**LLADA, key: value}))
        with pytest.raises(ClearheadError, match=key):
            ch.load(first)
