"""Paths: what heads carried, by source token, adds up to the logit; looks are slopes of the log-odds."""

from dataclasses import replace

import pytest
import torch

import clearhead as ch
from clearhead.errors import InputError
from clearhead.inside.attribution import Edge, looks, paths
from clearhead.inside.lens import contributions
from tests.harness import build
from tests.inside.test_lens import HEADS, IDS, PLACES, inputs

CASES = {
    **{f"decoder, {place}": changes for place, changes in PLACES.items()},
    **{f"encoder, {place}": {"family": "encoder", **PLACES[place]} for place in ("pre", "post")},
    **{f"both, {place}": {"family": "encoder-decoder", **PLACES[place]} for place in ("pre", "post")},
    **HEADS,
    "rope, sink": {"positions": "rope", "attention_sink": True, "n_kv_heads": 2},
}


@pytest.mark.ledger("K6")
def test_sources_add_up_to_the_logit_and_to_each_head():
    for number, (name, changes) in enumerate(CASES.items()):
        model = build(**changes)
        given, more = inputs(model.config)
        against = [None, 1][number % 2]
        found = paths(model, given, 0, **more, against=against)
        assert found.total == pytest.approx(found.logit, abs=1e-4), name
        parts = contributions(model, given, 0, **more, against=against).terms
        listed = {term.name: term.value for term in parts}
        for part, table in found.direct.items():
            for head, value in enumerate(table.sum((1, 2)).tolist()):
                assert value == pytest.approx(listed.pop(f"{part}.{head}"), abs=1e-5), (name, part)
        assert {term.name: term.value for term in found.terms} == pytest.approx(listed, abs=1e-6), name
        memory = 0 if found.memory is None else float(found.memory.sum())
        assert (found.memory is not None) == (model.config.family == "encoder-decoder"), name
        assert memory + float(found.sources.sum()) == pytest.approx(found.total - found.rest, abs=1e-4), name


@pytest.mark.ledger("K6")
def test_what_moved_most_came_from_another_token():
    """A head that reads its own token moves nothing: it leads only where no other speaks for it."""
    made = paths(build(), IDS, 0)
    last = made.rows[0]
    table = torch.zeros(2, 1, len(IDS))
    table[0, 0, last], table[1, 0, 1], table[0, 0, 2] = 3.0, 2.0, -4.0

    def leading(name: str) -> Edge | None:
        return replace(made, direct={name: table}).leading()

    assert leading("1") == Edge("1.1", last, 1, 2.0)
    assert leading("cross.1") == Edge("cross.1.0", last, last, 3.0)  # the same number, another text
    table[1] = 0
    assert leading("1") == Edge("1.0", last, last, 3.0)
    table[0, 0, last] = 0
    assert leading("1") is None


@pytest.mark.ledger("K6")
@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_looks_are_slopes_of_the_log_odds(family):
    """What an earlier head carried, times the slope: a finite difference of the log-odds gives the same."""
    model = build(family=family).double()
    given, more = inputs(model.config)
    head = "cross.1.2" if more else "1.2"
    tap = "blocks.1.cross" if more else "blocks.1.attention"
    found = looks(model, given, head, 3, 2, **more, count=10_000)
    assert [abs(edge.value) for edge in found] == sorted((abs(edge.value) for edge in found), reverse=True)
    edge = next(edge for edge in found if edge.part.startswith("encoder.0." if more else "0."))
    number, part = int(edge.part.split(".")[-1]), "encoder.blocks.0" if more else "blocks.0"
    main = {"source": torch.tensor([given])} if more else {}
    ids = torch.tensor([more.get("target", given)])

    def odds(step: float) -> float:
        def change(z):
            z = z.clone()
            z[0, number, edge.reader] += step * carried
            return z

        changes = ch.edit(model, {f"{part}.attention.z": change})
        with torch.no_grad(), changes, ch.record(model, f"{tap}.scores") as seen:
            model(ids, **main)
        scores = seen[f"{tap}.scores"][0, 2, 3]
        return float(scores[2] - torch.cat([scores[:2], scores[3:]]).logsumexp(0))

    with torch.no_grad(), ch.record(model, f"{part}.attention.*") as before:
        model(ids, **main)
    pattern, v = (before[f"{part}.attention.{name}"][0, number] for name in ("pattern", "v"))
    carried = pattern[edge.reader, edge.source] * v[edge.source]
    assert (odds(1e-4) - odds(-1e-4)) / 2e-4 == pytest.approx(edge.value, rel=1e-5, abs=1e-8)


def test_what_cannot_be_asked_is_said():
    with pytest.raises(InputError, match="no reader 99"):
        looks(build(), IDS, "0.0", 99, 0)
    with pytest.raises(InputError, match="no source -1"):
        looks(build(), IDS, "0.0", 2, -1)
    with pytest.raises(InputError, match=r'no head "7\.0"'):
        looks(build(), IDS, "7.0", 2, 1)
