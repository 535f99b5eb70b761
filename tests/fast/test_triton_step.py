"""The kernels of a decode step, where they can run: on a GPU, or with Triton and TRITON_INTERPRET=1.

Interpreted, they run in float32: the interpreter does not multiply matrices of bfloat16.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

import clearhead as ch
from clearhead.core.feedforward import ACTIVATIONS
from clearhead.core.norms import rms_norm
from clearhead.run.generate.decode import decode
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Prompts
from clearhead.run.kernels.fixed_cache import MatmulConfig
from clearhead.run.kernels.kernels import choose, step_linear
from clearhead.run.kernels.prepare import StepBlock, few_rows, prepared
from clearhead.run.kernels.steps import Steps
from clearhead.run.quant.apply import dequantized, quantize_model
from clearhead.run.quant.grid import Grid, laid, nearest_codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
GRIDS = [Grid(8, 32), Grid(4, 32), Grid(4, 64, symmetric=False), Grid(8, 128, symmetric=False)]
FORMS = [(True, "silu", False), (True, None, False), (False, None, True)]
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


def exact(product, gate, added):
    """What follows a product in float64: the gate, and what is added."""
    if gate:
        pre, up = product.chunk(2, dim=-1)
        product = ACTIVATIONS[gate](pre) * up
    return product if added is None else product + added.double()


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("columns", [100, 256, 352])
def test_codes_laid_out_for_a_gpu_stand_for_the_same_numbers(grid, columns):
    torch.manual_seed(0)
    made = nearest_codes(grid, torch.randn(13, columns))
    assert torch.equal(laid([made]).weight(torch.float32), made.weight())
    both = laid([made, nearest_codes(grid, torch.randn(6, columns))])
    assert torch.equal(both.weight(torch.bfloat16)[:13], made.weight(torch.bfloat16))
    rows = torch.tensor([12, 0, 7, 7])
    assert torch.equal(few_rows(laid([made]), rows, torch.float32), made.weight()[rows])


@pytest.mark.skipif(not RUNS, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 20, 70])
@pytest.mark.parametrize("grid", [*GRIDS, None])
@pytest.mark.parametrize(("norm", "gate", "add"), FORMS)
def test_a_product_with_norm_gate_and_residual_equals_float64(grid, rows, norm, gate, add, dtype):
    """Also where columns are split among programs, of which the last adds up, time after time."""
    torch.manual_seed(rows)
    wide, D = torch.randn(80, 544, device=DEVICE) / 544**0.5, 544
    made = None if grid is None else nearest_codes(grid, wide)
    weight = wide.to(dtype) if made is None else laid([made])
    numbers = (wide.to(dtype) if made is None else made.weight()).double()
    shape = (2, 35) if rows == 70 else (rows, 1)  # as those of prompts
    x = torch.randn(*shape, D, device=DEVICE).to(dtype)
    bias = torch.randn(80, device=DEVICE).to(dtype)
    scale = torch.rand(D, device=DEVICE).to(dtype) if norm else None
    added = torch.randn(*shape, 40 if gate else 80, device=DEVICE).to(dtype) if add else None
    wanted = x.double() if scale is None else rms_norm(x.double(), scale.double(), 1e-5, True)
    wanted = exact(wanted @ numbers.t() + bias.double(), gate, added)
    allowed = 1e-5 if dtype == torch.float32 else 0.02
    for _ in range(2):
        given = step_linear(x, weight, MatmulConfig(bias, scale, 1e-5, True, gate, added))
        assert (given - wanted).abs().max() <= allowed * (1 + wanted.abs().max())


@pytest.mark.skipif(not RUNS, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("gate", ["silu", None])
def test_programs_that_take_tile_after_tile_equal_float64(rows, gate):
    """Fewer programs than tiles, and inputs of several blocks of columns, of which the last is not full."""
    from clearhead.run.kernels.triton_step import Tile, linear

    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 1, 200, device=DEVICE), torch.randn(2402, 200, device=DEVICE) / 15
    scale, added = torch.rand(200, device=DEVICE), None if gate else torch.randn(rows, 1, 2402, device=DEVICE)
    normed = rms_norm(x.double(), scale.double(), 1e-5, False)
    wanted = exact(normed @ weight.double().t(), gate, added)
    given = linear(x, weight, MatmulConfig(None, scale, 1e-5, False, gate, added), Tile(4, 64, 4, 2))
    assert (given - wanted).abs().max() <= 1e-5 * (1 + wanted.abs().max())


@pytest.mark.skipif(not RUNS, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("gate", "add"), [("silu", False), (None, True)])
def test_products_on_matrix_units_equal_float64(gate, add, splits, dtype):
    """Tiles and blocks that are not full, and columns split among programs, of which the last adds up."""
    from clearhead.run.kernels.triton_rows import Cut, wide

    torch.manual_seed(splits)
    x, weight = torch.randn(19, 1, 600, device=DEVICE).to(dtype), torch.randn(180, 600, device=DEVICE) / 25
    weight, bias = weight.to(dtype), torch.randn(180, device=DEVICE).to(dtype)
    added = torch.randn(19, 1, 180, device=DEVICE).to(dtype) if add else None
    wanted = exact(x.double() @ weight.double().t() + bias.double(), gate, added)
    allowed = 1e-5 if dtype == torch.float32 else 0.02
    for _ in range(2):
        given = wide(x, weight, bias, gate, added, Cut(64, splits))
        assert (given - wanted).abs().max() <= allowed * (1 + wanted.abs().max())


@pytest.mark.skipif(not RUNS, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("grid", GRIDS)
def test_an_input_that_is_no_number_is_not_rounded_away(grid):
    """Also where a unit of columns is zero, of which the step would be nothing."""
    torch.manual_seed(0)
    weight = laid([nearest_codes(grid, torch.randn(8, 96, device=DEVICE))])
    for dtype in DTYPES:
        x = torch.randn(1, 1, 96, device=DEVICE).to(dtype)
        x[..., 32:64] = 0
        assert step_linear(x, weight).isfinite().all()
        for bad in (torch.nan, torch.inf):
            x[..., 70] = bad
            assert not step_linear(x, weight).isfinite().any()


def test_the_most_probable_token_is_kept_and_logits_that_are_not_numbers_are_told():
    torch.manual_seed(0)
    logits = torch.randn(4, 9001, device=DEVICE)
    logits[1, 5] = logits[1, 8500] = 9  # the first of two
    logits[2, 70] = torch.nan
    logits[3] = -torch.inf
    logits[3, 8999] = -3.0
    made, ids = (torch.zeros(4, size, dtype=torch.long, device=DEVICE) for size in (6, 1))
    kept = torch.zeros_like(logits)
    choose(logits, torch.tensor([2], device=DEVICE), made, ids, kept)
    assert made[:, 2].tolist() == [int(logits[0].argmax()), 5, -1, 8999]
    assert not made[:, [0, 1, 3, 4, 5]].any() and ids[[0, 1, 3], 0].tolist() == made[[0, 1, 3], 2].tolist()
    assert torch.equal(kept.nan_to_num(7.0), logits.nan_to_num(7.0))


@pytest.mark.parametrize(
    "plan", [ch.QuantPlan(4, method="rtn"), ch.QuantPlan(8, 64, False, "rtn", ("*.blocks.0.attention.q",))]
)
@pytest.mark.slow
def test_a_model_of_few_bits_takes_the_kernels_and_says_what_its_numbers_say(plan):
    """On a CPU without Triton, through their formulas; a block with one wide layer keeps its own forward."""
    torch.manual_seed(0)
    config = ch.preset("micro-decoder").replace(
        n_layers=2, n_heads=4, n_kv_heads=2, positions="rope", norm="rmsnorm", gated=True, activation="silu"
    )
    few = quantize_model(ch.Transformer(config.replace(bias=False)).eval().to(DEVICE), plan).model
    fast, wide = prepared(few, kernels=True), dequantized(few)
    assert [isinstance(block, StepBlock) for block in fast.decoder.blocks] == [not plan.wide, True]
    ids = torch.randint(config.vocab_size, (3, 9), device=DEVICE)
    with torch.inference_mode():
        assert (fast(ids).logits - wide(ids).logits).abs().max() <= 1e-4
    steps, request = Steps(fast, backend="eager"), Request(max_new_tokens=6, compile=True)
    for rows in (3,) if plan.wide else (1, 3):  # each is compiled
        given = Prompts(ids[:rows].tolist())
        ours, plain = decode(fast, request, given, steps=steps), decode(wide, request, given)
        assert [row.ids for row in ours] == [row.ids for row in plain]
    assert steps.unfit is None
