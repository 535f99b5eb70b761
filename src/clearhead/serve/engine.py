"""The engine: requests in, texts out, all of them a step further at a time.

Each step is one row of pieces: of every text that is being written its last token, then as much of the
prompts as the budget leaves. A request waits until the pool has room for its prompt. When room runs out, the
latest request gives its blocks back and later reads its tokens anew. Requests that read, such as embeddings,
wait in a line of their own and take turns with the steps.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from clearhead.bundle import Bundle
from clearhead.errors import BusyError, InputError, refuse
from clearhead.serve.jobs import Asked, Job, Told, blocks_for, check_served, plain_greedy
from clearhead.serve.paged import ALL, Group, PagedCache, Piece, Pool, groups_of, token_bytes
from clearhead.serve.ragged import ragged, rows_agree
from clearhead.tasks.generation import Prompt

CACHE_BYTES = 1 << 30  # of the pool, where nothing else is said
STALLED = 30.0  # seconds without a step, with work to do, after which the engine counts as ill


@dataclass(frozen=True)
class Limits:
    """How much the engine takes on."""

    tokens: int = 512  # read in one step at most, but for a piece that is longer
    running: int = 64  # texts written at the same time
    waiting: int = 256  # requests that wait
    waiting_tokens: int = 1 << 18  # tokens of the prompts that wait
    block: int = 64  # tokens of a block, and of a piece of a prompt
    cache_tokens: int | None = None  # that the pool holds; default: as many as 1 GiB holds

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            refuse(value is not None and value < 1, f"{name} {value} must be 1 or more")


@dataclass
class Figures:
    """What the engine has done so far."""

    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefix_asked: int = 0  # tokens of prompts that were looked for in the pool
    prefix_found: int = 0
    preempted: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # by stop reason


class Reading:
    """A request that reads: a function of all inputs that wait for it, and of these its own."""

    def __init__(
        self, inputs: Sequence[Any], run: Callable[[list[Any]], Sequence[Any]], kind: object
    ) -> None:
        self.inputs, self.run, self.kind = list(inputs), run, kind
        self.found: Sequence[Any] | None = None
        self.error: Exception | None = None
        self.done = threading.Event()
        self.cancelled = False
        self.told: Callable[[], None] | None = None

    def wait(self, timeout: float | None = None) -> Sequence[Any]:
        """Wait for the results, one for each input; raise what went wrong."""
        if not self.done.wait(timeout):
            raise TimeoutError("the request has not ended yet")
        if self.error is not None:
            raise self.error
        assert self.found is not None
        return self.found

    def end(self, found: Sequence[Any] | None, error: Exception | None = None) -> None:
        """Tell of the results."""
        self.found, self.error = found, error
        self.done.set()
        if self.told is not None:
            self.told()


class ServeEngine:
    """The requests of one model. `submit` and `read` may be called from any thread, `step` from one."""

    def __init__(self, m: Bundle, limits: Limits | None = None) -> None:
        self.m, self.limits, self.figures = m, limits or Limits(), Figures()
        self.runner = ragged(m.model)
        self.reader = _with_model(m, self.runner)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []  # by arrival
        self.readings: deque[Reading] = deque()
        self.moved = time.monotonic()  # when the last step ended
        self.closed = False
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        weight, spec = next(self.runner.parameters()), self.runner.main.spec
        self.writes = spec.causal and m.config.head == "lm"
        groups, size = groups_of(spec) if self.writes else [], self.limits.block
        # A layer that keeps a state has nothing that a later prompt could take up.
        self.shares = self.writes and all(kind.chooses for kind in spec.kinds)
        if self.writes:
            check_served(m.model)
        self.pool = (
            Pool(spec, size, self._counts(groups), weight.dtype, weight.device) if self.writes else None
        )

    def _counts(self, groups: Sequence[Group]) -> dict[Group, int]:
        """Return the number of blocks of each group."""
        limits, spec = self.limits, self.runner.main.spec
        each = next(self.runner.parameters()).element_size()
        whole = sum(token_bytes(spec, group, each) for group in groups)
        usual = limits.running * self.m.config.max_positions
        tokens = limits.cache_tokens or min(usual, max(CACHE_BYTES // max(1, whole), limits.block))
        counts = {group: blocks_for(tokens, limits.block) for group in groups}
        for group in counts:
            if group is not None and group[0] is not None:  # a window needs no more for each text
                counts[group] = min(counts[group], limits.running * self._window(group))
                counts[group] = max(counts[group], self._window(group))
        return counts

    def _window(self, group: Group) -> int:
        """Return how many blocks of a group one text needs at most; of a window, with a step's tokens."""
        reach, first = group or (0, 0)
        parts = (reach or 0, first, self.limits.tokens)
        return 2 + sum(blocks_for(tokens, self.limits.block) for tokens in parts)

    @property
    def exact(self) -> bool:
        """Return whether this machine gives a row the same bits whatever else is in the step."""
        return rows_agree(self.runner, self.limits.tokens + self.limits.running)

    # Requests ----------------------------------------------------------------------------------------------

    def check_room(self, tokens: int = 0) -> None:
        """Raise `BusyError` where no more may wait; cheap enough to ask before a prompt is encoded."""
        limits, waiting = self.limits, sum(len(job.tokens) for job in list(self.waiting))
        requests = len(self.waiting) + len(self.readings)
        if self.closed:
            raise BusyError("the server is ending and takes no more requests: try another one")
        if requests >= limits.waiting or (waiting and waiting + tokens > limits.waiting_tokens):
            raise BusyError(
                f"{requests} requests with {waiting} tokens of prompts are waiting, and at most "
                f"{limits.waiting} and {limits.waiting_tokens} may: try again later"
            )

    def submit(
        self,
        prompt: Prompt,
        options: Mapping[str, Any] | None = None,
        asked: Asked | None = None,
        told: Told | None = None,
        after: Job | None = None,
    ) -> Job:
        """Put a text to generate into the line; `options` are those of `generate`."""
        refuse(not self.writes, f"this model's head is {self.m.config.head}: it writes no text")
        job = Job(self.m, prompt, options or {}, asked or Asked(), told)
        job.after = after
        needed = len(job.row.prompt) + job.most
        whole = [] if self.pool is None else [(needed, ALL), (job.sources, None)]
        for tokens, group in whole:
            room = 0 if self.pool is None or group not in self.pool.blocks else self.pool.blocks[group].count
            refuse(
                room and blocks_for(tokens, self.limits.block) > room,
                f"a text of {tokens} tokens does not fit into the {room * self.limits.block} that the server "
                "holds: shorten it, or give the server a larger cache",
            )
        self.check_room(len(job.tokens))
        with self._wake:
            self.waiting.append(job)
            self._wake.notify()
        return job

    def read(self, inputs: Sequence[Any], run: Callable[[Bundle, list[Any]], Sequence[Any]]) -> Reading:
        """Put inputs into the line for `run`, a function of the model and a list; it gives a result for each.

        Requests with the same `run` may share a call.
        """
        self.check_room()
        reading = Reading(inputs, lambda every: run(self.reader, every), run)
        with self._wake:
            self.readings.append(reading)
            self._wake.notify()
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
            reason = job.ends.reason()
            if reason is not None:
                self._end(job, reason)
        plan: list[tuple[Job, int, int]] = []
        self._plan(plan)
        alone = [one for one in plan if not one[0].encoded]
        for one in alone:
            self._guarded([one])
        self._guarded([one for one in plan if one not in alone])
        self._read()
        self.figures.steps += 1
        self.moved = time.monotonic()

    def _plan(self, plan: list[tuple[Job, int, int]]) -> None:
        """Choose what is read in this step: texts that go on first, then prompts, in the order of arrival."""
        budget = self.limits.tokens
        for job in [job for job in self.running if job.decoding]:
            budget -= self._add(plan, job, budget, 1) if job in self.running else 0
        for job in [job for job in self.running if not job.decoding]:
            budget -= self._add(plan, job, budget) if job in self.running else 0
        while self.waiting and budget > 0 and len(self.running) < self.limits.running:
            job = self.waiting[0]
            if (job.after is not None and job.after.reading) or not self._admit(job):
                return
            self.waiting.popleft()
            self.running.append(job)
            budget -= self._add(plan, job, budget)

    def _add(self, plan: list[tuple[Job, int, int]], job: Job, budget: int, most: int | None = None) -> int:
        """Add pieces of a request up to the budget; return how many tokens they have."""
        added = 0
        for table in job.tables.values():
            table.trim(job.read)
        while job.planned < len(job.tokens) and (most is None or added < most):
            start, stop = job.next_piece(self.limits.block)
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
        self.waiting.appendleft(job)

    def _admit(self, job: Job) -> bool:
        """Find the beginning of a prompt in the pool, and whether there is room for the rest."""
        if self.pool is not None and not job.tables:
            job.place(self.pool)
            job.name(self.limits.block, self.shares)
        size, tables = self.limits.block, job.tables
        most = (len(job.row.prompt) - 1) // size if job.asked.prompt_logprobs is None else 0
        found = next(
            (
                n
                for n in range(most, 0, -1)
                if job.names and all(t.knows(job.names[:n]) for t in tables.values())
            ),
            0,
        )
        for table in tables.values():
            table.adopt(job.names[:found])
        if None in tables:
            if tables[None].missing(job.sources) > tables[None].blocks.available:
                return False
            tables[None].extend(job.sources)
        for group, table in tables.items():
            needed = table.missing(len(job.tokens) + 1) if group is not None else 0
            if group is not None and group[0] is not None:
                needed = min(needed, self._window(group))
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
            for job in {id(job): job for job, _, _ in plan}.values():
                self._end(job, "error", error)

    def _run(self, plan: list[tuple[Job, int, int]]) -> None:
        pieces, at = [], 0
        for job, start, stop in plan:
            pieces.append(Piece(slice(at, at + stop - start), start, job.tables, job.states))
            at += stop - start
        first, device = plan[0][0], next(self.runner.parameters()).device
        encoded = first.encoded
        sources = [job.sources for job, _, _ in plan] if first.sources and encoded else []
        assert self.pool is not None
        cache = PagedCache(self.pool, pieces, sources)
        hidden = self.runner(
            torch.tensor([[t for job, start, stop in plan for t in job.tokens[start:stop]]], device=device),
            positions=torch.tensor(
                [[p for _, start, stop in plan for p in range(start, stop)]], device=device
            ),
            source=None if encoded else first.prompts.source,
            cache=cache,
            logits="none",
        ).hidden[0]  # T D
        asked = [(job, piece) for (job, _, _), piece in zip(plan, pieces)]
        for job, piece in asked:
            job.encoded, job.read = True, piece.stop
            self.figures.prompt_tokens += max(0, min(piece.stop, len(job.row.prompt)) - piece.start)
            if job.asked.prompt_logprobs is not None and piece.start < len(job.row.prompt):
                job.keep_prompt(self.runner.head(hidden[None, piece.span], None)[0], piece.start)
            for table in job.tables.values():
                number = piece.stop // self.limits.block - 1
                if piece.stop % self.limits.block == 0 and 0 <= number < len(job.names):
                    block = table.ids[number] if number < len(table.ids) else None
                    if block is not None:
                        table.blocks.name(block, job.names[number])
        last = [(job, piece.span.stop - 1) for job, piece in asked if piece.stop == len(job.tokens)]
        if last:
            logits = self.runner.head(hidden[[place for _, place in last]][:, None], None)[:, 0]  # B V
            self._write([job for job, _ in last], logits)

    def _write(self, jobs: list[Job], logits: torch.Tensor) -> None:
        """Choose the next token of each text: logits [B, V]."""
        for job, row, best in zip(jobs, logits, plain_greedy(jobs, logits)):
            try:
                goes_on = bool(job.most) and job.add(row[None], best)
            except InputError as error:
                self._end(job, "error", error)
                continue
            self.figures.new_tokens += bool(job.most)
            if not goes_on:
                self._end(job)

    def _end(self, job: Job, reason: str | None = None, error: Exception | None = None) -> None:
        if job in self.running:
            self.running.remove(job)
        elif job in self.waiting:
            self.waiting.remove(job)
        job.end(reason, error)
        self.figures.ended[job.row.stop_reason] += 1

    def _read(self) -> None:
        """Run the first request that reads, and others that ask for the same."""
        together: list[Reading] = []
        while self.readings and len(together) < self.limits.running:
            if together and self.readings[0].kind != together[0].kind:
                break
            reading = self.readings.popleft()
            if not reading.cancelled:
                together.append(reading)
        if not together:
            return
        inputs = [one for reading in together for one in reading.inputs]
        try:
            found = together[0].run(inputs)
        except Exception as error:
            if len(together) == 1:
                together[0].end(None, error)
            else:  # one of them is at fault: each by itself
                for reading in together:
                    self._read_alone(reading)
            return
        at = 0
        for reading in together:
            reading.end(found[at : at + len(reading.inputs)])
            at += len(reading.inputs)

    def _read_alone(self, reading: Reading) -> None:
        try:
            reading.end(reading.run(reading.inputs))
        except Exception as error:
            reading.end(None, error)

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
                self.moved = self.moved if self.busy else time.monotonic()
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
        if self._thread is not None:
            self._thread.join(STALLED)


def _with_model(m: Bundle, model: Any) -> Bundle:
    """Return the same bundle with another model in it."""
    new = object.__new__(type(m))
    new.__dict__.update(m.__getstate__() | {"model": model})
    return new
