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


WRONG = {  # what the line says: config, inputs
    "ids must be a tensor, not list": ({}, {"ids": [[1, 2]]}),
    r"ids have shape \(6,\): token ids must be \[B, T\]": ({}, {"ids": IDS[0]}),
    r"ids have shape \(1, 2, 6\): token ids must be \[B, T\]": ({}, {"ids": IDS[None]}),
    r"ids are empty, shape \(2, 0\): give one row and one token": ({}, {"ids": IDS[:, :0]}),
    r"ids are empty, shape \(0, 6\)": ({}, {"ids": IDS[:0]}),
    "ids are torch.float32: token ids must be whole numbers": ({}, {"ids": IDS.float()}),
    "ids are torch.bool: token ids must be whole numbers": ({}, {"ids": YES}),
    rf"ids contain {V}: allowed are 0 to {V - 1} \(vocab_size {V}\)": ({}, {"ids": changed(IDS, V)}),
    f"ids contain -1: allowed are 0 to {V - 1}": ({}, {"ids": changed(IDS, -1)}),
    "ids reach 6 positions and the model has 5: shorten the input": ({"max_positions": 5}, {}),
    r"mask is torch.int64: it must be boolean.*mask.bool\(\)": ({}, {"mask": YES.long()}),
    r"mask has shape \(2, 5\): it must match its tokens, \(2, 6\)": ({}, {"mask": YES[:, 1:]}),
    r"mask has shape \(1, 6\)": ({}, {"mask": YES[:1]}),
    "positions are torch.float32: they must be whole numbers": ({}, {"positions": IDS.float()}),
    r"positions have shape \(2, 5\): they must match .* \(2, 6\)": ({}, {"positions": IDS[:, 1:]}),
    r"positions contain 9: allowed are 0 to 8 \(max_positions 9\)": (
        {"max_positions": 9},
        {"positions": changed(IDS % 9, 9)},
    ),
    "positions contain -2": ({}, {"positions": changed(IDS, -2)}),
    r"documents have shape \(6,\)": ({}, {"documents": IDS[0]}),
    "documents are torch.float32": ({}, {"documents": IDS.float()}),
    "types were given and the model has no segment embeddings": ({}, {"types": IDS * 0}),
    r"types contain 2: allowed are 0 to 1 \(n_types 2\)": ({"n_types": 2}, {"types": changed(IDS * 0, 2)}),
    r"types have shape \(2, 5\)": ({"n_types": 2}, {"types": IDS[:, 1:] * 0}),
    "source is for a model with an encoder and a decoder": ({}, {"source": IDS}),
    "this model has an encoder: give source": (BOTH, {}),
    "source must be a tensor, not list": (BOTH, {"source": [1]}),
    f"source contain 99: allowed are 0 to {V - 1}": (BOTH, {"source": changed(IDS, 99)}),
    "source has 1 rows and ids 2: give one source per row": (BOTH, {"source": IDS[:1]}),
    r"source_mask has shape \(2, 5\)": (BOTH, {"source": IDS, "source_mask": YES[:, 1:]}),
    "source_mask is torch.int32": (BOTH, {"source": IDS, "source_mask": YES.int()}),
    r"documents have shape \(2, 5\)": (BOTH, {"source": IDS, "source_documents": IDS[:, 1:]}),
    "source tokens reach 7 positions and the model has 6": (
        {**BOTH, "max_positions": 6},
        {"source": some_ids(2, 7)},
    ),
    "a cache was given to a model without a decoder": ({"family": "encoder"}, {"cache": ch.Cache()}),
    "bias are torch.int64: they must be floating": ({}, {"bias": torch.zeros(1, 1, 6, 6).long()}),
    r"bias has shape \(1, 6, 6\): .* \(2 or 1, 4 or 1, 6": ({}, {"bias": torch.zeros(1, 6, 6)}),
    r"bias has shape \(1, 3, 6, 6\)": ({}, {"bias": torch.zeros(1, 3, 6, 6)}),
    r"bias has shape \(1, 1, 6, 5\)": ({}, {"bias": torch.zeros(1, 1, 6, 5)}),
    r"a window cache of 3 forgets: use Cache\(\)": (
        {"window": 3},
        {"bias": torch.zeros(1, 1, 6, 6), "cache": ch.WindowCache()},
    ),
    "all, last or none": ({}, {"logits": "lats"}),
    r"shape \(2, 3, 8, 12\): pixels must be \[B, 3, 8, 8\]": (PATCHES, {"ids": torch.zeros(2, 3, 8, 12)}),
    r"pixels must be \[B, 3, 8, 8\]": (PATCHES, {"ids": torch.zeros(2, 2, 8, 8)}),
    r"ids are torch.uint8: .* x.float\(\) converts": (PATCHES, {"ids": torch.zeros(2, 3, 8, 8).byte()}),
    "a mask was given for an image": (PATCHES, {"ids": torch.zeros(2, 3, 8, 8), "mask": YES}),
    r"shape \(2, 6, 4\): vectors must be \[B, T, 5\]": (VECTORS, {"ids": torch.zeros(2, 6, 4)}),
    r"vectors must be \[B, T, 5\]": (VECTORS, {}),
    "must be floating point": (VECTORS, {"ids": torch.zeros(2, 6, 5).long()}),
}


@pytest.mark.ledger("B3", "E3")
@pytest.mark.parametrize("says", WRONG)
def test_one_line_says_what_is_wrong(says):
    choices, given = WRONG[says]
    with pytest.raises(ch.InputError, match=says) as caught:
        build(**choices)(**{"ids": IDS, **given})
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


@pytest.mark.ledger("G2")
def test_no_cache_without_a_decoder():
    with pytest.raises(ch.InputError, match="nothing to cache"):
        ch.FixedCache(config(family="encoder"), 1, 4)


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
