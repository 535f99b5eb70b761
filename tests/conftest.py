"""Fixtures of the whole suite, and the table of largest differences at the end of a run."""

from __future__ import annotations

import gc
import os
import pathlib
import platform
import sys
import zlib

# Before torch: some of its kernels heed nothing else, and a forked run waits forever for their threads.
os.environ["OMP_NUM_THREADS"] = "1"
# Under CLEARHEAD_CPU, which limits our own kernels, PyTorch's libraries are held to the same limit.
os.environ.update(
    {
        "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
        "avx2": dict(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", MKL_ENABLE_INSTRUCTIONS="AVX2"),
        "plain": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
        "neon": {"ATEN_CPU_CAPABILITY": "default"},
    }.get(os.environ.get("CLEARHEAD_CPU", ""), {})
)

import hypothesis
import pytest
import torch
from tokenizers import Tokenizer

from tests import harness, skipped
from tests.harness import CommandLine

# Compiled code is kept: to compile the tests anew takes each worker ten seconds, and each process
# that they start compiles the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

torch.set_num_threads(1)
# On Arm, oneDNN plans each product of float32 anew: 0.6 ms however small it is, as nearly all are here.
# The matrix of equality takes what users get.
torch._C._set_mkldnn_enabled(platform.machine() not in ("aarch64", "arm64"))
# The same examples in every run, however slow the machine is; CLEARHEAD_SEARCH=1 draws new ones.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize="CLEARHEAD_SEARCH" not in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("suite")

# To look for garbage takes longer the more is imported, and tests import nearly everything.
gc.set_threshold(10_000, 10, 10)

pytest_plugins = ["tests.device"]
SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


def pytest_addoption(parser):
    parser.addoption(
        "--tenth",
        action="store_true",
        help="run about one test in ten, always the same ones: none that is slow, of every file one at least",
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("--tenth"):
        number = {item: zlib.crc32(item.nodeid.encode()) for item in items}
        quick = [item for item in items if not item.get_closest_marker("slow")]
        first: dict[pathlib.Path, pytest.Item] = {}  # of each file
        for item in sorted(quick, key=number.__getitem__):
            first.setdefault(item.path, item)
        chosen = {item for item in quick if number[item] % 16 == 4} | {*first.values()}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def pytest_collection_finish():
    """Garbage is sought among what tests make: all that is here now stays."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _brief():
    """Spare tiny runs what takes as long as they do: the picture of their loss, and waits for the disk.

    The runs of test_recipes.py that learn draw theirs. No test pulls the plug. To seed a GPU that is not
    there, PyTorch notes the whole stack, which takes longer than a step of the smallest models.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clearhead.learn.training.events.draw", lambda folder: None)
        patch.setattr("os.fsync", lambda number: None)
        if not torch.cuda.is_available():
            patch.setattr("torch.cuda.manual_seed_all", lambda seed: None)
        yield


@pytest.fixture
def clearhead(capsys) -> CommandLine:
    """`clearhead("cost", "gpt2", "--json --batch 2")`: a command without a new process."""
    return CommandLine(capsys)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """One token for each byte, shared by the tests of generation and serving."""
    return harness.byte_tokenizer(special=())


@pytest.fixture
def short_pieces(monkeypatch):
    """Prompts are read in small pieces, so that `ch.check` needs no rows of a thousand tokens."""
    monkeypatch.setattr("clearhead.run.generate.decode.PREFILL_CHUNK", 64)


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
    left_out = [
        report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in terminalreporter.stats.get("skipped", [])
    ]
    if left_out:
        terminalreporter.section("skipped, and how to get it")
        for line in skipped.summary(left_out):
            terminalreporter.write_line(line)
    files: dict[str, dict[str, dict[str, float]]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            given = getattr(report, "user_properties", ())
            found = {
                key.removeprefix("difference:"): value
                for key, value in given
                if key.startswith("difference:")
            }
            if found:
                file, _, test = report.nodeid.partition("::")
                files.setdefault(file, {})[test] = found
    if files:
        terminalreporter.section("largest differences")
    for file, rows in sorted(files.items()):
        checks = dict.fromkeys(check for row in rows.values() for check in row)
        worst = {check: max(row.get(check, 0.0) for row in rows.values()) for check in checks}
        shown = rows if terminalreporter.config.option.verbose > 0 else {}
        for test, row in [*sorted(shown.items()), (file, worst)]:
            terminalreporter.write_line(f"{test}: " + ", ".join(f"{check} {row[check]:.1e}" for check in row))
