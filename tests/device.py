"""Run the tests of the model, the fast paths and generation on a device, as they are.

    pytest --device cuda [--dtype bfloat16] [--table OUT.json]

Models that a test builds and tensors that a test makes are on the device; what the package makes for itself
is wherever the package puts it, as for any user. Half precision runs the tests that know its tolerances.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
import types
from datetime import date

import torch

HERE = pathlib.Path(__file__).parent
# What a change of the model, the fast paths or generation can break on a device.
FILES = (
    "equality/test_kinds.py",
    "equality/test_matrix.py",
    "faults/test_planted.py",
    "fast/test_float8.py",
    "fast/test_prepare.py",
    "fast/test_triton_loss.py",
    "fast/test_triton_step.py",
    "generate/test_beam.py",
    "generate/test_compiled.py",
    "generate/test_decode.py",
    "generate/test_half.py",
    "generate/test_engine.py",
    "generate/test_sampling.py",
    "generate/test_speculate.py",
    "quant/test_quant.py",
    "serve/test_engine.py",
    "test_cache.py",
    "test_checks.py",
    "test_half.py",
    "test_parts.py",
    "test_positions.py",
    "test_taps.py",
    "training/test_captured.py",
    "test_variants.py",
)
VERDICTS = ("passed", "failed", "error", "skipped")
MAKERS = {
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "zeros", "tensor"),
    *("rand", "randint", "randn", "randperm"),
}
# In half precision two ways to compute may choose different tokens: these files allow for it.
HALF = ("equality/test_matrix.py", "generate/test_half.py", "test_half.py")


def pytest_addoption(parser):
    parser.addoption("--device", help="run the tests of the model and of generation on this device")
    parser.addoption("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.addoption("--table", help="with --device: write counts and largest differences to this JSON file")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "cpu: not run with --device: it is about the CPU, or about a reference that stays there"
    )
    if config.getoption("--device"):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        place_models(torch.device(config.getoption("--device")), getattr(torch, config.getoption("--dtype")))


def pytest_ignore_collect(collection_path, config):
    if config.getoption("--device") and (HERE / "browser") in (collection_path, *collection_path.parents):
        return True  # its fixtures need a browser and a server
    if config.getoption("--device") and collection_path.suffix == ".py":
        names = FILES if config.getoption("--dtype") == "float32" else HALF
        return collection_path not in {HERE / name for name in names} or None
    return None


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--device"):
        return
    kept = [item for item in items if not item.get_closest_marker("cpu")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    place_tensors(torch.device(config.getoption("--device")))


class PlacedTorch(types.ModuleType):
    """torch as the tests see it: what they make without naming a device is on this one.

    Random numbers are drawn on the CPU, so that a seed gives the same ones everywhere.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__("torch")
        self.placed_on = device

    def __getattr__(self, name: str):
        found = getattr(torch, name)
        if name not in MAKERS:
            return found

        def make(*args, **kwargs):
            made = found(*args, **kwargs)
            return (
                made
                if "device" in kwargs
                else made.detach().to(self.placed_on).requires_grad_(made.requires_grad)
            )

        return make


def place_tensors(device: torch.device) -> None:
    """Give the tests, and what they share, their own torch; move their constants."""
    placed = PlacedTorch(device)
    for name, module in list(sys.modules.items()):
        if name.startswith("tests.") and name != __name__:
            for key, value in list(vars(module).items()):
                if value is torch:
                    setattr(module, key, placed)
                elif isinstance(value, torch.Tensor):
                    setattr(module, key, value.to(device))


def place_models(device: torch.device, dtype: torch.dtype) -> None:
    """Make on the device the models, parts and fixed caches that a test builds; models in the dtype."""
    import clearhead as ch
    from clearhead.core import attention, embedding, feedforward, heads, norms, positions
    from clearhead.variants import heads as other_heads
    from clearhead.variants import routing

    def by_a_test() -> bool:
        return HERE in pathlib.Path(sys._getframe(2).f_code.co_filename).parents

    def place(kind: type, **to) -> None:
        build = kind.__init__

        def build_there(self, *args, **kwargs):
            build(self, *args, **kwargs)
            if by_a_test() and not any(weight.is_meta for weight in self.parameters()):
                self.to(**to)

        kind.__init__ = build_there

    place(ch.Transformer, device=device, dtype=dtype)
    for room in (attention, embedding, feedforward, heads, other_heads, norms, positions, routing):
        for kind in vars(room).values():
            if (
                isinstance(kind, type)
                and kind.__module__ == room.__name__
                and issubclass(kind, torch.nn.Module)
                and "__init__" in vars(kind)  # an inherited one is placed with the class that has it
            ):
                place(kind, device=device)
    allocate = ch.FixedCache.__init__

    def allocate_there(self, *args, **kwargs):
        if by_a_test():
            given = ("dtype", "device")[max(0, len(args) - 3) :]
            kwargs = {name: {"dtype": dtype, "device": device}[name] for name in given} | kwargs
        allocate(self, *args, **kwargs)

    ch.FixedCache.__init__ = allocate_there


def pytest_sessionstart(session):
    session.config.device_start = time.perf_counter()


def pytest_terminal_summary(terminalreporter, config):
    if not (config.getoption("--device") and config.getoption("--table")):
        return
    files: dict[str, dict] = {}
    for verdict, reports in terminalreporter.stats.items():
        for report in reports:
            if not hasattr(report, "nodeid") or verdict == "deselected":
                continue
            row = files.setdefault(report.nodeid.partition("::")[0].removeprefix("tests/"), {})
            if verdict in VERDICTS:
                row[verdict] = row.get(verdict, 0) + 1
            for key, value in getattr(report, "user_properties", ()):
                if key.startswith("difference:"):
                    worst = row.setdefault("largest differences", {})
                    check = key.removeprefix("difference:")
                    worst[check] = max(worst.get(check, 0.0), value)
    device = torch.device(config.getoption("--device"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    total = {verdict: sum(row.get(verdict, 0) for row in files.values()) for verdict in VERDICTS}
    body = {
        "command": f"pytest --device {device} --dtype {config.getoption('--dtype')}",
        "device": name,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "seconds": round(time.perf_counter() - config.device_start),
        "total": total,
        "files": dict(sorted(files.items())),
    }
    pathlib.Path(config.getoption("--table")).write_text(json.dumps(body, indent=2) + "\n")
