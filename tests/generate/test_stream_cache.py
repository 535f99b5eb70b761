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
from clearhead.app import cli
from clearhead.core.positions import alibi_slopes, rope_frequencies
from clearhead.run.generate.decode import decode
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Ends, Prompts
from clearhead.variants.positions import relative_bucket
from tests.harness import build, chunks, in_pieces, some_ids, worst

TOLERANCE = 1e-5
WINDOW, SINKS = 9, 3
MODELS = {
    "rope": {"positions": "rope"},
    "rope interleaved, part": {"positions": "rope", "rope_layout": "interleaved", "rope_fraction": 0.5},
    "yarn": dict(
        positions="rope", rope_scaling=ch.RopeScaling(kind="yarn", factor=4.0, original_positions=8)
    ),
    "grouped, some layers unrotated": {"positions": "rope", "n_kv_heads": 2, "rope_skips": (1,)},
    "alibi": {"positions": "alibi"},
    "relative": {"positions": "relative"},
    "none": {"positions": "none"},
    "own windows": {"positions": "rope", "n_layers": 3, "window": (4, None, 20), "rope_local_base": 50.0},
}


def streamed(model: ch.Transformer, ids: list[int], window: int, sinks: int) -> Tensor:
    """Logits [T, V] of one row in float64: every token reads what is kept, placed at 0, 1, 2, ..."""
    weights = {name: weight.double() for name, weight in model.state_dict().items()}
    spec, said = model.main.spec, []
    H, K, E = spec.n_heads, spec.n_kv_heads, spec.d_head
    kept: list[list[tuple[Tensor, Tensor]]] = [
        [] for _ in range(spec.n_layers)
    ]  # of each layer: k, v by token

    def norm(x: Tensor, name: str) -> Tensor:
        part = model.get_submodule(name)
        return torch.nn.functional.layer_norm(
            x, x.shape, weights[f"{name}.weight"], weights[f"{name}.bias"], part.eps
        )

    def apply(x: Tensor, name: str) -> Tensor:
        return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0.0)

    def turned(x: Tensor, places: Tensor, layer: int) -> Tensor:
        """Rotate pairs of columns of each head, [heads, S, E], by the places [S] of the tokens."""
        if spec.positions != "rope" or layer in spec.rope_skips:
            return x
        local = spec.windows[layer] is not None and spec.rope_local_base is not None
        base, scaling = (spec.rope_local_base, None) if local else (spec.rope_base, spec.rope_scaling)
        start, R = torch.zeros(1, dtype=torch.float64), spec.d_rotary
        frequencies, factor = rope_frequencies(R, base, scaling, spec.max_positions, start)
        a = torch.arange(R // 2) if spec.rope_layout == "half" else torch.arange(0, R, 2)
        b = a + (R // 2 if spec.rope_layout == "half" else 1)
        angles = places[:, None] * frequencies
        pairs, out = torch.complex(x[..., a], x[..., b]) * torch.exp(1j * angles) * factor, x.clone()
        out[..., a], out[..., b] = pairs.real, pairs.imag
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
            S, places = len(numbers), torch.arange(len(numbers))
            q = turned(q[:, None], places[-1:], layer).view(K, H // K, E)
            keys, values = (
                torch.stack([kept[layer][n][part] for n in numbers], 1) for part in (0, 1)
            )  # K S E
            keys = turned(keys, places, layer)
            scores = (q @ keys.mT / math.sqrt(E)).view(H, S)
            back = torch.arange(S - 1, -1, -1)
            if spec.positions == "alibi":
                scores = scores - alibi_slopes(H)[:, None] * back
            if spec.positions == "relative":
                buckets = relative_bucket(-back, False, spec.relative_buckets, spec.relative_max_distance)
                scores = scores + weights["decoder.positions.table.weight"][buckets].T
            z = scores.softmax(-1).view(K, H // K, S) @ values
            x = x + apply(z.flatten(), f"{name}.attention.out")
            y = norm(x, f"{name}.feedforward_residual.before")
            y = torch.nn.functional.gelu(apply(y, f"{name}.feedforward.up"))
            x = x + apply(y, f"{name}.feedforward.down")
        said.append(apply(norm(x, "decoder.norm"), "head.out"))
    return torch.stack(said)


@pytest.mark.parametrize(("name", "sinks"), [*((name, SINKS) for name in MODELS), ("rope", 0), ("alibi", 0)])
def test_every_token_reads_the_first_and_the_last(name, sinks):
    """Rows alone and together, one token at a time and in pieces of any size."""
    model, ids = build(**MODELS[name]), some_ids(2, 24)
    wanted = torch.stack([streamed(model, row, WINDOW, sinks) for row in ids.tolist()]).float()
    with torch.no_grad():
        for sizes in ([1] * 24, [24], [5, 1, 1, 14, 1, 2], chunks(24, WINDOW)):
            together = in_pieces(model, ids, sizes, ch.StreamCache(model.config, WINDOW, sinks))
            assert worst(together, wanted) <= TOLERANCE
        alone = in_pieces(model, ids[1:], [5, 7, *[1] * 12], ch.StreamCache(model.config, WINDOW, sinks))
        assert worst(alone, wanted[1:]) <= TOLERANCE
        assert worst(wanted[:, :WINDOW], model(ids[:, :WINDOW]).logits) <= TOLERANCE
        assert worst(wanted, model(ids).logits) > 1e-3  # it is not what a whole text says


@pytest.mark.parametrize("name", ["rope", "alibi", "own windows"])
@pytest.mark.parametrize("piece", [1024, 8])
def test_rows_of_any_length_generate_as_if_read_token_by_token(name, piece, monkeypatch):
    """Prompts shorter than the sinks, than the window, and longer, padded together; one ends early."""
    monkeypatch.setattr("clearhead.run.generate.decode.PREFILL_CHUNK", piece)
    model, lengths = build(**MODELS[name]), (2, 20, 7, 13)
    prompts = [some_ids(1, length, seed=length)[0].tolist() for length in lengths]
    request = Request(
        max_new_tokens=11,
        overflow="stream",
        sinks=SINKS,
        stream_window=WINDOW,
        alternatives=13,
        temperature=1.5,
    )
    ends = Ends(on_token=lambda number, row: "stop" if number == 1 and len(row.ids) == 5 else None)
    rows = decode(model, request, Prompts(prompts, seeds=[1, 2, 3, 4]), ends)
    assert [len(row.ids) for row in rows] == [11, 5, 11, 11]
    for row in rows:
        wanted = streamed(model, row.prompt + row.ids[:-1], WINDOW, SINKS)[len(row.prompt) - 1 :].log_softmax(
            -1
        )
        found = torch.tensor([[value for _, value in sorted(step)] for step in row.alternatives])
        assert worst(found, wanted.float()) <= TOLERANCE


@pytest.mark.parametrize("attention", [("linear(elu)", "full"), ("dilated(3, 2)", "full"), "window(64)"])
def test_layers_of_other_kinds_stream_beside_full_ones(attention):
    """States and small windows stay as they are; a window wider than what is kept is cut by it."""
    model, ids = build(positions="rope", attention=attention, max_positions=64), some_ids(1, 1000)
    with torch.no_grad():
        one_by_one, pieces, at_once = (
            in_pieces(model, ids, sizes, ch.StreamCache(model.config, WINDOW, SINKS))
            for sizes in ([*[1] * 40, 960], chunks(1000, 50), [1000])
        )
    assert worst(one_by_one, pieces) <= TOLERANCE
    assert worst(one_by_one, at_once) <= TOLERANCE
    if attention == "window(64)":
        full = build(positions="rope", max_positions=64)
        assert worst(pieces[0, :24], streamed(full, ids[0, :24].tolist(), WINDOW, SINKS).float()) <= TOLERANCE


def test_reorder_and_padding_in_the_middle():
    """Row i goes on as row rows[i] would; padding between tokens takes no place."""
    model, ids, rows = build(**MODELS["rope"]), some_ids(3, 24), torch.tensor([2, 0, 0])
    mask = torch.ones(3, 24, dtype=torch.bool)
    mask[0, 3:5], mask[1, 11], mask[2, :13] = False, False, False
    cache = ch.StreamCache(model.config, WINDOW, SINKS)
    with torch.no_grad():
        in_pieces(model, ids[:, :16], [10, 1, 5], cache, mask=mask[:, :16])
        cache.reorder(rows)
        said = in_pieces(model, ids[:, 16:], [1, 3, 4], cache)
    for row, origin in enumerate(rows.tolist()):
        text = [*ids[origin, :16][mask[origin, :16]].tolist(), *ids[row, 16:].tolist()]
        assert worst(said[row], streamed(model, text, WINDOW, SINKS)[-8:].float()) <= TOLERANCE


def held(thing: object, seen: set[int]) -> int:
    """Bytes of all tensors that an object holds, itself or by its parts."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes()
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, tuple | list) else ()
    return sum(held(part, seen) for part in (*parts, *getattr(thing, "__dict__", {}).values()))


def test_twenty_thousand_tokens_hold_what_forty_do():
    model, ids = build(positions="rope", n_layers=1), some_ids(1, 20_000)
    cache, sizes = ch.StreamCache(model.config, WINDOW, SINKS), []
    with torch.no_grad():
        for start, stop in ((0, 40), (40, 19_900), (19_900, 20_000)):
            in_pieces(model, ids[:, start : stop - 10], chunks(stop - start - 10, 100), cache)
            said = in_pieces(model, ids[:, stop - 10 : stop], [1] * 10, cache)
            sizes.append(held(cache, set()))
    assert cache.length == 20_000
    assert sizes[0] == sizes[1] == sizes[2] >= 2 * WINDOW * 16 * 4
    # One layer: keys depend on their token alone, so a text of those that are kept says the same.
    kept = torch.cat([ids[:, :SINKS], ids[:, SINKS - WINDOW :]], 1)
    assert worst(said[:, -1], model(kept).logits[:, -1]) <= TOLERANCE


def test_a_text_that_fits_is_generated_as_ever():
    m = ch.Model(build(positions="rope"))
    for prompt in ([3], [3, 4, 5, 6]):
        plain = m.generate(prompt, 20, alternatives=3)
        kept = m.generate(prompt, 20, alternatives=3, overflow="stream", stream_window=24)
        assert kept == plain
    plain, kept = (
        m.generate([3], 20, logprobs=True, **options)
        for options in ({}, {"overflow": "stream", "stream_window": 8})
    )
    assert kept.logprobs[:8] == pytest.approx(plain.logprobs[:8], abs=TOLERANCE)
    assert kept.logprobs[8] != pytest.approx(plain.logprobs[8], abs=1e-4)


def test_a_model_streams_without_a_warning_and_without_beams_of_its_own(recwarn):
    m = ch.Model(build(positions="rope"))
    m.generation = {"num_beams": 3}
    made = m.generate(some_ids(1, 50)[0].tolist(), 10, overflow="stream")
    assert len(made.ids) == 10 and not recwarn.list


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"sinks": 4, "overflow": "refuse"}, 'sinks 4 with overflow "refuse": it belongs to'),
        ({}, {"stream_window": 9, "overflow": "slide"}, 'stream_window 9 with overflow "slide"'),
        ({}, {"sinks": -1}, "sinks -1 must be a whole number"),
        ({}, {"sinks": 8, "stream_window": 8}, "sinks 8 leave no room for the last tokens: choose 0 to 7"),
        ({}, {"stream_window": 33}, "stream_window 33 must lie between 1 and the model's 32 positions"),
        ({}, {"num_beams": 2}, 'num_beams with overflow "stream"'),
        ({}, {"lookup": 2}, 'lookup with overflow "stream"'),
        ({}, {"reuse": True}, 'reuse with overflow "stream"'),
        ({"positions": "learned"}, {}, "learned positions are added .* cannot move: use overflow=.slide"),
        ({"positions": "sinusoidal"}, {}, "sinusoidal positions are added"),
        ({"rope_scaling": ch.RopeScaling(kind="dynamic", factor=2.0)}, {}, "dynamic scaling rotates keys"),
        ({"window": 6}, {}, "sinks 4 change nothing: no layer of the model sees 32 tokens"),
        ({"attention": "strided(4)"}, {}, "attention strided.* goes by positions in the whole text"),
        (
            {"family": "encoder-decoder"},
            {},
            "streaming is for a decoder alone, and this model has an encoder",
        ),
    ],
)
def test_what_cannot_stream_is_refused_by_name(changes, options, words):
    m = ch.Model(build(**{"positions": "rope", **changes}))
    with pytest.raises(ch.InputError, match=words) as error:
        m.generate([1, 2], 5, **{"overflow": "stream", **options})
    assert "\n" not in str(error.value)


def test_a_draft_and_a_step_back_are_refused():
    model = build(positions="rope")
    m, cache = ch.Model(model), ch.StreamCache(model.config, WINDOW, SINKS)
    with pytest.raises(ch.InputError, match='draft with overflow "stream"'):
        m.generate([1, 2], 5, overflow="stream", draft=m)
    model(some_ids(2, 12), cache=cache)
    with pytest.raises(ch.InputError, match="a stream cache of 12 tokens cannot be cropped to 11"):
        cache.crop(11)
    with pytest.raises(ch.InputError, match="leave positions and documents out"):
        model(some_ids(2, 1), positions=torch.tensor([[3]]), cache=cache)
    with pytest.raises(ch.InputError, match="bias speaks of keys that a stream cache forgets"):
        model(some_ids(2, 1), bias=torch.zeros(1, 1, 1, 13), cache=cache)
    with pytest.raises(ch.InputError, match="prefix came with a cache that forgets it"):
        model(some_ids(1, 12), prefix=torch.tensor([12]), cache=ch.StreamCache(model.config, WINDOW))


def test_a_step_that_streams_is_not_compiled_and_says_so():
    m = ch.Model(build(positions="rope"))
    with pytest.warns(RuntimeWarning, match="the decode step runs uncompiled: a text that streams"):
        made = m.generate([1, 2], 20, overflow="stream", stream_window=8, compile=True)
    assert made.ids == m.generate([1, 2], 20, overflow="stream", stream_window=8).ids


def test_all_layers_may_have_windows_of_their_own():
    """Without sinks, such a model goes on as it is, in constant memory."""
    m = ch.Model(build(positions="rope", window=6))
    made = m.generate([1, 2], 40, overflow="stream", sinks=0)
    with pytest.warns(RuntimeWarning, match="texts passed"):
        assert made.ids == m.generate([1, 2], 40).ids


def test_the_command_streams(tmp_path, capsys, byte_tokenizer):
    m = ch.Model(build(positions="rope", vocab_size=256), byte_tokenizer)
    m.save(tmp_path)
    cli.main([
        *("generate", str(tmp_path), "a", "--max-new-tokens", "60", "--json"),
        *("--overflow", "stream", "--sinks", "2", "--stream-window", "12"),
    ])  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert found["ids"] == m.generate("a", 60, overflow="stream", sinks=2, stream_window=12).ids
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", str(tmp_path), "a", "--sinks", "2"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip().endswith('it belongs to overflow "stream"')
