"""Attention maps: cells of long inputs, entropy, rollout, streaming to disk, files, pictures, the command."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.app.plot import prompts as pictures
from clearhead.app.plot import save
from clearhead.core import attention as attention_module
from clearhead.core.attention import KERNELS
from clearhead.errors import InputError
from clearhead.inside.attention import attention, in_cells, query_entropy, read_maps
from tests.harness import build, pad, some_ids, split, word_tokenizer, worst

pytestmark = pytest.mark.ledger("K2")

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5]
SOURCE = [2, 7, 1, 8, 2, 8, 1]


def of_words(model: ch.Transformer) -> ch.Model:
    """A model with a tokenizer of thirteen words, some of which look like mark-up and mathematics."""
    words = split("[UNK] the [bold]cat $sat$ on a_b mat dog ran to town at ten")
    return ch.Model(model, word_tokenizer(words, "[UNK]"))


@pytest.fixture(scope="module")
def both() -> ch.Transformer:
    return build(family="encoder-decoder", n_encoder_layers=3, n_encoder_heads=2)


# What is recorded -------------------------------------------------------------------------------------------


def test_every_kind_has_its_patterns_and_labels(both: ch.Transformer) -> None:
    maps = attention(both, SOURCE, target=IDS)
    with torch.no_grad(), ch.record(both, "*.pattern") as seen:
        both(torch.tensor([IDS]), source=torch.tensor([SOURCE]))
    parts = {
        "encoder": "encoder.blocks.{}.attention",
        "self": "blocks.{}.attention",
        "cross": "blocks.{}.cross",
    }
    order = [
        ("encoder", 0),
        ("encoder", 1),
        ("encoder", 2),
        ("self", 0),
        ("cross", 0),
        ("self", 1),
        ("cross", 1),
    ]
    assert [(each.kind, each.layer) for each in maps.maps] == order
    for each in maps.maps:
        assert np.array_equal(each.pattern, seen[parts[each.kind].format(each.layer) + ".pattern"][0].numpy())
    given, written = tuple(map(str, SOURCE)), tuple(map(str, IDS))
    assert {each.kind: (each.queries.labels, each.keys.labels) for each in maps.maps} == {
        "encoder": (given, given),
        "self": (written, written),
        "cross": (written, given),
    }
    assert maps.aggregated == 1
    assert np.array_equal(maps.head("cross.1.2").pattern, maps.layer(1, "cross").pattern[2])
    assert np.array_equal(maps.head("self.1.3").pattern, maps.layer(1).pattern[3])
    assert [str(head.head) for head in maps.layer(0, "encoder").heads()] == ["encoder.0.0", "encoder.0.1"]
    assert len(maps.heads()) == 3 * 2 + 2 * 4 * 2


def test_pruned_layers_have_fewer_heads() -> None:
    model = build(pruned_heads={"blocks.1.attention": (0, 2)})
    maps = attention(model, IDS)
    assert [len(each.pattern) for each in maps.maps] == [4, 2]
    assert np.isnan(maps.entropy()[1, 2:]).all() and np.isfinite(maps.entropy()[1, :2]).all()
    assert pictures.draw_entropy(maps) and pictures.draw_model(maps)


def test_half_precision_patterns_are_float32() -> None:
    assert attention(build().bfloat16(), IDS).maps[0].pattern.dtype == np.float32


@pytest.mark.ledger("C5")
def test_only_recorded_layers_leave_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = build(n_layers=4), []

    def counting(name):
        def attend(*given, **more):
            calls.append(name)
            return KERNELS[name](*given, **more)

        return attend

    monkeypatch.setattr(attention_module, "KERNELS", {name: counting(name) for name in KERNELS})
    maps = attention(model, IDS, layers=[2])
    assert calls == ["fused", "fused", "eager", "fused"]
    assert [each.layer for each in maps.maps] == [2]


def test_dropout_is_off_and_modes_come_back() -> None:
    model = build(dropout=0.5, attention_dropout=0.5).train()
    first, second = attention(model, IDS), attention(model, IDS)
    assert np.array_equal(first.maps[1].pattern, second.maps[1].pattern)
    assert all(part.training for part in model.modules())


def test_an_edit_around_it_is_seen() -> None:
    model = build()
    with ch.edit(model, {"blocks.0.attention.pattern": lambda p: torch.full_like(p, 0.25)}):
        assert (attention(model, IDS, layers=[0]).maps[0].pattern == 0.25).all()


# Cells ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "budget", "size"), [(9, 81, 1), (9, 80, 2), (9, 9, 3), (9, 1, 9), (8, 16, 2)]
)
def test_cells_are_sums_over_keys_and_means_over_queries(length: int, budget: int, size: int) -> None:
    """Against a loop over every cell, in float64."""
    model = build(family="encoder")
    whole, maps = attention(model, IDS[:length], budget=None), attention(model, IDS[:length], budget=budget)
    assert maps.aggregated == size
    starts = range(0, length, size)
    for exact, each in zip(whole.maps, maps.maps, strict=True):
        pattern = exact.pattern.astype(np.float64)
        wanted = [
            [[head[q : q + size, k : k + size].sum(1).mean() for k in starts] for q in starts]
            for head in pattern
        ]
        assert each.pattern.shape == (4, len(starts), len(starts))
        assert each.pattern[0].size <= budget
        assert np.abs(each.pattern - wanted).max() <= 1e-6
        assert np.abs(each.pattern.sum(-1) - 1).max() <= 1e-6
        assert len(each.queries.labels) == len(each.keys.labels) == len(starts)
        assert np.abs(each.entropies() - exact.entropies()).max() <= 1e-6  # always of single tokens
    if (length, size) == (9, 2):
        assert maps.maps[0].keys.labels == ("0-1 3…", "2-3 4…", "4-5 5…", "6-7 2…", "8 5")


def test_sides_of_cross_attention_have_cells_of_their_own(both: ch.Transformer) -> None:
    maps = attention(both, SOURCE * 4, target=IDS[:3], budget=30)
    sizes = {each.kind: (each.queries.size, each.keys.size, each.pattern.shape[1:]) for each in maps.maps}
    assert sizes == {"encoder": (6, 6, (5, 5)), "self": (1, 1, (3, 3)), "cross": (1, 6, (3, 5))}
    assert np.abs(maps.layer(0, "cross").pattern.sum(-1) - 1).max() <= 1e-6


def test_cells_of_uneven_sides() -> None:
    pattern = torch.rand(2, 7, 5, dtype=torch.float32)
    small = in_cells(pattern, 3, 2)
    assert small.shape == (2, 3, 3)
    assert worst(small[:, 2, 2], pattern[:, 6, 4]) == 0
    assert worst(small[:, 0, 1], pattern[:, :3, 2:4].sum(-1).mean(-1)) <= 1e-6


# Entropy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_entropy_is_that_of_a_loop(family: str) -> None:
    maps = attention(build(family=family), IDS)
    for row, each in zip(maps.entropy(), maps.maps, strict=True):
        for bits, head in zip(row, each.heads(), strict=True):
            wanted = [
                -sum(p * math.log2(p) for p in map(float, weights) if p > 0) for weights in head.pattern
            ]
            assert np.abs(head.entropies - wanted).max() <= 1e-5
            assert abs(bits - sum(wanted) / len(wanted)) <= 1e-5
            assert abs(head.entropy - bits) <= 1e-6


@pytest.mark.parametrize("side", ["left", "right", "gaps"])
def test_padding_has_no_part_in_entropy(side: str) -> None:
    model, ids = build(family="encoder"), some_ids(2)
    padded, mask = pad(ids, side)
    with torch.no_grad():
        with ch.record(model, "*.pattern") as plain:
            model(ids)
        with ch.record(model, "*.pattern") as among:
            model(padded, mask)
    for name in plain:
        bits = query_entropy(among[name], mask[:, None])
        assert bits.isnan().any()
        assert worst(bits.nanmean(-1), query_entropy(plain[name]).mean(-1)) <= 1e-5
    nothing = query_entropy(torch.tensor([[0.0, 0.0], [0.5, 0.5]]))
    assert nothing[0].isnan() and nothing[1] == 1


def test_the_strongest_link_is_one_of_choice() -> None:
    """The first token of a decoder gives itself all: that is no finding."""
    for head in attention(build(), IDS).heads():
        best = max((float(w), q, k) for q, row in enumerate(head.pattern) for k, w in enumerate(row) if q > 0)
        link = head.strongest
        assert (link.weight, link.query, link.key) == best
        assert (link.query_label, link.key_label) == (str(IDS[link.query]), str(IDS[link.key]))
    assert attention(build(), IDS[:1]).head("0.0").strongest.weight == 1


# Rollout ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [0.5, 0.0, 0.8])
def test_rollout_is_that_of_a_loop(both: ch.Transformer, residual: float) -> None:
    maps = attention(both, SOURCE, target=IDS)
    for kind in ("self", "encoder"):
        rollout, flow = maps.rollout(kind, residual), None
        for each, after in zip(maps.of(kind), rollout.flow, strict=True):
            n = each.pattern.shape[-1]
            mean = sum(head.astype(np.float64) for head in each.pattern) / len(each.pattern)
            mixed = [[(1 - residual) * mean[i, j] + residual * (i == j) for j in range(n)] for i in range(n)]
            mixed = [[value / sum(row) for value in row] for row in mixed]
            before = flow or np.eye(n)
            flow = [[sum(mixed[i][k] * before[k][j] for k in range(n)) for j in range(n)] for i in range(n)]
            assert np.abs(after - flow).max() <= 1e-6
            assert np.abs(after.sum(-1) - 1).max() <= 1e-5
        assert np.array_equal(rollout.last, rollout.flow[-1])
        assert rollout.tokens.labels == tuple(map(str, IDS if kind == "self" else SOURCE))


def test_rollout_says_what_it_cannot_follow(both: ch.Transformer) -> None:
    maps = attention(both, SOURCE, target=IDS)
    with pytest.raises(InputError, match="cross-attention joins two"):
        maps.rollout("cross")
    with pytest.raises(InputError, match="residual 2 must be"):
        maps.rollout(residual=2)
    with pytest.raises(InputError, match="record all layers"):
        attention(build(), IDS, layers=[1]).rollout()


# Disk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 9])
def test_streamed_patterns_are_the_same_and_come_back(both, tmp_path, budget):
    plain = attention(both, SOURCE, IDS, budget=budget)
    streamed = attention(both, SOURCE, IDS, budget=budget, to=tmp_path / "a" / "b")
    for again in (streamed, read_maps(tmp_path / "a" / "b")):
        assert [(each.kind, each.layer, each.queries, each.keys) for each in again.maps] == [
            (each.kind, each.layer, each.queries, each.keys) for each in plain.maps
        ]
        for mine, wanted in zip(again.maps, plain.maps):
            assert isinstance(mine.pattern, np.memmap)
            assert np.array_equal(mine.pattern, wanted.pattern)
            assert np.array_equal(mine.entropies(), wanted.entropies())
        assert np.array_equal(again.rollout().last, plain.rollout().last)
    with pytest.raises(InputError, match="is not empty"):
        attention(both, SOURCE, IDS, to=tmp_path / "a" / "b")


@pytest.mark.parametrize("way", ["streamed", "in cells"])
def test_memory_holds_one_whole_pattern_at_a_time(tmp_path: Path, way: str) -> None:
    model, alive = build(n_layers=5), []
    most = []

    def watch(pattern: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(pattern.untyped_storage()))
        most.append(sum(one() is not None for one in alive))
        return pattern

    options = {"to": tmp_path / "maps"} if way == "streamed" else {"budget": 20}
    with ch.edit(model, {"blocks.*.attention.pattern": watch}):
        attention(model, IDS, **options)
        assert most == [1] * 5
        kept = attention(model, IDS)
    assert most[5:] == [1, 2, 3, 4, 5] and len(kept.maps) == 5  # what is watched can fail


def test_files_hold_every_number(both: ch.Transformer, tmp_path: Path) -> None:
    maps = attention(both, SOURCE, IDS, budget=9)
    body = json.loads(maps.save(tmp_path / "new" / "maps.json").read_text())
    assert body["aggregated"] == maps.aggregated == 3
    arrays = np.load(maps.save(tmp_path / "maps.npz"))
    for each, found in zip(maps.maps, body["maps"], strict=True):
        at = f"{each.kind}.{each.layer}"
        assert np.array_equal(np.array(found["pattern"], dtype=np.float32), each.pattern)
        assert np.array_equal(arrays[f"{at}.pattern"], each.pattern)
        assert np.array_equal(arrays[f"{at}.entropies"], each.entropies())
        assert tuple(arrays[f"{at}.keys"]) == each.keys.labels == tuple(found["keys"]["labels"])
        assert np.allclose(found["entropies"], each.entropies(), atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["maps.npz", "new"]
    with pytest.raises(InputError, match=r"end the name in \.json or \.npz"):
        maps.save(tmp_path / "maps.csv")


# Mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kinds": ["cross"]}, 'no attention of the kind "cross": this model has self'),
        ({"layers": [2]}, "there is no layer 2: layers are 0 to 1"),
        ({"layers": []}, "name at least one kind and one layer"),
        ({"budget": 0}, "budget 0 must be 1 cell or more"),
    ],
)
def test_mistakes_have_one_line(options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        attention(build(), IDS, **options)


def test_what_was_not_recorded_is_named() -> None:
    maps = attention(build(), IDS, layers=[1])
    for name in ("0.1", "1.4", "x"):
        with pytest.raises(InputError, match=f'head "{name}" was not recorded'):
            maps.head(name)
    with pytest.raises(InputError, match="layer 0 of self attention was not recorded: there is 1"):
        maps.layer(0)
    with pytest.raises(InputError, match='no attention of the kind "cross" was recorded'):
        maps.entropy("cross")


# Pictures ---------------------------------------------------------------------------------------------------


def labels_of(ticks: list) -> list[str]:
    return [tick.get_text() for tick in ticks]


def test_pictures_have_labels_and_a_named_scale(both: ch.Transformer, tmp_path: Path) -> None:
    maps = attention(both, SOURCE, IDS)
    one, layer = pictures.draw_head(maps.head("cross.1.2")), pictures.draw_layer(maps.layer(1, "cross"))
    model, entropy = pictures.draw_model(maps, "cross"), pictures.draw_entropy(maps, "encoder")
    rollout = pictures.draw_rollout(maps.rollout())
    assert labels_of(one.axes[0].get_yticklabels()) == list(map(str, IDS))
    assert labels_of(one.axes[0].get_xticklabels()) == list(map(str, SOURCE))
    assert "cross.1.2" in one.axes[0].get_title()
    assert [axes.get_title() for axes in layer.axes[:4]] == [f"head cross.1.{number}" for number in range(4)]
    assert labels_of(model.axes[0].get_yticklabels()) == ["0", "1"]
    assert labels_of(model.axes[0].get_xticklabels()) == ["0", "1", "2", "3"]
    assert sorted(text.get_text() for text in entropy.axes[0].texts) == sorted(
        f"{bits:.2f}" for bits in maps.entropy("encoder").flat
    )
    scales = {
        "attention weight (root scale)": [one, layer, model],
        "entropy in bits, mean over queries": [entropy],
    }
    scales["share of the token (root scale)"] = [rollout]
    for name, figures in scales.items():
        assert all(figure.axes[-1].get_ylabel() == name for figure in figures)
    assert all(axes.images[0].get_clim() == (0, 1) for axes in (one.axes[0], *layer.axes[:4], model.axes[0]))
    for number, figure in enumerate((one, layer, model, entropy, rollout)):
        save(figure, tmp_path / f"{number}.svg")
    picture = model.axes[0].images[0].get_array()
    # Second row, third column.
    assert np.array_equal(picture[10:19, 16:23], maps.layer(1, "cross").pattern[2])


# The command ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model")
    of_words(build()).save(where)
    return where


TEXT = "the [bold]cat $sat$ on a_b mat"


def test_the_command_prints_a_table(folder: Path, clearhead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    said = clearhead("attention", folder, TEXT).out
    maps = attention(ch.load(folder), TEXT)
    for head in maps.heads():
        assert any(
            str(head.head) in line and f"{head.entropy:.2f}" in line and head.strongest.key_label in line
            for line in said.splitlines()
        )
    said = clearhead("attention", folder, TEXT, "--rollout").out
    for place, shares in enumerate(maps.rollout().last):
        token = int(shares.argmax())
        labels = maps.maps[0].keys.labels
        parts = (f"{place} {labels[place]} ", f"{token} {labels[token]} {shares[token]:.3f}")
        assert any(all(part in line for part in parts) for line in said.splitlines())


def test_the_command_writes_json_and_files(folder: Path, tmp_path: Path, clearhead) -> None:
    maps = attention(ch.load(folder), TEXT)
    files = f"--plot {tmp_path}/h.png --output {tmp_path}/h.npz"
    body = clearhead("attention", folder, TEXT, f"--head 1.2 --json {files}").json
    assert [head["head"] for head in body["heads"]] == ["1.2"]
    # Layer 0 is fused here.
    assert np.abs(np.array(body["heads"][0]["pattern"]) - maps.head("1.2").pattern).max() <= 1e-6
    assert body["plot"].endswith("h.png") and (tmp_path / "h.png").stat().st_size > 5000
    names = {f"self.1.{name}" for name in ("pattern", "entropies", "queries", "keys")}
    assert set(np.load(tmp_path / "h.npz")) == {"aggregated", *names}
    flow = clearhead("attention", folder, TEXT, "--rollout --json").json["rollout"]["flow"]
    assert np.allclose(flow[-1], maps.rollout().last, atol=1e-6)
    for number, view in enumerate(("--layer 1", "--rollout", "--entropy", "--json")):
        assert clearhead("attention", folder, TEXT, f"{view} --plot {tmp_path}/{number}.svg").code == 0
    assert len(list(tmp_path.glob("*.svg"))) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([""], "the text is empty"),
        (["the cat", "--head", "7.1"], 'no head "7.1"'),
        (["the cat", "--head", "cross.1.1"], 'no head "cross.1.1"'),
        (["the cat", "--kind", "cross"], 'no attention of the kind "cross"'),
        (["the cat", "--head", "1.1", "--layer", "1"], "choose one"),
        (["the cat", "--output", "x.csv"], "end the name in .json or .npz"),
        (["the cat", "--plot", "x.gif"], "use .png, .svg, .pdf"),
        (["the cat", "--target", "the dog"], "target is for a model with an encoder and a decoder"),
    ],
)
def test_mistakes_of_the_command(folder: Path, arguments: list[str], said: str, clearhead) -> None:
    clearhead.refuses(said, "attention", folder, *arguments)
