"""Files beside the weights: ids, pixels and templates equal those of the reference's own loader."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

import clearhead as ch
from clearhead.hub.preprocessor import to_pixels
from clearhead.hub.tokenizer import encode, load_tokenizer
from tests.hub.corpus import BLOCKS, HARD, WORDS

transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.ledger("A3")

TRIALS = 20
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
LINES = [text for text in HARD if text] + [" ".join(WORDS)] * 20


def wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=BERT, show_progress=False)
    made.train_from_iterator([line + " " + line.upper() for line in LINES], trainer)
    return made


def byte_pairs() -> Tokenizer:
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(LINES, vocab_size=500, special_tokens=FAIRSEQ, show_progress=False)
    return Tokenizer.from_str(made.to_str())


def unigram(first: list[str]) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=first, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    return made


def sentence_pairs(first: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*first, *bytes_], show_progress=False)
    made.train_from_iterator(LINES, trainer)
    return made


# What each class reads, and model types and names by which it is found.
KINDS: dict[str, tuple[Any, list[tuple[str, str | None]]]] = {
    "Bert": (
        wordpiece(),
        [("bert", None), ("distilbert", "DistilBertTokenizer"), ("gpt2", "BertTokenizerFast")],
    ),
    "bytes": (
        byte_pairs(),
        [
            *[("roberta", None), ("longformer", None), ("gpt2", None)],
            *[("bart", "BartTokenizerFast"), ("phi", "GPT2Tokenizer")],
            *[("qwen3", "Qwen2Tokenizer"), ("qwen2", "GPT2Tokenizer"), ("gpt_neox", "GPTNeoXTokenizerFast")],
            *[("opt", None), ("gptj", "GPT2Tokenizer"), ("gpt_neo", None), ("starcoder2", None)],
            *[("olmoe", None), ("bloom", "PreTrainedTokenizerFast"), ("qwen3_moe", "Qwen2Tokenizer")],
            *[("llama", "LlamaTokenizer"), ("mistral", "LlamaTokenizerFast"), ("olmo2", "GPT2Tokenizer")],
        ],
    ),
    "T5": (unigram(["<pad>", "</s>", "<unk>"]), [("t5", None), ("mt5", "T5Tokenizer")]),
    "XLM-RoBERTa": (
        unigram(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]),
        [("bert", "XLMRobertaTokenizerFast"), ("roberta", "XLMRobertaTokenizer")],
    ),
    "Albert": (unigram(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]), [("albert", None)]),
    "BigBird": (
        unigram(["<pad>", "</s>", "<s>", "[CLS]", "[SEP]", "[MASK]", "<unk>"]),
        [("big_bird", None), ("bert", "BigBirdTokenizer")],
    ),
    "Llama": (
        sentence_pairs(["<unk>", "<s>", "</s>"]),
        [("llama", "LlamaTokenizerFast"), ("llama", None), ("mistral", None), ("granite", "LlamaTokenizer")],
    ),
    "Gemma": (sentence_pairs(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]), [("gemma2", None)]),
    "as it stands": (byte_pairs(), [("gpt2", "PreTrainedTokenizerFast"), ("bert", "TokenizersBackend")]),
}
NEW = ["<tool>", "<|im_end|>", "king ", "Lord", "É"]
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
SPECIAL = [*BERT, *FAIRSEQ, *NEW, "<|pad|>", "<image>", "<extra_id_3>", "<bos>", "ÉCOLE", "中文", "\u0130"]


def random_settings(rng: random.Random) -> dict[str, Any]:
    """What tokenizer_config.json may say."""

    def token() -> dict[str, Any]:
        flags = {name: rng.random() < 0.5 for name in FLAGS if rng.random() < 0.4}
        return {"content": rng.choice(NEW), **flags}

    def some() -> list[str]:
        return rng.sample(NEW, rng.randint(0, 3))

    def flag() -> bool:
        return rng.random() < 0.5

    possible: dict[str, Any] = {
        **dict(do_lower_case=flag, strip_accents=flag, tokenize_chinese_chars=flag, keep_accents=flag),
        **{"add_prefix_space": flag, "add_bos_token": flag, "add_eos_token": flag, "legacy": flag},
        **{"split_special_tokens": flag, "additional_special_tokens": some},
        "extra_special_tokens": lambda: rng.choice([some(), {"tool_token": "<tool>", "end_token": "Lord"}]),
        "image_token": lambda: "<image>",
        "pad_token": lambda: rng.choice(["<|pad|>", "<pad>", "[PAD]"]),
        "mask_token": lambda: rng.choice(["<mask>", "[MASK]", "Lord"]),
        "added_tokens_decoder": lambda: {str(800 + i): token() for i in range(rng.randint(0, 3))},
    }
    return {name: make() for name, make in possible.items() if rng.random() < 0.3}


def random_text(rng: random.Random) -> str:
    low, high = rng.choice(BLOCKS)
    strange = "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(0, 6)))
    parts = [
        rng.choice([rng.choice(WORDS), rng.choice(HARD), strange, *rng.choices(SPECIAL, k=3)])
        for _ in range(8)
    ]
    return rng.choice(["", " ", "  "]).join(parts)


def write_random(folder: Path, rng: random.Random, kind: str) -> None:
    """Write a tokenizer.json of this kind, and what may lie beside it."""
    made, places = KINDS[kind]
    model_type, named = rng.choice(places)
    stated = random_settings(rng) | ({} if named is None else {"tokenizer_class": named})
    file = Tokenizer.from_str(made.to_str())
    if rng.random() < 0.3:
        file.normalizer = normalizers.Lowercase()
    if rng.random() < 0.3:
        file.add_tokens([rng.choice(NEW)])
    if rng.random() < 0.5:
        token = next(text for text in ("[CLS]", "</s>", "<eos>") if file.token_to_id(text) is not None)
        pair = [(token, file.token_to_id(token))]
        file.post_processor = TemplateProcessing(f"{token} $A", f"{token} $A $B", pair)
    folder.mkdir()
    file.save(str(folder / "tokenizer.json"))
    written = {"config.json": {"model_type": model_type}, "tokenizer_config.json": stated}
    if rng.random() < 0.3:
        written["special_tokens_map.json"] = {
            **{"pad_token": "<pad>", "bos_token": {"content": "<s>", "lstrip": True}},
            "additional_special_tokens": ["<tool>", "</s>"],
        }
    if rng.random() < 0.3:
        written["added_tokens.json"] = {"Lord": 901, "<|im_end|>": 900}
    for name, value in written.items():
        (folder / name).write_text(json.dumps(value))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_beside_tokenizer_json_equal_the_reference(kind: str, tmp_path: Path) -> None:
    rng = random.Random(kind)
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        write_random(folder, rng, kind)
        reference = transformers.AutoTokenizer.from_pretrained(folder)
        texts = [random_text(rng) for _ in range(12)] + ["".join(NEW), "É " + " ".join(NEW)]
        wanted = [reference(text)["input_ids"] for text in texts]
        files = {path.name: path.read_text() for path in folder.iterdir() if path.name != "tokenizer.json"}
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        assert tokenizer.get_vocab() == reference.get_vocab(), files
        for text, ours, theirs in zip(texts, encode(tokenizer, texts), wanted):
            assert ours == theirs, (text, files)


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OTHER = "{{ messages[0].content }} é"


@pytest.mark.parametrize("form", ["file", "files", "text", "list"])
def test_chat_templates_outlive_saving(form: str, tmp_path: Path) -> None:
    config = ch.ModelConfig(vocab_size=500, d_model=8, n_layers=1, n_heads=2, max_positions=16)
    ch.Model(ch.Transformer(config.replace(activation="gelu_tanh")), KINDS["bytes"][0]).save(tmp_path / "m")
    if form in ("file", "files"):
        (tmp_path / "m" / "chat_template.jinja").write_text(TEMPLATE)
    if form == "files":
        (tmp_path / "m" / "additional_chat_templates").mkdir()
        (tmp_path / "m" / "additional_chat_templates" / "rag.jinja").write_text(OTHER)
    if form in ("text", "list"):
        path = tmp_path / "m" / "tokenizer_config.json"
        listed = [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": OTHER}]
        stated = TEMPLATE if form == "text" else listed
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": stated}))
    before = transformers.AutoTokenizer.from_pretrained(tmp_path / "m").chat_template
    assert before == (TEMPLATE if form in ("file", "text") else {"default": TEMPLATE, "rag": OTHER})
    ch.load(tmp_path / "m").save(tmp_path / "once")
    ch.load(tmp_path / "once").save(tmp_path / "twice")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "once").chat_template == before
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "twice").chat_template == before


def test_what_an_unknown_class_does_is_refused(tmp_path: Path) -> None:
    """We take tokenizer.json as it stands for a class that we do not know, unless its settings disagree."""
    KINDS["Bert"][0].save(str(tmp_path / "tokenizer.json"))
    for setting, agrees in (
        ("do_lower_case", True),
        ("strip_accents", True),
        ("tokenize_chinese_chars", True),
    ):
        for value in (True, False):
            stated = {"tokenizer_class": "LxmertTokenizer", setting: value}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
            if value == agrees:
                assert load_tokenizer(tmp_path) is not None
            else:
                with pytest.raises(ch.CheckpointError, match=setting):
                    load_tokenizer(tmp_path)


# Images -----------------------------------------------------------------------------------------------------


def random_preprocessor(rng: random.Random, size: int) -> dict[str, Any]:
    """What preprocessor_config.json may say of a model that reads squares."""
    possible: dict[str, Any] = {
        "size": rng.choice([{"height": size, "width": size}, size]),
        "resample": rng.randrange(6),
        **{name: rng.random() < 0.5 for name in ("do_rescale", "do_normalize")},
        "rescale_factor": rng.choice([1 / 255, 1 / 127.5, 0.01]),
        **{name: [rng.uniform(0.2, 1.0) for _ in range(3)] for name in ("image_mean", "image_std")},
        "image_processor_type": rng.choice(["ViTImageProcessor", "ViTImageProcessorFast"]),
        "feature_extractor_type": "ViTFeatureExtractor",
        "do_center_crop": False,
    }
    stated = {name: value for name, value in possible.items() if rng.random() < 0.5}
    return {"image_processor_type": "ViTImageProcessor", **stated}


def test_pixels_equal_the_reference(tmp_path: Path) -> None:
    rng, refused = random.Random(0), 0
    numbers = np.random.default_rng(0)
    for trial in range(60):
        size = rng.choice([32, 224])
        config = vit(size)
        stated = random_preprocessor(rng, size)
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": size}))
        height, width = rng.choice([(rng.randint(5, 300), rng.randint(5, 300)), (size, size)])
        image = numbers.integers(0, 256, (height, width, 3), dtype=np.uint8)
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
        theirs = processor(image, return_tensors="pt", input_data_format="channels_last")["pixel_values"][0]
        if theirs.shape[1:] != (size, size):  # the default size, which this model does not read
            refused += 1
            with pytest.raises(ch.CheckpointError, match="makes images of size"):
                to_pixels(image, config, stated)
            continue
        ours = to_pixels(image, config, stated)
        assert torch.allclose(ours, theirs.float(), atol=1e-5, rtol=1e-5), (trial, stated)
    assert refused < 30


def vit(size: int) -> ch.ModelConfig:
    return ch.ModelConfig(
        **{"family": "encoder", "input": "patches", "image_size": (size, size), "patch_size": 16},
        **{"head": "classifier", "n_classes": 2, "d_model": 8, "n_layers": 1, "n_heads": 2},
    )


def test_an_image_processor_of_another_class_is_refused() -> None:
    image = np.zeros((40, 40, 3), np.uint8)
    for stated in ({"image_processor_type": "BeitImageProcessor"}, {"do_center_crop": True}, {"resample": 9}):
        with pytest.raises(ch.CheckpointError, match=r"preprocessor_config\.json"):
            to_pixels(image, vit(32), {"size": 32, **stated})
