"""Directories of sentence-transformers: every module that is served equals the installed library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from fastapi.testclient import TestClient
from torch import nn

import clearhead as ch
from clearhead.run.serve.app import make_server
from clearhead.run.serve.engine import ServeEngine
from tests.later import later

WORDS = ["the", "cat", "sat", "on", "mat", "a", "dog", "query", "passage", ":", "not"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
TEXTS = ["the cat", "  a dog sat on the mat not on a cat ", "The Dog", "a cat sat on the mat . " * 9]
library = later("sentence_transformers")
modules = later("sentence_transformers.sentence_transformer.modules")
PROMPTS = {"query": "query : ", "passage": "passage not : "}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    transformers.BertModel(transformers.BertConfig(vocab_size=len(VOCABULARY), **size)).save_pretrained(
        folder
    )
    return folder


def norm(width: int):
    made = modules.LayerNorm(width)
    nn.init.normal_(made.norm.weight), nn.init.normal_(made.norm.bias)
    return made


# Poolings; whether they count the prompt; the prompt of every text; what comes after, of a width.
CASES = {
    "max, unit": ("max", True, "query", lambda w: [modules.Normalize()]),
    "mean without prompt": ("mean", False, "passage", lambda w: []),
    "root of the length, tanh": ("mean_sqrt_len_tokens", False, "query", lambda w: [modules.Dense(w, 5)]),
    "later counts more": ("weightedmean", False, "query", lambda w: [norm(w), modules.Dropout(0.4)]),
    "last": (
        "lasttoken",
        False,
        "query",
        lambda w: [modules.Dense(w, w, bias=False, activation_function=None)],
    ),
    "two, in old order": (
        *(("cls", "mean"), False, "query"),
        lambda w: [modules.Dense(w, 5, activation_function=nn.GELU(), use_residual=True), norm(5)],
    ),
    "all, in an order of their own": (
        *(("lasttoken", "weightedmean", "mean_sqrt_len_tokens", "mean", "max", "cls"), True, None),
        lambda w: [
            modules.Normalize(),
            modules.Dense(w, w, activation_function=nn.SiLU(), use_residual=True),
            modules.Normalize(),
        ],
    ),
}


@pytest.mark.ledger("R1")
@pytest.mark.parametrize("case", CASES)
def test_every_module_equals_the_library_both_ways(case: str, base: Path, tmp_path: Path) -> None:
    pooling, counted, default, after = CASES[case]
    torch.manual_seed(1)
    pool = modules.Pooling(8, pooling_mode=pooling, include_prompt=counted)
    parts = [modules.Transformer(str(base), max_seq_length=24), pool, *after(pool.pooling_output_dimension)]
    theirs = library.SentenceTransformer(
        modules=parts, prompts=PROMPTS, default_prompt_name=default, device="cpu"
    )
    theirs.save(str(tmp_path / "theirs"))
    ours = ch.load(tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    again = library.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    for name in (None, "passage"):
        wanted = theirs.encode(TEXTS, prompt_name=name, convert_to_tensor=True)
        for found in (
            ours.embed(TEXTS, prompt=name),
            again.encode(TEXTS, prompt_name=name, convert_to_tensor=True),
            ch.load(tmp_path / "ours").embed(TEXTS, batch_size=1, prompt=name),
        ):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    known = ", ".join(sorted(theirs.prompts))
    with pytest.raises(ch.InputError, match=f"'title' is not one of this model's: it has {known}$"):
        ours.embed("king", prompt="title")


def test_what_is_not_served_is_named(base: Path, tmp_path: Path) -> None:
    parts = [modules.Transformer(str(base)), modules.Pooling(8), modules.Dense(8, 3), norm(3)]
    library.SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path))
    listed = json.loads((tmp_path / "modules.json").read_text())

    def said(name: str, change: dict[str, object] | list[object], complaint: str) -> None:
        path, old = tmp_path / name, (tmp_path / name).read_text()
        path.write_text(json.dumps({**json.loads(old), **change} if isinstance(change, dict) else change))
        with pytest.raises(ch.CheckpointError, match=complaint) as found:
            ch.load(tmp_path)
        assert "\n" not in str(found.value)
        path.write_text(old)

    dense = "2_Dense/config.json"
    said(
        "modules.json", [*listed, {"path": "4_LSTM", "type": "x.LSTM"}], "a module LSTM: supported are Trans"
    )
    said("modules.json", [listed[0], listed[2], listed[1]], "supported is a Transformer, a Pooling")
    for path in ("../x", str(tmp_path)):
        said("modules.json", [listed[0], {**listed[1], "path": path}], "outside of the directory")
    said(
        "1_Pooling/config.json", {"pooling_mode": ["mean", "attention"]}, "pools by attention: supported are"
    )
    said(dense, {"activation_function": "my.Bend"}, "activation_function my.Bend: supported are torch.nn's")
    said(dense, {"activation_function": "torch.nn.Linear"}, "activation_function torch.nn.Linear")
    said(dense, {"module_input_name": "token_embeddings"}, "module_input_name 'token_embeddings'")
    said(dense, {"out_features": 4}, r"a module Dense has tensors .* needs .*\(4, 8\)")
    said(dense, {"gain": 2}, "has gain: known of a Dense are")
    said("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task, which are not")
    ch.load(tmp_path / "1_Pooling" / "..")  # a directory may be named by way of another one


@pytest.mark.parametrize("unit", [False, True])
def test_vectors_cut_over_http_equal_the_library_s(unit: bool, base: Path, tmp_path: Path) -> None:
    """`dimensions` is truncate_dim with vectors of length one; token ids are read as they are."""
    parts = [modules.Transformer(str(base)), modules.Pooling(8), *([modules.Normalize()] if unit else [])]
    theirs = library.SentenceTransformer(modules=parts, prompts=PROMPTS, device="cpu")
    theirs.save(str(tmp_path))
    m = ch.load(tmp_path)
    with TestClient(make_server({"m": ServeEngine(m)}), base_url="http://127.0.0.1") as client:
        for dimensions in (1, 3, 8):
            wanted = theirs.encode(TEXTS, truncate_dim=dimensions, normalize_embeddings=True)
            for given in (TEXTS, m.encode(TEXTS)):
                body = {"input": given, "dimensions": dimensions}
                rows = client.post("/v1/embeddings", json=body).json()["data"]
                found = torch.tensor([row["embedding"] for row in rows])
                torch.testing.assert_close(found, torch.tensor(wanted), atol=1e-5, rtol=1e-5)
        wanted = theirs.encode(TEXTS, prompt_name="query", truncate_dim=3, normalize_embeddings=True)
        body = {"input": TEXTS, "dimensions": 3, "prompt_name": "query"}
        rows = client.post("/v1/embeddings", json=body).json()["data"]
        found = torch.tensor([row["embedding"] for row in rows])
        torch.testing.assert_close(found, torch.tensor(wanted), atol=1e-5, rtol=1e-5)
