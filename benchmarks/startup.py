"""Processor time to start: the list of commands, usage errors, a command's help, imports beyond torch.

    python benchmarks/startup.py [--rounds 9] [--save]

Each measurement is a process of its own, and the cases take turns. Processor time is user plus system time,
so that neighbours on the machine count for little. Each figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import subprocess
import sys

import torch

from common import save

COMMANDS = {  # name: arguments, and the most seconds that it may take
    "clearhead --help": (["--help"], 0.4),
    "a mistyped command": (["trian", "my.txt"], 0.4),
    "a wrong option": (["generate", "my-model/", "--tempreture", "1"], 0.4),
    "a missing argument": (["classify"], 0.4),
    "clearhead generate --help": (["generate", "--help"], None),
    "clearhead eval --help": (["eval", "--help"], None),
}
IMPORTS = {  # name: statement that follows `import torch`, and the most seconds
    "import clearhead, beyond torch": ("import clearhead", 0.3),
    "every public name, beyond torch": ("from clearhead import *", None),
}
IMPORT = "import time, torch; start = time.process_time(); {}; print(time.process_time() - start)"


def command_seconds(arguments: list[str]) -> float:
    """Run a command and return the user and system time of its process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "clearhead", *arguments], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def import_seconds(statement: str) -> float:
    """Return the processor time of an import statement, after `import torch`."""
    command = [sys.executable, "-c", IMPORT.format(statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    limits = {name: limit for name, (_, limit) in (COMMANDS | IMPORTS).items()}
    times: dict[str, list[float]] = {name: [] for name in limits}
    for _ in range(options.rounds + 1):  # the first fills the caches of files and bytecode
        for name, (arguments, _) in COMMANDS.items():
            times[name].append(command_seconds(arguments))
        for name, (statement, _) in IMPORTS.items():
            times[name].append(import_seconds(statement))
    device = f"CPU {platform.machine()}"
    print(f"processor time, median of {options.rounds}  [{device}, torch {torch.__version__}]")
    rows = {}
    for name, limit in limits.items():
        rows[name] = {"processor_seconds": round(statistics.median(times[name][1:]), 3), "limit": limit}
        allowed = "" if limit is None else f"   at most {limit:.1f} s"
        print(f"  {name:<34}{rows[name]['processor_seconds']:>7.3f} s{allowed}")
    result = {"title": "processor time to start", "device": device, "torch": torch.__version__, "rows": rows}
    if options.save:
        save("startup", [result])


if __name__ == "__main__":
    main()
