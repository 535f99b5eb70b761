"""Pruned equals masked for all kinds of attention; small checkpoints reload, export, train on; the curve."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import InputError
from clearhead.inside.ablation import Examples, ablate, judge
from clearhead.inside.interventions import ablating
from clearhead.inside.names import AttentionHead, all_heads, find_heads
from clearhead.inside.pruning import least, prune, prune_curve, scores, units
from clearhead.learn.batches.batch import Batch
from clearhead.run.generate.decode import greedy
from tests.harness import PATCHES, build, config, some_ids, split, worst

pytestmark = pytest.mark.ledger("K7", "N6")
TOLERANCE = 1e-6
LLAMA = {"positions": "rope", "norm": "rmsnorm", "bias": False, "gated": True, "activation": "silu"}
LLAMA |= {"tie_embeddings": False}
POSITIONS = ("learned", "sinusoidal", "rope", "alibi", "relative", "none")
ENCODER, BOTH = {"family": "encoder"}, {"family": "encoder-decoder"}
ACROSS = ["0.1", "encoder.1.0", "encoder.1.2", "cross.0.3"]
GROUPS = ["encoder.0.0", "encoder.0.1", "cross.1.2", "cross.1.3"]
SHARED = {"layer_groups": 2, "n_layers": 5}
PICTURES = {**PATCHES, "family": "encoder", "n_classes": 3}
WHOLE: dict[str, tuple[dict, list[str]]] = {
    **{f"decoder {name}": ({"positions": name}, ["0.1", "1.0", "1.3"]) for name in POSITIONS},
    **{f"encoder {name}": ({**ENCODER, "positions": name}, ["0.0", "0.2", "0.3"]) for name in POSITIONS},
    **{f"two stacks {name}": ({**BOTH, "positions": name}, ACROSS) for name in POSITIONS},
    "grouped": ({"n_kv_heads": 2, "positions": "alibi"}, ["0.0", "0.1", "1.2", "1.3"]),
    "grouped two stacks": ({**BOTH, "n_kv_heads": 2, "positions": "relative"}, GROUPS),
    "other widths": ({"d_head": 6, "d_value": 3, "positions": "rope"}, ["0.2", "1.0"]),
    "encoder heads": ({**BOTH, "n_encoder_heads": 8, "n_encoder_layers": 1}, ["encoder.0.7", "1.1"]),
    "norm per head": ({"qk_norm": "head"}, ["0.1", "1.2"]),
    "shared layers": ({**SHARED, "positions": "alibi"}, ["0.1", "1.1", "2.1", "3.0", "4.0"]),
    "post": ({"norm_position": "post", "family": "encoder"}, ["0.1"]),
    "parallel": ({"parallel": True, "positions": "rope"}, ["1.1"]),
    "experts": ({"n_experts": 3}, ["1.1"]),
    "windows": ({"window": (3, None), **LLAMA}, ["0.1", "1.0"]),
    "fewer heads everywhere": ({"n_kv_heads": 2, **LLAMA}, ["0.0", "0.1", "1.2", "1.3"]),
    "image": (PICTURES, ["0.3"]),
}


def inputs(model: ch.Transformer) -> dict[str, torch.Tensor]:
    """What a micro model is called with."""
    if model.main.spec.input == "patches":
        return {"ids": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    both = model.encoder is not None and model.decoder is not None
    return {"ids": some_ids()} | ({"source": some_ids(length=6, seed=3)} if both else {})


def judged(rows: int = 4, length: int = 8, seed: int = 5) -> Examples:
    """Next tokens of random rows."""
    ids = some_ids(rows, length + 1, seed)
    return Examples("lm", (Batch(ids[:, :-1], ids[:, 1:]),))


@pytest.mark.parametrize("name", WHOLE)
def test_pruned_equals_masked(name, differences):
    changes, heads = WHOLE[name]
    whole = build(**changes).double()  # what is wrong shows, and no rounding
    before = {key: weight.clone() for key, weight in whole.state_dict().items()}
    smaller = prune(whole, heads).model
    given = inputs(whole)
    if whole.config.input == "patches":
        given["ids"] = given["ids"].double()
    with torch.no_grad():
        plain = whole(**given).logits
        with ablating(whole, heads):
            masked = whole(**given).logits
        assert differences.see("pruned", smaller(**given).logits, masked) <= TOLERANCE
    assert worst(masked, plain) > 1e-3  # the heads did something
    assert all(torch.equal(weight, before[key]) for key, weight in whole.state_dict().items())
    counts = [sum(weight.numel() for weight in model.parameters()) for model in (smaller, whole)]
    assert ch.cost(smaller.config).parameters.total == counts[0] < counts[1]
    assert len(all_heads(smaller.config)) == len(all_heads(whole.config)) - len(heads)


@pytest.mark.parametrize("name", ["decoder alibi", "grouped", "two stacks relative", "shared layers"])
def test_a_pruned_model_writes_what_the_masked_one_does(name):
    """Cached greedy tokens: the pruned model's own cache has fewer heads."""
    changes, heads = WHOLE[name]
    whole, given = build(**changes), inputs(build(**changes))
    source = {"source": given["source"][:1]} if "source" in given else {}
    with ablating(whole, heads):
        masked = greedy(whole, given["ids"][:1, :3], 12, **source)
    assert torch.equal(greedy(prune(whole, heads).model, given["ids"][:1, :3], 12, **source), masked)


@pytest.mark.parametrize(
    "name", ["decoder learned", "grouped two stacks", "shared layers", "fewer heads everywhere"]
)
def test_a_smaller_checkpoint_reloads_bit_for_bit(name, tmp_path):
    changes, heads = WHOLE[name]
    whole = build(**changes)
    smaller = prune(whole, heads)
    smaller.save(tmp_path / "small")
    ch.Model(whole).save(tmp_path / "whole")
    sizes = [(tmp_path / side / "model.safetensors").stat().st_size for side in ("small", "whole")]
    assert sizes[0] < sizes[1]
    again = ch.load(tmp_path / "small")
    assert again.config == smaller.config
    given = inputs(whole)
    assert torch.equal(again.model(**given).logits, smaller.model(**given).logits)


def test_fewer_heads_in_all_layers_load_in_transformers(tmp_path, differences):
    """Fewer heads fit an architecture that states the width of its heads.

    Others are saved under clearhead's own names.
    """
    transformers = pytest.importorskip("transformers")
    changes, heads = WHOLE["fewer heads everywhere"]
    smaller = prune(build(**changes), heads)
    smaller.save(tmp_path)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert peer.config.num_attention_heads == 2 and peer.config.head_dim == 4
    with torch.no_grad():
        gap = differences.see("transformers", peer(some_ids()).logits, smaller.model(some_ids()).logits)
        assert gap <= 1e-5
    uneven = prune(build(**changes), ["0.0", "0.1"])
    uneven.save(tmp_path / "uneven")
    said = json.loads((tmp_path / "uneven" / "config.json").read_text())
    assert said["model_type"] == "clearhead"
    assert said["clearhead"]["config"]["pruned_heads"] == {"blocks.0.attention": [0, 1]}


@pytest.mark.parametrize("positions", ["alibi", "relative"])
def test_pruning_twice(positions):
    """Names count the heads that are there now; the config keeps the first numbers."""
    whole = build(positions=positions)
    once = prune(whole, ["0.1", "1.0"])
    twice = prune(once, ["0.1", "1.2"])
    assert twice.config.pruned_heads == {"blocks.0.attention": (1, 2), "blocks.1.attention": (0, 3)}
    at_once = prune(whole, ["0.1", "0.2", "1.0", "1.3"])
    assert twice.config == at_once.config
    assert torch.equal(twice.model(some_ids()).logits, at_once.model(some_ids()).logits)


def test_groups_go_whole():
    whole = build(n_kv_heads=2)
    with pytest.raises(InputError, match=r"head 0\.1 shares weights with 0\.0: name those too"):
        prune(whole, ["0.1"])
    assert prune(whole, ["0.1"], whole_groups=True).config.pruned_heads == {"blocks.0.attention": (0, 1)}
    shared = build(layer_groups=1)
    with pytest.raises(InputError, match=r"head 1\.2 shares weights with 0\.2"):
        prune(shared, ["1.2"])
    assert prune(shared, ["1.2"], whole_groups=True).config.pruned_heads == {
        "blocks.0.attention": (2,),
        "blocks.1.attention": (2,),
    }


@pytest.mark.parametrize(
    ("changes", "heads", "says"),
    [
        ({}, ["0.0", "0.1", "0.2", "0.3"], "all 4 heads of blocks.0.attention would go"),
        ({"n_kv_heads": 1}, ["0.0", "0.1", "0.2", "0.3"], "keep one at least"),
        ({"qk_norm": "full"}, ["0.0"], "norm over all heads"),
        ({}, [], "no head is named"),
        ({}, ["0.4"], 'no head "0.4"'),
        ({"family": "encoder"}, ["cross.0.0"], 'no head "cross.0.0"'),
    ],
)
def test_what_is_refused(changes, heads, says):
    with pytest.raises(InputError, match=says) as caught:
        prune(build(**changes), heads)
    assert "\n" not in str(caught.value)


def test_what_counts_least_goes_and_each_layer_keeps_one():
    shape = config()
    numbers = {head: head.layer * 10.0 + head.number for head in all_heads(shape)}
    assert [str(head) for head in least(shape, numbers, 0.5)] == ["0.0", "0.1", "0.2", "1.0"]
    assert [str(head) for head in least(shape, numbers, 0.75)] == ["0.0", "0.1"]
    assert len(least(shape, numbers, 0.01)) == 6
    assert least(shape, numbers, 1.0) == []
    grouped = config(n_kv_heads=2)
    assert [str(head) for head in least(grouped, numbers, 0.5)] == ["0.0", "0.1", "1.0", "1.1"]
    assert (AttentionHead("self", 0, 2), AttentionHead("self", 0, 3)) in units(grouped)
    with pytest.raises(InputError, match="no share"):
        least(shape, numbers, 0)


# The curve --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["importance", "ablation", "random"])
def test_the_curve_is_what_pruning_gives(by):
    """Each point is the loss of the model without the heads named so far; the last has none left."""
    model, examples = build(), judged()
    curve = prune_curve(model, examples, by=by, seed=3)
    assert curve.removed == tuple(range(9))
    assert sorted(curve.order) == [str(head) for head in all_heads(model.config)]
    ranked = scores(model, examples, by, seed=3).numbers(model.config)
    assert [ranked[head] for head in find_heads(model.config, curve.order)] == sorted(ranked.values())
    smaller = prune(model, curve.order[:3])
    assert abs(judge(smaller.model, examples).loss - curve.loss[3]) <= TOLERANCE
    for weight in (block.attention.out.weight for block in model.main.blocks):
        weight.data.zero_()
    assert abs(judge(model, examples).loss - curve.loss[-1]) <= TOLERANCE
    coarse = prune_curve(build(), examples, 2, by, seed=3)
    assert np.allclose(coarse.loss, [curve.loss[0], curve.loss[4], curve.loss[8]])


def test_ranking_anew_takes_the_least_of_those_left():
    model, examples = build(seed=2), judged()
    curve = prune_curve(model, examples, by="ablation", recompute=True)
    heads = find_heads(model.config, curve.order)
    for place in (1, 4):
        gone = heads[:place]
        losses = {}
        for head in heads[place:]:
            with ablating(model, [*gone, head]):
                losses[head] = judge(model, examples).loss
        assert heads[place] == min(losses, key=losses.get)
        assert abs(curve.loss[place + 1] - losses[heads[place]]) <= TOLERANCE


# From a trained model to a pruned one that trains on --------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny classifier with a tokenizer and data, trained for a few steps."""
    folder = tmp_path_factory.mktemp("prune")
    things, words = ("film", "book", "day", "food", "talk"), {"good": "yes", "bad": "no"}
    rows = [f"{word} {thing}\t{label}\n" for word, label in words.items() for thing in things]
    (folder / "rows.tsv").write_text("".join(rows * 4))
    settings = split("model.d_model=16 model.n_layers=2 model.n_heads=4 data.batch_size=8")
    settings += split("train.steps=8 train.device=cpu")
    ch.train(folder / "rows.tsv", out=folder / "model", settings=settings)
    return folder


def test_the_command_prunes_and_the_result_trains_on(trained, clearhead):
    data, out = str(trained / "rows.tsv"), trained / "half"
    drawn = ["--curve", "--plot", str(trained / "c.svg")]
    said = clearhead("prune", trained / "model", out, f"--keep 0.5 --data {data}", *drawn, "--json").json
    assert (said["before"]["heads"], said["after"]["heads"], said["removed"]) == (8, 4, 4)
    assert said["after"]["parameters"] < said["before"]["parameters"]
    m = ch.load(out)
    assert len(all_heads(m.config)) == 4 and m.labels == ("no", "yes")
    whole = ch.load(trained / "model")
    pruned = m.config.pruned_heads
    gone = [f"{part.split('.')[1]}.{number}" for part, numbers in pruned.items() for number in numbers]
    masked = ablate(whole, data, heads=gone)
    for side, quality in (("before", masked.before), ("after", masked.after)):
        assert said[side]["loss"] == pytest.approx(quality.loss, abs=TOLERANCE)
    assert said["curve"]["loss"][0] == said["before"]["loss"]
    assert (trained / "c.svg").stat().st_size > 1000
    settings = [f'model.base="{out}"', "train.steps=3", "train.device=cpu", "data.batch_size=8"]
    ch.train(data, out=trained / "tuned", settings=settings)
    tuned = ch.load(trained / "tuned" / "last")  # the best one may be the base
    assert tuned.config.pruned_heads == m.config.pruned_heads
    before, after = (one.model.encoder.blocks[0].attention.q.weight for one in (m, tuned))
    assert worst(after, before) > 0
    for arguments, line in {
        (str(out), "--heads", "0.0"): "is there already",
        ("--heads", "0.0"): "name OUT",
        (str(trained / "new"),): "say which heads go",
        (str(trained / "new"), "--keep", "0.5"): "add --data",
        (str(trained / "model"), "--heads", "0.0"): "is the model itself",
        (str(trained / "new"), "--heads", "7.0"): 'no head "7.0"',
    }.items():
        clearhead.refuses(line, "prune", trained / "model", *arguments)
    assert not (trained / "new").exists()


def test_a_pruned_copy_keeps_what_belongs_to_the_model(trained):
    m = ch.load(trained / "model")
    smaller = prune(m, ["0.0"])
    kept = [field.name for field in dataclasses.fields(m) if field.name not in ("model", "folder", "_engine")]
    assert all(getattr(smaller, name) is getattr(m, name) for name in kept)
    assert smaller.classify("good film").label in ("yes", "no")
