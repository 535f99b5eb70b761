"""Rows of unequal length: each example once an epoch, framed, cut with a word about it, little padding."""

from __future__ import annotations

import dataclasses
import functools
import random
from itertools import chain

import numpy as np
import pytest
import torch

from clearhead.errors import InputError
from clearhead.learn.batches.batch import IGNORE, Buckets, rounded
from clearhead.learn.batches.ragged import DEVICE_TOGETHER, ROWS, for_device
from clearhead.learn.data.examples import Labelled, Pair, Question, Tagged
from tests.batches.toys import batches_of, corpus_of, encoded_of, same, special_of, tokenizer_for

pytestmark = pytest.mark.ledger("H1", "H6")
TASKS = ("seq2seq", "classify", "tag")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("plan", [{"batch_size": 8}, {"batch_tokens": 300}], ids=["rows", "tokens"])
def test_each_example_comes_once_an_epoch(task, plan, tmp_path):
    batches = batches_of(task, tmp_path, length=128, **plan)
    orders = []
    for epoch in range(3):
        made = [batches.at(epoch * batches.per_epoch + index) for index in range(batches.per_epoch)]
        numbers = [batch.numbers.tolist() for batch in made]
        assert sorted(chain.from_iterable(numbers)) == list(range(200))
        orders.append(numbers)
    assert orders[0] != orders[1] != orders[2]
    assert sorted(map(sorted, orders[0])) != sorted(map(sorted, orders[1]))  # other companions too


def slots_of(batch) -> int:
    return batch.ids.numel() + (batch.source.numel() if batch.source is not None else 0)


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_a_share_of_the_tokens_is_hidden_in_training_alone(task, tmp_path):
    options = {"length": 128, "batch_size": 8}
    plain, hidden = (batches_of(task, tmp_path, **options, token_dropout=share) for share in (0.0, 0.3))
    unknown, changed, tokens = special_of(task)["unk"], 0, 0
    for index in range(plain.per_epoch):
        before, after = plain.at(index), hidden.at(index)
        assert torch.equal(before.targets, after.targets) and same(after, hidden.at(index))
        ordinary = ~torch.isin(before.ids, torch.tensor(list(special_of(task).values())))
        where = before.ids != after.ids
        assert ordinary[where].all() and (after.ids[where] == unknown).all()
        changed, tokens = changed + int(where.sum()), tokens + int(ordinary.sum())
    assert changed / tokens == pytest.approx(0.3, abs=4 * (0.21 / tokens) ** 0.5)
    judged = [
        batches_of(task, tmp_path, **options, training=False, token_dropout=share) for share in (0.0, 0.3)
    ]
    assert same(judged[0].at(0), judged[1].at(0))


@pytest.mark.parametrize("task", TASKS)
def test_a_batch_stays_within_its_tokens(task, tmp_path):
    limit = 150
    batches = batches_of(task, tmp_path, length=256, batch_tokens=limit)
    sizes = []
    for batch in batches.all():
        size = slots_of(batch)
        assert size <= limit or len(batch) == 1
        sizes.append(size)
    assert np.mean(sizes) > 0.5 * limit


@pytest.mark.parametrize("task", TASKS)
def test_buckets_waste_less_than_chance(task, tmp_path):
    batches = batches_of(task, tmp_path, length=256, batch_size=8)
    made = [batches.at(index) for index in range(batches.per_epoch)]
    slots = sum(map(slots_of, made))
    assert batches.waste == pytest.approx(1 - sum(batch.n_tokens for batch in made) / slots)
    sizes = batches.buckets.sizes
    order = np.random.default_rng(0).permutation(len(sizes))
    groups = [order[at : at + 8] for at in range(0, len(order), 8)]
    by_chance = sum(sizes[group].max(0).sum() * len(group) for group in groups)
    assert batches.waste < 0.6 * (1 - sizes.sum() / by_chance)


def test_lengths_are_rounded_up_by_an_eighth_at_most():
    lengths = np.arange(1, 5000)
    bound = rounded(lengths)
    assert (bound >= lengths).all() and (bound <= lengths * 1.125).all()
    assert (np.diff(bound) >= 0).all() and len(np.unique(bound)) < 100


def test_ten_thousand_pairs_pad_little():
    random = np.random.default_rng(0)
    source = random.integers(3, 60, 10_000)
    buckets = Buckets(np.stack([source, np.maximum(1, source + random.integers(-3, 4, 10_000))], 1), 32, 4096)
    order, _ = buckets.order(random)
    assert buckets.waste(order) < 0.06


# Frames -----------------------------------------------------------------------------------------------------


def test_pairs_are_framed_for_teacher_forcing(tmp_path):
    corpus, tokenizer, special = corpus_of("seq2seq"), tokenizer_for("seq2seq"), special_of("seq2seq")
    batches = batches_of("seq2seq", tmp_path, length=256, batch_size=8)
    for batch in batches.all():
        for row, number in enumerate(batch.numbers.tolist()):
            example = corpus.train[number]
            target = tokenizer.encode(example.target, add_special_tokens=False).ids
            # The source ends with the eos of the tokenizer's template.
            expect(batch.source[row], tokenizer.encode(example.source).ids, special["pad"])
            assert tokenizer.encode(example.source).ids[-1] == special["eos"]
            expect(batch.ids[row], [special["bos"], *target], special["pad"])
            expect(batch.targets[row], [*target, special["eos"]], IGNORE)
            if batch.mask is not None:
                assert batch.mask[row].sum() == len(target) + 1
            if batch.source_mask is not None:
                assert batch.source_mask[row].sum() == len(tokenizer.encode(example.source).ids)


def expect(found: torch.Tensor, wanted: list[int], fill: int) -> None:
    assert found.tolist() == wanted + [fill] * (len(found) - len(wanted))


def test_a_target_that_is_cut_does_not_learn_to_stop(tmp_path):
    corpus, tokenizer, special = corpus_of("seq2seq"), tokenizer_for("seq2seq"), special_of("seq2seq")
    batches = batches_of("seq2seq", tmp_path, length=20)
    plain = functools.partial(tokenizer.encode, add_special_tokens=False)
    lengths = [[len(plain(text).ids) + 1 for text in pair.texts()] for pair in corpus.train]
    longer = np.sum(np.array(lengths) > 20, 0)
    assert longer.min() > 10
    assert batches.notes == (
        f"{longer[0]} of 200 sources are longer than 20 tokens and were cut",
        f"{longer[1]} of 200 targets are longer than 20 tokens and were cut",
    )
    for batch in batches.all():
        for row, number in enumerate(batch.numbers.tolist()):
            source, target = (plain(text).ids for text in corpus.train[number].texts())
            expect(batch.source[row], [*source[:19], special["eos"]], special["pad"])
            expect(batch.targets[row], [*target, special["eos"]][:20], IGNORE)
            expect(batch.ids[row], [special["bos"], *target][:20], special["pad"])


@pytest.mark.parametrize("length", [24, 512])
def test_texts_and_pairs_of_texts_are_framed_as_the_tokenizer_does(length, tmp_path):
    corpus, tokenizer, special = corpus_of("classify"), tokenizer_for("classify"), special_of("classify")
    batches = batches_of("classify", tmp_path, length=length, batch_size=8)
    cut = tokenizer.from_str(tokenizer.to_str())
    cut.enable_truncation(length, strategy="longest_first")
    cuts = 0
    for batch in batches.all():
        for row, number in enumerate(batch.numbers.tolist()):
            example = corpus.train[number]
            texts = (example.text,) if example.pair is None else (example.text, example.pair)
            wanted = cut.encode(*texts)
            cuts += len(tokenizer.encode(*texts).ids) > length
            real = batch.ids[row] != special["pad"]
            own = batch.ids[row][real].tolist(), batch.types[row][real].tolist()
            assert int(real.sum()) == len(wanted.ids)
            if example.pair is None or len(tokenizer.encode(*texts).ids) <= length:
                expect(batch.ids[row], wanted.ids, special["pad"])
                expect(batch.types[row], wanted.type_ids, 0)
            else:  # where both are too long, which of the two keeps the odd token is a matter of taste
                for side in (0, 1):
                    mine = [token for token, kind in zip(*own) if kind == side]
                    theirs = [token for token, kind in zip(wanted.ids, wanted.type_ids) if kind == side]
                    assert abs(len(mine) - len(theirs)) <= 1
                    assert mine[:-2] == theirs[: len(mine) - 2] or theirs[:-2] == mine[: len(theirs) - 2]
                    assert mine[-1] == theirs[-1] == special["sep"]
            assert corpus.labels[batch.targets[row]] == example.label
            assert batch.mask is None or (batch.mask[row] == real).all()
    line = f"{cuts} of 200 examples are longer than {length} tokens and were cut"
    assert batches.notes == ((line,) if cuts else ())
    assert bool(cuts) == (length == 24)


def test_single_texts_have_no_types(tmp_path):
    corpus = corpus_of("classify")
    rows = [dataclasses.replace(row, pair=None) for row in corpus.train]
    single = dataclasses.replace(corpus, train=rows, fingerprint="single")
    assert batches_of("classify", tmp_path, corpus=single).at(0).types is None


@pytest.mark.parametrize("length", [20, 256])
@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "char"])
def test_tags_stand_at_the_first_piece_of_each_word(length, kind, tmp_path):
    corpus, tokenizer, special = corpus_of("tag"), tokenizer_for("tag", kind), special_of("tag", kind)
    batches = batches_of("tag", tmp_path, kind=kind, length=length, batch_size=8)
    lost = cut = several = 0
    for batch in batches.all():
        for row, number in enumerate(batch.numbers.tolist()):
            ids, targets = [], []
            # Go word by word, which is the slow way.
            for word, tag in zip(corpus.train[number].words, corpus.train[number].tags):
                pieces = tokenizer.encode([word], is_pretokenized=True, add_special_tokens=False).ids
                several += len(pieces) > 1
                ids += pieces
                targets += [corpus.labels.index(tag)] + [IGNORE] * (len(pieces) - 1)
            room = length - 2
            cut, lost = cut + (len(ids) > room), lost + sum(target != IGNORE for target in targets[room:])
            expect(batch.ids[row], [special["cls"], *ids[:room], special["sep"]], special["pad"])
            expect(batch.targets[row], [IGNORE, *targets[:room]], IGNORE)
    assert several > 100
    line = f"{cut} of 200 sentences are longer than {length} tokens and were cut: {lost:,} words have no tag"
    assert batches.notes == ((line,) if cut else ())


def test_words_that_vanish_are_said(tmp_path):
    rows = [Tagged(("cat", "\u200b\u0000", "sat"), ("O", "LONG", "O"))]
    odd = dataclasses.replace(corpus_of("tag"), train=rows, fingerprint="odd")
    batches = batches_of("tag", tmp_path, corpus=odd)
    targets, alone = batches.at(0).targets, {"is_pretokenized": True, "add_special_tokens": False}
    vanished = not tokenizer_for("tag").encode(["\u200b\u0000"], **alone).ids
    assert int((targets != IGNORE).sum()) == (2 if vanished else 3)
    assert batches.notes == (("1 words have no token and so no tag",) if vanished else ())


@pytest.mark.parametrize(
    ("length", "kind"), [(48, "wordpiece"), (512, "wordpiece"), (64, "bpe"), (96, "char")]
)
def test_answers_are_found_again_from_their_tokens(length, kind, tmp_path):
    corpus, special = corpus_of("answer"), special_of("answer", kind)
    tokenizer = tokenizer_for("answer", kind)
    ids_of = functools.cache(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    stride = 12
    batches = batches_of("answer", tmp_path, kind=kind, length=length, batch_size=8, stride=stride)
    seen: dict[int, int] = {}
    covered: dict[int, set[int]] = {}
    windows = 0
    for batch in batches.all():
        windows += len(batch)
        for row, window in enumerate(batch.numbers.tolist()):
            first, last = batch.targets[row].tolist()
            example, place = batches.found(window, first, last)
            asked = corpus.train[example]
            ids = batch.ids[row][batch.mask[row] if batch.mask is not None else slice(None)].tolist()
            question = ids_of(asked.question)[: (length - 3) // 2]
            assert ids[: len(question) + 2] == [special["cls"], *question, special["sep"]]
            assert ids[-1] == special["sep"]
            context = ids_of(asked.context)
            begin = int(batches.begin[window])
            assert ids[len(question) + 2 : -1] == context[begin : begin + len(ids) - len(question) - 3]
            first_part, second = len(question) + 2, len(ids) - len(question) - 2
            padding = batch.ids.shape[1] - len(ids)
            assert batch.types[row].tolist() == [0] * first_part + [1] * second + [0] * padding
            covered.setdefault(example, set()).update(range(begin, begin + len(ids) - len(question) - 3))
            if (first, last) != (0, 0):
                assert asked.context[slice(*place)].strip() == asked.answer
                seen[example] = seen.get(example, 0) + 1
            else:
                assert place is None
    for number, asked in enumerate(corpus.train):
        size = len(ids_of(asked.context))
        assert covered[number] == set(range(size))  # the whole context is read
        if not asked.answer:
            assert number not in seen
        elif len(ids_of(asked.answer)) <= stride:
            assert number in seen  # windows overlap by as much: the answer lies whole in one of them
    assert (windows > 200) == (length < 512)


# Mistakes in the data ---------------------------------------------------------------------------------------


def test_wrong_examples_are_named(tmp_path):
    labels = dataclasses.replace(corpus_of("classify"), train=[Labelled("cat", "evn")], fingerprint="label")
    with pytest.raises(InputError, match=r'the label "evn" is not among .*did you mean "even"'):
        encoded_of("classify", tmp_path, corpus=labels)
    tags = dataclasses.replace(corpus_of("tag"), train=[Tagged(("a", "cat"), ("O",))], fingerprint="tags")
    with pytest.raises(InputError, match="2 words and 1 tags"):
        encoded_of("tag", tmp_path, corpus=tags)
    rows = [Question("the", "a cat sat", "cat", 3)]
    moved = dataclasses.replace(corpus_of("answer"), train=rows, fingerprint="moved")
    with pytest.raises(InputError, match='"cat" does not stand at character 3'):
        encoded_of("answer", tmp_path, corpus=moved)
    with pytest.raises(InputError, match="the task classify learns from labels, and the data are pairs"):
        encoded_of("classify", tmp_path, corpus=corpus_of("seq2seq"))
    for task in ("seq2seq", "classify", "tag", "answer"):
        with pytest.raises(InputError, match=r"raise data\.max_length"):
            batches_of(task, tmp_path, length=1)
        empty = dataclasses.replace(corpus_of(task), train=[], fingerprint="none")
        with pytest.raises(InputError, match="no examples for training"):
            batches_of(task, tmp_path, corpus=empty)


def test_empty_texts_are_rows_of_special_tokens(tmp_path):
    rows = [Pair("", ""), Pair("cat", "")]
    pairs = dataclasses.replace(corpus_of("seq2seq"), train=rows, fingerprint="empty")
    special = special_of("seq2seq")
    batch = batches_of("seq2seq", tmp_path, corpus=pairs).at(0)
    assert batch.ids.tolist() == [[special["bos"]]] * 2 and batch.targets.tolist() == [[special["eos"]]] * 2
    rng = random.Random(0)
    rows = [Labelled("", rng.choice(("even", "odd"))) for _ in range(3)]
    texts = dataclasses.replace(corpus_of("classify"), train=rows, fingerprint="empty")
    special = special_of("classify")
    ids = batches_of("classify", tmp_path, corpus=texts).at(0).ids.tolist()
    assert ids == [[special["cls"], special["sep"]]] * 3


@pytest.mark.parametrize(("device", "batch_size"), [("cpu", None), ("cuda", None), ("cpu", 3), ("cuda", 3)])
def test_rows_are_grouped_as_a_device_reads_them(device, batch_size):
    """Nothing runs on the device: a GPU is named, and need not be there."""
    draw = random.Random(0)
    lengths = [draw.randint(1, 400) for _ in range(500)]
    groups = for_device(lengths, batch_size, torch.device(device))
    assert sorted(place for group in groups for place in group) == list(range(500))
    sizes = [len(group) for group in groups]
    assert max(sizes) <= (batch_size or (ROWS if device == "cpu" else 500))
    if device == "cuda" and batch_size is None:
        tokens = [len(group) * max(lengths[place] for place in group) for group in groups]
        assert max(tokens) <= DEVICE_TOGETHER and len(groups) < 10 and max(sizes) > ROWS
    if device == "cuda" and batch_size:
        assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
