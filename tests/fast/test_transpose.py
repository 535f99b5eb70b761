"""Matrices in columns: copied to rows bit for bit; models that have them compute, train, copy and save."""

import copy

import pytest
import torch

import clearhead as ch
from clearhead.run.kernels import library, transpose
from clearhead.run.kernels.prepare import prepared
from clearhead.run.kernels.transpose import copied, is_transposed
from clearhead.run.quant.apply import QuantPlan, quantize_model


@pytest.mark.skipif(library.library() is None, reason="no C compiler, or other threads than GNU's")
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 40), (16, 16), (64, 15), (65, 49), (17, 129)])
def test_a_transposed_matrix_has_the_same_bits(rows, columns, monkeypatch):
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
    monkeypatch.setattr(transpose, "compiled_before", compiled)
    copied(source, into.view(torch.float32)[:, 2 : 2 + rows])
    assert torch.equal(into, wanted)  # what lies beside it has stayed
    assert used


def test_opening_a_file_does_not_wait_for_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.compiled_before.__wrapped__() is None
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Save a model in GPT-2's layout with matrices of more than a megabyte."""
    torch.manual_seed(0)
    config = ch.ModelConfig(
        vocab_size=40, d_model=520, d_ff=600, n_layers=1, n_heads=4, max_positions=16, activation="gelu_tanh"
    )
    model = ch.Transformer(config).eval()
    folder = tmp_path_factory.mktemp("columns")
    ch.Model(model).save(folder)
    return model, folder


def in_columns(model):
    return {name for name, parameter in model.named_parameters() if is_transposed(parameter)}


def step(model, optimizer):
    model(torch.arange(8)[None]).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_large_matrices_stay_as_the_file_has_them(stored, tmp_path):
    model, folder = stored
    loaded = ch.load(folder)
    matrices = {f"decoder.blocks.0.{part}.weight" for part in ("feedforward.up", "feedforward.down")}
    matrices |= {f"decoder.blocks.0.attention.{part}.weight" for part in ("q", "k", "v", "out")}
    assert in_columns(loaded.model) == matrices
    read = ch.load(folder, mapped=False).model
    ids = torch.arange(8)[None]
    for other in (loaded.model, copy.deepcopy(loaded.model), read):
        assert all(map(torch.equal, other.parameters(), model.parameters()))
        assert torch.allclose(other(ids).logits, model(ids).logits, atol=1e-5)
    loaded.save(tmp_path / "again")
    file = "model.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()
    loaded.model.load_state_dict(model.state_dict())
    quantized = [quantize_model(one, QuantPlan.named("int4")).model for one in (loaded.model, model)]
    assert all(map(torch.equal, *(one.state_dict().values() for one in quantized)))


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("first", ["trained", "prepared"])
def test_a_fused_optimizer_finds_weights_as_it_left_them(stored, first, copied):
    model, folder = stored
    loaded = copy.deepcopy(ch.load(folder).model) if copied else ch.load(folder).model
    optimizer = torch.optim.AdamW(loaded.parameters(), lr=1e-3, fused=True)  # it walks through memory
    wanted = copy.deepcopy(model)
    reference = torch.optim.AdamW(wanted.parameters(), lr=1e-3)
    ids = torch.arange(8)[None]
    for number in range(3):
        if number or first == "prepared":
            with torch.no_grad():
                assert torch.allclose(prepared(loaded)(ids).logits, loaded(ids).logits, atol=1e-5)
        step(loaded, optimizer)
        step(wanted, reference)
        assert bool(in_columns(loaded)) == copied  # a copy may have been trained already
    for ours, theirs in zip(loaded.parameters(), wanted.parameters()):
        assert torch.allclose(ours, theirs, atol=2e-4)


def test_training_changes_no_file(stored):
    _, folder = stored
    before = (folder / "model.safetensors").read_bytes()
    loaded = ch.load(folder).model
    step(loaded, torch.optim.SGD(loaded.parameters(), lr=1.0))
    assert (folder / "model.safetensors").read_bytes() == before
    assert torch.equal(
        ch.load(folder).model.head.out.weight, ch.load(folder, mapped=False).model.head.out.weight
    )
