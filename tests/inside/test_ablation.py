"""Compare ablation with weights set to zero by hand, means with plain loops, gradients with differences, and
every part alone, as rows of batched passes, with `effect` of each.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf

import clearhead as ch
from clearhead.errors import ClearheadError, InputError
from clearhead.inside.ablation import (
    Examples,
    ablate,
    effect,
    effect_of_each,
    examples_from,
    judge,
    mean_activations,
)
from clearhead.inside.interventions import ablating, single_parts
from clearhead.inside.names import all_heads
from clearhead.inside.pruning import ablate_each, importance
from clearhead.learn.batches.batch import IGNORE, Batch
from tests.explorer.toys import picture, toy
from tests.harness import V, build, scramble, some_ids, worst
from tests.inside.test_prune import judged

pytestmark = pytest.mark.ledger("K7")
BOTH = {"family": "encoder-decoder"}
LAYOUTS = {
    "pre": {},
    "post": {"norm_position": "post"},
    "sandwich": {"norm_position": "sandwich"},
    "output": {"norm_position": "output"},
    "parallel": {"parallel": True},
    "experts": {"n_experts": 3},
    "two stacks": BOTH,
    "grouped": {"n_kv_heads": 2},
}


def given(model: ch.Transformer) -> dict[str, torch.Tensor]:
    """Two rows, the second shorter, for whichever stacks there are."""
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    source = {"source": some_ids(length=8, seed=3), "source_mask": mask}
    return {"ids": some_ids(), "mask": mask, **(source if model.config.family == "encoder-decoder" else {})}


def silenced(model: ch.Transformer, *modules: str) -> ch.Transformer:
    """A copy in which some linear layers give zeros."""
    copy = ch.Transformer(model.config).eval()
    copy.load_state_dict(model.state_dict())
    for name in modules:
        for weight in copy.get_submodule(name).parameters():
            weight.data.zero_()
    return copy


@pytest.mark.parametrize("name", LAYOUTS)
def test_ablated_equals_weights_of_zero(name, differences):
    """Zero a head's columns of `out`, or the weights that give the answers of a feed-forward or a layer."""
    model = build(**LAYOUTS[name])
    inputs, stack = given(model), "decoder"
    without = silenced(model)
    without.get_submodule(f"{stack}.blocks.1.attention").out.weight.data[:, 4:8] = 0  # head 1 of width 4
    experts = [f"experts.{number}.down" for number in range(3)] if model.config.n_experts else ["down"]
    down = [f"{stack}.blocks.0.feedforward.{part}" for part in experts]
    parts = ("attention", "cross") if name == "two stacks" else ("attention",)
    attention = [f"{stack}.blocks.0.{part}.out" for part in parts]
    cases = {
        "head": ({"heads": ["1.1"]}, without),
        "feed-forward": ({"feedforwards": [0]}, silenced(model, *down)),
        "layer": ({"layers": ["0"]}, silenced(model, *down, *attention)),
    }
    with torch.no_grad():
        plain = model(**inputs).logits
        for what, (off, expected) in cases.items():
            with ablating(model, **off):
                ablated = model(**inputs).logits
            assert differences.see(what, ablated, expected(**inputs).logits) <= 1e-5
            assert worst(ablated, plain) > 1e-3
        assert torch.equal(model(**inputs).logits, plain)


def test_a_layer_of_a_pre_norm_model_leaves_the_stream_as_it_was():
    model = build(n_layers=3)
    with torch.no_grad(), ablating(model, layers=[1]), ch.record(model, "blocks.1.resid_*") as seen:
        model(some_ids())
    assert torch.equal(seen["blocks.1.resid_pre"], seen["blocks.1.resid_post"])


def test_means_are_those_of_real_tokens(differences):
    model = build(**BOTH)
    inputs = given(model)
    targets = inputs["ids"].masked_fill(~inputs["mask"], IGNORE)
    means = mean_activations(model, Examples("seq2seq", (Batch(targets=targets, **inputs),) * 2))
    with torch.no_grad(), ch.record(model, "*") as seen:
        model(**inputs)
    real = [(0, slot) for slot in range(8)] + [(1, slot) for slot in range(5)]
    assert len(means) == 2 * 3 + 2 * 5  # z and out of attention and cross, out of the feed-forward
    for name, mean in means.items():
        by_head = seen[name].transpose(1, 2) if name.endswith(".z") else seen[name]
        expected = sum(by_head[row, slot].double() for row, slot in real) / 13
        expected = expected[None, :, None] if name.endswith(".z") else expected[None, None]
        assert differences.see("mean", mean, expected.float()) <= 1e-6
    without = ablating(model, ["encoder.0.2"], feedforwards=[1], means=means)
    with without, torch.no_grad(), ch.record(model, "*z", "*feedforward.out") as off:
        model(**inputs)
    z = "encoder.blocks.0.attention.z"
    assert worst(off[z][:, 2], means[z][0, 2].expand(2, 8, 4)) == 0
    assert worst(off[z][:, 1], seen[z][:, 1]) <= 1e-6
    assert worst(off["blocks.1.feedforward.out"], means["blocks.1.feedforward.out"].expand(2, 8, 16)) == 0


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_effect_on_the_loss(how):
    """Against the cross-entropy of logits with z changed by hand."""
    model, examples = build(), judged()
    ids, targets = examples.batches[0].ids, examples.batches[0].targets
    with torch.no_grad(), ch.record(model, "blocks.0.attention.z") as seen:
        whole = nnf.cross_entropy(model(ids).logits.reshape(-1, V), targets.reshape(-1))
    other = seen["blocks.0.attention.z"][:, 3].mean((0, 1)) if how == "mean" else torch.zeros(4)

    def change(z):
        z = z.clone()
        z[:, 3] = other
        return z

    with torch.no_grad(), ch.edit(model, {"blocks.0.attention.z": change}):
        logits = model(ids).logits
    done = ablate(model, examples, heads="0.3", how=how)
    without = nnf.cross_entropy(logits.reshape(-1, V), targets.reshape(-1))
    assert done.before.loss == pytest.approx(float(whole), abs=1e-5)
    assert done.after.loss == pytest.approx(float(without), abs=1e-5)
    assert done.after.accuracy == float((logits.argmax(-1) == targets).float().mean())
    assert done.ablated == ("head 0.3",) and json.dumps(done.to_dict())
    each = ablate_each(model, examples, how)
    assert each.values[0, 3] == pytest.approx(done.increase, abs=1e-6)
    assert each.values.shape == (2, 4) and each.rows == ("0", "1")


def test_rows_of_a_map_follow_the_heads_that_are_left():
    gone = {"encoder.blocks.1.attention": (0,), "blocks.0.cross": (2,)}
    model = build(family="encoder-decoder", pruned_heads=gone)
    ids = some_ids(2, 8, seed=4)
    found = ablate_each(model, Examples("seq2seq", (Batch(ids, ids.roll(-1, 1), source=some_ids()),)))
    assert found.rows == ("encoder.0", "encoder.1", "0", "cross.0", "1", "cross.1")
    assert np.isnan(found.values).sum() == 2 and np.isnan(found.values[[1, 3], 3]).all()
    assert found.to_dict()["values"][1][3] is None
    assert set(found.numbers(model.config)) == set(all_heads(model.config))


def test_loss_of_texts_is_that_of_score(trained_lm):
    m = trained_lm
    texts = ["abra cadabra", "a", "bad cab and a crab"]
    with pytest.raises(InputError, match="fewer than two tokens"):
        examples_from(m, texts, texts=True)
    texts[1] = "cab"
    logprobs = [value for text in texts for value in m.score(text).logprobs if value is not None]
    judged_loss = judge(m.model, examples_from(m, texts, texts=True)).loss
    assert judged_loss == pytest.approx(-np.mean(logprobs), abs=1e-5)


def test_loss_of_a_file_is_that_of_evaluate(trained_lm, tmp_path):
    from clearhead.learn.evaluation.evaluate import evaluate

    (tmp_path / "text.txt").write_text("a bad crab and a cab. " * 30)
    examples = examples_from(trained_lm, tmp_path / "text.txt")
    assert judge(trained_lm.model, examples).loss == pytest.approx(
        evaluate(trained_lm, tmp_path / "text.txt").metrics["loss"], abs=1e-6
    )


@pytest.fixture(scope="module")
def trained_lm(tmp_path_factory):
    """A random character model with its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = ["<eos>", *"abcdnr. "]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    sizes = {"vocab_size": len(letters), "d_model": 16, "n_layers": 2, "n_heads": 4, "max_positions": 64}
    m = ch.Model(scramble(ch.Transformer(ch.ModelConfig(**sizes))).eval(), tokenizer, special={"eos": 0})
    folder = tmp_path_factory.mktemp("lm")
    m.save(folder)
    return ch.load(folder)


def precise(value: float) -> torch.Tensor:
    """A number that keeps all of its digits."""
    return torch.tensor(value, dtype=torch.float64)


# Importance -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pre", "grouped", "two stacks", "classifier"])
def test_importance_equals_differences(name, differences):
    """|loss(1 + e) - loss(1 - e)| / 2e of each row alone, in float64, with z scaled by hand."""
    shape = {"family": "encoder", "n_classes": 3} if name == "classifier" else LAYOUTS[name]
    model = build(**shape).double()
    inputs = given(model)
    targets = inputs["ids"].roll(-1, 1).masked_fill(~inputs["mask"], IGNORE)
    targets = torch.tensor([2, 0]) if name == "classifier" else targets
    batch = Batch(targets=targets, **inputs)
    found = importance(model, Examples("lm", (batch,)))

    def loss(row: int, change: dict) -> float:
        one = {key: tensor[row : row + 1] for key, tensor in inputs.items()}
        with torch.no_grad(), ch.edit(model, change):
            logits = model(**one).logits
        flat, wanted = logits.reshape(-1, logits.shape[-1]), targets[row : row + 1].reshape(-1)
        return float(nnf.cross_entropy(flat, wanted, reduction="sum"))

    def slope(change) -> float:
        rows = [abs(loss(row, change(1 + 1e-5)) - loss(row, change(1 - 1e-5))) / 2e-5 for row in range(2)]
        return sum(rows) / batch.n_targets

    for head, value in found.heads.numbers(model.config).items():

        def scaled(factor, head=head):
            by = torch.ones(4, 1, 1, dtype=torch.float64)
            by[head.number] = factor
            return {f"{head.part}.z": lambda z: z * by}

        assert differences.see("heads", precise(value), precise(slope(scaled))) <= 1e-7
    for layer, value in found.feedforwards.items():
        part = f"{layer.replace('encoder.', 'encoder.blocks.')}" if "encoder" in layer else f"blocks.{layer}"
        wanted = slope(lambda factor, part=part: {f"{part}.feedforward.out": lambda x: x * factor})
        assert differences.see("feed-forward", precise(value), precise(wanted)) <= 1e-7
    assert len(found.feedforwards) == (4 if name == "two stacks" else 2)
    assert min(found.feedforwards.values()) > 1e-3
    normal = importance(model, Examples("lm", (batch,)), normalise=True).heads.values
    assert np.allclose(normal, found.heads.values / np.linalg.norm(found.heads.values, axis=1, keepdims=True))


def test_importance_does_not_depend_on_the_batches_and_leaves_no_gradient():
    model, together = build(), judged(rows=4)
    (batch,) = together.batches
    rows = tuple(Batch(batch.ids[row : row + 1], batch.targets[row : row + 1]) for row in range(4))
    apart = dataclasses.replace(together, batches=rows)
    one, other = (importance(model, examples).heads.values for examples in (together, apart))
    assert np.abs(one - other).max() <= 1e-6
    assert all(weight.grad is None for weight in model.parameters())


# One text ---------------------------------------------------------------------------------------------------


def test_effect_on_the_next_token(trained_lm):
    found = effect(trained_lm, "a cab", heads=["0.1"], layers=[1], top=3)
    ids = torch.tensor([trained_lm.encode(["a cab"])[0]])
    block = "decoder.blocks.1"
    without = silenced(trained_lm.model, f"{block}.attention.out", f"{block}.feedforward.down")
    without.decoder.blocks[0].attention.out.weight.data[:, 4:8] = 0
    with torch.no_grad():
        before, after = (model(ids).logits[0, -1] for model in (trained_lm.model, without))
    assert worst(found.before, before) == 0 and worst(found.after, after) <= 1e-5
    p, q = before.double().softmax(-1), after.double().softmax(-1)
    assert found.kl == pytest.approx(float(sum(p[i] * torch.log2(p[i] / q[i]) for i in range(9))), abs=1e-6)
    assert found.kl > 1e-3
    assert found.position == 4 and found.tokens == ("a", "·", "c", "a", "b")
    assert {one.id for one in found.top} == {*p.topk(3).indices.tolist(), *q.topk(3).indices.tolist()}
    assert found.top[0].before == pytest.approx(float(p.max())) and found.ablated == ("head 0.1", "layer 1")
    assert effect(trained_lm, "a cab", heads=["0.1"], position=1).position == 1
    assert effect(trained_lm, "a cab", heads=["0.1"], how="mean").kl > 0
    with pytest.raises(InputError, match="no token 9"):
        effect(trained_lm, "a cab", heads=["0.1"], position=9)


def test_effect_on_two_stacks_and_on_classes():
    both = effect(build(**BOTH), [3, 4, 5], heads=["encoder.0.1", "cross.1.0"], target=[1, 2])
    assert both.position == 1 and both.kl > 0
    classes = effect(build(family="encoder", n_classes=3), [3, 4, 5], feedforwards=[0])
    assert classes.position is None and len(classes.top) == 3 and classes.before.shape == (3,)
    with pytest.raises(InputError, match="chooses nothing"):
        effect(build(family="encoder", head="none"), [3, 4], heads=["0.0"])


# The command ------------------------------------------------------------------------------------------------


def test_the_command(trained_lm, tmp_path, clearhead):
    folder, data = str(trained_lm.folder), tmp_path / "text.txt"
    data.write_text("a bad crab and a cab. " * 30)
    said = clearhead("ablate", folder, data, "--heads 0.1 1.2 --json").json
    assert said["increase"] == pytest.approx(ablate(trained_lm, data, heads=["0.1", "1.2"]).increase)
    each = clearhead("ablate", folder, data, f"--each --plot {tmp_path}/each.png --json").json
    assert np.array(each["values"]).shape == (2, 4)
    drawn = f"--layers 0 --how mean --plot {tmp_path}/text.svg"
    assert "whole model" in clearhead("ablate", folder, "--text", "[red] cab", drawn).out
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("each.png", "text.svg"))
    for arguments, line in {
        (str(data),): "nothing is named",
        ("--heads", "0.1"): "give data or --text",
        (str(data), "--text", "a", "--heads", "0.1"): "give data or --text",
        (str(data), "--heads", "0.9"): 'no head "0.9"',
        (str(data), "--layers", "5"): 'layer "5" is not known',
        ("--text", "", "--heads", "0.1"): "empty",
        (str(tmp_path / "none.txt"), "--heads", "0.1"): "none.txt",
        (str(data), "--each", "--plot", "x.gif"): "its name must end in",
    }.items():
        clearhead.refuses(line, "ablate", folder, *arguments)


# Each part alone --------------------------------------------------------------------------------------------


TOYS = {
    "decoder": ("they speak of the king", None),
    "encoder": ("England [MASK] the king", None),
    "encoder-decoder": ("Ein Hund", "speak of it"),
    "classifier": ("they shall", None),
    "vit": (picture(3), None),
}


@pytest.mark.parametrize("family", TOYS)
@pytest.mark.parametrize("how", ["zero", "mean"])
def test_each_part_is_what_effect_says_of_it(family, how, monkeypatch):
    monkeypatch.setattr("clearhead.inside.interventions.TOKENS_AT_ONCE", 25)  # several batches
    (text, target), told = TOYS[family], []
    m = toy(family)
    found = effect_of_each(m, text, how, target=target, on_progress=lambda *at: told.append(at))
    parts = single_parts(m.config)
    assert list(found.effects) == list(parts)
    assert len(told) > 1 and told[-1] == (len(parts) + 1, len(parts) + 1)
    for name, part in list(parts.items())[:: 3 if family != "encoder-decoder" else 1]:
        alone = effect(m, text, **part, how=how, target=target)
        assert found.effects[name].ablated == alone.ablated
        assert found.kl[name] == pytest.approx(alone.kl, abs=1e-5)
        assert found.effects[name].after.tolist() == pytest.approx(alone.after.tolist(), abs=1e-5)
        assert found.effects[name].position == alone.position
    assert max(found.kl.values()) > 1e-3


def test_what_chooses_nothing_is_refused():
    with pytest.raises(ClearheadError, match="chooses nothing"):
        effect_of_each(toy("vectors"), "they speak")
    with pytest.raises(ClearheadError, match="gone"):
        effect_of_each(toy("decoder"), "they speak", "gone")
