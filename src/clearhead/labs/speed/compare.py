"""Time a model here beside what else is installed, job by job, the programs taking turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from clearhead.core.transformer import evaluating
from clearhead.errors import InputError, first_line, nearest, refuse
from clearhead.inside.results import Result
from clearhead.labs.speed.jobs import (
    KINDS,
    Kind,
    Machine,
    SpeedJob,
    SpeedSizes,
    jobs_of,
    measure_machine,
    timed,
    weight_bytes,
)
from clearhead.labs.speed.peers import OURS, PEERS, Rival, Run, check_answer, opened, ours
from clearhead.run.api import Model

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
        rounds: runs of each program, in turn, after one to warm up; the median counts.
        on_progress: called with a stage, how much of it is done, and how much there is.
    """
    sizes = sizes or SpeedSizes()
    refuse(rounds < 1, f"rounds is {rounds}: at least one is needed")
    refuse(min((sizes.prompt, sizes.new, *sizes.batches)) < 1, "prompt, new and batches are 1 at least")
    for name in peers or ():
        if name not in PEERS:
            known = ", ".join(PEERS)
            raise InputError(f'"{name}" is no program to compare with{nearest(name, PEERS)}: {known}')
    weight = next(m.model.parameters())
    with evaluating(m.model):
        jobs = jobs_of(m, tuple(kinds), sizes)
        longest = max(job.ids.shape[1] + job.new for job in jobs)
        programs, notes = [ours(m)], []
        for found in opened(m, None if peers is None else tuple(peers), longest):
            programs.append(found) if isinstance(found, Rival) else notes.append(found)
        measured = partial(measure_machine, weight.device, weight.dtype, weight_bytes(m))
        machine, tried = measured(), []
        try:
            for number, job in enumerate(jobs):
                on_progress("measuring", number, len(jobs))
                tried.append([_tried(one, job, weight.device) for one in programs])
                _repeat(job, tried[-1], rounds, weight.device)
            on_progress("measuring", len(jobs), len(jobs))
        finally:
            for one in programs:
                one.close()
        machine = machine.best(measured())
    rows = tuple(_judged(job, [one for one in some if one], machine) for job, some in zip(jobs, tried))
    return SpeedReport(machine, rows, tuple(notes))


@dataclass
class Attempt:
    """One program at one job: what it answered first, and the seconds of every round; or what went wrong."""

    program: str
    run: Run
    answer: object = None
    seconds: list[float] = field(default_factory=list)
    fault: str = ""

    def time(self, job: SpeedJob, device: torch.device) -> float:
        """Return the seconds of one run, whose answer shows that it did the job."""
        answers: list[object] = []
        took = timed(lambda: answers.append(self.run()), device)
        check_answer(job, answers[0])
        self.answer = answers[0]
        return took


def _tried(one: Rival, job: SpeedJob, device: torch.device) -> Attempt | None:
    """Run a program once, to warm up; None where it has no such job."""
    run = one.runs(job)
    attempt = None if run is None else Attempt(one.name, run)
    if attempt is not None:
        _timed_or_fault(attempt, job, device)
    return attempt


def _repeat(job: SpeedJob, attempts: Sequence[Attempt | None], rounds: int, device: torch.device) -> None:
    """Run all programs in turn, so many times; the time of the first run, which warmed up, goes."""
    able = [one for one in attempts if one is not None and not one.fault]
    slow = max(one.seconds.pop() for one in able) > PATIENCE
    for _ in range(1 if slow else rounds):
        for one in able:
            if not one.fault:
                _timed_or_fault(one, job, device)


def _timed_or_fault(one: Attempt, job: SpeedJob, device: torch.device) -> None:
    """Add the seconds of one run; what another program raises is its fault, and the others go on."""
    try:
        one.seconds.append(one.time(job, device))
    except Exception as error:
        if one.program == OURS:
            raise
        one.fault = first_line(error)


def _judged(job: SpeedJob, attempts: list[Attempt], machine: Machine) -> JobTimes:
    """Return the times of a job; a program that is quicker than the limit has none."""
    least = machine.least(job.read, job.flops)
    reading = job.read / machine.bandwidth >= job.flops / machine.arithmetic
    medians = [None if one.fault else statistics.median(one.seconds) for one in attempts]
    for place, (one, took) in enumerate(zip(attempts, medians)):
        if took is not None and took * ABOVE < least:
            one.fault = f"{ABOVE_LIMIT}: a run took {took:.2g} s, and the machine needs {least:.2g} s"
            medians[place] = None
    mine = medians[0]
    timings = tuple(
        Timing(
            one.program,
            took,
            None if took is None else job.tokens / took,
            None if took is None or mine is None else took / mine,
            None if one.fault else _same(attempts[0].answer, one.answer),
            one.fault,
        )
        for one, took in zip(attempts, medians)
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
    pairs = [pair for one, other in zip(ours, theirs) for pair in zip(one, other)]
    return sum(bool(one == other) for one, other in pairs) / len(pairs)
