"""Checks on inputs: one line that names the value, what is allowed and the way out, before any compute."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from tests.harness import V, build, config, some_ids, worst

IDS = some_ids(2, 6)
YES = torch.ones(2, 6, dtype=torch.bool)
PATCHES = {"family": "encoder", "input": "patches", "image_size": (8, 8), "patch_size": 4, "n_classes": 3}
VECTORS = {"family": "encoder", "input": "vectors", "d_input": 5, "n_classes": 3}
BOTH = {"family": "encoder-decoder"}


def changed(x: torch.Tensor, value) -> torch.Tensor:
    """`x` with its last element replaced."""
    x = x.clone()
    x.view(-1)[-1] = value
    return x


WRONG = {
    # what is wrong: config, inputs, what the line says
    "not a tensor": ({}, {"ids": [[1, 2]]}, "ids must be a tensor, not list"),
    "one dimension": ({}, {"ids": IDS[0]}, r"ids have shape \(6,\): token ids must be \[B, T\]"),
    "three dimensions": ({}, {"ids": IDS[None]}, r"ids have shape \(1, 2, 6\): token ids must be \[B, T\]"),
    "no token": ({}, {"ids": IDS[:, :0]}, r"ids are empty, shape \(2, 0\): give one row and one token"),
    "no row": ({}, {"ids": IDS[:0]}, r"ids are empty, shape \(0, 6\)"),
    "float ids": ({}, {"ids": IDS.float()}, "ids are torch.float32: token ids must be whole numbers"),
    "boolean ids": ({}, {"ids": YES}, "ids are torch.bool: token ids must be whole numbers"),
    "id too large": (
        {},
        {"ids": changed(IDS, V)},
        rf"ids contain {V}: allowed are 0 to {V - 1} \(vocab_size {V}\)",
    ),
    "negative id": ({}, {"ids": changed(IDS, -1)}, f"ids contain -1: allowed are 0 to {V - 1}"),
    "too long": (
        {"max_positions": 5},
        {"ids": IDS},
        "ids reach 6 positions and the model has 5: shorten the input",
    ),
    "mask of numbers": (
        {},
        {"ids": IDS, "mask": YES.long()},
        r"mask is torch.int64: it must be boolean.*mask.bool\(\)",
    ),
    "mask too short": (
        {},
        {"ids": IDS, "mask": YES[:, 1:]},
        r"mask has shape \(2, 5\): it must match its tokens, \(2, 6\)",
    ),
    "mask of one row": ({}, {"ids": IDS, "mask": YES[:1]}, r"mask has shape \(1, 6\)"),
    "float positions": (
        {},
        {"ids": IDS, "positions": IDS.float()},
        "positions are torch.float32: they must be whole numbers",
    ),
    "positions too short": (
        {},
        {"ids": IDS, "positions": IDS[:, 1:]},
        r"positions have shape \(2, 5\): they must match .* \(2, 6\)",
    ),
    "position past the table": (
        {"max_positions": 9},
        {"ids": IDS, "positions": changed(IDS % 9, 9)},
        r"positions contain 9: allowed are 0 to 8 \(max_positions 9\)",
    ),
    "negative position": ({}, {"ids": IDS, "positions": changed(IDS, -2)}, "positions contain -2"),
    "documents of one dimension": ({}, {"ids": IDS, "documents": IDS[0]}, r"documents have shape \(6,\)"),
    "float documents": ({}, {"ids": IDS, "documents": IDS.float()}, "documents are torch.float32"),
    "types without a table": (
        {},
        {"ids": IDS, "types": IDS * 0},
        "types were given and the model has no segment embeddings",
    ),
    "type too large": (
        {"n_types": 2},
        {"ids": IDS, "types": changed(IDS * 0, 2)},
        r"types contain 2: allowed are 0 to 1 \(n_types 2\)",
    ),
    "types too short": ({"n_types": 2}, {"ids": IDS, "types": IDS[:, 1:] * 0}, r"types have shape \(2, 5\)"),
    "source without encoder": (
        {},
        {"ids": IDS, "source": IDS},
        "source is for a model with an encoder and a decoder",
    ),
    "no source": (BOTH, {"ids": IDS}, "this model has an encoder: give source"),
    "source is a list": (BOTH, {"ids": IDS, "source": [1]}, "source must be a tensor, not list"),
    "source id too large": (
        BOTH,
        {"ids": IDS, "source": changed(IDS, 99)},
        f"source contain 99: allowed are 0 to {V - 1}",
    ),
    "source batch": (
        BOTH,
        {"ids": IDS, "source": IDS[:1]},
        "source has 1 rows and ids 2: give one source per row",
    ),
    "source mask": (
        BOTH,
        {"ids": IDS, "source": IDS, "source_mask": YES[:, 1:]},
        r"source_mask has shape \(2, 5\)",
    ),
    "source mask of numbers": (
        BOTH,
        {"ids": IDS, "source": IDS, "source_mask": YES.int()},
        "source_mask is torch.int32",
    ),
    "source documents": (
        BOTH,
        {"ids": IDS, "source": IDS, "source_documents": IDS[:, 1:]},
        r"documents have shape \(2, 5\)",
    ),
    "source too long": (
        {**BOTH, "max_positions": 6},
        {"ids": IDS, "source": some_ids(2, 7)},
        "source tokens reach 7 positions and the model has 6",
    ),
    "cache for an encoder": (
        {"family": "encoder"},
        {"ids": IDS, "cache": ch.Cache()},
        "a cache was given to a model without a decoder",
    ),
    "bias of whole numbers": (
        {},
        {"ids": IDS, "bias": torch.zeros(1, 1, 6, 6).long()},
        "bias are torch.int64: they must be floating",
    ),
    "bias of three dimensions": (
        {},
        {"ids": IDS, "bias": torch.zeros(1, 6, 6)},
        r"bias has shape \(1, 6, 6\): .* \(2 or 1, 4 or 1, 6",
    ),
    "bias of three heads": (
        {},
        {"ids": IDS, "bias": torch.zeros(1, 3, 6, 6)},
        r"bias has shape \(1, 3, 6, 6\)",
    ),
    "bias too narrow": ({}, {"ids": IDS, "bias": torch.zeros(1, 1, 6, 5)}, r"bias has shape \(1, 1, 6, 5\)"),
    "pixels of another size": (
        PATCHES,
        {"ids": torch.zeros(2, 3, 8, 12)},
        r"shape \(2, 3, 8, 12\): pixels must be \[B, 3, 8, 8\]",
    ),
    "pixels of two channels": (PATCHES, {"ids": torch.zeros(2, 2, 8, 8)}, r"pixels must be \[B, 3, 8, 8\]"),
    "pixels of whole numbers": (
        PATCHES,
        {"ids": torch.zeros(2, 3, 8, 8).byte()},
        r"ids are torch.uint8: .* x.float\(\) converts",
    ),
    "mask of an image": (
        PATCHES,
        {"ids": torch.zeros(2, 3, 8, 8), "mask": YES},
        "a mask was given for an image",
    ),
    "vectors too narrow": (
        VECTORS,
        {"ids": torch.zeros(2, 6, 4)},
        r"shape \(2, 6, 4\): vectors must be \[B, T, 5\]",
    ),
    "ids for vectors": (VECTORS, {"ids": IDS}, r"vectors must be \[B, T, 5\]"),
    "vectors of whole numbers": (VECTORS, {"ids": torch.zeros(2, 6, 5).long()}, "must be floating point"),
}


@pytest.mark.ledger("B3", "E3")
@pytest.mark.parametrize("name", list(WRONG))
def test_one_line_says_what_is_wrong(name):
    choices, given, says = WRONG[name]
    with pytest.raises(ch.InputError, match=says) as caught:
        build(**choices)(**given)
    assert isinstance(caught.value, ch.ClearheadError)
    assert "\n" not in str(caught.value)


@pytest.mark.ledger("B3")
@pytest.mark.parametrize(
    "make", [lambda c: ch.Cache(), lambda c: ch.WindowCache(), lambda c: ch.FixedCache(c, 2, 20)]
)
def test_the_table_of_positions_ends_in_a_cache_too(make):
    model = build(max_positions=6)
    cache = make(model.config)
    model(IDS[:, :4], cache=cache)
    with pytest.raises(ch.InputError, match="ids reach 7 positions and the model has 6"):
        model(IDS[:, :3], cache=cache)
    assert cache.length == 4  # and the cache is as it was
    model(IDS[:, 4:], cache=cache)
    with pytest.raises(ch.InputError, match="reach 7 positions"):
        model(IDS[:, :1], cache=cache)


@pytest.mark.ledger("A4", "B3")
def test_padding_takes_no_position():
    """A batch may be longer than the table if the real tokens of each row fit; cached too."""
    model, ids = build(max_positions=6), some_ids(2, 8)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[:, :2] = False
    whole = model(ids[:, 2:]).logits
    assert worst(model(ids, mask=mask).logits[:, 2:], whole) <= 1e-5
    cache = ch.Cache()
    first = model(ids[:, :7], mask=mask[:, :7], cache=cache).logits
    last = model(ids[:, 7:], cache=cache).logits
    assert worst(torch.cat([first, last], 1)[:, 2:], whole) <= 1e-5
    documents = torch.tensor([[0] * 4 + [1] * 4] * 2)
    assert worst(model(ids, documents=documents).logits[:, 4:], model(ids[:, 4:]).logits) <= 1e-5


@pytest.mark.ledger("B2", "B4", "B5", "B6")
@pytest.mark.parametrize("positions", ["sinusoidal", "rope", "alibi", "relative", "none"])
def test_schemes_without_a_table_go_on(positions):
    assert build(max_positions=4, positions=positions)(some_ids(1, 9)).logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_every_whole_number_dtype_means_the_same(family, dtype):
    model = build(family=family, positions="alibi", n_types=2, window=4)
    given = {
        "types": IDS % 2,
        "documents": torch.tensor([[0, 0, 0, 0, 1, 1]] * 2),
        "positions": torch.tensor([[9, 3, 5, 4, 0, 1]] * 2),
    }
    expected = model(IDS, **given).logits
    assert torch.equal(
        model(IDS.to(dtype), **{name: x.to(dtype) for name, x in given.items()}).logits, expected
    )
    if family == "decoder":
        for cache in (ch.Cache(), ch.FixedCache(model.config, 2, 6), ch.WindowCache()):
            again = model(
                IDS.to(dtype), cache=cache, **{name: x.to(dtype) for name, x in given.items()}
            ).logits
            assert worst(again, expected) <= 1e-5


@pytest.mark.ledger("G2")
def test_a_cache_stays_with_its_rows():
    model, cache = build(), ch.Cache()
    model(IDS, cache=cache)
    for rows in (1, 3):
        with pytest.raises(ch.InputError, match=f"the cache holds 2 rows and ids have {rows}"):
            model(some_ids(rows, 1), cache=cache)
    with pytest.raises(ch.InputError, match="the cache holds 4 rows and ids have 2"):
        model(IDS, cache=ch.FixedCache(model.config, 4, 8))


def test_a_bias_does_not_go_with_a_window_cache():
    with pytest.raises(ch.InputError, match=r"a window cache of 3 forgets: use Cache\(\)"):
        build(window=3)(IDS, bias=torch.zeros(1, 1, 6, 6), cache=ch.WindowCache())


@pytest.mark.ledger("G2")
def test_no_cache_without_a_decoder():
    with pytest.raises(ch.InputError, match="nothing to cache"):
        ch.FixedCache(config(family="encoder"), 1, 4)


def test_the_meta_device_builds_and_runs():
    """Shapes without numbers, as loading and cost need them."""
    with torch.device("meta"):
        model = ch.Transformer(config())
    assert model(torch.zeros(2, 5, dtype=torch.long, device="meta")).logits.shape == (2, 5, V)


def test_every_error_is_a_value_error_too():
    assert issubclass(ch.InputError, ValueError)
    assert issubclass(ch.ConfigError, ValueError)
    assert issubclass(ch.MissingExtraError, ImportError)


def test_packed_cache_wants_to_know_which_document_goes_on():
    model = ch.Transformer(ch.preset("micro-decoder")).eval()
    ids, documents = torch.randint(50, (1, 6)), torch.tensor([[0, 0, 0, 1, 1, 1]])
    for cache in (ch.Cache(), ch.WindowCache(), ch.FixedCache(model.config, 1, 8)):
        model(ids, cache=cache, documents=documents)
        with pytest.raises(ch.InputError, match="give documents"):
            model(ids[:, :1], cache=cache)


def test_unknown_logits_choice():
    with pytest.raises(ch.InputError, match="all, last or none"):
        ch.Transformer(ch.preset("micro-decoder"))(torch.zeros(1, 2, dtype=torch.long), logits="lats")
