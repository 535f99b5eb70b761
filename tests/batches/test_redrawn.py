"""Batches whose tokens are drawn anew in each epoch: the same texts, the same draw at any time."""

from __future__ import annotations

import pytest

from clearhead.hub.tokens.text import Merges
from clearhead.learn.batches.batch import IGNORE, Redrawn
from clearhead.learn.batches.encoding import BpeDropout
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import TASKS
from tests.batches.toys import corpus_of, encoded_of, same, special_of, tokenizer_for


def redrawn(task: str, folder, share: float = 0.3) -> Redrawn:
    tokenizer, corpus, special = tokenizer_for(task, "bpe"), corpus_of(task), special_of(task, "bpe")
    rows, merges = encoded_of(task, folder, kind="bpe"), Merges(tokenizer)

    def draw(epoch: int):
        dropout = BpeDropout(merges, share, 7, epoch)
        drawn = TASKS[task].redrawn(rows, corpus, tokenizer, corpus.labels, special, dropout)
        plan = DataPlan(task=task, batch_size=8)
        return TASKS[task].make_batches(drawn, plan, special=special, length=512, seed=0, training=True)

    return Redrawn(draw)


@pytest.mark.parametrize("task", ["lm", "seq2seq", "classify", "tag"])
def test_an_epoch_has_tokens_of_its_own_whatever_came_before(task, tmp_path):
    first, again = redrawn(task, tmp_path), redrawn(task, tmp_path)
    count = first.per_epoch
    ahead = {index: again.at(index) for index in (3 * count + 1, count, 0, count - 1)}
    assert all(same(first.at(index), ahead[index]) for index in sorted(ahead))
    assert not same(first.at(0), redrawn(task, tmp_path, 0.1).at(0))


@pytest.mark.parametrize("task", ["seq2seq", "classify", "tag"])
def test_each_row_comes_once_an_epoch_and_says_what_it_said(task, tmp_path):
    batches, tokenizer, corpus = redrawn(task, tmp_path), tokenizer_for(task, "bpe"), corpus_of(task)
    cuts = []
    for epoch in range(2):
        made = [batches.at(epoch * batches.per_epoch + index) for index in range(batches.per_epoch)]
        cut = {}
        for batch in made:
            for row, number in enumerate(batch.numbers.tolist()):
                text = batch.source[row] if task == "seq2seq" else batch.ids[row]
                example, ids = corpus.train[number], text.tolist()
                if task == "seq2seq":
                    assert tokenizer.decode(ids) == example.source
                    targets = batch.targets[row][batch.targets[row] != IGNORE].tolist()
                    assert tokenizer.decode(targets) == example.target
                elif task == "classify":
                    assert tokenizer.decode(ids) == example.text + (example.pair or "")
                    assert corpus.labels[int(batch.targets[row])] == example.label
                else:
                    tagged = batch.targets[row] != IGNORE
                    assert tokenizer.decode(ids) == "".join(example.words)
                    tags = [corpus.labels[tag] for tag in batch.targets[row][tagged].tolist()]
                    assert tuple(tags) == example.tags
                    words = tokenizer.encode_batch(list(example.words), add_special_tokens=False)
                    begins = [tokenizer.decode([token]) for token in batch.ids[row][tagged].tolist()]
                    assert all(map(str.startswith, example.words, begins)) and len(words) == len(begins)
                cut[number] = ids
        assert sorted(cut) == list(range(len(corpus.train)))
        cuts.append(cut)
    assert sum(cuts[0][number] != cuts[1][number] for number in cuts[0]) > len(cuts[0]) / 2


def test_without_skips_batches_are_those_of_the_tokenizer(tmp_path):
    for task in ("lm", "seq2seq", "tag"):
        plain = TASKS[task].make_batches(
            encoded_of(task, tmp_path, kind="bpe"),
            DataPlan(task=task, batch_size=8),
            special=special_of(task, "bpe"),
            length=512,
            seed=0,
            training=True,
        )
        drawn = redrawn(task, tmp_path, share=0.0)
        assert drawn.per_epoch == plain.per_epoch
        assert all(same(drawn.at(index), plain.at(index)) for index in range(plain.per_epoch))
