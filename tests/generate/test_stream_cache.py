"""A text without end: its first tokens and its last ones, at the positions they have in the cache.

The reference is a loop in float64 over the weights, one row and one token at a time. It keeps the keys of
each token as they were when the token was read, before rotation, and rotates them anew for every query.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.cli import main
from clearhead.generate.decode import Prompts, decode, prefill
from clearhead.generate.request import Request
from clearhead.model.positions import alibi_slopes, relative_bucket, rope_frequencies
from tests.harness import build, chunks, in_pieces, scramble, some_ids, worst

TOLERANCE = 1e-5
WINDOW, SINKS = 9, 3
MODELS = {
    "rope": {"positions": "rope"},
    "rope interleaved, part": {"positions": "rope", "rope_layout": "interleaved", "rope_fraction": 0.5},
    "yarn": {
        "positions": "rope",
        "rope_scaling": ch.RopeScaling(kind="yarn", factor=4.0, original_positions=8),
    },
    "grouped, some layers unrotated": {"positions": "rope", "n_kv_heads": 2, "rope_skips": (1,)},
    "alibi": {"positions": "alibi"},
    "relative": {"positions": "relative"},
    "none": {"positions": "none"},
    "own windows": {"positions": "rope", "n_layers": 3, "window": (4, None, 20), "rope_local_base": 50.0},
}
every_model = pytest.mark.parametrize("name", MODELS)


def streamed(model: ch.Transformer, ids: list[int], window: int, sinks: int) -> Tensor:
    """Logits [T, V] of one row in float64: every token reads what is kept, placed at 0, 1, 2, ..."""
    weights = {name: weight.double() for name, weight in model.state_dict().items()}
    spec, said = model.main.spec, []
    H, K, E = spec.n_heads, spec.n_kv_heads, spec.d_head
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(spec.n_layers)]  # of each layer: k, v by token

    def norm(x: Tensor, name: str) -> Tensor:
        part = model.get_submodule(name)
        return torch.nn.functional.layer_norm(
            x, x.shape, weights[f"{name}.weight"], weights[f"{name}.bias"], part.eps
        )

    def apply(x: Tensor, name: str) -> Tensor:
        return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0.0)

    def turned(x: Tensor, place: int, layer: int) -> Tensor:
        """Rotate pairs of columns of each head [heads, E]."""
        if spec.positions != "rope" or layer in spec.rope_skips:
            return x
        local = spec.windows[layer] is not None and spec.rope_local_base is not None
        base, scaling = (spec.rope_local_base, None) if local else (spec.rope_base, spec.rope_scaling)
        where = torch.tensor([float(place)], dtype=torch.float64)
        frequencies, factor = rope_frequencies(spec.d_rotary, base, scaling, spec.max_positions, where)
        out = x.clone()
        for pair, frequency in enumerate(frequencies.tolist()):
            half = spec.rope_layout == "half"
            a, b = (pair, pair + spec.d_rotary // 2) if half else (2 * pair, 2 * pair + 1)
            cos, sin = math.cos(place * frequency) * factor, math.sin(place * frequency) * factor
            out[:, a], out[:, b] = x[:, a] * cos - x[:, b] * sin, x[:, a] * sin + x[:, b] * cos
        return out

    for count, token in enumerate(ids):
        x = weights["decoder.embedding.front.tokens.weight"][token]
        for layer in range(spec.n_layers):
            name, own = f"decoder.blocks.{layer}", spec.windows[layer]
            y = norm(x, f"{name}.attention_residual.before")
            q, k, v = (apply(y, f"{name}.attention.{part}").view(-1, E) for part in "qkv")
            kept[layer].append((k, v))
            numbers = list(range(count + 1))
            if own is not None and own < window:
                numbers = numbers[-own:]
            elif count >= window:
                numbers = numbers[:sinks] + numbers[sinks - window :]
            places = range(len(numbers))  # within the cache
            q = turned(q, len(numbers) - 1, layer)
            rows = []
            for head in range(H):
                keys = [
                    turned(kept[layer][number][0], place, layer)[head * K // H]
                    for number, place in zip(numbers, places)
                ]
                scores = torch.stack([q[head] @ key / math.sqrt(E) for key in keys])
                back = torch.tensor([len(numbers) - 1 - place for place in places])
                if spec.positions == "alibi":
                    scores = scores - alibi_slopes(H)[head] * back
                if spec.positions == "relative":
                    buckets = relative_bucket(-back, False, spec.relative_buckets, spec.relative_max_distance)
                    scores = scores + weights["decoder.positions.table.weight"][buckets, head]
                values = torch.stack([kept[layer][number][1][head * K // H] for number in numbers])
                rows.append(scores.softmax(0) @ values)
            x = x + apply(torch.cat(rows), f"{name}.attention.out")
            y = norm(x, f"{name}.feedforward_residual.before")
            y = torch.nn.functional.gelu(apply(y, f"{name}.feedforward.up"))
            x = x + apply(y, f"{name}.feedforward.down")
        said.append(apply(norm(x, "decoder.norm"), "head.out"))
    return torch.stack(said)


@every_model
@pytest.mark.parametrize("sinks", [SINKS, 0])
def test_every_token_reads_the_first_and_the_last(name, sinks):
    """Rows alone and together, one token at a time and in pieces of any size."""
    model, ids = build(**MODELS[name]), some_ids(2, 30)
    wanted = torch.stack([streamed(model, row, WINDOW, sinks) for row in ids.tolist()]).float()
    for sizes in ([1] * 30, [30], [5, 1, 1, 14, 1, 1, 7], chunks(30, WINDOW)):
        with torch.no_grad():
            together = in_pieces(model, ids, sizes, ch.StreamCache(model.config, WINDOW, sinks))
            alone = in_pieces(model, ids[1:], sizes, ch.StreamCache(model.config, WINDOW, sinks))
        assert worst(together, wanted) <= TOLERANCE
        assert worst(alone, wanted[1:]) <= TOLERANCE
    with torch.no_grad():
        assert worst(wanted[:, :WINDOW], model(ids[:, :WINDOW]).logits) <= TOLERANCE
        assert worst(wanted, model(ids).logits) > 1e-3 or name == "none"  # it is not what a whole text says
