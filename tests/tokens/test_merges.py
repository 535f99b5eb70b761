"""BPE dropout: the tokenizer's own tokens, single characters, and in between what the library draws."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from clearhead.errors import ConfigError
from clearhead.hub.tokens.text import Merges
from tests.tokens.toys import LINES, TEXT, trained

WORD = " England"
ODD = f"{TEXT}<|endoftext|>spoken\u200bland 𝔘 \x00 Englanders"  # with letters never seen, and a special token


def of_suffixes() -> Tokenizer:
    """BPE as in its paper: the last character of a word is another token; what continues one has a mark."""
    marks = {"continuing_subword_prefix": "##", "end_of_word_suffix": "</w>"}
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", **marks))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=220, special_tokens=["[UNK]"], show_progress=False, **marks)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def of_whole_texts() -> Tokenizer:
    """BPE of texts that are not split before, where words cannot be told apart."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", fuse_unk=True))
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


@pytest.mark.parametrize("make", [lambda: trained("bpe", vocab_size=320), of_suffixes, of_whole_texts])
def test_nothing_skipped_is_the_tokenizer_and_everything_its_characters(make):
    tokenizer = make()
    merges, encoding = Merges(tokenizer), tokenizer.encode(ODD)
    assert merges.redrawn(encoding.ids, encoding.word_ids, 0.0, Random(0)) == encoding.ids
    without = json.loads(tokenizer.to_str())
    without["model"]["merges"] = []
    letters = Tokenizer.from_str(json.dumps(without)).encode(ODD).ids
    assert merges.redrawn(encoding.ids, encoding.word_ids, 1.0, Random(0)) == letters
    assert len(encoding.ids) < len(letters)
    drawn = [merges.redrawn(encoding.ids, encoding.word_ids, 0.2, Random(seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    spelled = ["".join(map(tokenizer.id_to_token, ids)).replace("##", "") for ids in (drawn[0], encoding.ids)]
    assert spelled[0] == spelled[1]


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_segmentations_are_as_frequent_as_those_of_the_library(share):
    """Pearson's statistic of two samples lies within six deviations of its mean."""
    tokenizer, count = trained("bpe", vocab_size=320), 8000
    described = json.loads(tokenizer.to_str())
    described["model"]["dropout"] = share
    theirs, encoding = Tokenizer.from_str(json.dumps(described)), tokenizer.encode(WORD)
    merges, random = Merges(tokenizer), Random(0)
    library = Counter(tuple(theirs.encode(WORD).ids) for _ in range(count))
    own = Counter(tuple(merges.redrawn(encoding.ids, encoding.word_ids, share, random)) for _ in range(count))
    kinds = [tokens for tokens in own | library if own[tokens] + library[tokens] >= 10]
    statistic = sum((own[each] - library[each]) ** 2 / (own[each] + library[each]) for each in kinds)
    assert len(kinds) > 5
    assert statistic < len(kinds) + 6 * (2 * len(kinds)) ** 0.5


@pytest.mark.parametrize("kind", ["char", "wordpiece", "unigram"])
def test_a_tokenizer_without_merges_is_refused(kind):
    with pytest.raises(ConfigError, match=r"data.bpe_dropout skips merges, .* has none: set tokens.kind=bpe"):
        Merges(trained(kind))
