"""Shortcuts between layers: the formula, what a fresh model is, and what has no place for them."""

from __future__ import annotations

import json

import pytest
import torch

import clearhead as ch
from clearhead.variants.shortcuts import Carried, Shortcut
from tests.harness import build, some_ids

ALL = {"input_skips": True, "mirror_skips": True, "value_residual": True, "value_embeddings": (0, 2)}
BEFORE = {"smear_gate": 5, "bigrams": 7}
SIZE = {"vocab_size": 11, "d_model": 16, "n_heads": 4, "n_layers": 4, "max_positions": 16}


@pytest.mark.parametrize(
    "chosen",
    [
        {**ALL, "n_layers": 4},
        {
            **ALL,
            "n_layers": 3,
            "positions": "rope",
            "n_kv_heads": 2,
            "attention": ("window(3)", "full", "full"),
        },
        {"family": "encoder", "head": "classifier", "n_classes": 3, "n_layers": 3, **ALL},
        {**BEFORE, "positions": "rope"},
        {**BEFORE, "bigrams": 0, "attention": "gated-delta", "positions": "none"},
    ],
    ids=["gpt", "windows", "encoder", "before", "states"],
)
@pytest.mark.usefixtures("short_pieces")
def test_every_check_passes(chosen):
    assert [(row.name, row.note) for row in ch.check(build(0, **chosen)) if not row.passed] == []


def test_a_layer_reads_its_mirror_and_the_first_input():
    parts = [Shortcut(ch.ModelConfig(**SIZE, **ALL).main, layer).double() for layer in range(4)]
    with torch.no_grad():
        parts[3].mirror.fill_(0.5)
        parts[3].input.copy_(torch.tensor([2.0, 3.0]))
    carried, streams = Carried(some_ids(2, 5)), torch.randn(4, 2, 5, 16, dtype=torch.float64)
    read = [part.stream(x, carried) for part, x in zip(parts, streams)]
    # The last of four layers mirrors the first, whose output is what the second layer was given.
    assert torch.equal(read[3], 2 * (streams[3] + 0.5 * streams[1]) + 3 * streams[0])
    assert torch.equal(read[0], streams[0])
    assert torch.equal(read[1], streams[1])  # a fresh one changes nothing


def test_a_fresh_model_with_input_skips_is_the_plain_one():
    plain, skips = ch.ModelConfig(**SIZE), ch.ModelConfig(**SIZE, input_skips=True)
    ids, logits = some_ids(2, 7, vocab=11), []
    for config in (plain, skips):
        torch.manual_seed(0)
        logits.append(ch.Transformer(config)(ids).logits)
    assert torch.equal(*logits)


def test_a_token_reads_the_one_before_it_in_its_document():
    model = build(0, n_layers=2, positions="rope", **BEFORE).double()
    ids, mask = some_ids(1, 9), torch.ones(1, 9, dtype=torch.bool)
    documents = torch.tensor([[3, 3, 3, 3, 5, 5, 5, 5, 5]])
    mask[0, [1, 6]] = False  # padding in between is not seen
    together = model(ids, mask, documents=documents).logits
    apart = [model(ids[:, part]).logits for part in ([0, 2, 3], [4, 5, 7, 8])]
    assert torch.allclose(together[mask], torch.cat(apart, 1)[0], atol=1e-12)


def test_steps_of_a_fixed_cache_are_those_of_a_whole_row():
    model = build(0, n_layers=2, positions="rope", **BEFORE)
    ids, cache = some_ids(2, 8), ch.FixedCache(model.config, 2, 8)
    with torch.no_grad():
        steps = [
            model(ids[:, part], cache=cache).logits for part in (slice(5), *map(slice, (5, 6, 7), (6, 7, 8)))
        ]
        assert torch.allclose(torch.cat(steps, 1), model(ids).logits, atol=1e-5)


@pytest.mark.parametrize("field", [*ALL, *BEFORE])
def test_only_our_own_format_has_such_a_field(field, tmp_path):
    m = ch.Model(build(0, n_layers=3, **{field: (ALL | BEFORE)[field]}))
    m.save(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["model_type"] == "clearhead"
    assert field in written["clearhead"]["config"]
    with pytest.raises(ch.ClearheadError, match="GGUF has no architecture for this model"):
        m.save(tmp_path / "theirs.gguf")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"input_skips": True, "layer_groups": 2}, "input_skips reads each layer .* layer_groups 2"),
        ({"value_residual": True, "attention": "linear"}, "takes no value_residual"),
        ({"bigrams": 9, "family": "encoder-decoder"}, "bigrams reads the token before"),
        ({"value_embeddings": (7,)}, "value_embeddings names layer 7"),
    ],
)
def test_what_does_not_go_together_is_refused(more, said):
    with pytest.raises(ch.ConfigError, match=said):
        ch.ModelConfig(**{**SIZE, **more})
