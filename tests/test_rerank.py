"""Reranking: the order and the scores are those of the reference on the same pairs."""

from __future__ import annotations

import pytest
import torch
import transformers

import clearhead as ch

QUERY = "who lives in berlin ?"
TEXTS = ["it rains .", "anna lives in berlin .", "berlin rains", "who ?"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(" ".join([QUERY, *TEXTS]).split()))]


@pytest.fixture
def folder(tmp_path, request):
    """A cross-encoder or, without classes, an embedder, with a tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    labels = request.param
    config = transformers.BertConfig(vocab_size=len(WORDS), num_labels=labels or 2, **sizes)
    kind = transformers.BertForSequenceClassification if labels else transformers.BertModel
    model = kind(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    model.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return tmp_path


@pytest.mark.parametrize("folder", [1], indirect=True)
def test_a_cross_encoder_ranks_as_the_reference_scores(folder, clearhead):
    tokenizer = transformers.BertTokenizer.from_pretrained(folder)
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    given = tokenizer([QUERY] * len(TEXTS), TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = model(**given).logits[:, 0].sigmoid()
    order = wanted.argsort(descending=True).tolist()
    found = ch.load(folder).rerank(QUERY, TEXTS, batch_size=3)
    assert [one.index for one in found] == order
    assert [one.text for one in found] == [TEXTS[n] for n in order]
    assert max(abs(one.score - float(wanted[one.index])) for one in found) <= 1e-6
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    results = clearhead("rerank", folder, QUERY, f"--file {folder}/texts.txt --top 2 --json").json["results"]
    assert [result["index"] for result in results] == order[:2]


@pytest.mark.parametrize("folder", [0], indirect=True)
def test_an_embedder_ranks_by_the_angle_of_vectors(folder):
    m = ch.load(folder)
    query, *others = m.embed([QUERY, *TEXTS])
    wanted = torch.nn.functional.cosine_similarity(torch.stack(others), query[None])
    found = m.rerank(QUERY, TEXTS, top=3)
    assert [one.index for one in found] == wanted.argsort(descending=True).tolist()[:3]
    assert max(abs(one.score - float(wanted[one.index])) for one in found) <= 1e-6


@pytest.mark.parametrize("folder", [3], indirect=True)
def test_what_cannot_rank_says_so(folder):
    m = ch.load(folder)
    with pytest.raises(ch.InputError, match="tells 3 classes apart"):
        m.rerank(QUERY, TEXTS)
    with pytest.raises(ch.InputError, match="give a list of texts"):
        m.rerank(QUERY, TEXTS[0])
