"""Neurons as memories: a running top equals a full sort, promoted tokens equal a float64 loop.

A planted neuron is found.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import InputError
from clearhead.inside import memories as reading
from clearhead.inside.memories import memories
from tests.harness import PATCHES, V, build, config, scramble, some_ids, word_tokenizer

pytestmark = pytest.mark.ledger("K5")
BOTH = {"family": "encoder-decoder", "n_encoder_layers": 1}
ENCODER = {"family": "encoder"}
IMAGES = {**PATCHES, "family": "encoder", "n_classes": 3}
WORDS = ["<s>", "</s>", "sun", "moon", "rises", "sets", "and", "then", "late", "early"]
TEXTS = ["sun rises early and then moon sets", "late sun rises", "and sun rises then moon rises late"]
TEXTS = [*TEXTS, "moon sets"] * 4


def worded(model: ch.Transformer) -> ch.Model:
    """A model with a tokenizer of ten words."""
    tokenizer = word_tokenizer(WORDS, "</s>")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return ch.Model(model, tokenizer, special={"bos": 0, "eos": 1, "unk": 1})


def texts_for(model: ch.Transformer, count: int = 7) -> list:
    """Rows of unequal length, pairs of such rows, or pictures."""
    if model.config.input == "patches":
        return [torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]
    rows = [some_ids(1, 3 + 2 * seed % 7, seed)[0].tolist() for seed in range(count)]
    return rows if model.decoder is None or model.encoder is None else list(zip(rows, rows[::-1]))


def every_activation(model: ch.Transformer, texts: list, tap: str) -> dict[tuple[int, int], np.ndarray]:
    """Return what each neuron did by text and place, one row at a time, no padding; experts by a loop."""
    seen: dict[tuple[int, int], np.ndarray] = {}
    expert = int(tap.split(".")[-2]) if "experts" in tap else None
    router = tap.split(".experts")[0] + ".router"
    for number, text in enumerate(texts):
        with torch.no_grad(), ch.record(model, tap, *([router] if expert is not None else [])) as recorded:
            if isinstance(text, tuple):
                model(torch.tensor([text[1]]), source=torch.tensor([text[0]]))
            else:
                model(text[None] if isinstance(text, torch.Tensor) else torch.tensor([text]))
        rows = recorded[tap].reshape(-1, recorded[tap].shape[-1]).numpy()
        places = list(range(len(rows)))
        if expert is not None:
            best = [row.argsort(descending=True)[:2].tolist() for row in recorded[router][0]]
            places = [place for place, chosen in enumerate(best) if expert in chosen]
        seen |= {(number, place): row for place, row in zip(places, rows)}
    return seen


SHAPES = {
    "decoder": {},
    "gated": {"activation": "silu", "gated": True, "norm": "rmsnorm"},
    "encoder": {"norm_position": "post", **ENCODER},
    "experts": {"n_experts": 3, "n_active_experts": 2},
    "shared": {"n_experts": 2, "d_expert": 6, "d_shared_expert": 5, "n_layers": 3, "dense_layers": (1,)},
    "parallel": {"parallel": True, "layer_groups": 1},
    "both": BOTH,
    "patches": {"positions": "sinusoidal", **IMAGES},
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("batch", [4096, 12], ids=["one batch", "small batches"])
def test_the_running_top_is_the_top_of_all_activations(name, batch, monkeypatch, differences):
    monkeypatch.setattr(reading, "BATCH", batch)
    changes = SHAPES[name]
    model = build(**{**changes, "d_ff": 8})
    texts = texts_for(model)
    found = memories(model, iter(texts), top=4)
    several = 7 if model.config.dense_layers else 2 * max(1, model.config.n_experts)
    assert len(found.groups) == (3 if changes is BOTH else several)
    for group in found.groups:
        part = f"{group.stack}blocks.{group.layer}.{group.part}"
        everything = every_activation(model, texts, f"{part}.post")
        table = np.stack(list(everything.values()))
        for row in range(len(group.units)):
            wanted = np.sort(table[:, row])[::-1][:4]
            wanted = wanted[wanted > 0]
            contexts = found.neuron(group.name(row)).contexts
            values = torch.tensor([context.activation for context in contexts])
            assert differences.see("top", values, torch.from_numpy(wanted.copy())) < 1e-5
            there = torch.tensor([everything[context.text, context.place][row] for context in contexts])
            assert differences.see("place", values, there) < 1e-5


def by_hand(model: ch.Transformer, layer: int, unit: int) -> np.ndarray:
    """Score all tokens in float64: a column of `down` through the linear part of each norm on its way."""

    def array(tensor):
        return tensor.detach().numpy().astype(np.float64)

    def through(norm, x):
        if norm is None:
            return x
        weight = array(norm.weight) + float(model.config.norm_unit_offset)
        mean = sum(x) / len(x) if model.config.norm == "layernorm" else 0.0
        return np.array([(value - mean) * scale for value, scale in zip(x, weight)])

    blocks = list(model.main.blocks)
    column = array(blocks[layer].feedforward.down.weight)[:, unit]
    x = through(blocks[layer].feedforward_residual.inside, column)
    x = through(blocks[layer].feedforward_residual.after, x * model.config.residual_scale)
    for block in blocks[layer + 1 :]:
        cross = [block.cross_residual] if block.cross else []
        for residual in (block.attention_residual, *cross, block.feedforward_residual):
            x = through(residual.after, x)
    x = through(model.main.norm, x)
    head = model.head
    if getattr(head, "transform", None) is not None:
        x = array(head.transform.weight) @ x
    x = through(getattr(head, "norm", None), x)
    return array(head.out.weight) @ x * model.config.logit_scale


@pytest.mark.parametrize(
    "changes",
    [
        {"residual_scale": 0.4, "logit_scale": 0.5},
        {"norm_position": "post", "family": "encoder"},
        {"norm_position": "sandwich", "norm": "rmsnorm", "norm_unit_offset": True, "tie_embeddings": False},
        {"norm_position": "output", "d_embedding": 8},
        {**BOTH, "norm_position": "post"},
        {**ENCODER, "head": "tagger", "n_classes": 12},
        {**ENCODER, "head": "classifier", "n_classes": 12, "pooling": "mean"},
    ],
    ids=["pre", "post masked", "sandwich", "output narrow", "both post", "tagger", "classifier"],
)
def test_promoted_tokens_equal_a_loop_in_float64(changes, differences):
    model = build(**changes)
    found = memories(model, texts_for(model), top=5)
    for layer, unit in ((0, 3), (1, 7)):
        scores = by_hand(model, layer, unit)
        memory = found.neuron(f"{layer}.{unit}")
        order = np.argsort(scores)
        names = [f"LABEL_{token}" if found.head.names else str(token) for token in order]
        assert [name for name, _ in memory.promoted] == names[::-1][:5]
        assert [name for name, _ in memory.suppressed] == names[:5]
        told = [score for _, score in (*memory.promoted, *memory.suppressed)]
        ours = torch.tensor(told, dtype=torch.float64)
        theirs = torch.from_numpy(np.concatenate([scores[order[::-1][:5]], scores[order[:5]]]))
        assert differences.see("score", ours, theirs) < 1e-5
        token = 4
        promoting = dict(found.search(f"LABEL_{token}" if found.head.names else token, count=48).promoting)
        assert promoting[memory.name] == pytest.approx(scores[token], abs=1e-5)


def planted() -> ch.Model:
    """A model in which neuron 1.5 fires at "sun" and writes "rises"; all its other weights are noise."""
    settings = {"vocab_size": len(WORDS), "d_model": 32, "tie_embeddings": False, "positions": "none"}
    model = scramble(ch.Transformer(config(**settings)), spread=0.02).eval()
    with torch.no_grad():
        block = model.decoder.blocks[1]
        table = model.decoder.embedding.front.tokens.weight
        table.copy_(torch.nn.init.orthogonal_(torch.empty(len(WORDS), 32)) * 4)
        sun = table[WORDS.index("sun")]
        block.feedforward.up.weight[5] = sun
        block.feedforward.up.bias[5] = -5.0
        block.feedforward.down.weight[:, 5] = 3 * model.head.out.weight[WORDS.index("rises")]
    return worded(model)


def test_a_planted_neuron_is_found():
    m = planted()
    texts = TEXTS
    found = memories(m, texts, top=8)
    best = found.ranked(count=1)[0]
    assert best.name == "1.5"
    assert best.agreement == 1.0 and best.chance < 0.3
    assert best.promoted[0][0] == "rises"
    assert {(context.token, context.answer) for context in best.contexts} == {("sun", "rises")}
    assert best.contexts[0].before + best.contexts[0].token + best.contexts[0].after in texts
    assert found.search("rises", 1).promoting[0][0] == "1.5"
    assert ("1.5", 1.0) in [(name, share) for name, share, _ in found.search("sun", 3).fired]
    answers = [word for text in texts for word in text.split()[1:]]
    assert best.chance == pytest.approx(answers.count("rises") / len(answers))  # depth is one token of ten
    largest = max(float(group.activations.max()) for group in found.groups)
    assert found.ranked("activation", 1)[0].activation == largest


def test_agreement_is_the_share_of_contexts_whose_next_token_is_promoted():
    model = build(vocab_size=40)
    texts = [some_ids(1, 20, seed, 40)[0].tolist() for seed in range(5)]
    found = memories(model, texts, top=6)
    assert found.depth == 2
    for memory in found.ranked(count=None):
        said = {name for name, _ in memory.promoted[:2]}
        places = [(texts[context.text], context.place + 1) for context in memory.contexts]
        following = [str(text[place]) for text, place in places if place < len(text)]
        assert memory.agreement == pytest.approx(sum(token in said for token in following) / 6)


def test_long_texts_are_read_in_stretches_and_the_limit_holds():
    m = worded(build(vocab_size=len(WORDS), max_positions=8))
    text = " ".join(WORDS[2:]) + " " + " ".join(WORDS[2:][::-1])
    assert [len(p.prepared.tokens) for p in reading.passages(m, [text, "", text])] == [8, 8, 8, 8]
    assert [p.answers[-1] for p in reading.passages(m, [text])] == [WORDS.index("early"), reading.NOTHING]
    assert memories(m, [text] * 9).tokens == 9 * 16
    assert memories(m, [text] * 9, limit=30).tokens == 32


def test_a_target_ends_and_its_answers_are_its_next_tokens():
    m = worded(build(vocab_size=len(WORDS), **BOTH))
    m.special["decoder_start"] = 0
    passage = next(reading.passages(m, [("sun and moon", "moon and sun")]))
    assert passage.prepared.tokens.ids == (0, *(WORDS.index(word) for word in ("moon", "and", "sun")))
    assert passage.answers == (*passage.prepared.tokens.ids[1:], WORDS.index("</s>"))


def test_what_cannot_be_promoted_is_refused_and_the_contexts_stay():
    both = memories(build(**BOTH), texts_for(build(**BOTH)))
    assert both.neuron("encoder.0.1").promoted == () and both.neuron("encoder.0.1").contexts
    classes = {"head": "classifier", "n_classes": 3, "pooler": "tanh"}
    for changes in (classes, {"head": "embedding"}, {"head": "none"}):
        model = build(**ENCODER, **changes)
        found = memories(model, texts_for(model))
        assert "cannot be read off" in found.note and not found.agrees
        assert found.ranked(count=1)[0].contexts and not found.ranked(count=1)[0].promoted
        with pytest.raises(InputError, match="sort by activation"):
            found.ranked("agreement")


def test_patches_are_named_by_row_and_column():
    model = build(**IMAGES)
    found = memories(model, texts_for(model), top=40)
    contexts = [context for memory in found.ranked(count=None) for context in memory.contexts]
    assert {context.token for context in contexts} == {"[CLS]", "0,0", "0,1", "1,0", "1,1"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"neurons": ["2.5"]}, 'no neuron "2.5": neurons are called layer.neuron'),
        ({"neurons": ["0.24"]}, "neurons 0 to 23"),
        ({"neurons": []}, "no neurons are named"),
        ({"layer": 7}, 'layer "7" is not known.*: choose from 0, 1'),
        ({"layer": "encoder.0"}, 'layer "encoder.0" is not known'),
        ({"top": 0}, "top 0 must be 1 or more"),
        ({"texts": []}, "corpus is empty"),
        ({"texts": [("a", "b")]}, "a pair was given"),
    ],
)
def test_mistakes_are_one_line(given, message):
    with pytest.raises(InputError, match=message) as error:
        memories(build(), **{"texts": [[1, 2, 3]], **given})
    assert "\n" not in str(error.value)


def test_only_the_neurons_asked_for_are_kept():
    found = memories(build(), [[1, 2, 3]], neurons=["1.7", "1.2"])
    assert [group.name(row) for group in found.groups for row in range(len(group.units))] == ["1.2", "1.7"]
    with pytest.raises(InputError, match="was not looked at"):
        found.neuron("0.3")
    with pytest.raises(InputError, match=f"ids go from 0 to {V - 1}"):
        found.search(99)


def test_the_command(tmp_path, clearhead):
    planted().save(tmp_path / "model")
    corpus, model = tmp_path / "corpus.txt", tmp_path / "model"
    corpus.write_text("\n".join(TEXTS))
    body = clearhead("memories", model, corpus, f"--json --top 8 --plot {tmp_path}/all.png").json
    assert body["neurons"][0]["name"] == "1.5" and (tmp_path / "all.png").stat().st_size > 5000
    text = ["memories", model, "--text", "sun rises"]
    assert "⟦sun⟧" in clearhead(*text, f"--neuron 1.5 --plot {tmp_path}/one.svg").out
    assert (tmp_path / "one.svg").exists()
    assert clearhead(*text, "--token rises --json").json["promoting"][0][0] == "1.5"
    for wrong in (["--neuron 9.9"], ["--layer x"], ["--token", "nowhere and back"], ["--plot picture.doc"]):
        clearhead.refuses("clearhead: ", *text, *wrong)
    clearhead.refuses("nothing.txt", "memories", model, tmp_path / "nothing.txt")
