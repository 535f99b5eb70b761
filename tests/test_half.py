"""Every choice of the config in half precision, held to what the dtype can tell apart."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.inside.checks.rows import TOLERANCE
from tests.harness import build
from tests.test_checks import FAMILIES, OTHERS

CHOICES = {**FAMILIES, **OTHERS}


def pytest_generate_tests(metafunc):
    """On a device every choice in its dtype; on the CPU, where it is slow, a few in both."""
    if metafunc.config.getoption("--device"):
        cases = [(name, metafunc.config.getoption("--dtype")) for name in CHOICES]
    else:
        cases = [("gemma2", "float16"), ("experts", "bfloat16"), ("rope longrope", "bfloat16")]
        cases += [("bert", "bfloat16"), ("t5", "float16")]
    metafunc.parametrize(("name", "dtype"), cases)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_every_choice_passes_the_check(name, dtype, differences):
    model = ch.Transformer(build(**CHOICES[name]).config).to(getattr(torch, dtype))
    rows = ch.check(model)
    for row in rows:
        differences.worst[row.name.partition(" (")[0]] = max(
            row.difference or 0.0, differences.worst.get(row.name.partition(" (")[0], 0.0)
        )
    assert [row for row in rows if not row.passed] == []
    # The copies that test the code alone are float32.
    assert {row.tolerance for row in rows} >= {TOLERANCE[next(model.parameters()).dtype], 1e-5}
