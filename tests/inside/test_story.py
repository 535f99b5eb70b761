"""The story: which part an answer rests on, by removing each, against `effect` and a plain edit."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.inside import interventions
from clearhead.inside.ablation import effect, effect_of_each
from clearhead.inside.inputs import prepare
from clearhead.inside.interventions import Resumed, Site, patched_scores, single_parts
from clearhead.inside.story import explain, percent
from tests.explorer.toys import picture, toy
from tests.harness import build
from tests.inside.test_lens import IDS

pytestmark = pytest.mark.ledger("X4")
INPUTS = {
    "decoder": "The king's men speak of the king",
    "encoder": "Ein Hund [MASK] speak",
    "encoder-decoder": "shall they",
    "classifier": "they speak of it",
    "tagger": "they speak",
    "vit": picture(),
}


@pytest.mark.parametrize("family", INPUTS)
def test_the_story_names_the_part_with_the_largest_effect(family):
    m, given = toy(family), INPUTS[family]
    told = explain(m, given)
    parts = {name: part for name, part in single_parts(m.config).items() if not name.startswith("layer")}
    position = None if m.config.head == "classifier" else -1
    prepared = prepare(m, given)
    after = {}
    for name, part in parts.items():
        seen = effect(m, prepared, position=position, **part)
        after[name] = float(seen.after.double().softmax(-1)[int(seen.before.argmax())])
        assert told.before == pytest.approx(float(seen.before.double().softmax(-1).max()), abs=1e-6)
    least = min(after, key=after.__getitem__)
    assert told.effects[0].name == least
    assert {each.name: each.after for each in told.effects} == pytest.approx(after, abs=1e-6)
    heads = {name: value for name, value in after.items() if ":" not in name}
    assert told.head is not None and told.head.name == min(heads, key=heads.__getitem__)
    assert percent(told.before) in told.sentence and percent(after[least]) in told.sentence


def test_a_copying_head_is_said_to_copy_and_a_feed_forward_to_decide():
    """A head that puts what it reads before the answer, in a model whose answer is otherwise flat."""
    config = ch.ModelConfig(
        vocab_size=8, d_model=8, n_layers=1, n_heads=1, d_ff=4, positions="none", norm="rmsnorm",
        tie_embeddings=False,
    )  # fmt: skip
    model = ch.Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.zero_()
        block, eye = model.main.layers()[0], torch.eye(8)
        model.main.embedding.front.tokens.weight.copy_(eye)
        model.head.out.weight.copy_(8 * eye)
        block.attention.q.weight[0, 3] = block.attention.k.weight[0, 5] = 5  # token 3 looks at token 5
        block.attention.v.weight.copy_(eye)
        block.attention.out.weight.copy_(4 * eye)
    told = explain(ch.Model(model), [1, 5, 2, 3])
    assert told.choice == "5"
    assert told.sentence.startswith("Head 0.0 copied “5” from 2 tokens back; without it ")
    assert told.edge is not None and (told.edge.reader, told.edge.source) == (3, 1)


def test_rows_that_resume_are_rows_that_run_whole():
    m = toy("decoder")
    prepared = prepare(m, "The king's men speak of the king")
    rows = [[], [Site("blocks.1.attention.z", head=1)], [Site("blocks.0.feedforward.out", position=2)]]
    rows += [[Site("blocks.1.feedforward.out")]]
    resumed = Resumed.of(prepared)
    assert resumed is not None and [resumed.first(sites) for sites in rows] == [1, 1, 0, 1]
    whole_row = [Site("embedding", position=1)]
    assert resumed.first(whole_row) == -1
    found = [*patched_scores(prepared, {}, rows, -1), *patched_scores(prepared, {}, [whole_row], -1)]
    rows.append(whole_row)
    for sites, scores in zip(rows, found):
        changes = {
            site.tap: lambda x, site=site: x.index_put(  # type: ignore[misc]
                (
                    torch.tensor(0),
                    *([torch.tensor(site.head)] if site.head is not None else []),
                    *([torch.tensor(site.position)] if site.position is not None else []),
                ),
                torch.tensor(0.0),
            )
            for site in sites
        }
        with torch.no_grad(), ch.edit(m.model, changes):
            whole = m.model(prepared.main).logits[0, -1]
        torch.testing.assert_close(scores, whole, atol=1e-5, rtol=0)


def test_parts_that_were_removed_once_are_known(monkeypatch):
    """Effects of parts that the story removed are the same, and take no pass; others are computed."""
    model, known = ch.Model(build()), dict[str, torch.Tensor]()
    told = explain(model, IDS, known=known)
    tried = [effect.name for effect in told.effects]
    assert known.keys() == {"whole", *tried}
    fresh = effect_of_each(model, IDS, position=-1, parts=[*tried, "layer:0"])
    again = effect_of_each(model, IDS, position=-1, parts=[*tried, "layer:0"], known=known)
    assert again.kl == pytest.approx(fresh.kl, abs=1e-6)
    monkeypatch.setattr(interventions, "patched_scores", None)
    assert effect_of_each(model, IDS, position=-1, parts=[*tried, "layer:0"], known=known).kl == again.kl
