"""Fixtures of the whole suite, and the table of largest differences at the end of a run."""

from __future__ import annotations

import os
import pathlib

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: some of its kernels heed nothing else, and a forked run waits forever for their threads

import pytest
import torch

torch.set_num_threads(1)

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of data and weights beside the repository."""
    if not SHARED.is_dir():
        pytest.skip(f"no folder {SHARED}: data and weights are not on this machine")
    return SHARED


class Differences:
    """The largest difference that each check of one test has seen."""

    def __init__(self) -> None:
        self.worst: dict[str, float] = {}

    def see(self, check: str, a: torch.Tensor, b: torch.Tensor) -> float:
        """Compare two tensors, keep the largest absolute difference; NaN counts as infinite."""
        assert a.shape == b.shape, f"{check}: {tuple(a.shape)} against {tuple(b.shape)}"
        difference = (a.detach() - b.detach()).abs().max().item() if a.numel() else 0.0
        difference = difference if difference == difference else float("inf")
        self.worst[check] = max(self.worst.get(check, 0.0), difference)
        return difference


@pytest.fixture
def differences(record_property):
    """`differences.see(check, a, b)`; what it saw is printed in the table at the end of the run."""
    seen = Differences()
    yield seen
    for check, value in seen.worst.items():
        record_property(f"difference:{check}", value)


def pytest_terminal_summary(terminalreporter):
    rows: dict[str, dict[str, float]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            found = dict(getattr(report, "user_properties", ()))
            found = {key.removeprefix("difference:"): value for key, value in found.items() if key.startswith("difference:")}
            if found:
                rows[report.nodeid] = found
    if not rows:
        return
    checks = list(dict.fromkeys(check for row in rows.values() for check in row))
    names = {nodeid: nodeid.rpartition("/")[2].replace(".py::", " ") for nodeid in rows}
    width = max(map(len, names.values()))
    terminalreporter.section("largest differences")
    terminalreporter.write_line(" " * width + "".join(f"{check:>12}" for check in checks))
    for nodeid in sorted(rows):
        cells = "".join(f"{rows[nodeid][check]:12.1e}" if check in rows[nodeid] else f"{'':12}" for check in checks)
        terminalreporter.write_line(f"{names[nodeid]:{width}}{cells}")
    cells = "".join(f"{max(row.get(check, 0.0) for row in rows.values()):12.1e}" for check in checks)
    terminalreporter.write_line(f"{'worst of all':{width}}{cells}")
