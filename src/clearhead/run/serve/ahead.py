"""Speculation in the engine: how a text may go on, found in the text itself, read as further rows of a step.

A guess is one more row of its text, so attention sees the shapes that it sees without guesses. A token is
chosen at each row as it always would be, and the rows behind a wrong guess are left out: tokens are those of
a text that was written one by one. Whether a guess is read at all depends on how often guesses of this text
came true, also of those that were not read, and on what a further row of a step has cost.
"""

from collections.abc import Sequence
from dataclasses import replace

from clearhead.core.transformer import Transformer
from clearhead.run.generate.prompts import steps_back
from clearhead.run.generate.speculate import Guesser, guessers_for
from clearhead.run.serve.guesses import Guesses
from clearhead.run.serve.jobs import Job
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.passes import Part

LOOKUP = 8  # tokens that are guessed for a text at most
FEW = 8  # texts that may be written at once; with more of them a step has work enough
ROWS = 16  # of a step with guesses, at most
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

    def of_one_more(self, rows: int, tokens: float) -> float:
        """Return the price of a further row in new tokens, where `rows` rows are worth `tokens` of them."""
        count, all_rows, seconds, squared, mixed = self.sums
        spread = count * squared - all_rows**2
        each = seconds / all_rows if seconds > 0 else 1.0  # the most that a row can cost
        if spread > 0.01 * count**2:
            slope = min(max((count * mixed - all_rows * seconds) / spread, 0.0), each)
        else:
            slope = ASSUMED * each
        whole = seconds / count + slope * (rows - all_rows / count) if seconds > 0 else 1.0
        return slope * tokens / max(whole, slope)


class Speculation:
    """The guesses of an engine: for whom, how many, and what they have cost."""

    def __init__(self, model: Transformer, limits: Limits) -> None:
        most = LOOKUP if limits.lookup is None else limits.lookup
        if limits.lookup is None and next(model.parameters()).is_cuda:
            most = 0  # there further rows of a text would not be recorded steps
        self.model, self.most = model, most if steps_back(model) else 0
        self.rows, self.price = min(limits.tokens, ROWS), RowPrice()

    def add(self, plan: list[Part]) -> None:
        """Add guesses to a step that takes a few texts one token further each."""
        if not self.most or len(plan) > FEW or not self.is_plain(plan):
            return
        expected = float(len(plan))
        for job, _, stop in list(plan):
            guesses = job.guesses = job.guesses or Guesses(self._guesser(job))
            guesses.look(job.tokens, min(self.most, job.most - len(job.row.ids) - 1))
            chance = guesses.share
            for place in range(stop, stop + len(guesses.found)):
                pays = chance > self.price.of_one_more(len(plan), expected)
                if not pays or len(plan) >= self.rows or not job.take_free(place + 1):
                    break
                plan.append((job, place, place + 1))
                guesses.read += 1
                expected, chance = expected + chance, chance * guesses.share

    @staticmethod
    def is_plain(plan: Sequence[Part]) -> bool:
        """Return whether a step reads the last tokens of texts alone."""
        return bool(plan) and all(job.decoding for job, _, _ in plan)

    def _guesser(self, job: Job) -> Guesser:
        asked = replace(job.request, lookup=self.most)
        return guessers_for(self.model, asked, job.prompts, job.prompts.texts, None)[0]
