"""Probes: planted labels are found where they are and not before; the control task knows types alone.

The two sides are kept apart.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import clearhead as ch
from clearhead.app.plot.models import probe_figure
from clearhead.inside import probe_data
from clearhead.inside.names import spec_of, states
from clearhead.inside.probe import (
    Probes,
    baselines,
    control_labels,
    interval,
    numbered,
    predict,
    probe,
    standardised,
)
from clearhead.inside.probe_data import (
    ProbeItem,
    Vectors,
    apart,
    choose_items,
    governor,
    read_items,
    split_items,
    stack_of,
    vectors_of,
)
from clearhead.learn.data.conll import Sentence, TreeWord
from clearhead.learn.data.examples import Images, Labelled, Tagged
from tests.harness import PATCHES, build

pytestmark = pytest.mark.ledger("K4")

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefg", *("##" + letter for letter in "abcdefg")]
LETTERS = "abcdefg"


def loaded(**changes) -> ch.Model:
    """A random model whose tokens are single letters: a word of three letters has three."""
    model = build(**{"vocab_size": len(PIECES), "max_positions": 64, "n_layers": 3, **changes})
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if model.config.family != "decoder":
        tokenizer.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [("[CLS]", 2), ("[SEP]", 3)]
        )
    return ch.Model(model, tokenizer, special={"pad": 0, "cls": 2, "sep": 3, "decoder_start": 2})


def sentences(count: int, seed: int = 0, length: int = 6, labels: str = "XYZ") -> list[Tagged]:
    """Random words, each time with a random tag: nothing tells the tag."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        words = ["".join(draw.choice(list(LETTERS), draw.integers(1, 4))) for _ in range(length)]
        rows.append(Tagged(tuple(words), tuple(draw.choice(list(labels), length).tolist())))
    return rows


# Planted information ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_a_planted_label_is_read_from_its_layer_on_and_by_chance_before(family: str) -> None:
    m, rows = loaded(family=family), sentences(150)
    directions = torch.randn(3, m.config.d_model, generator=torch.Generator().manual_seed(5)) * 8
    tags: dict[tuple[int, ...], list[int | None]] = {}  # of each token, by the ids of the sentence
    for row in rows:
        encoded, own = m.tokenizer.encode(" ".join(row.words)), ["XYZ".index(tag) for tag in row.tags]
        tags[tuple(encoded.ids)] = [None if word is None else own[word] for word in encoded.word_ids]
    now: dict[str, torch.Tensor] = {}

    def watch(module, given, named) -> None:
        now.update(ids=named["ids"])

    m.model.register_forward_pre_hook(watch, with_kwargs=True)

    def plant(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for place, ids in enumerate(now["ids"].tolist()):
            known = tags[tuple(token for token in ids if token)]
            for slot, tag in enumerate(known):
                if tag is not None:
                    x[place, slot] += directions[tag]
        return x

    with ch.edit(m.model, {"blocks.1.resid_post": plant}):
        found = probe(m, rows)
    assert [layer.name for layer in found.layers] == ["embedding", "0", "1", "2"]
    chance = [layer.accuracy for layer in found.layers[:2]]
    assert max(chance) < 0.45, chance
    assert min(layer.accuracy for layer in found.layers[2:]) > 0.98
    assert found.layers[2].interval[0] > 0.85  # of 30 sentences
    assert found.layers[0].interval[0] < found.layers[0].accuracy < found.layers[0].interval[1]
    assert (found.column, found.unit, found.labels) == ("tag", "words", ("X", "Y", "Z"))
    assert found.train + found.test == 900
    assert found.best.name in "12"


def test_the_type_of_a_word_is_read_off_the_embedding_and_capitals_are_one_type_with_small_letters() -> None:
    """A label that the letters decide: all of control, baseline and probe find it."""
    rows = [Tagged(tuple("abcdefg"), tuple("YXYXYYX")), Tagged(tuple("gfedcba"), tuple("XYYXYXY"))]
    draw = np.random.default_rng(0)
    for _ in range(40):
        order = draw.permutation(7)
        rows.append(Tagged(*(tuple(letters[place] for place in order) for letters in ("ABCDEFG", "YXYXYYX"))))
    found = probe(loaded(positions="none"), rows, iterations=500)
    assert found.seen == found.by_type == 1
    assert found.layers[0].accuracy == found.layers[0].control == 1
    assert found.majority == pytest.approx(4 / 7)


# States -----------------------------------------------------------------------------------------------------


def one_by_one(m: ch.Model, row: Tagged, pool: str, prefix: str, **given) -> torch.Tensor:
    """[L, N, D] from a forward pass of one sentence."""
    encoded = m.tokenizer.encode(" ".join(row.words))
    names = states(spec_of(m.config, "encoder" if prefix else "self"))
    with torch.no_grad(), ch.record(m.model, *names) as seen:
        shift = given.pop("shift", 0)
        m.model(**given) if given else m.model(torch.tensor([encoded.ids]))
    rows = []
    for number in range(len(row.words)):
        at = [place + shift for place, word in enumerate(encoded.word_ids) if word == number]
        at = {"mean": at, "first": at[:1], "last": at[-1:]}[pool]
        rows.append(torch.stack([seen[name][0, at].mean(0) for name in names]))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("pool", ["mean", "first", "last"])
@pytest.mark.parametrize(
    "changes",
    [{"family": "encoder"}, {"family": "decoder"}, {"family": "encoder", "norm_position": "post"}],
    ids=str,
)
def test_batched_vectors_equal_one_sentence_at_a_time(changes, pool, monkeypatch, differences):
    monkeypatch.setattr(probe_data, "BATCH_TOKENS", 60)
    m, rows = loaded(**changes), [row for length in (2, 5, 3, 7) for row in sentences(2, length, length)]
    items, _ = read_items(rows)
    found = vectors_of(m, items, *stack_of(m, None), pool)
    expected = torch.cat([one_by_one(m, row, pool, "") for row in rows], 1)
    assert differences.see("vectors", torch.from_numpy(found.layers), expected) <= 1e-5
    assert found.items.tolist() == [number for number, row in enumerate(rows) for _ in row.words]
    assert found.labels == tuple(tag for row in rows for tag in row.tags)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_both_stacks_of_an_encoder_decoder(stack: str, differences) -> None:
    m, rows = loaded(family="encoder-decoder"), sentences(5)
    items, _ = read_items(rows)
    found = vectors_of(m, items, *stack_of(m, stack), "mean")
    expected = []
    for row in rows:
        ids = m.tokenizer.encode(" ".join(row.words)).ids
        target = [2, *ids[1:-1]] if stack == "decoder" else [2]  # [CLS] is where this decoder begins
        given = {"ids": torch.tensor([target]), "source": torch.tensor([ids])}
        expected.append(one_by_one(m, row, "mean", "encoder." if stack == "encoder" else "", **given))
    assert differences.see("vectors", torch.from_numpy(found.layers), torch.cat(expected, 1)) <= 1e-5
    assert probe(m, sentences(20), stack=stack).stack == stack


def test_a_text_is_pooled_as_the_model_embeds_it(differences) -> None:
    m = loaded(family="encoder")
    texts = [Labelled(" ".join(row.words), row.tags[0]) for row in sentences(6)]
    found = vectors_of(m, read_items(texts)[0], "encoder", "", "mean")
    m.model.encoder.norm = None  # so that the last hidden states are what the last block gives
    gap = differences.see("texts", torch.from_numpy(found.layers[-1]), m.embed([row.text for row in texts]))
    assert gap <= 1e-5


def test_many_vectors_lie_in_a_file_and_are_the_same(monkeypatch) -> None:
    m, items = loaded(), read_items(sentences(4))[0]
    plain: Vectors = vectors_of(m, items, "decoder", "", "mean")
    monkeypatch.setattr(probe_data, "IN_MEMORY", 0)
    mapped = vectors_of(m, items, "decoder", "", "mean")
    assert isinstance(mapped.layers, np.memmap)
    assert np.array_equal(mapped.layers, plain.layers)


def test_words_beyond_the_model_s_length_are_left_out_and_said() -> None:
    rows = [*sentences(12, length=6), *sentences(3, seed=1, length=60)]
    found = probe(loaded(family="encoder"), rows, seed=1)
    assert found.train + found.test < 12 * 6 + 3 * 60
    assert any("without a token" in line for line in found.said)


# The parts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 4])
def test_the_fit_is_the_optimum_of_the_stated_loss(classes: int) -> None:
    """Against torch in float64, led by the gradient of the loss that the docstring states."""
    draw = np.random.default_rng(0)
    x, x_test = draw.normal(size=(80, 5)).astype(np.float32), draw.normal(size=(400, 5)).astype(np.float32)
    y = draw.integers(classes, size=80)
    y[:classes] = np.arange(classes)
    rows = 1 if classes == 2 else classes
    wanted, inputs = torch.from_numpy(y), torch.from_numpy(x).double()

    def logits(flat: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        weights = flat.view(rows, 6)
        made = at @ weights[:, :5].T + weights[:, 5]
        return torch.cat([torch.zeros_like(made), made], 1) if classes == 2 else made

    def loss(flat: torch.Tensor) -> torch.Tensor:
        penalty = 0.025 * flat.view(rows, 6)[:, :5].square().sum()
        return torch.nn.functional.cross_entropy(logits(flat, inputs), wanted) + penalty

    flat = torch.zeros(rows * 6, dtype=torch.float64, requires_grad=True)
    ends = {"max_iter": 500, "tolerance_grad": 1e-10, "tolerance_change": 0}
    search = torch.optim.LBFGS([flat], line_search_fn="strong_wolfe", **ends)

    def closure() -> torch.Tensor:
        search.zero_grad()
        now = loss(flat)
        now.backward()
        return now

    search.step(closure)
    assert torch.autograd.grad(loss(flat), flat)[0].abs().max() < 1e-7
    best = logits(flat.detach(), torch.from_numpy(x_test).double())
    top = best.topk(2, 1).values
    clear = (top[:, 0] - top[:, 1]) > 0.01  # on the edge between two classes either may win
    assert clear.sum() > 350
    assert np.array_equal(predict(x, y, x_test, 0.05, 1000)[clear], best.argmax(1).numpy()[clear])


def test_one_class_is_always_said() -> None:
    x = np.zeros((3, 2), np.float32)
    assert predict(x, np.array([4, 4, 4]), x, 0.1, 5).tolist() == [4, 4, 4]


def test_standardised_by_the_training_side() -> None:
    draw = np.random.default_rng(0)
    x = (draw.normal(size=(50, 3)) * [1, 20, 0] + [5, -3, 2]).astype(np.float32)
    left, right = standardised(x, x[:7] + 1)
    assert np.allclose(left.mean(0), 0, atol=1e-5)
    assert np.allclose(left.std(0), [1, 1, 0], atol=1e-5)
    assert np.allclose(right[:, 0], left[:7, 0] + 1 / x[:, 0].std(), atol=1e-5)


def test_control_labels_are_a_function_of_the_type_alone() -> None:
    draw = np.random.default_rng(0)
    words = [f"w{number}" for number in draw.zipf(1.5, 5000) % 700]
    unseen = [f"u{number}" for number in range(3000)]
    y = draw.choice(3, size=5000, p=[0.6, 0.3, 0.1])
    left, right = control_labels(words, words[::-1] + unseen, y, seed=3)
    label = dict(zip(words, left.tolist()))
    assert left.tolist() == [label[word] for word in words]
    assert right[:5000].tolist() == [label[word] for word in words[::-1]]
    shares = np.bincount(right[5000:], minlength=3) / 3000
    assert np.allclose(shares, [0.6, 0.3, 0.1], atol=0.03)  # the distribution of the training labels
    order = draw.permutation(5000)
    again, _ = control_labels([words[place] for place in order], unseen, y[order], seed=3)
    assert again.tolist() == left[order].tolist()  # neither the order nor the word's own label matters
    assert control_labels(words, unseen, y, seed=4)[0].tolist() != left.tolist()


def test_baselines_by_hand() -> None:
    types, test = ["a", "a", "a", "b", "b", "c"], ["a", "b", "d", "d", "c"]
    y, y_test = np.array([0, 0, 1, 1, 1, 1]), np.array([0, 1, 1, 0, 0])
    assert baselines(types, test, y, y_test) == (2 / 5, 3 / 5, 3 / 5)


def test_the_interval_is_over_sentences() -> None:
    hits, items = np.repeat([True, False], 500), np.repeat(np.arange(10), 100)
    low, high = interval(hits, items, 0)
    assert (low, high) == pytest.approx((0.2, 0.8), abs=0.01)  # ten sentences, of which five are right
    alone = interval(hits, np.zeros(1000, int), 0)
    assert alone == pytest.approx((0.469, 0.531), abs=0.01)


def test_labels_unknown_to_training_have_no_number() -> None:
    assert numbered(["a", "c", "b"], ["a", "b"]).tolist() == [0, -1, 1]


# Data -------------------------------------------------------------------------------------------------------


def keys(items: list[ProbeItem]) -> set[int]:
    return {item.key for item in items}


def test_the_sides_are_disjoint_and_equal_sentences_stay_together() -> None:
    rows = sentences(30)
    items, _ = read_items([*rows, *rows[:10]])
    for seed in range(5):
        train, test = split_items(items, 0.2, seed)
        assert not keys(train) & keys(test)
        assert len(train) + len(test) == 40
        assert len(keys(test)) == 6
    assert keys(split_items(items, 0.2, 0)[1]) != keys(split_items(items, 0.2, 1)[1])


def test_sentences_to_test_on_are_not_trained_on() -> None:
    rows = sentences(30)
    kept, left_out = apart(read_items(rows)[0], read_items(rows[:4])[0])
    assert (len(kept), left_out) == (26, 4)
    found = probe(loaded(), rows, test=rows[:4])
    assert (found.train, found.test) == (26 * 6, 4 * 6)
    assert any("4 that are among those to test on" in line for line in found.said)


def test_words_are_capped_exactly_and_sentences_drawn() -> None:
    items, _ = read_items(sentences(30))
    chosen, said = choose_items(items, 20, 0, "train")
    assert sum(item.count for item in chosen) == 20
    assert [item.count for item in chosen] == [6, 6, 6, 2]
    assert said == "to train on: 20 of 180 words, from 4 sentences, drawn at random"
    assert keys(choose_items(items, 20, 1, "train")[0]) != keys(chosen)
    assert choose_items(items, 180, 0, "train")[1] is None


TREE = """# text = Dogs don't bark.
1\tDogs\tdog\tNOUN\tNNS\tNumber=Plur\t4\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVBP\tMood=Ind|Tense=Pres\t4\taux\t_\t_
3\tn't\tnot\tPART\tRB\t_\t4\tadvmod:neg\t_\t_
4\tbark\tbark\tVERB\t_\tVerbForm=Inf\t0\troot\t_\tSpaceAfter=No
5\t.\t.\tPUNCT\t.\t_\t4\tpunct\t_\t_

"""


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (None, ["NOUN", "AUX", "PART", "VERB", "PUNCT"]),
        ("xpos", ["NNS", "VBP", "RB", None, "."]),
        ("deprel", ["nsubj", "aux", "advmod:neg", "root", "punct"]),
        ("relation", ["nsubj", "aux", "advmod", "root", "punct"]),
        ("arc", ["+3", "+2", "+1", "root", "-1"]),
        ("lemma", ["dog", "do", "not", "bark", "."]),
        ("feats.Number", ["Plur", None, None, None, None]),
        ("feats.Tense", [None, "Pres", None, None, None]),
    ],
)
def test_columns_of_a_treebank(column: str | None, expected: list[str | None], tmp_path: Path) -> None:
    path = tmp_path / "tree.conllu"
    path.write_text(TREE)
    items, name = read_items(path, column)
    assert name == (column or "upos")
    assert list(items[0].labels) == expected
    words = [items[0].text[start:end] for start, end in items[0].spans or ()]
    assert words == ["Dogs", "do", "n't", "bark", "."]


def test_far_governors_are_one_class() -> None:
    word = TreeWord("a", "a", "X", "X", "_", 9, "dep")
    assert [governor(word, place) for place in (0, 3, 4, 12, 13)] == ["+far", "+far", "+4", "-4", "-far"]


def tagged(rows: list[Tagged]) -> str:
    return "\n".join("".join(f"{w} {t}\n" for w, t in zip(row.words, row.tags)) for row in rows)


def test_texts_and_tags_from_files(tmp_path: Path) -> None:
    rows = "".join(f"{' '.join(row.words)}\t{row.tags[0]}\n" for row in sentences(40))
    (tmp_path / "labels.tsv").write_text(f"text\tlabel\n{rows}")
    (tmp_path / "tags.conll").write_text(tagged(sentences(20)))
    m = loaded(family="encoder")
    texts = probe(m, tmp_path / "labels.tsv")
    assert (texts.unit, texts.column, texts.pool, texts.train, texts.test) == (
        "texts",
        "label",
        "mean",
        32,
        8,
    )
    tags = probe(m, tmp_path / "tags.conll")
    assert (tags.unit, tags.column, tags.train + tags.test) == ("words", "tag", 120)


def test_images_by_class() -> None:
    """Bright and dark pictures: the embedding shows it."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 40, (40, 8, 8, 1), dtype=np.uint8)
    pixels[20:] += 200
    model = build(**PATCHES, family="encoder", n_channels=1, head="classifier", n_classes=2)
    found = probe(model, Images(pixels, np.repeat([0, 1], 20)))
    assert (found.unit, found.column, found.pool) == ("images", "class", "first")
    assert found.train + found.test == 40
    assert probe(model, Images(pixels, np.repeat([0, 1], 20)), pool="mean").layers[0].accuracy == 1
    with pytest.raises(ch.InputError, match="reads images"):
        probe(model, sentences(10))


# Wrong input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "given", "line"),
    [
        ([], {}, "there are no examples"),
        (["a text"], {}, "not str"),
        (sentences(1), {}, "one sentence cannot be split"),
        (sentences(9), {"column": "xpos"}, 'column "xpos" is for a treebank'),
        (sentences(9, labels="X"), {}, "nothing to tell apart"),
        (sentences(9), {"classes": 2}, "3 labels, and a probe takes 2"),
        (sentences(9), {"pool": "max"}, 'pool "max" is not known'),
        (sentences(9), {"stack": "encoder"}, 'stack "encoder" is not there'),
        (sentences(9), {"words": 0}, "0 words are too few"),
        (sentences(9), {"test_share": 1.0}, "test_share 1.0"),
        (sentences(9), {"penalty": 0.0}, "penalty 0.0"),
        (sentences(9), {"iterations": 0}, "iterations 0"),
        (sentences(9), {"test": [Labelled("a", "X")]}, "both must be of one kind"),
        (sentences(9), {"test": sentences(9)}, "every sentence to train on is among those to test on"),
        ([Sentence((TreeWord("b", "b", "X", "_", "_", 0, "root"),), "a")], {}, "do not make up the text"),
        ("nowhere.conllu", {}, "there is no file or folder"),
    ],
)
def test_wrong_input_is_one_line(data, given: dict[str, object], line: str) -> None:
    with pytest.raises(ch.InputError, match=line) as raised:
        probe(loaded(), data, **given)
    assert "\n" not in str(raised.value)


def test_a_wrong_column_names_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "tree.conllu"
    path.write_text(TREE)
    line = r'column "uposs" is not known \(did you mean "upos"\?\): choose from upos, xpos'
    with pytest.raises(ch.InputError, match=line):
        read_items(path, "uposs")
    with pytest.raises(ch.InputError, match="no word to train on has a label"):
        choose_items(read_items(path, "feats.Gender")[0], 10, 0, "train")


def test_without_scikit_learn_one_line_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ch.MissingExtraError, match=r"pip install 'clearhead\[train\]'"):
        probe(loaded(), sentences(9))


# The command and the picture --------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, clearhead) -> None:
    loaded(family="encoder", head="mlm").save(tmp_path / "model")
    data = tmp_path / "data.conll"
    data.write_text(tagged(sentences(20)))
    printed = clearhead("probe", tmp_path / "model", data, f"--json --plot {tmp_path}/probe.png --words 50")
    body = json.loads(printed.out)
    assert "50 of" in printed.err
    assert [row["layer"] for row in body["layers"]] == ["embedding", "0", "1", "2"]
    for row in body["layers"]:
        assert row["selectivity"] == row["accuracy"] - row["control"]
        assert row["interval"][0] <= row["accuracy"] <= row["interval"][1]
    assert (tmp_path / "probe.png").stat().st_size > 1000
    assert "selectivity" in clearhead("probe", tmp_path / "model", data, "--words 50").out
    clearhead.refuses("probe.gif", "probe", tmp_path / "model", data, "--plot probe.gif")


def test_the_picture_shows_the_figures() -> None:
    found: Probes = probe(loaded(), sentences(20))
    axes = probe_figure(found, "a $model").axes[0]
    shown = [line.get_ydata() for line in axes.get_lines()]
    accuracies, controls = ([getattr(one, name) for one in found.layers] for name in ("accuracy", "control"))
    for values in (accuracies, controls, [found.majority] * 2):
        assert any(len(line) == len(values) and np.allclose(line, values) for line in shown)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["embedding", "0", "1", "2"]
