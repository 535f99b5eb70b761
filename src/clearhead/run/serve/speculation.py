"""The draft tokens of an engine: for which sequences, how many, and what they have cost.

They come from a sequence's own text, from a draft model that runs next to the engine's, or from the model's
own MTP layers, which read the states that its steps compute. None changes a token: the model chooses each as
it always would, by the sequence's own seed, and goes on for as long as it chooses the draft tokens. What
drafts by a distribution draws with the numbers that the model itself will draw with, so that two like
distributions mostly give the same token.
"""

import time
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.learn.tasks.generation import check_draft
from clearhead.run.bundle import Bundle
from clearhead.run.generate.decode import check_steps_back, steps_back
from clearhead.run.generate.sequence import Drafter
from clearhead.run.generate.speculate import DraftModel, MTPDrafter, drafters_for
from clearhead.run.kernels.prepare import prepared
from clearhead.run.serve.kv_cache import Chunk
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.sequence import DraftTokens, Plan, ServedSequence
from clearhead.variants.cuda_attention import without_cudnn

LOOKUP = 8  # draft tokens of a sequence at most
FEW = 8  # sequences that may decode at once; with more of them a step has work enough
ROWS = 16  # of a step with draft tokens, at most
LEAST_READ = 16
HOPE = 0.8  # share of a draft model's tokens that is assumed to be right at first
TRIED = 32  # steps without draft tokens of a model after which one is compared, to see whether they pay now
FORGOTTEN = 0.95  # how much of what steps cost is kept from one to the next
ASSUMED = 0.25  # of a step of one row, the price of one more, until steps of several sizes were seen


class RowPrice:
    """What a step costs by the number of its rows: a line through the latest steps."""

    def __init__(self) -> None:
        self.sums = [0.0] * 5  # of 1, rows, seconds, rows squared, rows times seconds

    def keep(self, rows: int, seconds: float) -> None:
        """Note what a step has cost."""
        values = (1, rows, seconds, rows * rows, rows * seconds)
        self.sums = [FORGOTTEN * old + new for old, new in zip(self.sums, values)]

    def of_one_more(self, rows: int, tokens: float, drafting: float = 0.0) -> float:
        """Return the price of a further row in new tokens, where `rows` rows are worth `tokens` of them.

        `drafting`: seconds that its draft token takes besides.
        """
        count, all_rows, seconds, squared, mixed = self.sums
        spread = count * squared - all_rows**2
        each = seconds / all_rows if seconds > 0 else 1.0  # the most that a row can cost
        if spread > 0.01 * count**2:
            slope = min(max((count * mixed - all_rows * seconds) / spread, 0.0), each)
        else:
            slope = ASSUMED * each
        whole = seconds / count + slope * (rows - all_rows / count) if seconds > 0 else 1.0
        return (slope + drafting) * tokens / max(whole, slope)


class Speculation:
    """The draft tokens of an engine."""

    def __init__(
        self, m: Bundle, limits: Limits, draft: Bundle | str | None = None, own: Transformer | None = None
    ) -> None:
        """`draft`: a smaller model with the same vocabulary, or "mtp"; None: the text itself is looked into.

        `own`: the inference model whose MTP layers draft.
        """
        self.model, self.rows, self.price = m.model, min(limits.tokens, ROWS), RowPrice()
        self.draft: Transformer | None = None  # the inference model that drafts
        self.mtp = isinstance(draft, str)
        self.seconds, self.count = 0.0, 0.0  # that the latest of its draft tokens took, and their number
        # Tokens of a text that the draft model reads in a step: more than a step adds.
        self.chunk = max(LEAST_READ, limits.tokens // FEW) + limits.draft_tokens
        if draft is not None:
            refuse(limits.lookup, f"lookup {limits.lookup} with a draft model: both propose draft tokens")
            check_draft(m, draft)
            check_steps_back(m.model, *([] if isinstance(draft, str) else [draft.model]))
            self.draft = own if isinstance(draft, str) else prepared(draft.model)
            self.most = limits.draft_tokens
            return
        most = LOOKUP if limits.lookup is None else limits.lookup
        if limits.lookup is None and next(m.model.parameters()).is_cuda:
            most = 0  # there further rows of a sequence would not be in the captured CUDA graph
        self.most = most if steps_back(m.model) else 0

    def add(self, plan: Plan) -> None:
        """Add draft tokens to a step that takes a few sequences one token further each."""
        if not self.most or len(plan) > FEW or not self.is_plain(plan):
            return
        expected = float(len(plan))
        for seq, stop in [(chunk.seq, chunk.stop) for chunk in plan]:
            drafts = self._propose(seq, len(plan), expected)
            chance = drafts.share
            for place in range(stop, stop + len(drafts.found)):
                pays = chance > self.price.of_one_more(len(plan), expected)
                if not pays or len(plan) >= self.rows or not seq.take_free(place + 1):
                    break
                plan.append(Chunk(seq, place, place + 1))
                drafts.read += 1
                expected, chance = expected + chance, chance * drafts.share

    def observe(self, chunk: Chunk[ServedSequence], states: Tensor) -> None:
        """Let MTP layers see the states [N, D] of a chunk, which the next step may overwrite."""
        if self.mtp and chunk.seq.most:
            self._drafts_of(chunk.seq).drafter.observe(chunk.start, states[None].clone())

    def _drafts_of(self, seq: ServedSequence) -> DraftTokens:
        if seq.drafts is None:
            seq.drafts = DraftTokens(self._drafter(seq), HOPE if self.draft else 0.0)
        return seq.drafts

    @staticmethod
    def is_plain(plan: Plan) -> bool:
        """Return whether a step is decoding alone: the last token of each sequence."""
        return bool(plan) and all(chunk.seq.decoding for chunk in plan)

    def _propose(self, seq: ServedSequence, rows: int, tokens: float) -> DraftTokens:
        """Propose tokens for a sequence of a step of `rows` rows, worth `tokens` tokens."""
        drafts, most = self._drafts_of(seq), min(self.most, seq.most - len(seq.ids) - 1)
        if seq.most_drafts is not None:
            most = min(most, seq.most_drafts)
        drafts.compare(seq.tokens)
        if self.draft is None:
            # What is looked up is not drawn.
            drafts.found = drafts.drafter.propose(seq.tokens, most, lambda: torch.zeros(1)).tokens
            return drafts
        try:
            self._draft(seq, drafts, self._paying(drafts, most, rows, tokens))
        except Exception:  # such as logits that are no numbers: the text goes on without draft tokens
            drafts.found, seq.most_drafts = [], 0
        return drafts

    def _paying(self, drafts: DraftTokens, most: int, rows: int, tokens: float) -> int:
        """Return how many tokens of the draft model pay for being made and verified."""
        price = self.price.of_one_more(rows, tokens, self.seconds / max(1.0, self.count))
        count, chance = 0, drafts.share
        while count < most and chance > price:
            count, chance = count + 1, chance * drafts.share
        if not count and drafts.without >= TRIED:
            count = min(most, 1)
        drafts.without = 0 if count else drafts.without + 1
        return count

    @without_cudnn()  # which makes a plan for every new length
    def _draft(self, seq: ServedSequence, drafts: DraftTokens, count: int) -> None:
        """Let the draft model propose `count` tokens, and note what they cost."""
        dice = None if seq.dice is None else seq.dice.copy()  # the model is going to roll the same numbers

        def roll() -> torch.Tensor:
            return torch.tensor([0.0 if dice is None else dice.roll()], dtype=torch.float64)

        unread, before = len(drafts.drafter.unread(seq.tokens)), time.thread_time()
        drafts.found = drafts.drafter.propose(seq.tokens, count, roll).tokens
        if drafts.found and unread <= self.most + 1:  # else it read a text besides
            self.seconds = FORGOTTEN * self.seconds + time.thread_time() - before
            self.count = FORGOTTEN * self.count + len(drafts.found)

    def _drafter(self, seq: ServedSequence) -> Drafter:
        if self.draft is not None and self.mtp:
            return MTPDrafter(self.draft, self.most, seq.request)
        if self.draft is not None:
            return DraftModel(self.draft, self.most, seq.request, seq.prompts, self.chunk)
        request = replace(seq.request, lookup=self.most)
        return drafters_for(self.model, request, seq.prompts, [seq.prompts.text(0)], None)[0]
