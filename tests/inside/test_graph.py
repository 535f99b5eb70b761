"""Attribution graphs and scores: sums, and every node and edge by an intervention, for all three families."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import clearhead as ch
from clearhead.app.plot.prompts import draw_graph
from clearhead.inside.attribution import looks
from clearhead.inside.edges import Cut, EdgeGraph, cut_model
from clearhead.inside.features.dictionary import Dictionary
from clearhead.inside.graph import _Site, without_edges
from clearhead.inside.held import CutPass, exact_copy, holding
from clearhead.inside.inputs import prepare
from clearhead.inside.logit_attribution import LogitQuery
from clearhead.inside.names import part_of
from tests.harness import build
from tests.inside.test_lens import HEADS, IDS, PLACES, inputs

CASES = {
    **{f"decoder, {place}": changes for place, changes in PLACES.items()},
    "encoder": {"family": "encoder", "norm_position": "post"},
    "both": {"family": "encoder-decoder"},
    "rope, sink": {"positions": "rope", "attention_sink": True, "n_kv_heads": 2, "qk_norm": "head"},
    "gate": {"attention_gate": True, "gated": True, "positions": "alibi", "attention_softcap": 2.0},
    "half blocks": {"attention": ("none", "full", "full"), "feedforward_skips": (1,), "n_layers": 3},
    "attention alone": {"feedforward_skips": (0, 1)},
    "latent": {"attention": "latent", "positions": "rope", "rope_fraction": 0.5},
    "tied, scaled, capped": {
        "tie_embeddings": True,
        "embedding_scale": 4.0,
        "norm": "rmsnorm",
        "norm_unit_offset": True,
        "norm_position": "sandwich",
        "gated": True,
        "attention_softcap": 3.0,
        "logit_softcap": 2.0,
    },
    "both, biases by distance": {"family": "encoder-decoder", "positions": "relative", "norm": "rmsnorm"},
    "both, post-norm, alibi": {"family": "encoder-decoder", "positions": "alibi", "norm_position": "post"},
    **{name: HEADS[name] for name in ("classifier, mean", "span", "image", "shared layers", "pruned")},
}


@pytest.mark.ledger("T3")
@pytest.mark.parametrize("name", CASES)
def test_every_edge_by_an_intervention(name):
    """Without a node, what its targets read changes by the edge, and the logit by its value."""
    model = build(**CASES[name])
    given, more = inputs(model.config)
    for scores in (False, True):
        found = ch.graph(model, given, 0, **more, scores=scores, verify=True, nodes=30)
        assert found.difference is not None and found.difference < 1e-10
        assert len(found.edges) > 5 and (len({edge.kind for edge in found.edges}) == 3) == scores
        for node in found.nodes:
            into = sum(edge.value for edge in found.edges if edge.target == node.id and edge.kind == "value")
            if node.kind not in ("embedding", "error") and (not scores or node.kind == "logit"):
                assert node.value == pytest.approx(into + node.others + node.bias, abs=1e-10)


@pytest.mark.ledger("T3")
@pytest.mark.parametrize(
    "name", ["decoder, pre", "decoder, sandwich", "encoder", "both", "rope, sink", "image"]
)
def test_without_an_edge_as_a_model_whose_parts_have_streams_of_their_own(name):
    """What the target gives without the edge, by `cut_model`; the model then adds that in its place."""
    model = build(**{**CASES[name], "n_layers": 3}).double()
    given, more = inputs(model.config)
    if isinstance(given, torch.Tensor):
        given = given.double() if given.is_floating_point() else given
    found = ch.graph(model, given, 0, **more, scores=True, nodes=40)
    parts, tested = EdgeGraph.of(model), []
    for kind in ("value", "key", "query"):
        tested += [edge for edge in found.edges if edge.kind == kind and edge.target != "logit"][:4]
    tested += [edge for edge in found.edges if edge.target == "logit"][:2]
    effects = without_edges(model, given, tested, 0, **more)
    prepared, cut = prepare(model, given, **more), CutPass.of(prepare(model, given, **more))
    query = LogitQuery.of(prepared.m, prepared, 0, -1, parts=False)

    def name_of(node):
        return node.rpartition("@")[0].replace("feedforward ", "feedforward:")

    def logit(run):
        hidden = run.hidden.detach()
        return float(query.difference(query.choices.column_scores(hidden, query.column)[0]).detach())

    for edge, effect in zip(tested, effects):
        site = _Site.of(edge.source)
        lost = {writer: torch.zeros(1, 1, model.config.d_model).double() for writer in parts.writers}
        length = cut.leaves[site.tap].shape[1]
        lost[name_of(edge.source)] = torch.zeros(1, length, model.config.d_model).double()
        lost[name_of(edge.source)][0, site.position] = -site.added(cut, cut[site.shows][0].detach())
        read = "logits" if edge.target == "logit" else name_of(edge.target)
        read += f".{edge.kind[0]}" if ":" not in read and read != "logits" else ""
        _, (stop,) = parts.find(f"{name_of(edge.source)} -> {read}")
        mask = torch.zeros(1, *parts.valid.shape).double()
        mask[0, stop.readers, parts.writers.index(name_of(edge.source))] = 1
        plain, seen = {}, {}
        with torch.no_grad():
            cut_model(model, parts, Cut(seen=plain))(**prepared.arguments, logits="none")
            run = cut_model(model, parts, Cut(mask, changes=lost, seen=seen))(
                **prepared.arguments, logits="none"
            )
            if edge.target != "logit":
                own, at = name_of(edge.target), _Site.of(edge.target)
                change = (seen[own] - plain[own])[0, at.position]

                def moved(x, at=at, change=change):
                    x = x.clone()
                    x[0, at.position] += change
                    return x

                with ch.edit(model, {at.tap: moved}):
                    run = model(**prepared.arguments, logits="none")
        assert effect.change == pytest.approx(logit(run) - query.output_logit, abs=1e-9)
        assert (edge.source, edge.target, edge.kind) == (effect.source, effect.target, effect.kind)
    exact = ch.graph(model, given, 0, **more, nodes=20).edges[:20]
    held = [effect.held for effect in without_edges(model, given, exact, 0, **more)]
    assert held == pytest.approx([-edge.value for edge in exact], abs=1e-9)
    assert max(abs(effect.change) for effect in effects) > 1e-3


@pytest.mark.ledger("T3")
@pytest.mark.parametrize("name", ["decoder, sandwich", "encoder", "both", "gate"])
def test_biases_are_what_is_left_when_nothing_is_added(name):
    """With all nodes kept, edges and the bias are all there is; the bias: a pass without any node."""
    model = build(**{"bias": True, **CASES[name]}) if name == "decoder, sandwich" else build(**CASES[name])
    with torch.no_grad():
        for weight in (w for key, w in model.named_parameters() if key.endswith("bias")):
            weight.normal_()
    given, more = inputs(model.config)
    found = ch.graph(model, given, 0, **more, node_share=1, edge_share=1, nodes=10_000)
    logit = found.nodes[-1]
    assert logit.others == pytest.approx(0, abs=1e-9)
    prepared = exact_copy(prepare(model, given, **more))
    query = LogitQuery.of(prepared.m, prepared, 0, -1, parts=False)
    cut = CutPass.of(prepared)
    nothing = {tap: (lambda x, tap=tap: cut.bias_out(tap).expand_as(x)) for tap in cut.leaves}
    with torch.no_grad(), holding(prepared.model):
        prepared.run(logits="none")  # the first row is held: so both are one batch
        both = {key: x.expand(2, *x.shape[1:]) for key, x in prepared.arguments.items()}
        changes = {tap: (lambda x, tap=tap: torch.stack([x[0], nothing[tap](x)[1]])) for tap in nothing}
        with ch.edit(prepared.model, changes):
            hidden = prepared.model(**both, logits="none").hidden[1]
    left = float((hidden[query.read.rows] * query.read.directions).sum())
    left += query.read.transform + query.read.bias
    assert logit.bias == pytest.approx(left, abs=1e-9)


def test_what_one_thread_holds_another_does_not():
    """A page answers several questions at a time: what one holds changes no answer of the others."""
    model = build(attention_gate=True)
    rows = torch.arange(10).view(2, 5)
    with torch.no_grad(), ThreadPoolExecutor(1) as other:
        plain = model(rows).logits
        with holding(model):
            held, free = model(rows).logits, other.submit(torch.no_grad()(model), rows).result().logits
    assert torch.equal(free, plain) and not torch.allclose(held[1], plain[1], atol=1e-3)


def dictionary(model, layer, kind, seed=0):
    """Return a random dictionary of a feed-forward, in which about half of the features are active."""
    D, N = model.config.d_model, 24
    part, torch_seed = f"blocks.{layer}.feedforward", torch.Generator().manual_seed(seed)
    reads = [f"{part}.out" if kind == "autoencoder" else f"{part}.in"]
    made = Dictionary(kind, reads, [f"{part}.out"], D, D, N, k=8 if kind == "transcoder" else None)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=torch_seed))
    return made


@pytest.mark.ledger("T3")
@pytest.mark.parametrize("kind", ["autoencoder", "transcoder", "skip-transcoder"])
def test_features_and_errors_are_the_feedforward(kind):
    model = build(gated=True)
    own = dictionary(model, 0, kind)
    found = ch.graph(model, IDS, 3, features=[own], node_share=1, edge_share=1, nodes=10_000, verify=True)
    whole = ch.graph(model, IDS, 3, node_share=1, edge_share=1, nodes=10_000)
    assert found.difference < 1e-10
    kinds = {node.kind for node in found.nodes}
    assert {"feature", "error"} <= kinds and ("skip" in kinds) == (kind == "skip-transcoder")
    model = model.double()
    with torch.no_grad(), ch.record(model, *own.reads) as seen:
        model(torch.tensor([IDS]))
    active = own.double().encode(seen[own.at][0]).detach()
    for position in range(len(IDS)):
        parts = [node for node in found.nodes if node.position == position and node.layer == 0]
        parts = [node for node in parts if node.kind in ("feature", "error", "skip")]
        for node in (node for node in parts if node.kind == "feature"):
            number = int(node.id.partition("@")[0].rpartition(".")[2])
            assert node.activation == pytest.approx(float(active[position, number]), abs=1e-6)
    logits = found.nodes[-1]
    assert logits.value == pytest.approx(whole.nodes[-1].value, abs=1e-6)


def test_a_pass_of_another_thread_is_no_part_of_a_graph():
    """It holds norms and gates by hooks on the same model, which come and go."""
    model = build()
    wanted = ch.graph(model, IDS).logit
    with holding(model):
        assert any(part._forward_hooks for part in model.modules())
        copied = exact_copy(prepare(model, IDS)).model
        assert not any(part._forward_hooks for part in copied.modules())
        assert ch.graph(model, IDS).logit == wanted


def test_neurons_and_groups(tmp_path):
    model = build()
    found = ch.graph(model, IDS, 3, neurons=True, verify=True, nodes=40)
    assert found.difference < 1e-10 and any(node.kind == "neuron" for node in found.nodes)
    some = [node.id for node in found.nodes if node.kind in ("head", "neuron")][:4]
    merged = found.merged({"mine": some})
    assert len(merged.nodes) == len(found.nodes) - 3
    for kind in ("source", "target"):
        out = [edge for edge in found.edges if getattr(edge, kind) in some]
        both = [edge for edge in out if edge.source in some and edge.target in some]
        total = sum(edge.value for edge in out) - sum(edge.value for edge in both)
        own = sum(edge.value for edge in merged.edges if getattr(edge, kind) == "mine")
        assert own == pytest.approx(total, abs=1e-10)
    body = json.loads(merged.save(tmp_path / "graph.json").read_text())
    assert body["nodes"][-1]["id"] == "logit" and {"source", "target", "kind", "value"} <= {*body["edges"][0]}
    assert draw_graph(merged).axes


@pytest.mark.ledger("T5")
@pytest.mark.parametrize("name", ["decoder, pre", "encoder", "both", "rope, sink", "gate"])
def test_terms_add_up_to_the_score_and_each_part_is_what_goes_without_it(name):
    model = build(**CASES[name]).double()
    given, more = inputs(model.config)
    head, part = ("cross.1.2", "blocks.1.cross") if more else ("1.2", "blocks.1.attention")
    found = looks(model, given, head, 3, 2, **more, count=10_000)
    prepared = prepare(model, given, **more)
    with torch.no_grad(), ch.record(model, f"{part}.scores") as seen:
        prepared.run()
    score = float(seen[f"{part}.scores"][0, 2, 3, 2])
    assert found.inexact is None and found.score == pytest.approx(score, abs=1e-12)
    assert sum(term.value for term in found.terms) + found.position == pytest.approx(score, abs=1e-10)
    if not more:  # features and what they leave over are the feed-forward that they take apart
        whole = {(term.query, term.key): term.value for term in found.terms}
        own = looks(model, given, head, 3, 2, count=10_000, features=[dictionary(model, 0, "transcoder")])
        apart = [term for term in own.terms if term.key.startswith(("feature 0.", "error 0"))]
        for query in {term.query for term in apart if not term.query.startswith(("feature", "error"))}:
            value = sum(term.value for term in apart if term.query == query)
            assert value == pytest.approx(whole[query, "feedforward 0"], abs=1e-10)
        assert len({term.key for term in apart}) > 2
        assert sum(term.value for term in own.terms) + own.position == pytest.approx(score, abs=1e-10)
    cut, number = CutPass.of(prepared), 2
    tap = "encoder.blocks.0.feedforward.out" if more else "blocks.0.feedforward.out"
    stack, query = ("encoder.", "embedding") if more else ("", "feedforward 0")
    vector = cut.leaves[tap][0, 2].detach()
    held = {
        other: (lambda x, own=own: own.detach().expand_as(x).clone()) for other, own in cut.leaves.items()
    }

    def without(x):
        x = cut.leaves[tap].detach().expand_as(x).clone()
        x[1, 2] -= vector
        return x

    both = {key: x.expand(2, *x.shape[1:]) for key, x in prepared.arguments.items()}
    changes = ch.edit(model, {**held, tap: without})
    with torch.no_grad(), holding(model), ch.record(model, f"{part}.q", f"{part}.k") as seen, changes:
        model(**both, logits="none")
    q, k = seen[f"{part}.q"][:, number, 3], seen[f"{part}.k"]
    k = k[:, number * k.shape[1] // 4, 2]
    module = part_of(model, f"{part}.out")
    raw = q[0] @ (k[0] - k[1]) * (q.shape[-1] ** -0.5 if module.scale is None else module.scale)
    if module.softcap is not None:
        whole = q[0] @ k[0] * q.shape[-1] ** -0.5
        raw = raw * module.softcap * torch.tanh(whole / module.softcap) / whole
    name = f"feedforward {stack}0"
    assert sum(term.value for term in found.terms if term.key == name) == pytest.approx(float(raw), abs=1e-10)
    assert any(term.query == query for term in found.terms)
    edge = next(edge for edge in found.edges if edge.part == name and edge.reader == 2)
    assert edge.value == pytest.approx(float(raw), abs=1e-10)


def test_what_is_no_linear_map_is_refused():
    for changes, words in (
        ({"n_experts": 3}, "mixtures of experts"),
        ({"attention": "gated-delta", "positions": "none"}, "without an attention pattern"),
        ({"attention": ("mamba2", "full"), "positions": "rope"}, "without an attention pattern"),
        ({"gated": True, "gated_clamp": 0.3}, "gated_clamp 0.3"),
        ({"depth_capacity": 0.5}, "mixture of depths"),
    ):
        with pytest.raises(ch.InputError, match=words):
            ch.graph(build(**changes), IDS)
    with pytest.raises(ch.InputError, match="keeps nothing"):
        ch.graph(build(), IDS, nodes=0)
    linear = build(attention="linear")
    assert ch.graph(linear, IDS, verify=True).difference < 1e-10
    with pytest.raises(ch.InputError, match="no product of one query and one key"):
        ch.graph(linear, IDS, scores=True)
    assert looks(build(n_experts=3), IDS, "1.0", 3, 2).inexact


def test_the_command(shared, clearhead, tmp_path):
    folder = shared / "weights" / "stories260K"
    asked = ("graph", folder / "hf", "Once upon a", "--tokenizer", folder / "tok512.bin")
    body = clearhead(*asked, "--verify --json --nodes 12").json
    assert body["difference"] < 1e-9 and body["nodes"][-1]["id"] == "logit"
    groups = ("--merge", f"first={body['nodes'][0]['id']}")
    clearhead(*asked, *groups, "--plot", tmp_path / "g.svg")
    assert (tmp_path / "g.svg").exists()
