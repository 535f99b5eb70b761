"""What the tensors of a file decide: one dtype, tables that differ, and how large a model can be."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import clearhead as ch
from tests.parity import mutations
from tests.parity.encoders import said

TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(params=["BART", "T5", "Marian", "M2M-100"])
def seq2seq(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A random encoder-decoder that transformers saved, by name and folder."""
    mutations.prepare(mutations.SUBJECTS[request.param], tmp_path)
    return request.param, tmp_path


def change(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Rewrite the weights of a folder."""
    path = folder / "model.safetensors"
    save_file(edit(load_file(path)), path, {"format": "pt"})


def compare(name: str, folder: Path, tolerance: float = 1e-5) -> ch.Model:
    """Load a folder on both sides and compare the logits."""
    model = getattr(transformers, mutations.SUBJECTS[name].model)
    reference = model.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    theirs, inputs = mutations.inputs_of(reference)
    ours = ch.load(folder)
    with torch.no_grad():
        wanted, found = said(reference(**theirs)), ours.model.float()(**inputs).logits
    assert float((found - wanted).abs().max()) <= tolerance * max(1.0, float(wanted.abs().max()))
    return ours


@pytest.mark.parametrize("which", [(1,), (0, 2), (0, 1, 2)])
def test_tables_that_differ_are_kept_apart(
    seq2seq: tuple[str, Path], which: tuple[int, ...], tmp_path: Path
) -> None:
    """config.json says that all tables are one, and the file holds others: the file is right."""
    name, folder = seq2seq

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        shared = next(key for key in tensors if key.endswith("shared.weight"))
        torch.manual_seed(5)
        for number in which:
            prefix = "" if number == 2 else shared.removesuffix("shared.weight")
            tensors[prefix + TABLES[number]] = tensors[shared] + torch.randn_like(tensors[shared])
        return tensors

    change(folder, edit)
    ours = compare(name, folder)
    for model in (ours, ch.Model(ours.model)):  # as it came, and from our config alone
        model.save(tmp_path / "again")
        again = ch.load(tmp_path / "again")
        assert all(map(torch.equal, again.model.parameters(), ours.model.parameters()))
        if json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] != "clearhead":
            compare(name, tmp_path / "again")


@pytest.mark.parametrize("stated", ["bfloat16", None])
@pytest.mark.parametrize("name", ["Llama", "BERT", "T5"])
def test_weights_of_several_dtypes_become_one(name: str, stated: str | None, tmp_path: Path) -> None:
    mutations.prepare(mutations.SUBJECTS[name], tmp_path)

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: x if x.ndim == 1 else x.bfloat16() for key, x in tensors.items()}

    change(tmp_path, edit)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": stated}))
    ours = ch.load(tmp_path)
    assert {x.dtype for x in ours.model.parameters()} == {torch.bfloat16 if stated else torch.float32}
    model = getattr(transformers, mutations.SUBJECTS[name].model)
    reference = model.from_pretrained(tmp_path, dtype=stated or "float32", attn_implementation="eager").eval()
    theirs, inputs = mutations.inputs_of(reference)
    with torch.no_grad():
        wanted, found = said(reference.float()(**theirs)), ours.model.float()(**inputs).logits
    assert float((found - wanted).abs().max()) <= 1e-4


@pytest.mark.parametrize("when", ["saving", "loading"])
@pytest.mark.parametrize("value", [70_000.0, -1e30])
def test_a_number_too_large_for_a_dtype(when: str, value: float, tmp_path: Path) -> None:
    mutations.prepare(mutations.SUBJECTS["Llama"], tmp_path / "model")

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.norm.weight"][3] = value
        return tensors

    change(tmp_path / "model", edit)
    loaded = ch.load(tmp_path / "model")
    action = {
        "saving": lambda: loaded.save(tmp_path / "half", dtype=torch.float16),
        "loading": lambda: ch.load(tmp_path / "model", dtype=torch.float16),
    }[when]
    with pytest.raises(ch.CheckpointError, match=r"model\.norm\.weight .* float16 .* bfloat16"):
        action()
    assert not (tmp_path / "half").exists()
    loaded.save(tmp_path / "brain", dtype=torch.bfloat16)
    assert all(x.isfinite().all() for x in ch.load(tmp_path / "brain").model.parameters())


SIZES = ("Mistral", "Mixtral", "T5", "BART", "ViT")


@pytest.mark.parametrize("name", SIZES)
def test_a_huge_number_in_a_config_costs_nothing(name: str, tmp_path: Path) -> None:
    """Whatever number of config.json is huge, the file is refused, or it loads as quickly as ever."""
    mutations.prepare(mutations.SUBJECTS[name], tmp_path)
    path = tmp_path / "config.json"
    written: dict[str, Any] = json.loads(path.read_text())
    gc.disable()  # to look through all that earlier tests have left takes a second by itself
    try:
        for key, old in written.items():
            for value in (10_000, 10**9):
                if type(old) is int:
                    path.write_text(json.dumps({**written, key: value}))
                    begun = time.process_time()
                    with contextlib.suppress(ch.ClearheadError):
                        ch.load(tmp_path)
                    assert time.process_time() - begun < 1, (key, value)
    finally:
        gc.enable()
