"""Time a model on this machine next to what else is installed, job by job, the programs alternating."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from clearhead.errors import first_line, refuse, refuse_unknown
from clearhead.inside.long_text import timed
from clearhead.inside.results import Result
from clearhead.labs.speed.jobs import (
    KINDS,
    Kind,
    Machine,
    SpeedJob,
    SpeedSizes,
    bytes_read,
    jobs_of,
    measure_machine,
)
from clearhead.labs.speed.peers import OURS, PEERS, Rival, Run, check_answer, opened, ours
from clearhead.run.api import Model
from clearhead.variants.contexts import evaluating

PATIENCE = 20.0  # seconds of a first run after which one more is enough
ABOVE_LIMIT = "above the limit"
ABOVE = 1.1  # times the limit: programs and the limit are measured, and so much may be chance


@dataclass(frozen=True)
class Timing(Result):
    """A program's seconds of one job, the median of its rounds.

    Where it did not do the job, or took less time than the machine needs, it has no speed: `fault` says so.
    """

    program: str
    seconds: float | None
    per_second: float | None  # tokens, or pictures
    ours_over_this: float | None  # above 1: clearhead is quicker
    same_tokens: float | None = None  # of what clearhead wrote, the share that this program wrote too
    fault: str = ""

    @property
    def above_limit(self) -> bool:
        """Whether its time was measured, and is less than the machine needs."""
        return self.fault.startswith(ABOVE_LIMIT)


@dataclass(frozen=True)
class JobTimes(Result):
    """One job in every program that has it, clearhead first, with the least time it could take."""

    name: str
    kind: str
    least_seconds: float
    limit: float  # tokens or pictures a second in that time
    share_of_limit: float | None  # the least divided by clearhead's
    bound_by: str  # "reading" or "arithmetic"
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class SpeedReport(Result):
    """Every job of a model on this machine."""

    machine: Machine
    jobs: tuple[JobTimes, ...]
    notes: tuple[str, ...]


def compare(
    m: Model,
    kinds: Sequence[Kind] = KINDS,
    sizes: SpeedSizes | None = None,
    peers: Sequence[str] | None = None,
    rounds: int = 3,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> SpeedReport:
    """Time the jobs that suit a model.

    Args:
        m: the model, on the device and in the dtype to be measured.
        kinds: "first" (token), "decode", "read", "train".
        sizes: tokens of the prompt, new tokens, rows of a batch.
        peers: names of `PEERS`; None: all that are installed.
        rounds: runs of each program, alternating, after one to warm up; the median counts.
        on_progress: called with a stage, how much of it is done, and how much there is.
    """
    sizes = sizes or SpeedSizes()
    refuse(rounds < 1, f"rounds is {rounds}: at least one is needed")
    refuse(min((sizes.prompt, sizes.new, *sizes.batches)) < 1, "prompt, new and batches are 1 at least")
    for name in peers or ():
        refuse_unknown("program", name, PEERS)
    weight = next(m.model.parameters())
    with evaluating(m.model):
        jobs = jobs_of(m, tuple(kinds), sizes)
        longest = max(job.ids.shape[1] + job.new for job in jobs)
        programs, notes = [ours(m)], []
        for opened_or_why in opened(m, None if peers is None else tuple(peers), longest):
            if isinstance(opened_or_why, Rival):
                programs.append(opened_or_why)
            else:
                notes.append(opened_or_why)
        measured = partial(measure_machine, weight.device, weight.dtype, bytes_read(m))
        machine, tried = measured(), []
        try:
            for number, job in enumerate(jobs):
                on_progress("measuring", number, len(jobs))
                tried.append(_warmed_up(programs, job, weight.device))
                _repeat(tried[-1], rounds)
            on_progress("measuring", len(jobs), len(jobs))
        finally:
            for program in programs:
                program.close()
        machine = machine.best(measured())
    rows = tuple(_judged(job, attempts, machine) for job, attempts in zip(jobs, tried))
    return SpeedReport(machine, rows, tuple(notes))


@dataclass
class Attempt:
    """One program at one job: what it answered first, and the seconds of every round; or what went wrong."""

    program: str
    run: Run
    job: SpeedJob
    device: torch.device
    answer: object = None
    seconds: list[float] = field(default_factory=list)
    fault: str = ""

    def time(self) -> None:
        """Add the seconds of one run, whose answer shows that it did the job.

        What another program raises is its fault, and the others go on.
        """
        answers: list[object] = []
        try:
            took = timed(lambda: answers.append(self.run()), self.device)
            check_answer(self.job, answers[0])
        except Exception as error:
            if self.program == OURS:
                raise
            self.fault = first_line(error)
        else:
            self.answer = answers[0]
            self.seconds.append(took)


def _warmed_up(programs: Sequence[Rival], job: SpeedJob, device: torch.device) -> list[Attempt]:
    """Run each program that has such a job once."""
    runs = ((program.name, program.runs(job)) for program in programs)
    attempts = [Attempt(name, run, job, device) for name, run in runs if run is not None]
    for attempt in attempts:
        attempt.time()
    return attempts


def _repeat(attempts: Sequence[Attempt], rounds: int) -> None:
    """Run all programs alternately, so many times; the time of the first run, which warmed up, goes."""
    able = [attempt for attempt in attempts if not attempt.fault]
    slow = max(attempt.seconds.pop() for attempt in able) > PATIENCE
    for _ in range(1 if slow else rounds):
        for attempt in able:
            if not attempt.fault:
                attempt.time()


def _judged(job: SpeedJob, attempts: list[Attempt], machine: Machine) -> JobTimes:
    """Return the times of a job; a time below the roofline limit is a wrong measurement and left out."""
    least = machine.least(job.read, job.flops)
    reading = job.read / machine.bandwidth >= job.flops / machine.arithmetic
    medians = [None if attempt.fault else statistics.median(attempt.seconds) for attempt in attempts]
    for number, (attempt, took) in enumerate(zip(attempts, medians)):
        if took is not None and took * ABOVE < least:
            attempt.fault = f"{ABOVE_LIMIT}: a run took {took:.2g} s, and the machine needs {least:.2g} s"
            medians[number] = None
    mine = medians[0]
    timings = tuple(
        Timing(
            attempt.program,
            took,
            None if took is None else job.tokens / took,
            None if took is None or mine is None else took / mine,
            None if attempt.fault else _same(attempts[0].answer, attempt.answer),
            attempt.fault,
        )
        for attempt, took in zip(attempts, medians)
    )
    share = None if mine is None else least / mine
    bound = "reading" if reading else "arithmetic"
    return JobTimes(job.name, job.kind, least, job.tokens / least, share, bound, timings)


def _same(ours: object, theirs: object) -> float | None:
    """Return the share of tokens that are the same, where both are rows of ids."""
    if not isinstance(ours, list) or not isinstance(theirs, list) or ours is theirs:
        return None
    if not all(isinstance(row, list) and row and isinstance(row[0], int) for row in (*ours, *theirs)):
        return None
    pairs = [pair for row, other in zip(ours, theirs) for pair in zip(row, other)]
    return sum(bool(token == other) for token, other in pairs) / len(pairs)
