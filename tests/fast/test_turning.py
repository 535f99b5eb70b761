"""A matrix that lies the other way round is copied bit for bit, whatever its size and what lies beside it."""

import pytest
import torch

from clearhead.run.kernels import library, turning
from clearhead.run.kernels.turning import copied


@pytest.mark.skipif(library.library() is None, reason="no C compiler, or other threads than GNU's")
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 40), (16, 16), (64, 15), (65, 49), (17, 129)])
def test_a_turned_matrix_has_the_same_bits(rows, columns, monkeypatch):
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (rows, columns + 7), dtype=torch.int32)  # some are no numbers
    source = bits.view(torch.float32)[:, 3 : 3 + columns].t()
    into = torch.full((columns, rows + 5), 7, dtype=torch.int32)
    wanted = into.clone()
    wanted[:, 2 : 2 + rows] = bits[:, 3 : 3 + columns].t()

    def compiled():
        used.append(True)
        return library.library()

    used = []
    monkeypatch.setattr(turning, "compiled_before", compiled)
    copied(source, into.view(torch.float32)[:, 2 : 2 + rows])
    assert torch.equal(into, wanted)  # what lies beside it has stayed
    assert used


def test_opening_a_file_does_not_wait_for_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.compiled_before.__wrapped__() is None
    assert not list(tmp_path.iterdir())
