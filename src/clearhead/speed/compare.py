"""Time a model here beside what else is installed, job by job, the programs taking turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from clearhead.api import Model
from clearhead.errors import InputError, nearest, refuse
from clearhead.inside.results import Result
from clearhead.model.transformer import evaluating
from clearhead.speed.jobs import KINDS, Kind, SpeedJob, SpeedSizes, jobs_of
from clearhead.speed.machine import Machine, measure_machine, timed
from clearhead.speed.peers import PEERS, Rival, Run, opened, ours

PATIENCE = 20.0  # seconds of a first run after which one more is enough


@dataclass(frozen=True)
class Timing(Result):
    """A program's seconds of one job, the median of its rounds."""

    program: str
    seconds: float
    per_second: float  # tokens, or pictures
    ours_over_this: float  # above 1: clearhead is quicker
    same_tokens: float | None = None  # of what clearhead wrote, the share that this program wrote too


@dataclass(frozen=True)
class JobTimes(Result):
    """One job in every program that has it, clearhead first, with the least time it could take."""

    name: str
    kind: str
    least_seconds: float
    share_of_limit: float  # the least divided by clearhead's
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
        programs, notes = [ours(m)], []
        for found in opened(m, None if peers is None else tuple(peers)):
            programs.append(found) if isinstance(found, Rival) else notes.append(found)
        machine, rows = measure_machine(weight.device, weight.dtype), []
        try:
            for number, job in enumerate(jobs):
                on_progress("measuring", number, len(jobs))
                rows.append(_times(job, programs, machine, rounds, weight.device, notes))
            on_progress("measuring", len(jobs), len(jobs))
        finally:
            for one in programs:
                one.close()
    return SpeedReport(machine, tuple(rows), tuple(notes))


def _times(
    job: SpeedJob,
    programs: list[Rival],
    machine: Machine,
    rounds: int,
    device: torch.device,
    notes: list[str],
) -> JobTimes:
    runs, first, written = {}, {}, {}
    for one in programs:
        run = one.runs(job)
        if run is None:
            continue
        kept: list[object] = []
        try:
            first[one.name] = timed(partial(_keep, run, kept), device)
        except Exception as error:
            if one.name == programs[0].name:
                raise
            notes.append(
                f"{one.name} has no {job.name}: {str(error).splitlines()[0] if str(error) else error!r}"
            )
            continue
        runs[one.name], written[one.name] = run, kept[0]
    many = 1 if max(first.values()) > PATIENCE else rounds
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(many):
        for name, run in runs.items():
            seconds[name].append(timed(run, device))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    mine = medians[programs[0].name]
    least = machine.least(job.read, job.flops)
    reading = job.read / machine.bandwidth >= job.flops / machine.arithmetic
    timings = tuple(
        Timing(name, took, job.tokens / took, took / mine, _same(written[programs[0].name], written[name]))
        for name, took in medians.items()
    )
    return JobTimes(job.name, job.kind, least, least / mine, "reading" if reading else "arithmetic", timings)


def _keep(run: Run, kept: list[object]) -> None:
    kept.append(run())


def _same(ours: object, theirs: object) -> float | None:
    """Return the share of tokens that are the same, where both are rows of ids."""
    if not isinstance(ours, list) or not isinstance(theirs, list) or ours is theirs:
        return None
    if not all(isinstance(row, list) and row and isinstance(row[0], int) for row in (*ours, *theirs)):
        return None
    pairs = [pair for one, other in zip(ours, theirs) for pair in zip(one, other)]
    return sum(bool(one == other) for one, other in pairs) / len(pairs)
