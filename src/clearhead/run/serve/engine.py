"""The engine: requests in, texts out, all of them a step further at a time.

Each step is one row of pieces: of every text that is being written its last token, then as much of the
prompts as the budget leaves. A request waits until the pool has room for its prompt. When room runs out, the
latest request gives its blocks back and later reads its tokens anew. Requests that read, such as embeddings,
wait in a line of their own and take turns with the steps.
"""

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from clearhead.core.transformer import Transformer
from clearhead.errors import BusyError, InputError, refuse
from clearhead.learn.tasks.generation import Prompt
from clearhead.run.api import Model
from clearhead.run.bundle import Bundle
from clearhead.run.generate.decode import steps_back
from clearhead.run.generate.speculate import Guesser, guessers_for
from clearhead.run.serve import limits as limiting
from clearhead.run.serve.adapters import Updates
from clearhead.run.serve.kv_cache import ALL
from clearhead.run.serve.limits import Limits, ServeFigures, check_fits, piece_of, pool_for, window_blocks
from clearhead.run.serve.model_runner import Part, Passes, Read
from clearhead.run.serve.pooling import CHARACTERS, InsideView, Reading, ReadingLine, with_model
from clearhead.run.serve.sequence import Asked, Guesses, Job, Told, check_served, plain_greedy

KEPT = 64  # requests that are remembered once they have ended
STALLED = 30.0  # seconds without a step, with work to do, after which the engine counts as ill


class ServeEngine:
    """The requests of one model. `submit` and `read` may be called from any thread, `step` from one."""

    def __init__(
        self, m: Model, limits: Limits | None = None, adapters: Mapping[str, Updates] | None = None
    ) -> None:
        self.m, self.limits, self.figures = m, limits or Limits(), ServeFigures()
        self.adapters = adapters or {}
        self.passes = Passes(m.model, self.limits, self.adapters)
        self.reader = with_model(m, self.passes.runner)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []  # by arrival
        self.finished: deque[Job] = deque(maxlen=KEPT)  # for those who look inside them
        self.inside = InsideView(m)
        self.moved = time.monotonic()  # when the last step ended
        self.sign: Callable[[], None] = lambda: None  # told whenever `busy`, `moved` or `room` may differ
        self.closed, self._count, self.decided = False, 0, 0  # requests let in or refused
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        weight, spec = next(m.model.parameters()), m.model.main.spec
        self.piece = piece_of(self.limits, weight.is_cuda)
        self.readings = ReadingLine(sys.maxsize if weight.is_cuda else CHARACTERS)
        self.writes = spec.causal and m.config.head == "lm"
        # A layer that keeps a state has nothing that a later prompt could take up.
        self.shares = self.writes and all(kind.chooses for kind in spec.kinds)
        self.ahead = Speculation(m.model, self.limits)
        self.pool = None
        if self.writes:
            check_served(m.model)
            self.pool = pool_for(spec, self.limits, m.config.max_positions, weight.dtype, weight.device)

    @functools.cached_property
    def exact(self) -> bool:
        """Whether this machine gives a row the same bits whatever else is in the step."""
        return self.passes.agree(self.limits.tokens + self.limits.running)

    @property
    def longest(self) -> int:
        """The most tokens that a prompt and its text may have together."""
        pool = self.pool.blocks.get(ALL) if self.pool is not None else None
        room = self.m.max_length if pool is None else pool.count * self.limits.block
        return min(self.m.max_length, room)

    # Requests ----------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Number of requests that may still come: those that can begin at the next step, and may wait."""
        free = self.limits.running - len(self.running)
        return self.limits.waiting + free - len(self.waiting) - len(self.readings.waiting)

    def check_room(self, tokens: int = 0, joined: bool = False) -> None:
        """Raise `BusyError` where no more may wait; cheap enough to ask before a prompt is encoded.

        `joined`: one more text of a request that was let in.
        """
        limits, waiting = self.limits, sum(len(job.tokens) for job in list(self.waiting))
        requests = len(self.waiting) + len(self.readings.waiting)
        if self.closed:
            raise BusyError("the server is ending and takes no more requests: try another one")
        if (self.room < 1 and not joined) or (waiting and waiting + tokens > limits.waiting_tokens):
            raise BusyError(
                f"{requests} requests with {waiting} tokens of prompts are waiting, and at most "
                f"{limits.waiting} and {limits.waiting_tokens} may: try again later"
            )

    def settle(self) -> None:
        """Count a request that was refused."""
        with self._wake:
            self.decided += 1
        self.sign()

    def submit(
        self,
        prompt: Prompt,
        options: Mapping[str, Any] | None = None,
        asked: Asked | None = None,
        told: Told | None = None,
        after: Job | None = None,
        joined: bool = False,
    ) -> Job:
        """Put a text to generate into the line; `options` are those of `generate`."""
        refuse(not self.writes, f"this model's head is {self.m.config.head}: it writes no text")
        assert self.pool is not None
        limiting.check_prompt(self.pool, prompt, None if self.m.model.main.spec.cross else ALL)
        job = Job(self.m, prompt, options or {}, asked or Asked(), told)
        job.after = after
        needed = len(job.row.prompt) + job.most
        check_fits(self.pool, needed, ALL)
        check_fits(self.pool, job.sources, None)
        adapter = job.asked.adapter
        refuse(adapter and adapter not in self.adapters, f'no adapter is called "{adapter}"')
        if job.asked.inside:
            refuse(adapter, f'inside is given of the model, and not with an adapter such as "{adapter}"')
            self.inside.check(job.asked.inside, needed, job.sources)
        self.check_room(len(job.tokens), joined)
        with self._wake:
            self.moved = self.moved if self.busy else time.monotonic()  # nothing had to move before
            self._count += 1
            self.decided += not joined
            job.number = self._count
            self.waiting.append(job)
            self._wake.notify()
        self.sign()
        return job

    def read(self, inputs: Sequence[Any], run: Callable[[Bundle, list[Any]], Sequence[Any]]) -> Reading:
        """Put inputs into the line for `run`, a function of the model and a list; it gives a result for each.

        Requests with the same `run` may share a call.
        """
        self.check_room()
        reading = Reading(inputs, lambda every: run(self.reader, every), run)
        with self._wake:
            self.moved = self.moved if self.busy else time.monotonic()
            self.decided += 1
            self.readings.waiting.append(reading)
            self._wake.notify()
        self.sign()
        return reading

    # Steps -------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether there is work to do."""
        return bool(self.waiting or self.running or self.readings)

    @property
    def well(self) -> bool:
        """Return False where work waits and nothing moves."""
        return not self.busy or time.monotonic() - self.moved < STALLED

    @torch.inference_mode()
    def step(self) -> None:
        """Take every request one step further."""
        for job in [*self.running, *self.waiting]:
            if (reason := job.ends.reason()) is not None:
                self._end(job, reason)
        plan: list[tuple[Job, int, int]] = []
        self._plan(plan)
        plain = self.ahead.is_plain(plan)
        self.ahead.add(plan)
        self.sign()
        alone = [one for one in plan if not one[0].encoded]
        for one in alone:
            self._guarded([one])
        before = time.thread_time()
        self._guarded([one for one in plan if one not in alone])
        if plain:
            self.ahead.price.keep(len(plan), time.thread_time() - before)
        self.readings.step()
        self.figures.steps += 1
        self.moved = time.monotonic()
        self.sign()

    def _plan(self, plan: list[tuple[Job, int, int]]) -> None:
        """Choose what is read in this step: texts that go on first, then prompts, in the order of arrival."""
        budget = self.limits.tokens
        for job in [job for job in self.running if job.decoding]:
            budget -= self._add(plan, job, budget, 1) if job.placed else 0
        for job in [job for job in self.running if not job.decoding]:
            budget -= self._add(plan, job, budget) if job.placed else 0
        while self.waiting and budget > 0 and len(self.running) < self.limits.running:
            job = self.waiting[0]
            if (job.after is not None and job.after.reading) or not self._admit(job):
                return
            self.waiting.popleft()
            self.running.append(job)
            job.placed = True
            budget -= self._add(plan, job, budget)

    def _add(self, plan: list[tuple[Job, int, int]], job: Job, budget: int, most: int | None = None) -> int:
        """Add pieces of a request up to the budget; return how many tokens they have."""
        added = 0
        for table in job.tables.values():
            table.trim(job.read)
        while job.planned < len(job.tokens) and (most is None or added < most):
            start, stop = job.next_piece(self.piece)
            if (plan and added + stop - start > budget) or not self._make_room(plan, job, stop):
                break
            plan.append((job, start, stop))
            job.planned, added = stop, added + stop - start
        return added

    def _make_room(self, plan: list[tuple[Job, int, int]], job: Job, tokens: int) -> bool:
        """Take the blocks for so many tokens, from the latest requests if need be."""
        for group, table in job.tables.items():
            while group is not None and table.missing(tokens) > table.blocks.available:
                latest = self.running[-1]
                self._preempt(latest)
                plan[:] = [one for one in plan if one[0] is not latest]
                if latest is job:
                    return False
            if group is not None:
                table.extend(tokens)
        return True

    def _preempt(self, job: Job) -> None:
        job.restart()
        job.preempted += 1
        self.figures.preempted += 1
        self.running.remove(job)
        job.placed = False
        self.waiting.appendleft(job)

    def _admit(self, job: Job) -> bool:
        """Find the beginning of a prompt in the pool, and whether there is room for the rest."""
        if self.pool is not None and not job.tables:
            job.place(self.pool)
            job.name(self.limits.block, self.shares)
        size, tables = self.limits.block, job.tables
        most = (len(job.row.prompt) - 1) // size if job.asked.prompt_logprobs is None else 0
        found = job.adopt(most)
        if None in tables:
            if tables[None].missing(job.sources) > tables[None].blocks.available:
                return False
            tables[None].extend(job.sources)
        for group, table in tables.items():
            needed = table.missing(len(job.tokens) + 1) if group is not None else 0
            if group is not None and group[0] is not None:
                needed = min(needed, window_blocks(group, self.limits))
            if needed > table.blocks.available and self.running:
                for one in tables.values():
                    one.clear()
                return False
        job.read = job.planned = found * size
        if job.times.begun is None:
            self.figures.prefix_asked += len(job.row.prompt)
            self.figures.prefix_found += job.read
            job.cached = job.read
        job.times.begun = job.times.begun or time.monotonic()
        return True

    def _guarded(self, plan: list[tuple[Job, int, int]]) -> None:
        """Run a step; an error of the whole of it ends the requests that are in it, and no other."""
        if not plan:
            return
        try:
            self._run(plan)
        except Exception as error:
            for job in {id(job): job for job, _, _ in plan if not job.done}.values():
                self._end(job, "error", error)

    def _run(self, plan: list[tuple[Job, int, int]]) -> None:
        assert self.pool is not None
        for read, last, logits in self.passes.run(self.pool, plan):
            for job, piece in read:
                self.figures.prompt_tokens += max(0, min(piece.stop, len(job.row.prompt)) - piece.start)
                self.figures.prompt_tokens += 0 if job.encoded else job.sources
                job.encoded, job.read = True, piece.stop
                job.name_blocks(piece.start, piece.stop, self.limits.block)
            if logits is not None:
                self._write(last, logits)
            for job in {id(job): job for job, _ in read}.values():
                guessed, right = job.end_guesses()
                self.figures.guessed += guessed
                self.figures.guessed_right += right

    def _write(self, last: Read, logits: torch.Tensor) -> None:
        """Choose the next token of each text, and of its guesses while they are right: logits [B, V]."""
        for (job, piece), row, best in zip(last, logits, plain_greedy([job for job, _ in last], logits)):
            if not job.stands(piece.stop):
                continue
            try:
                goes_on = bool(job.most) and job.add(row[None], best, int(job.guessed(piece.start) is None))
            except InputError as error:
                self._end(job, "error", error)
                continue
            self.figures.new_tokens += bool(job.most)
            if not goes_on:
                self._end(job)

    def _end(self, job: Job, reason: str | None = None, error: Exception | None = None) -> None:
        if job.asked.inside and reason is None:
            try:
                job.inside = self.inside.look(job.asked.inside, job.tokens, job.prompts.source)
            except Exception as wrong:
                error = wrong
        self.finished.append(job)  # before anyone is told that it has ended
        job.end(reason, error)
        self.figures.ended[job.row.stop_reason] += 1
        if job.placed:
            self.running.remove(job)
            job.placed = False
        elif job in self.waiting:
            self.waiting.remove(job)

    # The thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take steps in a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self._loop, name="clearhead-engine", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self.busy and not self.closed:
                    self._wake.wait()
            if not self.busy:
                return
            self.step()

    def close(self, drain: float = 0.0) -> None:
        """Take no more requests; end those that are there within so many seconds, or cancel them."""
        with self._wake:
            self.closed = True
            self._wake.notify()
        until = time.monotonic() + drain
        while self.busy and time.monotonic() < until:
            time.sleep(0.01)
        for job in [*self.running, *self.waiting]:
            job.cancel()
        self.readings.close()
        if self._thread is not None:
            self._thread.join(STALLED)


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
