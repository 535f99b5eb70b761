"""BPE dropout (Provilkov et al. 2020): the merges of a BPE tokenizer, applied with some of them left out.

A model that sees one word in several segmentations learns what its parts mean. At a share of 0 the tokens are
the tokenizer's own, at 1 single characters (of a byte-level tokenizer: bytes), and in between they are drawn
as the tokenizers library draws them. Its random numbers have no seed; here they are an argument.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import itemgetter
from random import Random

from tokenizers import Tokenizer

from clearhead.errors import ConfigError, refuse

GONE = -1  # in place of a token that was merged into the one before it


class Merges:
    """The merges of a BPE tokenizer: pairs of tokens, each with its rank and the token that it becomes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        model = json.loads(tokenizer.to_str())["model"]
        refuse(
            not model.get("merges"),
            f"data.bpe_dropout skips merges, and this tokenizer ({model['type']}) has none: set "
            "tokens.kind=bpe, or leave bpe_dropout out",
            ConfigError,
        )
        ids, prefix = model["vocab"], len(model["continuing_subword_prefix"] or "")
        self.pairs: dict[tuple[int, int], tuple[int, int]] = {}  # left, right -> rank, merged
        made_of: dict[int, tuple[int, int]] = {}  # merged -> left, right
        for rank, merge in enumerate(model["merges"]):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            pair, merged = (ids[left], ids[right]), ids[left + right[prefix:]]
            self.pairs[pair] = rank, merged
            made_of.setdefault(merged, pair)
        whole = tokenizer.get_added_tokens_decoder()  # these are never merged from parts
        self.made_of = {token: pair for token, pair in made_of.items() if token not in whole}
        self.known: dict[int, tuple[int, ...]] = {}

    def leaves(self, token: int) -> tuple[int, ...]:
        """Return the characters that a token is merged from; one that is not merged is its own."""
        if token not in self.known:
            parts = self.made_of.get(token)
            split = (token,) if parts is None else self.leaves(parts[0]) + self.leaves(parts[1])
            self.known[token] = split
        return self.known[token]

    def redrawn(
        self, ids: Sequence[int], words: Sequence[int | None], share: float, random: Random
    ) -> list[int]:
        """Cut a text into tokens again, with a share of the merges left out.

        Args:
            ids: the tokens of the text, as the tokenizer cuts it.
            words: of each token the number of the word that it belongs to; no token is merged beyond one.
            share: the probability with which a merge is skipped.
            random: where random numbers come from.
        """
        tokens = list[int]()
        for _, word in groupby(zip(words, ids), key=itemgetter(0)):
            tokens += self.merged([leaf for _, token in word for leaf in self.leaves(token)], share, random)
        return tokens

    def merged(self, leaves: Sequence[int], share: float, random: Random) -> list[int]:
        """Merge the characters of a word, the merges of lowest rank first.

        Each is skipped with probability `share`, and may come again after the next one that is not.
        """
        tokens, end = list(leaves), len(leaves)
        before, after = list(range(-1, end - 1)), list(range(1, end + 1))

        def merges_at(*places: int) -> Iterator[tuple[int, int, int]]:
            for place in places:
                if place >= 0 and after[place] < end:
                    found = self.pairs.get((tokens[place], tokens[after[place]]))
                    if found is not None:
                        yield found[0], place, found[1]

        queue = list(merges_at(*range(end)))
        heapify(queue)
        skipped = list[tuple[int, int, int]]()
        while queue:
            merge = heappop(queue)
            if share and random.random() < share:
                skipped.append(merge)
                continue
            while skipped:
                heappush(queue, skipped.pop())
            if merge not in merges_at(merge[1]):
                continue  # one of the two tokens has been merged with another since
            _, place, tokens[place] = merge
            right = after[place]
            tokens[right], after[place] = GONE, after[right]
            if after[place] < end:
                before[after[place]] = place
            for new in merges_at(before[place], place):
                heappush(queue, new)
        return [token for token in tokens if token != GONE]
