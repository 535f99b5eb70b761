"""SPLADE and ColBERT: each layout equals sentence-transformers, both ways; commands, ranking and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import clearhead as ch
from clearhead.learn.tasks.table import TASKS
from tests.later import later

library = later("sentence_transformers")
base_modules = later("sentence_transformers.base.modules")
sparse_modules = later("sentence_transformers.sparse_encoder.modules")
late_modules = later("sentence_transformers.multi_vector_encoder.modules")
pytestmark = pytest.mark.ledger("W9")

WORDS = ["the", "cat", "sat", "on", "mat", "a", "dog", "query", "passage", ":", "not", ".", "!"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]", *WORDS]
LONG = "a cat sat . on the mat ! " * 9
TEXTS = ["the cat", "  a dog sat on the mat not on a cat ", "The Dog!", LONG, "", "."]
SIZES = {"vocab_size": len(VOCABULARY), "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
SIZES |= {"initializer_range": 0.5, "num_hidden_layers": 2}
BASES = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            **SIZES,
            pad_token_id=0,
            local_attention=4,
            global_attn_every_n_layers=2,
            attn_implementation="eager",
        )
    ),
    "xlm-roberta": lambda: transformers.XLMRobertaForMaskedLM(
        transformers.XLMRobertaConfig(**SIZES, pad_token_id=0, max_position_embeddings=130)
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny masked language models, each with a tokenizer."""
    folder = tmp_path_factory.mktemp("bases")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    for name, make in BASES.items():
        torch.manual_seed(1)
        make().save_pretrained(folder / name)
        transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / name)
    return folder


def worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference of lists of vectors of the same shapes."""
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs))


# SPLADE -----------------------------------------------------------------------------------------------------

SPLADES = {  # the base, the pooling, its activation, weights that are kept, how vectors are compared
    "as published": ("bert", "max", "relu", None, None),
    "sum of two logs, few weights": ("modernbert", "sum", "log1p_relu", 5, "cosine"),
    "max of two logs": ("xlm-roberta", "max", "log1p_relu", 3, "dot"),
}


@pytest.mark.parametrize("case", SPLADES)
def test_splade_equals_the_library_both_ways(case: str, bases: Path, tmp_path: Path) -> None:
    base, pooling, activation, most, by = SPLADES[case]
    first = sparse_modules.Transformer(str(bases / base), transformer_task="fill-mask", max_seq_length=24)
    theirs = library.SparseEncoder(
        modules=[first, sparse_modules.SpladePooling(pooling, activation)],
        prompts={"query": "query : "},
        max_active_dims=most,
        similarity_fn_name=by,
        device="cpu",
    )
    theirs.save(str(tmp_path / "theirs"))
    ours = ch.load(tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    again = library.SparseEncoder(str(tmp_path / "ours"), device="cpu")
    for name in ("query", None):
        for reference in (theirs, again):
            wanted = reference.encode(TEXTS, prompt_name=name, convert_to_sparse_tensor=False)
            for m in (ours, ch.load(tmp_path / "ours")):
                found = m.embed(TEXTS, prompt=name, batch_size=4)
                torch.testing.assert_close(torch.stack([v.dense() for v in found]), wanted, atol=2e-6, rtol=0)
                assert all(len(v.ids) == int((row != 0).sum()) for v, row in zip(found, wanted))
    if most is not None:
        assert max(len(v.ids) for v in ours.embed(TEXTS)) == most
    asked, *_ = theirs.encode_query([TEXTS[0]])
    scores = theirs.similarity(asked[None].to_dense(), theirs.encode_document(TEXTS[1:]).to_dense())[0]
    ranked = ours.rerank(TEXTS[0], TEXTS[1:])
    assert [one.index for one in ranked] == scores.argsort(descending=True).tolist()
    assert [one.score for one in ranked] == pytest.approx(sorted(scores.tolist(), reverse=True), abs=1e-5)


def test_long_texts_are_pooled_chunk_by_chunk(bases: Path, tmp_path: Path, monkeypatch) -> None:
    """However few logits are in memory at a time, and whoever shares a batch, the weights are the same."""
    first = sparse_modules.Transformer(str(bases / "bert"), transformer_task="fill-mask")
    for pooling in ("max", "sum"):
        modules = [first, sparse_modules.SpladePooling(pooling)]
        library.SparseEncoder(modules=modules, device="cpu").save(str(tmp_path / pooling))
        m = ch.load(tmp_path / pooling)
        whole = torch.stack([m.embed([text])[0].dense() for text in TEXTS])
        with monkeypatch.context() as patch:
            patch.setattr("clearhead.learn.tasks.vectors.LOGITS", 3 * len(VOCABULARY))
            parts = torch.stack([vector.dense() for vector in m.embed(TEXTS)])
        torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-6)


# ColBERT ----------------------------------------------------------------------------------------------------


def dense(width: int = 4, **options):
    torch.manual_seed(2)
    return base_modules.Dense(8, width, module_input_name="token_embeddings", **options)


def native(folder: Path, name: str, target: Path, **options) -> None:
    """Write a MultiVectorEncoder as sentence-transformers does."""
    words, options = options.pop("words", [".", "!"]), {"query_length": 16, "document_length": 20, **options}
    similarity = options.pop("similarity_fn_name", None)
    layers = [dense(bias=False, activation_function=nn.Identity())]
    if name == "modernbert":  # two layers
        layers = [
            dense(12, use_residual=True),
            base_modules.Dense(12, 4, module_input_name="token_embeddings"),
        ]
    tasks = ["document", "query"] if name == "xlm-roberta" else None
    library.MultiVectorEncoder(
        modules=[
            base_modules.Transformer(str(folder / name), **options),
            *layers,
            late_modules.MultiVectorMask(words, skiplist_tasks=tasks),
            *([] if similarity else [base_modules.Normalize("token_embeddings")]),
        ],
        prompts={"query": "query : ", "document": "passage : "},
        similarity_fn_name=similarity,
        device="cpu",
    ).save(str(target))


def stanford(folder: Path, name: str, target: Path, **metadata) -> None:
    """Write a ColBERT as Stanford's code does: the layer is a tensor of the model, settings lie beside it."""
    shutil.copytree(folder / name, target)
    weights = {
        key: x for key, x in load_file(target / "model.safetensors").items() if not key.startswith("cls")
    }
    weights["linear.weight"] = dense(bias=False).linear.weight.detach().clone()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    usual = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 16, "doc_maxlen": 20}
    (target / "artifact.metadata").write_text(json.dumps({**usual, **metadata}))


def pylate(folder: Path, name: str, target: Path, **stated) -> None:
    """Write a ColBERT as PyLate does: the markers are tokens that were added, the layer is a module."""
    model = transformers.AutoModel.from_pretrained(folder / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / name)
    tokenizer.add_tokens(["[Q] ", "[D] "])
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(target), tokenizer.save_pretrained(target)
    layer = dense(bias=False, activation_function=nn.Identity())
    (target / "1_Dense").mkdir()
    layer.save(str(target / "1_Dense"))
    keys = ("in_features", "out_features", "bias", "activation_function")
    path = target / "1_Dense" / "config.json"
    path.write_text(json.dumps({key: json.loads(path.read_text())[key] for key in keys}))
    types = ("sentence_transformers.models.Transformer", "pylate.models.Dense.Dense")
    modules = [
        {"idx": n, "name": str(n), "path": p, "type": t} for n, p, t in zip((0, 1), ("", "1_Dense"), types)
    ]
    (target / "modules.json").write_text(json.dumps(modules))
    usual = {
        "model_type": "ColBERT",
        "similarity_fn_name": "MaxSim",
        "prompts": {"query": "", "document": ""},
    }
    usual |= {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 12, "document_length": 20}
    usual |= {"attend_to_expansion_tokens": False, "do_query_expansion": True}
    (target / "config_sentence_transformers.json").write_text(json.dumps(usual | stated))
    (target / "sentence_bert_config.json").write_text('{"max_seq_length": 11, "do_lower_case": false}')


EXPANSION = {"strategy": "fixed", "length": 14}
LAYOUTS = {
    "native": (native, "bert", {}),
    "native, queries made longer": (
        native,
        "modernbert",
        {"query_length": None, "query_expansion": EXPANSION},
    ),
    "native, seen, by another token, not cut": (
        native,
        "xlm-roberta",
        {"query_expansion": {"strategy": "min", "length": 9, "attend": True, "token": "not"}},
    ),
    "native, mean of products": (native, "bert", {"similarity_fn_name": "meanmaxsim", "words": None}),
    "stanford": (stanford, "bert", {}),
    "stanford, seen, with punctuation": (
        stanford,
        "bert",
        {"attend_to_mask_tokens": True, "mask_punctuation": False},
    ),
    "pylate": (pylate, "bert", {"skiplist_words": ["!", "mat", "unheard"]}),
    "pylate, seen": (pylate, "modernbert", {"attend_to_expansion_tokens": True}),
    "pylate, queries as they are": (pylate, "xlm-roberta", {"do_query_expansion": False}),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_late_interaction_equals_the_library_both_ways(case: str, bases: Path, tmp_path: Path) -> None:
    write, base, options = LAYOUTS[case]
    write(bases, base, tmp_path / "theirs", **options)
    theirs, ours = (
        library.MultiVectorEncoder(str(tmp_path / "theirs"), device="cpu"),
        ch.load(tmp_path / "theirs"),
    )
    ours.save(tmp_path / "ours")
    again = library.MultiVectorEncoder(str(tmp_path / "ours"), device="cpu")
    for reference in (theirs, again):
        queries, documents = reference.encode_query(TEXTS), reference.encode_document(TEXTS)
        for m in (ours, ch.load(tmp_path / "ours")):
            assert worst(m.embed(TEXTS, prompt="query"), queries) <= 2e-6
            assert worst(m.embed(TEXTS, batch_size=4), documents) <= 2e-6
        scores = reference.similarity(queries[:1], documents)[0]
        ranked = ours.rerank(TEXTS[0], TEXTS)
        assert [one.score for one in ranked] == pytest.approx(sorted(scores.tolist(), reverse=True), abs=1e-5)
    saved = transformers.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)[1]
    assert {*saved["unexpected_keys"]} <= {"cls.predictions.bias"}


def test_a_query_differs_from_a_document(bases: Path, tmp_path: Path) -> None:
    """Markers, expansion and punctuation each change what is compared."""
    stanford(bases, "bert", tmp_path / "plain")
    stanford(bases, "bert", tmp_path / "seen", attend_to_mask_tokens=True)
    plain, seen = ch.load(tmp_path / "plain"), ch.load(tmp_path / "seen")
    (query,), (document,) = plain.embed(["the cat !"], prompt="query"), plain.embed(["the cat !"])
    assert (len(query), len(document)) == (16, 5)  # [CLS] [Q] the cat ! [SEP] and masks; without !
    assert float((query[:5] - document).abs().max()) > 0.01
    assert worst([query], seen.embed(["the cat !"], prompt="query")) > 0.01
    assert [len(one) for one in plain.embed(["", "cat"])] == [3, 4]
    assert plain.embed([]) == [] and plain.rerank("the cat", []) == []


def test_commands_print_every_kind(bases: Path, tmp_path: Path, clearhead) -> None:
    first = sparse_modules.Transformer(str(bases / "bert"), transformer_task="fill-mask")
    modules = [first, sparse_modules.SpladePooling()]
    library.SparseEncoder(modules=modules, device="cpu").save(str(tmp_path / "splade"))
    native(bases, "bert", tmp_path / "colbert")
    (vector,), m = ch.load(tmp_path / "splade").embed(["the cat"]), ch.load(tmp_path / "colbert")
    lines = clearhead("embed", tmp_path / "splade", "the cat").out.splitlines()
    best = int(vector.weights.argmax())
    assert lines[0] == f"{float(vector.weights[best]):.4f}\t{VOCABULARY[vector.ids[best]]}"
    assert len(lines) == len(vector.ids)
    shown = clearhead("embed", tmp_path / "splade", "the cat", "--json").json["embedding"]
    assert (shown["indices"], shown["values"]) == (vector.ids.tolist(), vector.weights.tolist())
    assert shown["tokens"] == [VOCABULARY[token] for token in vector.ids]
    printed = clearhead("embed", tmp_path / "colbert", "the cat", "--prompt query").out.splitlines()
    wanted = m.embed(["the cat"], prompt="query")[0].tolist()
    assert [list(map(float, row.split())) for row in printed] == [
        pytest.approx(row, rel=1e-5) for row in wanted
    ]
    assert (
        clearhead("embed", tmp_path / "colbert", "the cat", "--json").json["embedding"]
        == m.embed(["the cat"])[0].tolist()
    )
    clearhead.refuses(
        "a .npy file holds one vector for each text", "embed", tmp_path / "colbert", "x", "--output", "a.npy"
    )
    ranked = clearhead("rerank", tmp_path / "colbert", "the cat", *TEXTS[:3], "--json").json["results"]
    assert [one["index"] for one in ranked] == [one.index for one in m.rerank("the cat", TEXTS[:3])]


@pytest.fixture(scope="module")
def layouts(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory of each kind."""
    folder = tmp_path_factory.mktemp("layouts")
    first = sparse_modules.Transformer(str(bases / "bert"), transformer_task="fill-mask")
    modules = [first, sparse_modules.SpladePooling()]
    library.SparseEncoder(modules=modules, device="cpu").save(str(folder / "splade"))
    native(bases, "bert", folder / "native", query_expansion=EXPANSION)
    stanford(bases, "bert", folder / "stanford")
    pylate(bases, "bert", folder / "pylate")
    return folder


REFUSED = {  # directory, file, change, complaint
    "static queries": (
        *("splade", "modules.json", [{"path": "", "type": "x.Router"}]),
        "names a module Router: supported are Transformer, MLMTransformer, SpladePooling",
    ),
    "other pooling": (
        "splade",
        "1_SpladePooling/config.json",
        {"pooling_strategy": "mean"},
        "choose max or sum",
    ),
    "other activation": (
        "splade",
        "1_SpladePooling/config.json",
        {"activation_function": "x"},
        "choose relu or",
    ),
    "no weights": (
        "splade",
        "config_sentence_transformers.json",
        {"max_active_dims": 0},
        "whole number of 1 at",
    ),
    "distance": (
        *("splade", "config_sentence_transformers.json", {"similarity_fn_name": "euclidean"}),
        "choose dot or cosine",
    ),
    "states": (
        *("splade", "sentence_bert_config.json", {"transformer_task": "feature-extraction"}),
        "transformer_task, which are not supported",
    ),
    "other kind": (
        *("splade", "config_sentence_transformers.json", {"model_type": "CrossEncoder"}),
        "supported are SentenceTransformer, SparseEncoder, MultiVectorEncoder, ColBERT",
    ),
    "some tokens": ("native", "2_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "only null is"),
    "words": ("native", "2_MultiVectorMask/config.json", {"skiplist_words": "."}, "must be a list of texts"),
    "cosine of tokens": (
        *("native", "config_sentence_transformers.json", {"similarity_fn_name": "cosine"}),
        "choose maxsim or meanmaxsim",
    ),
    "other expansion": (
        "native",
        "sentence_bert_config.json",
        {"query_expansion": {"strategy": "x"}},
        "fixed or",
    ),
    "endless expansion": (
        *("native", "sentence_bert_config.json", {"query_expansion": {"strategy": "min"}}),
        "it needs a length",
    ),
    "length": ("native", "sentence_bert_config.json", {"document_length": 2.5}, "whole number of 1 at least"),
    "layer on a sentence": (
        *("native", "1_Dense/config.json", {"module_input_name": "sentence_embedding"}),
        "only token_embeddings is supported",
    ),
    "distance of tokens": ("stanford", "artifact.metadata", {"similarity": "l2"}, "only cosine is supported"),
    "prefix": ("pylate", "config_sentence_transformers.json", {"query_prefix": 3}, "of text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_named(case: str, layouts: Path) -> None:
    name, file, change, complaint = REFUSED[case]
    path = layouts / name / file
    old = path.read_text()
    path.write_text(json.dumps({**json.loads(old), **change} if isinstance(change, dict) else change))
    try:
        with pytest.raises(ch.CheckpointError, match=complaint) as refused:
            ch.load(layouts / name)
        assert "\n" not in str(refused.value)
    finally:
        path.write_text(old)


def test_what_fits_no_other_task_says_so(layouts: Path, tmp_path: Path) -> None:
    """A token that is missing, training, a graph, and a model that is no masked language model."""
    m = ch.load(layouts / "stanford")
    shutil.copytree(layouts / "stanford", tmp_path / "marked")
    metadata = json.loads((tmp_path / "marked" / "artifact.metadata").read_text())
    (tmp_path / "marked" / "artifact.metadata").write_text(json.dumps({**metadata, "query_token_id": "[X]"}))
    with pytest.raises(ch.CheckpointError, match=r"no token '\[X\]', which marks a query"):
        ch.load(tmp_path / "marked").embed(["the cat"], prompt="query")
    with pytest.raises(ch.InputError, match=r"'title' is not one of this model's: it has query, document$"):
        m.embed(["the cat"], prompt="title")
    weights = load_file(tmp_path / "marked" / "model.safetensors")
    save_file(
        {name: x for name, x in weights.items() if name != "linear.weight"},
        tmp_path / "marked" / "model.safetensors",
    )
    with pytest.raises(ch.CheckpointError, match=r"has no tensor linear.weight: fetch it again"):
        ch.load(tmp_path / "marked")
    complaint = r"a vector for each token \(ColBERT\) of a text, and the task embed is of one vector"
    with pytest.raises(ch.InputError, match=complaint):
        TASKS["embed"].ready(m, ch.Recipe(), None)
    with pytest.raises(ch.ClearheadError, match=r"from a copy of the directory without modules.json"):
        ch.export(m, tmp_path / "m.onnx")
    assert ch.inside.similarity(m, "the cat", "the cat").cosine == pytest.approx(1, abs=1e-6)
    splade = ch.load(layouts / "splade")
    assert ch.inside.similarity(splade, "the cat", "the cat").cosine == pytest.approx(1, abs=1e-6)
    assert ch.inside.similarity(splade, "the cat", "not on a mat").cosine < 0.99
