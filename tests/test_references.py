"""Attention and blocks held against PyTorch's own, and against loops in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.attention import KERNELS, Attention
from clearhead.core.masks import View
from clearhead.core.stack import Block, LayerInputs
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


@pytest.mark.ledger("D1", "D2", "D3", "D4", "E3", "E5")
@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("family", ["encoder", "encoder-decoder"])
def test_a_block_equals_the_layer_of_pytorch(family, place, activation, kernel):
    layer = nn.TransformerEncoderLayer if family == "encoder" else nn.TransformerDecoderLayer
    options = {"dropout": 0.1, "activation": activation, "batch_first": True, "norm_first": place == "pre"}
    theirs = scramble(layer(D, H, 24, **options), spread=0.1).eval()
    model = ch.Transformer(config(family=family, activation=activation, norm_position=place)).eval()
    block = model.main.blocks[0]
    carry_block(block, theirs)
    x, memory, real = torch.randn(2, 6, D), torch.randn(2, 5, D), torch.ones(2, 6, dtype=torch.bool)
    real[1, 4:] = False
    for dtype, allowed in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        block, theirs = block.to(dtype), theirs.to(dtype)
        x, memory = x.to(dtype), memory.to(dtype)
        with torch.set_grad_enabled(dtype is torch.float64), ch.attending(model, kernel):
            if family == "encoder":
                ours = block(x, LayerInputs(View(mask=real[:, None, None].expand(2, 1, 6, 6))))[real]
                assert worst(ours, theirs(x, src_key_padding_mask=~real)[real]) <= allowed
                assert worst(block(x, LayerInputs(View())), theirs(x)) <= allowed
            else:
                cross = View(mask=real[:, None, None, 1:].expand(2, 1, 6, 5))
                causal = nn.Transformer.generate_square_subsequent_mask(6).to(dtype)
                given = {"tgt_mask": causal, "memory_key_padding_mask": ~real[:, 1:]}
                expected = theirs(x, memory, tgt_is_causal=True, **given)
                inputs = LayerInputs(View(causal=True), memory=memory, cross_view=cross)
                assert worst(block(x, inputs), expected) <= allowed


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
