"""Circuits: cut edges equal a plain pass with a stream for each reader; estimates, pruning, paths, files."""

from __future__ import annotations

import json
import math

import pytest
import torch

import clearhead as ch
from clearhead.app.cli import main
from clearhead.app.plot.prompts import draw_circuit
from clearhead.inside.circuit import (
    METHODS,
    Circuit,
    PromptPair,
    _moved,
    _split_parts,
    circuit,
    connected,
    exact_scores,
    path_patch,
)
from clearhead.inside.edges import Cut, EdgeGraph, cut_model, runs_of
from clearhead.inside.inputs import choices_of, prepare
from clearhead.variants.contexts import record
from tests.harness import build as built
from tests.harness import byte_tokenizer, some_ids
from tests.inside.test_patch import CLEAN, CORRUPT, MODELS, prompts

pytestmark = pytest.mark.ledger("T4")
LAYOUTS = ("pre", "post", "sandwich", "output")


def build(**changes) -> ch.Transformer:
    """A micro model in float64."""
    return built(**changes).double().eval()


def plain(model: ch.Transformer, ids, cut: set[tuple[str, str]], values) -> tuple[torch.Tensor, dict]:
    """Run a decoder with learned positions; each reader has a stream summed up from the start."""
    spec, written = model.config.decoder, []  # (writer, residual or None, output)

    def stream(reader: str, upto: int) -> torch.Tensor:
        """What a reader sees of the first writers, grouped by the sublayer that adds them."""
        x, waiting = None, []
        for number, (name, joins, y) in enumerate(written[:upto]):
            waiting.append(values[name] if (name, reader) in cut else y)
            if number + 1 < upto and written[number + 1][1] is joins and joins is not None:
                continue
            total = sum(waiting)
            x, waiting = total if joins is None else joins.add(x, total), []
        return x

    def project(linear, joins, number: int, reader: str, upto: int) -> torch.Tensor:
        """One head's queries, keys or values."""
        rows = slice(number * spec.d_head, (number + 1) * spec.d_head)
        x = joins.norm_input(stream(reader, upto))
        return x @ linear.weight[rows].T + (0 if linear.bias is None else linear.bias[rows])

    places = model.decoder.positions.embed(torch.arange(len(ids))[None], torch.float64)
    front = model.decoder.embedding.front.tokens(ids) + places[0]
    written.append(("embedding", None, front))
    mask = torch.ones(len(ids), len(ids)).tril().bool()
    for layer, block in enumerate(model.decoder.layers()):
        attention, joins, width = block.attention, block.attention_residual, spec.d_head
        count, heads = len(written), []
        for head in range(spec.n_heads):
            group = head * spec.n_kv_heads // spec.n_heads
            first = group * (spec.n_heads // spec.n_kv_heads)
            last = first + spec.n_heads // spec.n_kv_heads - 1
            shared = f"{layer}.{first}" if first == last else f"{layer}.{first}-{last}"

            q = project(attention.q, joins, head, f"{layer}.{head}.q", count)
            k = project(attention.k, joins, group, f"{shared}.k", count)
            v = project(attention.v, joins, group, f"{shared}.v", count)
            pattern = (q @ k.T / math.sqrt(width)).masked_fill(~mask, -math.inf).softmax(-1)
            out = attention.out.weight[:, head * width : (head + 1) * width]
            heads.append((f"{layer}.{head}", joins, pattern @ v @ out.T))
        written += heads
        if attention.out.bias is not None:
            written.append(("bias", joins, attention.out.bias.expand_as(front)))
        joins = block.feedforward_residual
        y = block.feedforward(joins.norm_input(stream(f"feedforward:{layer}", len(written))))
        written.append((f"feedforward:{layer}", joins, y))
    x = stream("logits", len(written))
    x = x if model.decoder.norm is None else model.decoder.norm(x)
    return model.head(x[None], None)[0], {name: y for name, _, y in written}


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_cut_edges_equal_a_plain_pass_with_a_stream_for_each_reader(layout):
    """Any set of edges, in every residual layout, to 1e-10 in float64."""
    model = build(norm_position=layout, n_kv_heads=2)
    graph, (ids, other) = EdgeGraph.of(model), (torch.tensor(row) for row in (CLEAN, CORRUPT))
    _, values = plain(model, other, set(), {})
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        mask = graph.valid & (torch.rand(graph.valid.shape, generator=generator) < seed / 4)
        edges = {(graph.writers[column], graph.readers[row].name) for row, column in mask.nonzero().tolist()}
        wanted, _ = plain(model, ids, edges, values)
        cut = Cut(mask[None], {name: y[None] for name, y in values.items()})
        assert (cut_model(model, graph, cut)(ids[None]).logits[0] - wanted).abs().max() < 1e-10
        assert len(edges) == int(mask.sum())


ODD = {
    "latent": {"attention": "latent", "positions": "rope", "rope_fraction": 0.5},
    "mamba2": {"attention": ("mamba2", "full"), "positions": "rope"},
    "half blocks": {"attention": ("none", "full", "full"), "feedforward_skips": (1,), "n_layers": 3},
    "gated, capped": {"attention_gate": True, "attention_softcap": 2.0, "gated": True, "gated_clamp": 0.3},
    "linear": {"attention": "linear", "tie_embeddings": True, "embedding_scale": 4.0},
    "both, post-norm, alibi": {"family": "encoder-decoder", "positions": "alibi", "norm_position": "post"},
}


@pytest.mark.parametrize("name", [*MODELS, *ODD])
def test_no_cut_is_the_model_and_all_cuts_the_corrupt_run(name):
    model = build(**{**MODELS, **ODD}[name])
    clean, corrupt, more = prompts(model.config)
    found = circuit(model, clean, corrupt, method="eap", draws=1, answer=0, wrong=1, **more)
    scores = [circuit_scores(model, prompt, more) for prompt in (clean, corrupt)]
    assert [found.full, found.empty] == pytest.approx(scores, abs=1e-9)
    last = found.curve[-1]
    assert (last.edges, last.faithfulness, last.completeness, last.random) == (
        found.n_edges, *(pytest.approx(1, abs=1e-9),) * 3
    )  # fmt: skip


def circuit_scores(model, prompt, more) -> float:
    """The difference of the first two choices, at the last column."""
    prepared = prepare(model, prompt, **more)
    scores = choices_of(prepared).scores(prepared.record()[0].logits)[0, -1]
    return float(scores[0] - scores[1])


def test_a_slope_is_what_a_small_cut_costs():
    """EAP is the derivative of exact patching, and EAP-IG adds up to the difference of the metric."""
    model = build(n_layers=2, n_kv_heads=2)
    (run,) = runs_of(ch.Model(model), [PromptPair(CLEAN, CORRUPT, 0, 1)], "logit", "resample", -1)
    eap, small = METHODS["eap"](run, 1), 1e-6
    base = run.measure(Cut())
    for row, column in run.graph.valid.nonzero()[::9].tolist():
        mask = torch.zeros(1, *run.graph.valid.shape, dtype=torch.float64)
        mask[0, row, column] = small
        slope = ((base - run.measure(Cut(mask, run.values))) / small).detach()
        assert float(slope) == pytest.approx(float(eap[row, column]), abs=1e-4)
    starts = [name.endswith("embedding") for name in run.graph.writers]
    whole = METHODS["eap-ig"](run, 40)[:, starts].sum()
    full, empty = run.measure_rows(torch.stack([torch.zeros_like(run.graph.valid), run.graph.valid])).tolist()
    assert float(whole) == pytest.approx(full - empty, rel=1e-4)


def test_eap_ig_is_the_mean_of_small_cuts_on_the_way_of_the_input():
    """Each point again in a plain pass: the embedding is moved for all readers, and one edge a little."""
    model, small = build(n_layers=2, n_kv_heads=2), 1e-6
    ids, other = (torch.tensor(row) for row in (CLEAN, CORRUPT))
    (run,) = runs_of(ch.Model(model), [PromptPair(CLEAN, CORRUPT, 0, 1)], "logit", "resample", -1)
    scores, graph = METHODS["eap-ig"](run, 3), run.graph
    with torch.no_grad():
        clean, corrupt = (plain(model, row, set(), {})[1] for row in (ids, other))
        change = {name: corrupt[name] - clean[name] for name in clean}
        starts = {("embedding", reader.name) for reader in graph.readers}
        edges = graph.valid.nonzero()
        for row, column in edges[edges[:, 1] > 0][::9].tolist():
            writer, mean = graph.writers[column], 0.0
            for share, weight in zip((0.5 - 0.15**0.5, 0.5, 0.5 + 0.15**0.5), (5 / 18, 8 / 18, 5 / 18)):
                values = {"embedding": clean["embedding"] + share * change["embedding"]}
                before, outputs = plain(model, ids, starts, values)
                values[writer] = outputs[writer] + small * change[writer]
                after, _ = plain(model, ids, starts | {(writer, graph.readers[row].name)}, values)
                lost = (before - after)[-1, :2] / small
                mean += weight * float(lost[0] - lost[1])
            assert float(scores[row, column]) == pytest.approx(mean, abs=1e-5), graph.edge(row, column)


def test_corrections_of_atp_are_what_heads_mix_when_one_edge_is_cut():
    model = build(n_kv_heads=2)
    (run,) = runs_of(ch.Model(model), [PromptPair(CLEAN, CORRUPT, 0, 1)], "logit", "resample", -1)
    graph, moved = run.graph, _moved(run, _split_parts(model), "k")
    row = [reader.name for reader in graph.readers].index("1.2-3.k")
    column = graph.writers.index("0.1")
    mask = torch.zeros(1, *graph.valid.shape)
    mask[0, row, column] = 1
    cut = cut_model(model, graph, Cut(mask, run.values))
    with (
        torch.no_grad(),
        record(model, "blocks.1.attention.z") as clean,
        record(cut, "blocks.1.attention.z") as seen,
    ):
        model(torch.tensor([CLEAN])), cut(torch.tensor([CLEAN]))
    change = seen["blocks.1.attention.z"] - clean["blocks.1.attention.z"]
    assert change[:, 2:].abs().max() > 1e-4 and not change[:, :2].abs().max() > 1e-12
    assert (moved["blocks.1.attention"][column, 2:] - change[0, 2:]).abs().max() < 1e-12


def test_acdc_in_one_pass_is_acdc_edge_by_edge(monkeypatch):
    model = build(n_layers=1)
    many = circuit(model, CLEAN, CORRUPT, method="acdc", metric="kl", draws=0)
    monkeypatch.setattr("clearhead.inside.circuit.TRIED", 1)
    alone = circuit(model, CLEAN, CORRUPT, method="acdc", metric="kl", draws=0)
    assert torch.equal(alone.scores.abs() > 1e-12, many.scores.abs() > 1e-12)
    assert [*map(str, alone.edges)] == [*map(str, many.edges)]
    assert (alone.scores - many.scores).abs().max() < 1e-9
    assert 0 < len(many.edges) < many.n_edges


@pytest.mark.parametrize("path", ["0.1 -> 1.3.q -> logits", "embedding -> 0.2 -> feedforward:0 -> logits"])
@pytest.mark.ledger("T5")
def test_a_path_is_patched_hop_by_hop(path):
    """Each hop by the plain pass: what its reader gives then is all that the next reader sees of it."""
    model = build()
    ids, other = (torch.tensor(row) for row in (CLEAN, CORRUPT))
    values = plain(model, other, set(), {})[1]
    first, *stops = path.split(" -> ")
    for stop in stops:
        names = [f"{stop}.{role}" for role in "qkv"] if stop == "0.2" else [stop]
        logits, given = plain(model, ids, {(first, name) for name in names}, values)
        first = stop.removesuffix(".q")
        values = given
    found = path_patch(model, CLEAN, CORRUPT, path, 3, 5)
    logits = logits.detach()
    assert found.patched == pytest.approx(float(logits[-1, 3] - logits[-1, 5]), abs=1e-9)
    assert found.patched != pytest.approx(found.clean, abs=1e-6)


def test_the_path_of_one_edge_is_that_edge():
    model = build(family="encoder-decoder")
    more = {"target": some_ids(1, 4, seed=3)[0].tolist()}
    exact = circuit(model, CLEAN, CORRUPT, 3, 5, method="exact", draws=0, **more)
    edge = path_patch(model, CLEAN, CORRUPT, "cross.0.1 -> logits", 3, 5, **more)
    row = [reader.name for reader in exact.graph.readers].index("logits")
    score = exact.scores[row, exact.graph.writers.index("cross.0.1")]
    assert edge.clean - edge.patched == pytest.approx(float(score), abs=1e-9)


def test_a_saved_circuit_is_applied(tmp_path):
    """The model of its edges says what was measured; with ablation zero it generates through a cache."""
    m = ch.Model(build(positions="rope"))
    found = circuit(m, CLEAN, CORRUPT, edges=40, draws=0)
    found.save(tmp_path / "circuit.json")
    loaded = Circuit.load(tmp_path / "circuit.json")
    assert loaded.edges == found.edges and loaded.to_dict() == found.to_dict()
    good, bad = (int(pair) for pair in found.prompts[0][2:4])
    with torch.no_grad():
        logits = loaded.apply(m).model(torch.tensor([CLEAN])).logits[0, -1]
    value = (float(logits[good] - logits[bad]) - found.empty) / (found.full - found.empty)
    assert value == pytest.approx(found.faithfulness, abs=1e-9)
    with pytest.raises(ch.InputError, match="ablation zero or mean"), torch.no_grad():
        loaded.apply(m).model(torch.tensor([[1, 2, 3]]))

    cut = circuit(m, CLEAN, CORRUPT, edges=60, ablation="zero", draws=0).apply(m)
    ids = list(CLEAN)
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(cut.model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert list(cut.generate(CLEAN, 5).ids) == ids[len(CLEAN) :]


@pytest.mark.parametrize(
    ("metric", "kept"), [("logit", (True, True)), ("probability", (True, False)), ("kl", (False, False))]
)
def test_prompts_of_a_circuit_can_be_given_again(metric, kept):
    """They have the answers that the metric reads, and no others."""
    m, options = ch.Model(build()), {"metric": metric, "method": "exact", "edges": 20, "draws": 0}
    found = circuit(m, CLEAN, CORRUPT, **options)
    (pair,) = found.prompts
    assert (pair.answer is not None, pair.wrong is not None) == kept
    again = circuit(m, prompts=found.prompts, **options)
    assert again.to_dict() == found.to_dict()


def test_a_circuit_has_no_loose_ends():
    graph = EdgeGraph.of(build(n_layers=1))
    names = [reader.name for reader in graph.readers]

    def place(writer, reader):
        return names.index(reader) * len(graph.writers) + graph.writers.index(writer)

    wanted = [place("embedding", "0.1.v"), place("0.1", "logits")]
    loose = [place("embedding", "0.2.q"), place("feedforward:0", "logits")]
    kept = connected(graph, torch.tensor([*loose, *wanted]), 4)
    assert sorted(kept.flatten().nonzero()[:, 0].tolist()) == sorted(wanted)


def test_the_command(tmp_path, capsys):
    tokenizer = byte_tokenizer()
    m = ch.Model(built(vocab_size=tokenizer.get_vocab_size()), tokenizer)
    m.save(tmp_path / "m")
    (tmp_path / "pairs.tsv").write_text("clean\tcorrupt\nabcd\tabed\nbbcd\tbbed\n")
    args = ["circuit", str(tmp_path / "m")]
    main([*args, "--prompts", str(tmp_path / "pairs.tsv"), "--json", "--save", str(tmp_path / "c.json")])
    body = json.loads(capsys.readouterr().out)
    assert len(body["prompts"]) == 2 and body["edges"][0].keys() == {"writer", "reader", "score"}
    assert json.loads((tmp_path / "c.json").read_text()) == body
    main([*args, "abcd", "abed", "--edges", "10", "--plot", str(tmp_path / "c.svg")])
    assert "of 110 edges, by eap-ig" in capsys.readouterr().out and (tmp_path / "c.svg").stat().st_size
    main([*args, "abcd", "abed", "--edges", "10", "--metric", "kl"])
    assert "by eap-ig: all answers" in capsys.readouterr().out
    main([*args, "abcd", "abed", "--path", "0.1 -> logits"])
    assert "of the way" in capsys.readouterr().out
    assert draw_circuit(Circuit.load(tmp_path / "c.json")).axes
    for more, wanted in {
        ("abcd", "abed", "--path", "0.1 -> 0.0.q"): "name parts in their order",
        ("abcd", "abed", "--path", "9.1 -> logits"): 'part "9.1" is not known',
    }.items():
        with pytest.raises(SystemExit):
            main([*args, *more])
        assert wanted in capsys.readouterr().err


def test_routers_are_refused():
    with pytest.raises(ch.InputError, match="router"):
        EdgeGraph.of(built(depth_capacity=0.5))


def test_exact_scores_of_some_edges_leave_others_open():
    (run,) = runs_of(ch.Model(build()), [PromptPair(CLEAN, CORRUPT, 0, 1)], "probability", "mean", -1)
    scores = exact_scores([run], run.graph.valid.nonzero()[:3])
    assert int(scores.isfinite()[run.graph.valid].sum()) == 3
