"""Attention and blocks held against PyTorch's own, and against loops in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as nnf
from torch import nn

import clearhead as ch
from clearhead.core.attention import KERNELS, Attention, eager
from clearhead.core.masks import View
from clearhead.core.stack import Block
from tests.harness import config, scramble, some_ids, worst

D, H = 16, 4


def attend_by_loops(q, k, v, mask=None, bias=None, scale=None, softcap=None):
    """One query, one head, one key at a time, in Python floats."""
    (B, H, T, E), (K, S) = q.shape, k.shape[1:3]
    scale = 1 / math.sqrt(E) if scale is None else scale
    q, k, v = q.tolist(), k.tolist(), v.tolist()  # lists are much quicker to read one number from
    seen, added = (None if x is None else x.expand(B, H, T, S).tolist() for x in (mask, bias))
    out = torch.zeros(B, H, T, len(v[0][0][0]), dtype=torch.float64)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        shared = h * K // H
        scores = {}
        for s in range(S):
            if seen is not None and not seen[b][h][t][s]:
                continue
            score = sum(one * other for one, other in zip(q[b][h][t], k[b][shared][s])) * scale
            score = softcap * math.tanh(score / softcap) if softcap else score
            scores[s] = score + (added[b][h][t][s] if added is not None else 0.0)
        total = sum(math.exp(score) for score in scores.values())
        weighed = [[math.exp(score) / total * x for x in v[b][shared][s]] for s, score in scores.items()]
        out[b, h, t] = torch.tensor([sum(column) for column in zip(*weighed)], dtype=torch.float64)
    return out


@pytest.mark.ledger("C1", "C3", "C4", "C5")
@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize(
    ("kv_heads", "length", "causal"), itertools.product((4, 2, 1), (1, 3, 5), (False, True))
)
def test_attend_equals_loops_in_float64(kernel, kv_heads, length, causal):
    q, k, v = torch.randn(2, 4, length, 6), torch.randn(2, kv_heads, 5, 6), torch.randn(2, kv_heads, 5, 3)
    tril = torch.ones(length, 5, dtype=torch.bool).tril()[None, None]
    shapes = [(1, 1, length, 5), (2, 4, length, 5), (2, 1, length, 5)]
    for shape, biased, scale, softcap in itertools.product(shapes, (False, True), (None, 1.0), (None, 2.0)):
        mask = (torch.rand(shape) > 0.3) | tril[..., :1, :].expand(shape)  # the first key is always there
        mask[..., 0] = True
        bias = torch.randn(shape) if biased else None
        given = {"scale": scale, "softcap": softcap, "bias": bias}
        found = KERNELS[kernel](q, k, v, None if causal else mask, **given, causal=causal)
        assert worst(found.double(), attend_by_loops(q, k, v, tril if causal else mask, **given)) <= 2e-6


@pytest.mark.ledger("C1", "C5")
@pytest.mark.parametrize("causal", [False, True])
def test_eager_equals_scaled_dot_product_attention(causal):
    q, k, v = torch.randn(2, H, 7, 5), torch.randn(2, H, 7, 5), torch.randn(2, H, 7, 5)
    assert (
        worst(eager(q, k, v, causal=causal), nnf.scaled_dot_product_attention(q, k, v, is_causal=causal))
        <= 1e-6
    )
    mask = torch.rand(2, 1, 7, 7) > 0.4
    mask[..., 0] = True
    assert (
        worst(eager(q, k, v, mask, scale=0.7), nnf.scaled_dot_product_attention(q, k, v, mask, scale=0.7))
        <= 1e-6
    )


def carry(attention: Attention, theirs: nn.MultiheadAttention) -> None:
    """PyTorch's packed projections, cut in three."""
    for part, weight, bias in zip(
        (attention.q, attention.k, attention.v), theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    ):
        part.weight.data, part.bias.data = weight.clone(), bias.clone()
    attention.out.load_state_dict(theirs.out_proj.state_dict())


@pytest.mark.ledger("C1", "C3", "C4")
@pytest.mark.parametrize("kernel", list(KERNELS))
def test_attention_equals_multi_head_attention(kernel):
    theirs = scramble(nn.MultiheadAttention(D, H, batch_first=True))
    model = ch.Transformer(config(family="encoder-decoder")).eval()
    block = model.decoder.blocks[0]
    carry(block.attention, theirs)
    carry(block.cross, theirs)
    x, memory = torch.randn(2, 5, D), torch.randn(2, 7, D)
    padding = torch.rand(2, 7) > 0.5
    padding[:, 0] = False
    with ch.attending(block, kernel):
        expected, weights = theirs(x, x, x, average_attn_weights=False)
        assert worst(block.attention(x, View()), expected) <= 1e-6
        expected, _ = theirs(x, memory, memory, key_padding_mask=padding)
        assert (
            worst(block.cross(x, View(mask=~padding[:, None, None].expand(2, 1, 5, 7)), memory), expected)
            <= 1e-6
        )
    q, k = (
        project(x).unflatten(-1, (H, D // H)).transpose(1, 2)
        for project in (block.attention.q, block.attention.k)
    )
    assert worst((q @ k.transpose(-1, -2) / 2).softmax(-1), weights) <= 1e-6


def carry_block(block: Block, theirs: nn.Module) -> None:
    carry(block.attention, theirs.self_attn)
    block.feedforward.up.load_state_dict(theirs.linear1.state_dict())
    block.feedforward.down.load_state_dict(theirs.linear2.state_dict())
    residuals, norms = [block.attention_residual, block.feedforward_residual], [theirs.norm1, theirs.norm2]
    if block.cross is not None:
        carry(block.cross, theirs.multihead_attn)
        residuals, norms = (
            [block.attention_residual, block.cross_residual, block.feedforward_residual],
            [*norms, theirs.norm3],
        )
    for residual, norm in zip(residuals, norms):
        (residual.before or residual.after).load_state_dict(norm.state_dict())


@pytest.mark.ledger("D1", "D2", "D3", "D4", "E5")
@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("place", ["pre", "post"])
def test_block_equals_transformer_encoder_layer(place, activation, kernel):
    theirs = nn.TransformerEncoderLayer(
        D, H, 24, dropout=0.1, activation=activation, batch_first=True, norm_first=place == "pre"
    )
    theirs = scramble(theirs, spread=0.1).eval()
    model = ch.Transformer(config(family="encoder", activation=activation, norm_position=place)).eval()
    block = model.encoder.blocks[0]
    carry_block(block, theirs)
    x, real = torch.randn(2, 6, D), torch.ones(2, 6, dtype=torch.bool)
    real[1, 4:] = False
    with torch.no_grad(), ch.attending(model, kernel):
        assert worst(block(x, View()), theirs(x)) <= 1e-6
        ours = block(x, View(mask=real[:, None, None].expand(2, 1, 6, 6)))
        assert worst(ours[real], theirs(x, src_key_padding_mask=~real)[real]) <= 1e-6
    block, theirs, x = block.double(), theirs.double(), x.double()
    assert worst(block(x, View()), theirs(x)) <= 1e-12


@pytest.mark.ledger("D1", "D2", "D3", "D4", "E3", "E5")
@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("place", ["pre", "post"])
def test_block_equals_transformer_decoder_layer(place, activation, kernel):
    theirs = nn.TransformerDecoderLayer(
        D, H, 24, dropout=0.1, activation=activation, batch_first=True, norm_first=place == "pre"
    )
    theirs = scramble(theirs, spread=0.1).eval()
    model = ch.Transformer(
        config(family="encoder-decoder", activation=activation, norm_position=place)
    ).eval()
    block = model.decoder.blocks[0]
    carry_block(block, theirs)
    x, memory, real = torch.randn(2, 6, D), torch.randn(2, 5, D), torch.ones(2, 5, dtype=torch.bool)
    real[0, 3:] = False
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    cross = View(mask=real[:, None, None].expand(2, 1, 6, 5))
    with torch.no_grad(), ch.attending(model, kernel):
        ours = block(x, View(causal=True), memory, cross)
        expected = theirs(x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=~real)
        assert worst(ours, expected) <= 1e-6
        block, theirs = block.double(), theirs.double()
        ours = block(x.double(), View(causal=True), memory.double(), cross)
        expected = theirs(
            x.double(),
            memory.double(),
            tgt_mask=causal.double(),
            tgt_is_causal=True,
            memory_key_padding_mask=~real,
        )
        assert worst(ours, expected) <= 1e-12


@pytest.mark.ledger("D3", "D6")
def test_residual_layouts_equal_their_formulas():
    """Each line of the drawing in stack.py, written out with the block's own parts."""
    x = torch.randn(2, 5, D)
    for place in ("sandwich", "output"):
        block = scramble(ch.Transformer(config(norm_position=place))).decoder.blocks[0].eval()
        a, f = block.attention_residual, block.feedforward_residual
        pre = place == "sandwich"
        y = x + a.inside(block.attention(a.before(x) if pre else x, View(causal=True)))
        y = y + f.inside(block.feedforward(f.before(y) if pre else y))
        assert worst(block(x, View(causal=True)), y) <= 1e-6
    for norms in (1, 2):
        block = scramble(ch.Transformer(config(parallel=True, parallel_norms=norms))).decoder.blocks[0].eval()
        a, f = block.attention_residual.before, block.feedforward_residual.before
        y = x + block.attention(a(x), View(causal=True)) + block.feedforward((f if norms == 2 else a)(x))
        assert worst(block(x, View(causal=True)), y) <= 1e-6
    block = scramble(ch.Transformer(config(residual_scale=0.5))).decoder.blocks[0].eval()
    y = x + 0.5 * block.attention(block.attention_residual.before(x), View(causal=True))
    y = y + 0.5 * block.feedforward(block.feedforward_residual.before(y))
    assert worst(block(x, View(causal=True)), y) <= 1e-6


@pytest.mark.ledger("B7")
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_without_positions_an_encoder_is_permutation_equivariant(norm_position):
    model = scramble(
        ch.Transformer(config(family="encoder", positions="none", norm_position=norm_position))
    ).eval()
    ids, order = some_ids(2, 8), torch.randperm(8)
    with torch.no_grad():
        assert worst(model(ids[:, order]).logits, model(ids).logits[:, order]) <= 5e-6
        for positions in ("learned", "sinusoidal", "rope", "alibi", "relative"):
            placed = scramble(ch.Transformer(config(family="encoder", positions=positions))).eval()
            assert worst(placed(ids[:, order]).logits, placed(ids).logits[:, order]) > 1e-2
    attention, x = model.encoder.blocks[0].attention, torch.randn(1, 8, D)
    assert worst(attention(x[:, order], View()), attention(x, View())[:, order]) <= 1e-6
