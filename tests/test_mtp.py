"""Multi-token prediction: its loss against a float64 loop written from the paper, rows, training, cost."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead.core.config import ModelConfig
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.losses import Terms, batch_loss
from clearhead.run.generate.request import Request
from clearhead.run.generate.speculate import MTPDrafter
from clearhead.run.kernels.lora import add_lora
from clearhead.variants.contexts import attending
from tests.harness import build, config, some_ids, worst

LLAMA = {"positions": "rope", "norm": "rmsnorm", "gated": True, "activation": "silu", "bias": False}
DEPTHS = {**LLAMA, "n_mtp_layers": 2}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of one vector."""
    return x / torch.sqrt((x * x).mean() + 1e-5) * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """One head's query or key, rotated to its position: pairs are (i, i + E/2)."""
    half = len(x) // 2
    angles = position * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[:half], x[half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


def block(xs: list[Tensor], w: dict[str, Tensor], name: str, heads: int) -> list[Tensor]:
    """One pre-norm block over the states of a row, one token and one head at a time."""
    normed = [rms(x, w[f"{name}.attention_residual.before.weight"]) for x in xs]
    q, k, v = ([(w[f"{name}.attention.{part}.weight"] @ x).view(heads, -1) for x in normed] for part in "qkv")
    answers = []
    for t, x in enumerate(xs):
        z = []
        for h in range(heads):
            scores = torch.stack([rotated(q[t][h], t) @ rotated(k[s][h], s) for s in range(t + 1)])
            pattern = (scores / math.sqrt(len(q[t][h]))).softmax(0)
            z.append(sum(pattern[s] * v[s][h] for s in range(t + 1)))
        x = x + w[f"{name}.attention.out.weight"] @ torch.cat(z)
        y = rms(x, w[f"{name}.feedforward_residual.before.weight"])
        gate, up, down = (w[f"{name}.feedforward.{part}.weight"] for part in ("gate", "up", "down"))
        answers.append(x + down @ (torch.nn.functional.silu(gate @ y) * (up @ y)))
    return answers


def losses_of(row: list[int], w: dict[str, Tensor], layers: int, depths: int, heads: int) -> list[Tensor]:
    """The summed cross-entropy at each depth: the next token, the one after it, ... (equations 21 to 24)."""
    table = w["decoder.embedding.front.tokens.weight"]
    xs = [table[token] for token in row[:-1]]
    for layer in range(layers):
        xs = block(xs, w, f"decoder.blocks.{layer}", heads)
    states, found = [rms(x, w["decoder.norm.weight"]) for x in xs], []
    for depth in range(depths + 1):
        if depth:
            front = f"mtp.{depth - 1}.embedding.front"
            xs = [
                w[f"{front}.project.weight"]
                @ torch.cat(
                    [
                        rms(table[row[i + depth]], w[f"{front}.token_norm.weight"]),
                        rms(states[i], w[f"{front}.hidden_norm.weight"]),
                    ]
                )
                for i in range(len(row) - 1 - depth)
            ]
            xs = block(xs, w, f"mtp.{depth - 1}.blocks.0", heads)
            states = [rms(x, w[f"mtp.{depth - 1}.norm.weight"]) for x in xs]
        found.append(sum(-(table @ x).log_softmax(0)[row[i + 1 + depth]] for i, x in enumerate(states)))
    return found


@pytest.mark.ledger("W2")
def test_the_loss_is_that_of_the_paper():
    """Value and gradients of every parameter, in float64, by a loop that shares no code."""
    model = build(**DEPTHS).double().train()
    rows = some_ids(2, 7, seed=4)
    batch = Batch(ids=rows[:, :-1], targets=rows[:, 1:].clone())
    found, count = batch_loss(model, batch, terms=Terms(mtp_weight=0.3))
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    each = [losses_of(row.tolist(), weights, 2, 2, 4) for row in rows]
    main, *later = (sum(depth) for depth in zip(*each))
    expected = main + 0.3 / 2 * sum(later)
    assert count == 12 and abs(found - expected) / expected < 1e-8  # sines are float32
    ours = torch.autograd.grad(found, list(model.parameters()))
    theirs = torch.autograd.grad(expected, list(weights.values()))
    assert max(worst(a, b) for a, b in zip(ours, theirs)) < 1e-6
    plain = batch_loss(model, batch)[0]
    assert torch.equal(
        plain, batch_loss(model.eval(), batch, terms=Terms(mtp_weight=0.3))[0]
    )  # validation is without
    assert abs(plain - main) / main < 1e-8


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal", "alibi", "relative"])
def test_rows_packed_or_padded_have_the_loss_of_each_alone(positions):
    """No depth reads or predicts a token of another document, or padding."""
    model = build(**{**DEPTHS, "positions": positions}).train()
    rows = [some_ids(1, length, seed)[0] for seed, length in ((1, 5), (2, 8), (3, 3))]

    def loss(ids: list[Tensor], targets: list[Tensor], **more: Tensor) -> Tensor:
        return batch_loss(
            model, Batch(torch.stack(ids), torch.stack(targets), **more), terms=Terms(mtp_weight=1.0)
        )[0]

    alone = sum(loss([row[:-1]], [row[1:]]) for row in rows)
    ids, targets = torch.cat([row[:-1] for row in rows]), torch.cat([row[1:] for row in rows])
    documents = torch.tensor([n for n, row in enumerate(rows) for _ in row[1:]])[None]
    assert abs(loss([ids], [targets], documents=documents) - alone) / alone < 1e-6
    for left in (False, True):
        masks = [torch.zeros(7, dtype=torch.bool) for _ in rows]
        filled = [(torch.full((7,), 5), torch.full((7,), IGNORE)) for _ in rows]
        for row, mask, (padded, wanted) in zip(rows, masks, filled):
            real = slice(8 - len(row), 7) if left else slice(len(row) - 1)
            mask[real], padded[real], wanted[real] = True, row[:-1], row[1:]
        padded, wanted = zip(*filled)
        assert abs(loss(list(padded), list(wanted), mask=torch.stack(masks)) - alone) / alone < 1e-6


def test_cost_counts_weights_always_and_work_where_it_is_done():
    """Parameters without those that a token needs, and the FLOPs that torch counts in training."""
    mixture = {"n_experts": 4, "dense_layers": (0,), "d_expert": 9}
    wide: ModelConfig = config(**DEPTHS, **mixture)
    model, ids = ch.Transformer(wide), some_ids(2, 8)
    bare, whole = ch.cost(wide, 8, batch=2), ch.cost(wide, 8, batch=2, mtp=True)
    without = ch.cost(wide.replace(n_mtp_layers=0), 8, batch=2)
    assert bare.parameters.total == whole.parameters.total == sum(p.numel() for p in model.parameters())
    assert bare.parameters.active == without.parameters.active and bare.flops == without.flops
    counted = []
    for mtp in (False, True):
        with attending(model, "eager"), FlopCounterMode(display=False) as forward:
            out = model(ids, mtp=mtp)
            loss = sum((model.head(states, None).sum() for states in out.mtp), out.logits.sum())
        with FlopCounterMode(display=False) as backward:
            loss.backward()
        counted.append((forward.get_total_flops(), backward.get_total_flops()))
    assert [(cost.flops.forward.total, cost.flops.backward.total) for cost in (bare, whole)] == counted


def test_updates_of_low_rank_are_of_the_model_and_not_of_its_mtp_layers():
    model = build(**DEPTHS)
    names = add_lora(model, 2, 4.0, ["all-linear"])
    assert names and not any(name.startswith("mtp.") for name in names)
    assert not any(weight.requires_grad for weight in model.mtp.parameters())


def test_segments_are_refused():
    with pytest.raises(ch.ConfigError, match="MTP layers read no segments"):
        config(**DEPTHS, n_types=2)


def test_training_lowers_the_loss_of_layers_and_leaves_other_recipes_alone(tmp_path):
    """One recipe key; a model trained with it opens again; what would train nothing is refused."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log\n" * 60)
    shape = {"model.d_model": 32, "model.n_layers": 1, "model.n_heads": 2, "data.max_length": 24}
    settings = {**shape, "train.steps": 30, "train.samples": 0, "tokens.kind": "char", "train.device": "cpu"}
    with pytest.raises(ch.ConfigError, match="is for models with MTP layers"):
        ch.train(text, out=tmp_path / "refused", settings={**settings, "train.mtp_weight": 0.3})
    settings |= {"model.n_mtp_layers": 1, "train.mtp_weight": 1.0}
    m = ch.train(text, out=tmp_path / "out", settings=settings).model
    assert m.config.n_mtp_layers == 1
    ids = torch.tensor(m.encode(["the cat sat on the mat"]))
    m.save(tmp_path / "saved")
    again = ch.load(tmp_path / "saved")
    with torch.no_grad():
        states = m.model(ids, mtp=True).mtp[0]
        assert torch.equal(states, again.model(ids, mtp=True).mtp[0])
        right = m.model.head(states, None)[0, :-2].argmax(-1) == ids[0, 2:]
    assert right.float().mean() > 0.6


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_drafts_of_the_layers_change_no_token(layers):
    """Greedy output is that of decoding without; drafts are what a pass over the whole row predicts."""
    m = ch.Model(build(**{**LLAMA, "n_mtp_layers": layers, "max_positions": 64}, seed=layers))
    prompts = [[1, 2, 3, 4, 5], [6]]
    plain = m.generate(prompts, 24)
    for count in (1, 2, 4):
        drafted = m.generate(prompts, 24, draft="mtp", draft_tokens=count)
        assert [row.ids for row in drafted] == [row.ids for row in plain]
        assert all(row.steps <= 24 for row in drafted)
    drafter = MTPDrafter(m.model, layers, Request())
    row = prompts[0] + plain[0].ids
    with torch.inference_mode():
        states = m.model(torch.tensor([row])).hidden
        for before, stop in itertools.pairwise((1, 5, 6, 9, 14)):
            first = before - 1  # the last state is of a rejected draft token, and is replaced
            drafter.observe(first, states[:, first : stop + 1])
            found = drafter.propose(row[:stop], 9, lambda: torch.zeros(1)).tokens
            known = list(row[:stop])
            for depth in range(layers):
                out = m.model(torch.tensor([[*known, 0]]), mtp=True).mtp[depth]
                known.append(int(m.model.head(out[:, [stop - 2]], None).argmax()))
            assert found == known[stop:]


def test_a_model_without_layers_refuses_to_draft_for_itself():
    """By name, with the way out."""
    m = ch.Model(build(**LLAMA))
    with pytest.raises(ch.InputError, match='draft "mtp" is for a model with MTP layers'):
        m.generate([1, 2], 3, draft="mtp")
    with pytest.raises(ch.InputError, match='draft "small" is not known'):
        m.generate([1, 2], 3, draft="small")
