"""Each way that `step.c` can be compiled, for one processor or another, gives the numbers of the others."""

import shutil

import pytest
import torch

from clearhead.fast import library, native
from clearhead.fast.native import NativeLinear, NativeQuantized
from clearhead.fast.parts import like
from clearhead.quant.grid import Grid, nearest_codes
from clearhead.quant.layers import QuantizedLinear

pytestmark = pytest.mark.skipif(
    library.library() is None, reason="no C compiler, or other threads than GNU's"
)

GRIDS = [Grid(8, 32), Grid(4, 32), Grid(4, 64, False), Grid(8, 128, False)]
X86 = "fma" in library._processor()
# By name, the flags and whether products and sums are fused as in the processor's own way.
WAYS = {"plain loops": (["-DPLAIN"], True)}
if X86:
    without = {"AVX-512 without VNNI": (["-mno-avx512vnni"], True)}
    WAYS |= {"AVX2": (["-mno-avx512f"], True), "SSE": (["-mno-avx"], False), **without}
WIDTHS = [(5, 33), (64, 172), (9, 64), (36, 96), (67, 320)]


@pytest.fixture(params=WAYS)
def way(request):
    """Functions compiled in another way, and whether their bits are those of the library."""
    flags, same = WAYS[request.param]
    return library.opened(shutil.which("cc"), *flags), same


def by(way, monkeypatch, layer, x):
    with monkeypatch.context() as patched:
        patched.setattr(native, "library", lambda: way)
        return layer(x)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_sums_of_whole_numbers_have_the_same_bits(way, width, grid, monkeypatch):
    torch.manual_seed(0)
    functions, same = way
    weight, x = torch.randn(width), torch.randn(6, width[1]) * torch.logspace(-3, 3, 6)[:, None]
    weight[0], x[1] = weight[0].abs(), x[1].abs()  # the largest sums
    layer = QuantizedLinear(nearest_codes(grid, weight), torch.randn(width[0]), None)
    fast = like(layer, NativeQuantized)
    for rows in (1, 4, 6):
        ours, theirs = fast(x[:rows]), by(functions, monkeypatch, fast, x[:rows])
        apart = (ours - theirs).abs() / ours.abs().amax(1, keepdim=True)
        assert apart.max() <= (0 if same else 1e-5)


@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
def test_the_largest_codes_do_not_overflow(way, grid, monkeypatch):
    """All codes and inputs at their limits: sums of 16 bits would be too small for more than two products."""
    functions, _ = way
    for sign in (1, -1):
        weight, x = torch.full((20, 64), float(sign)), torch.ones(2, 64)
        fast = like(QuantizedLinear(nearest_codes(grid, weight), None, None), NativeQuantized)
        for made in (fast(x), by(functions, monkeypatch, fast, x)):
            assert torch.allclose(made, torch.full_like(made, 64.0 * sign), rtol=0.01)


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
