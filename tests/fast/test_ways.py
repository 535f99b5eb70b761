"""Each way that `step.c` can be compiled, for one processor or another, gives the numbers of the others."""

import os
import shutil
import subprocess

import pytest
import torch

from clearhead.errors import InputError
from clearhead.run.kernels import library, native
from clearhead.run.kernels.native import NativeLinear, NativeQuantized
from clearhead.run.kernels.parts import like
from clearhead.run.quant.grid import Grid, nearest_codes
from clearhead.run.quant.layers import QuantizedLinear

pytestmark = pytest.mark.skipif(
    library.library() is None, reason="no C compiler, or other threads than GNU's"
)

GRIDS = [Grid(8, 32), Grid(4, 32), Grid(4, 64, False), Grid(8, 128, False)]
FUSED = {"fma", "asimd"} & set(library._processor().split())  # products and sums are rounded once
# By name, the flags and whether products and sums are fused.
WAYS = {name: (library.allowed(name), name != "plain") for name in library.limits()}
WAYS["plain loops"] = ("-march=native", "-DPLAIN"), True
if "fma" in FUSED:
    WAYS["AVX-512 without VNNI"] = ("-march=native", "-mno-avx512vnni"), True
WIDTHS = [(1, 300), (5, 33), (64, 172), (9, 64), (36, 96), (67, 320)]


@pytest.fixture(params=WAYS)
def way(request):
    """Functions compiled in another way, and whether they fuse products and sums as the library does."""
    flags, fused = WAYS[request.param]
    here = os.environ.get(library.LIMIT) != "plain" or "asimd" in FUSED
    return library.opened(shutil.which("cc"), *flags), (fused or "asimd" in FUSED) == here


def by(way, monkeypatch, layer, x):
    with monkeypatch.context() as patched:
        patched.setattr(native, "library", lambda: way)
        return layer(x)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_sums_of_whole_numbers_are_the_same(way, width, grid, monkeypatch):
    torch.manual_seed(0)
    functions, same = way
    weight, x = torch.randn(width), torch.randn(6, width[1]) * torch.logspace(-3, 3, 6)[:, None]
    weight[0], x[1] = weight[0].abs(), x[1].abs()  # the largest sums
    layer = QuantizedLinear(nearest_codes(grid, weight), torch.randn(width[0]), None)
    fast = like(layer, NativeQuantized)
    for rows in (1, 4, 6):
        ours, theirs = fast(x[:rows]), by(functions, monkeypatch, fast, x[:rows])
        apart = (ours - theirs).abs() / ours.abs().amax(1, keepdim=True)
        # What follows the sums, a scale and a bias, compilers may round once or twice.
        assert apart.max() <= (2.4e-7 if same else 1e-5)


@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
def test_the_largest_codes_do_not_overflow(way, grid, monkeypatch):
    """All codes and inputs at their limits: sums of 16 bits would be too small for more than two products."""
    functions, _ = way
    for sign in (1, -1):
        weight, x = torch.full((20, 64), float(sign)), torch.ones(2, 64)
        fast = like(QuantizedLinear(nearest_codes(grid, weight), None, None), NativeQuantized)
        for made in (fast(x), by(functions, monkeypatch, fast, x)):
            assert torch.allclose(made, torch.full_like(made, 64.0 * sign), rtol=0.01)


@pytest.mark.ledger("X2")
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_products_in_float32(way, width, monkeypatch):
    torch.manual_seed(0)
    functions, _ = way
    layer, x = torch.nn.Linear(width[1], width[0]), torch.randn(64, width[1])
    fast = NativeLinear(layer)
    with torch.inference_mode():
        for rows in (*range(1, 10), 24, 37, 64):
            theirs = by(functions, monkeypatch, fast, x[:rows])
            assert (theirs - layer(x[:rows])).abs().max() <= 2e-6 * width[1] ** 0.5
            exact = torch.nn.functional.linear(x[:rows].double(), layer.weight.double(), layer.bias.double())
            assert (theirs - exact).abs().max() <= 2e-6 * width[1] ** 0.5


@pytest.mark.parametrize("wrong", ["avx3", "AVX2", "sse", *({"neon", "avx2"} - set(library.limits()))])
def test_a_limit_that_is_not_to_be_had_is_refused_by_name(wrong, monkeypatch):
    monkeypatch.setenv(library.LIMIT, wrong)
    for reading in (library.library, library.compiled_before):
        reading.cache_clear()
        with pytest.raises(InputError, match=f"CLEARHEAD_CPU='{wrong}' .* this machine has .*plain"):
            reading()


@pytest.mark.parametrize("limit", ["", *library.limits()])
def test_under_a_limit_nothing_more_is_compiled(limit, monkeypatch, tmp_path):
    """The compiler says what it may use, and each limit has a place of its own in the cache."""
    monkeypatch.setenv(library.LIMIT, limit)
    compiler, flags = shutil.which("cc"), library.allowed()
    asked = subprocess.run([compiler, *flags, "-dM", "-E", "-"], input="", capture_output=True, text=True)
    macros = {line.split()[1] for line in asked.stdout.splitlines()}
    beyond = {
        "avx512": {"__AVX512BF16__", "__AMX_TILE__", "__AVX512FP16__"},
        "avx2": {"__AVX512F__", "__AVXVNNI__", "__AMX_TILE__"},
        "plain": {"__AVX__", "__FMA__", "__ARM_FEATURE_DOTPROD", "__ARM_FEATURE_SVE"},
        "neon": {"__ARM_FEATURE_DOTPROD", "__ARM_FEATURE_BF16", "__ARM_FEATURE_SVE"},
    }
    assert not macros & beyond.get(limit, set())
    assert ("PLAIN" in macros) == (limit == "plain")
    assert limit != "avx512" or {"__AVX512VNNI__", "__AVX512BW__", "__AVX512VL__"} <= macros
    places = {library._place(compiler, library.allowed(each)) for each in ("", *library.limits())}
    assert len(places) == 1 + len(library.limits())
