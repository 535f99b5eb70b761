"""The cache: reorder, crop, room, and what is computed once."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from tests.harness import build, chunks, in_pieces, some_ids, worst

TOLERANCE = 1e-5
FORMS = {
    "growing": lambda c, rows=2, room=16: ch.Cache(),
    "reserved": lambda c, rows=2, room=16: ch.Cache(reserve=room),
    "window": lambda c, rows=2, room=16: ch.WindowCache(),
    "fixed": lambda c, rows=2, room=16: ch.FixedCache(c, rows, room),
}
every_form = pytest.mark.parametrize("form", list(FORMS))
every_family = pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])


def given_for(family: str, rows: int = 2) -> dict:
    return {"source": some_ids(rows, 5, seed=3)} if family == "encoder-decoder" else {}


@pytest.mark.ledger("G1", "G2")
@every_form
@every_family
@pytest.mark.parametrize("padded", [False, True])
def test_reorder(family, form, padded):
    """After a reorder, row i goes on as row rows[i] would have."""
    model, ids, given = (
        build(family=family, positions="rope", window=(3, None)),
        some_ids(3, 9),
        given_for(family, 3),
    )
    cache, rows = FORMS[form](model.config, 3), torch.tensor([2, 0, 0])
    mask = torch.ones(3, 9, dtype=torch.bool)
    if padded:
        mask[0, :2], mask[2, 4:5] = False, False
    more = {"mask": mask[:, :5]} if padded else {}
    with torch.no_grad():
        model(ids[:, :5], cache=cache, **more, **given)
        cache.reorder(rows)
        tail = in_pieces(model, ids[:, 5:], [1, 3], cache)
        joined, full_mask = (
            torch.cat([ids[rows, :5], ids[:, 5:]], 1),
            torch.cat([mask[rows, :5], mask[:, 5:]], 1),
        )
        moved = {name: x[rows] for name, x in given.items()}
        whole = model(joined, mask=full_mask, **moved).logits
    assert worst(tail, whole[:, 5:]) <= TOLERANCE


@pytest.mark.ledger("G1", "G2")
@pytest.mark.parametrize("form", ["growing", "window"])
@every_family
def test_reorder_to_more_and_fewer_rows(family, form):
    model, ids, given = build(family=family, window=4), some_ids(2, 6), given_for(family)
    cache = FORMS[form](model.config)
    with torch.no_grad():
        model(ids[:, :4], cache=cache, **given)
        for rows in ([0, 0, 1, 1], [3]):
            cache.reorder(torch.tensor(rows))
        assert cache.rows == 1
        said = model(ids[:1, 4:], cache=cache).logits
        joined = torch.cat([ids[1:, :4], ids[:1, 4:]], 1)
        assert (
            worst(said, model(joined, **{name: x[1:] for name, x in given.items()}).logits[:, 4:])
            <= TOLERANCE
        )


@pytest.mark.ledger("G1", "G2")
def test_reorder_may_leave_the_source_alone():
    model, ids = build(family="encoder-decoder"), some_ids(2, 6)
    source = some_ids(1, 5, seed=3).expand(2, -1)
    cache = ch.Cache()
    with torch.no_grad():
        model(ids[:, :4], source=source, cache=cache)
        kept = [cross.k for cross in cache.cross.values()]
        cache.reorder(torch.tensor([1, 1]), cross=False)
        assert all(cross.k is k for cross, k in zip(cache.cross.values(), kept))
        joined = torch.cat([ids[[1, 1], :4], ids[:, 4:]], 1)
        assert (
            worst(model(ids[:, 4:], cache=cache).logits, model(joined, source=source).logits[:, 4:])
            <= TOLERANCE
        )


@pytest.mark.ledger("G2")
@every_form
@every_family
@pytest.mark.parametrize("padded", [False, True])
def test_crop(family, form, padded):
    """Step back to any length and go on as if nothing had been; a window cache, if nothing is forgotten."""
    model, ids, given = (
        build(family=family, positions="rope", window=(8, None)),
        some_ids(2, 8),
        given_for(family),
    )
    other, mask = some_ids(2, 8, seed=11), torch.ones(2, 8, dtype=torch.bool)
    if padded:
        mask[0, 1], mask[1, 0] = False, False
    with torch.no_grad():
        for length in (0, 1, 4, 7):
            cache = FORMS[form](model.config)
            model(ids[:, :7], mask=mask[:, :7] if padded else None, cache=cache, **given)
            cache.crop(length)
            assert cache.length == length
            more = {"mask": mask[:, length:]} if padded else {}
            said = in_pieces(model, other[:, length:], [8 - length], cache, **more)
            joined = torch.cat([ids[:, :length], other[:, length:]], 1)
            whole = model(joined, mask=mask if padded else None, **given).logits
            real = mask[:, length:]
            assert worst(said[real], whole[:, length:][real]) <= TOLERANCE
        with pytest.raises(ch.InputError, match="cannot crop a cache of 8 tokens to 9: choose 0 to 8"):
            cache.crop(9)
        with pytest.raises(ch.InputError, match="to -1"):
            cache.crop(-1)


@pytest.mark.ledger("G2")
def test_a_window_that_has_forgotten_cannot_step_back():
    model, cache = build(window=3), ch.WindowCache()
    model(some_ids(2, 5), cache=cache)
    with pytest.raises(ch.InputError, match="a window cache of 3 has forgotten what a crop to 4 needs"):
        cache.crop(4)
    cache.crop(5)
    assert cache.length == 5


@pytest.mark.ledger("G2")
def test_a_window_cache_holds_a_window_and_no_more():
    model, cache = build(window=(3, None)), ch.WindowCache()
    with torch.no_grad():
        in_pieces(model, some_ids(2, 20), chunks(20, 4), cache)
    assert cache.layers[0].k.shape[2] == 4  # the window, and the slot for what is not kept
    assert cache.layers[1].k.shape[2] >= 20


@pytest.mark.ledger("G2", "J2")
@pytest.mark.parametrize(
    ("attention", "form"),
    [
        ("window(3, sinks=1)", ch.WindowCache),
        ("linear", ch.Cache),
        (("gated-delta", "window(4)"), ch.WindowCache),
    ],
    ids=str,
)
def test_a_ragged_batch_forgets_the_tokens_that_no_layer_sees(attention, form):
    """Its cache stays small, also where a row pauses for longer than it keeps, and rows are as if alone."""
    model, cache, ids = build(attention=attention, positions="rope"), form(), some_ids(2, 60)
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[0, :2], mask[1, 20:45] = False, False
    with torch.no_grad():
        pieces = zip(ids.split([5, *[1] * 55], 1), mask.split([5, *[1] * 55], 1), strict=True)
        ours = torch.cat([model(one, mask=its, cache=cache).logits for one, its in pieces], dim=1)
        assert cache.length == 60
        assert cache.tokens.length <= 12
        for row in range(2):
            assert worst(ours[row, mask[row]], model(ids[row : row + 1, mask[row]]).logits[0]) <= 1e-5


@pytest.mark.ledger("G2", "J2", "D8")
@pytest.mark.parametrize(
    "choices",
    [
        {"attention": "linear"},
        {"attention": ("window(30)", "linear"), "depth_capacity": (1.0, 0.5)},
    ],
    ids=str,
)
def test_a_cache_of_states_crops_to_its_own_length_and_to_none(choices):
    """What it refuses, between the two, leaves it as it was."""
    model, ids = build(positions="rope", max_positions=64, **choices), some_ids(3, 24)
    mask = torch.ones(3, 24, dtype=torch.bool)
    mask[1, :4], mask[2, :11] = False, False
    with torch.no_grad():
        whole = model(ids, mask=mask).logits
        for form in (ch.Cache, ch.WindowCache):
            cache = form()
            in_pieces(model, ids[:, :20], [12, 1, 1, 3, 3], cache, mask=mask[:, :20])
            cache.crop(20)
            with pytest.raises(ch.InputError, match="cannot step back to 7 of 20 tokens"):
                cache.crop(7)
            assert cache.length == 20
            rest = in_pieces(model, ids[:, 20:], [1, 3], cache)
            assert worst(rest, whole[:, 20:]) <= TOLERANCE
            cache.crop(0)
            anew = in_pieces(model, ids, [20, 4], cache, mask=mask)
            assert worst(anew[mask], whole[mask]) <= TOLERANCE


@pytest.mark.ledger("G2")
def test_a_window_cache_steps_back_among_the_slots_it_describes():
    """Padding in every row: the window has forgotten nothing, and slots are counted from the first one."""
    model, ids, other = build(window=6, positions="rope"), some_ids(2, 30), some_ids(2, 30, seed=11)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[:, 1:26], mask[1, 0] = False, False
    with torch.no_grad():
        for length in (26, 28, 0):
            cache = ch.WindowCache()
            in_pieces(model, ids[:, :29], [27, 1, 1], cache, mask=mask[:, :29])
            assert cache.tokens.length < cache.length == 29
            cache.crop(length)
            said = in_pieces(model, other[:, length:], [30 - length], cache, mask=mask[:, length:])
            joined = torch.cat([ids[:, :length], other[:, length:]], 1)
            whole, real = model(joined, mask=mask).logits[:, length:], mask[:, length:]
            assert worst(said[real], whole[real]) <= TOLERANCE
        model(ids, mask=mask, cache=(cache := ch.WindowCache()))
        with pytest.raises(
            ch.InputError, match="has forgotten the first 22 slots, and cannot step back to 9"
        ):
            cache.crop(9)


@pytest.mark.ledger("G2")
def test_fixed_cache_overflow():
    model = build()
    cache = ch.FixedCache(model.config, 2, 6)
    model(some_ids(2, 5), cache=cache)
    with pytest.raises(ch.InputError, match="the fixed cache holds 6 tokens, has 5 and was given 2 more"):
        model(some_ids(2, 2), cache=cache)
    model(some_ids(2, 1), cache=cache)
    assert cache.length == 6


@pytest.mark.ledger("G2")
@pytest.mark.parametrize("form", ["reserved", "fixed"])
def test_room_made_beforehand_is_all_the_room(form):
    """No buffer is replaced, step after step: neither keys nor counts."""
    model, ids = build(n_kv_heads=2), some_ids(2, 16)
    cache = FORMS[form](model.config)
    with torch.no_grad():
        in_pieces(model, ids[:, :6], [5, 1], cache)
        where = [(keys.k.data_ptr(), keys.v.data_ptr()) for keys in cache.layers.values()]
        counted = cache._count.data_ptr() if form == "reserved" else cache.tokens.order.data_ptr()
        in_pieces(model, ids[:, 6:], [1] * 10, cache)
    assert [(keys.k.data_ptr(), keys.v.data_ptr()) for keys in cache.layers.values()] == where
    assert (cache._count.data_ptr() if form == "reserved" else cache.tokens.order.data_ptr()) == counted


@pytest.mark.ledger("G2")
def test_a_growing_cache_doubles():
    model, cache = build(), ch.Cache()
    replaced, last = 0, None
    with torch.no_grad():
        for token in some_ids(1, 30).T:
            model(token[None], cache=cache)
            replaced += cache.layers[0].k.data_ptr() != last
            last = cache.layers[0].k.data_ptr()
    assert replaced <= 6  # 1, 2, 4, 8, 16, 32


@pytest.mark.ledger("E3", "G2")
@every_form
def test_the_encoder_runs_once(form):
    """And cross-attention computes its keys once: later calls read them."""
    model, ids, calls = build(family="encoder-decoder"), some_ids(2, 6), []
    model.encoder.register_forward_hook(lambda *_: calls.append("encoder"))
    for block in model.decoder.blocks:
        block.cross.k.register_forward_hook(lambda *_: calls.append("keys"))
    with torch.no_grad():
        cache = FORMS[form](model.config)
        first = model(ids[:, :3], source=some_ids(2, 5), cache=cache)
        later = [model(ids[:, t : t + 1], cache=cache) for t in range(3, 6)]
    assert calls == ["encoder", "keys", "keys"]
    assert first.memory is not None
    assert all(out.memory is None for out in later)


@pytest.mark.ledger("C4", "G2")
@every_form
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_cache_holds_key_value_heads_only(form, kv_heads):
    model, ids = build(n_kv_heads=kv_heads, d_value=6, positions="rope"), some_ids()
    cache = FORMS[form](model.config)
    with torch.no_grad():
        assert worst(in_pieces(model, ids, chunks(8, 3), cache), model(ids).logits) <= TOLERANCE
    assert cache.layers[0].k.shape[1] == kv_heads
    assert cache.layers[0].v.shape[-1] == 6


@pytest.mark.ledger("B9")
@pytest.mark.parametrize("positions", ["none", "rope", "alibi", "relative"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_a_pairwise_bias_from_the_caller(positions, shape):
    """It adds to the scores of every layer, on both kernels, and in cached steps row by row."""
    model, ids, bias = build(positions=positions, n_kv_heads=2), some_ids(), torch.randn(*shape, 8, 8)
    scores = "blocks.*.attention.scores"
    with torch.no_grad():
        given = model(ids, bias=bias).logits
        with ch.edit(model, {scores: lambda x: x + bias.masked_fill(x < -1e30, 0)}):  # the formula, by hand
            assert worst(given, model(ids).logits) <= TOLERANCE
        with ch.attending(model, "eager"):
            assert worst(given, model(ids, bias=bias).logits) <= TOLERANCE
        assert worst(given, model(ids).logits) > 1e-2
        for make in (FORMS["growing"], FORMS["fixed"]):
            cache, said = make(model.config), []
            for start, stop in ((0, 3), (3, 4), (4, 8)):
                said.append(model(ids[:, start:stop], bias=bias[:, :, start:stop, :stop], cache=cache).logits)
            assert worst(torch.cat(said, 1), given) <= TOLERANCE
        forbidden = torch.zeros(1, 1, 8, 8).masked_fill(
            torch.eye(8).roll(-1, 0)[None, None] > 0, float("-inf")
        )
        # The previous token shut out, all else as before.
        assert model(ids, bias=forbidden).logits.isfinite().all()


@pytest.mark.ledger("B9")
def test_the_bias_learns():
    model, ids = build(family="encoder"), some_ids()
    bias = torch.zeros(1, 4, 8, 8, requires_grad=True)
    for kernel in ("eager", "fused"):
        with ch.attending(model, kernel):
            gradient = torch.autograd.grad(model(ids, bias=bias).logits.square().sum(), bias)[0]
        assert gradient.isfinite().all()
        assert gradient.any()


@pytest.mark.parametrize("wrong", [ch.ModelConfig(vocab_size=8), -1, 2.5], ids=type)
def test_what_is_no_number_of_tokens_is_refused_when_the_cache_is_made(wrong):
    with pytest.raises(ch.InputError, match=r"is no number of tokens: use Cache\(\)"):
        ch.Cache(wrong)
