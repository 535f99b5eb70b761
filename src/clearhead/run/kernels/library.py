"""The library compiled from `step.c` by the machine's C compiler, and the structures that it reads.

Compiling takes a second, once for a machine: the library is kept in the user's cache. Where there is no
compiler, or PyTorch's threads are not those of GNU OpenMP, `library` is None and nothing of it is used.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.errors import nearest, refuse

SOURCE = Path(__file__).with_name("step.c")
INCLUDED = [SOURCE.with_name(f"{name}.h") for name in ("transpose", "gemm", "quantized", "topk")]
# Comparisons set no flags that anyone reads: without them loops with a choice become vectors.
FLAGS = ("-O3", "-fno-trapping-math", "-shared", "-fPIC")
OFF = "CLEARHEAD_NATIVE"  # in the environment: 0 leaves the library out
LIMIT = "CLEARHEAD_CPU"  # in the environment: a name of LIMITS, the most that the library may use
# By processor and name: the flags of the compiler, and what the processor must have.
LIMITS: dict[str, dict[str, tuple[tuple[str, ...], set[str]]]] = {
    "x86_64": {
        "avx512": (
            ("-march=x86-64-v4", "-mavx512vnni", "-mtune=native"),
            {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"},
        ),
        "avx2": (("-march=x86-64-v3", "-mtune=native"), {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"}),
        "plain": (("-march=x86-64", "-DPLAIN"), set()),
    },
    "aarch64": {
        "neon": (("-march=armv8-a", "-mtune=native"), {"asimd"}),
        "plain": (("-march=armv8-a", "-DPLAIN"), set()),
    },
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions; None where they cannot be had."""
    flags = allowed()
    if os.environ.get(OFF) == "0" or torch.backends.mps.is_available() or os.name != "posix":
        return None
    threads, compiler = _openmp(), shutil.which(os.environ.get("CC", "cc"))
    if threads is None or compiler is None:
        return None
    try:
        ctypes.CDLL(threads, mode=ctypes.RTLD_GLOBAL)  # loaded already: its names become visible
        found = opened(compiler, *flags)
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None
    return found if _agrees(found) else None


@functools.cache
def compiled_before() -> ctypes.CDLL | None:
    """Return `library()` where it need not be compiled first: opening a file does not wait for that."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    try:
        return library() if compiler and _place(compiler, (*FLAGS, *allowed())).exists() else None
    except (OSError, RuntimeError):
        return None


def limits() -> list[str]:
    """Return the names of the limits that this processor can be put under, the widest first."""
    has = set(_processor().split())
    return [name for name, (_, needed) in LIMITS.get(platform.machine(), {}).items() if needed <= has]


def allowed(limit: str | None = None) -> tuple[str, ...]:
    """Return the compiler flags for an instruction set limit, by default that of the environment, or all."""
    limit = os.environ.get(LIMIT, "") if limit is None else limit
    if not limit:
        return ("-march=native",)
    known = {name for each in LIMITS.values() for name in each}
    ways = f"this machine has {', '.join(limits()) or 'none'}; unset, all that it has is used"
    refuse(limit not in known, f"{LIMIT}={limit!r} is no limit{nearest(limit, known)}: {ways}")
    refuse(limit not in limits(), f"{LIMIT}={limit!r} is not to be had: {ways}")
    return LIMITS[platform.machine()][limit][0]


def opened(compiler: str, *flags: str) -> ctypes.CDLL:
    """Compile and load the library with these flags, such as those of `allowed`."""
    found = ctypes.CDLL(str(_built(compiler, (*FLAGS, *flags))))
    found.clearhead_blocks.argtypes = (c_void_p, c_int64, c_void_p)
    found.clearhead_linear.argtypes = (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64)
    found.clearhead_rows.argtypes = (c_void_p, c_void_p, c_int64, c_void_p)
    found.clearhead_best.argtypes, found.clearhead_best.restype = (c_void_p, c_int64), None
    found.clearhead_transpose.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64)
    found.clearhead_transpose.restype = None
    return found


def _agrees(found: ctypes.CDLL) -> bool:
    """Return True if the compiled matmul and PyTorch's give the same numbers."""
    layer, x, out = nn.Linear(19, 9), torch.linspace(-1, 1, 57).view(3, 19), torch.empty(3, 9)
    fields = LINEAR(layer.weight.data_ptr(), layer.bias.data_ptr(), 9, 19)
    pointers = (ctypes.addressof(fields), x.data_ptr(), out.data_ptr())
    found.clearhead_linear(*pointers, 3, torch.get_num_threads(), 0)
    return torch.allclose(out, layer(x), atol=1e-5)


def _openmp() -> str | None:
    """Return the path of the OpenMP library whose threads PyTorch uses, if it is GNU's."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line}
    home = Path(torch.__file__).resolve().parent  # the environment may be reached by a link
    homes = (home, home.with_name("torch.libs"))
    own = {path for path in paths if Path(path).parent.parent in homes or Path(path).parent in homes}
    found = own or paths  # other packages may bring theirs
    return found.pop() if len(found) == 1 else None


def _built(compiler: str, flags: tuple[str, ...]) -> Path:
    """Return the path of the library, compiled now if it is not in the cache."""
    path = _place(compiler, flags)
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to someone else")
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as apart:
            command = [compiler, *flags, "-o", f"{apart}/{path.name}", str(SOURCE), "-lm"]
            subprocess.run(command, capture_output=True, check=True, timeout=300)
            os.replace(f"{apart}/{path.name}", path)
    return path


def _place(compiler: str, flags: tuple[str, ...]) -> Path:
    """Return where the library lies once it is compiled."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clearhead"
    about = os.stat(compiler)
    made_of = (compiler, about.st_size, about.st_mtime_ns, *flags, _processor(), *_sources())
    return folder / f"step-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"


def _sources() -> list[str]:
    """Return the text of what is compiled."""
    return [path.read_text("utf-8") for path in (SOURCE, *INCLUDED)]


def _processor() -> str:
    """Describe the processor that `native` means."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return " ".join(
        sorted({line for line in lines if line.lower().startswith(("flags", "features", "model n"))})
    )


def _structures() -> dict[str, Any]:
    """Return the structures that the sources declare, by name, but for those of other types of C."""
    kinds: dict[str, Any] = {"int64_t": c_int64, "double": c_double}
    source = re.sub(r"/\*.*?\*/|\bconst\b", "", "".join(_sources()), flags=re.DOTALL)
    for body, name in re.findall(r"typedef struct \{([^{}#]*)\} (\w+);", source):
        fields = []
        for line in filter(str.strip, body.split(";")):
            kind, names = line.split(maxsplit=1)
            for each in names.split(","):
                fields.append((each.strip(" *"), c_void_p if "*" in each else kinds.get(kind)))
        if all(kind is not None for _, kind in fields):
            kinds[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return kinds


STRUCTURES = _structures()
NORM, LINEAR, RESIDUAL, BEST = (STRUCTURES[name] for name in ("Norm", "Linear", "Residual", "Best"))
ATTENTION, FEEDFORWARD, BLOCK = (STRUCTURES[name] for name in ("Attention", "FeedForward", "Block"))
VIEW, CALL = STRUCTURES["View"], STRUCTURES["Call"]
