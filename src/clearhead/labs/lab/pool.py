"""Trials of experiments side by side, each in a process of its own with one thread."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import torch

from clearhead.labs.lab.experiment import Conditions, Numbers, said, trial
from clearhead.labs.lab.run import find


def spread(
    folders: dict[str, Path], seeds: int, setting: Conditions, workers: int, tell: Callable[[str], None]
) -> None:
    """Run every trial of experiments, by name with their folders; long ones begin first.

    Each trial is kept in its experiment's folder, from which `conduct` reads it.
    """
    jobs = [
        (name, arm, replace(setting, seed=seed), folder)
        for name, folder in sorted(folders.items(), key=lambda item: -find(item[0]).seconds)
        for seed in range(seeds)
        for arm in find(name).arms
    ]
    apart = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, apart, torch.set_num_threads, (1,)) as pool:
        running = {pool.submit(_run, *job): job for job in jobs}
        faults = []
        try:
            for number, done in enumerate(as_completed(running), start=1):
                name, arm, _, _ = running[done]
                fault = done.exception()
                if fault is not None:
                    faults.append(fault)
                line = fault or said(find(name), arm, done.result())
                tell(f"{number} of {len(jobs)}  {name}: {line}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if faults:  # after all others: what they measured is kept
        raise faults[0]


def _run(name: str, arm: str, setting: Conditions, folder: Path) -> Numbers:
    return trial(find(name), arm, setting, folder)
