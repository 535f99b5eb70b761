"""Change fields of the files beside a model's weights; ask the reference and clearhead what comes out now.

    python -m tests.parity.settings_mutations [--only generation tokenizer sentences] [--share 0.1]
        [--pairs 100] [--out OUT.json]

- generation: generation_config.json, or, without one, config.json; transformers' generate gives the ids
- tokenizer: tokenizer_config.json, special_tokens_map.json and added_tokens.json; AutoTokenizer gives the ids
  and the vocabulary, of whole texts and of texts that are cut
- sentences: modules.json, the config of its Pooling, sentence_bert_config.json and
  config_sentence_transformers.json; sentence-transformers gives the embeddings

The verdicts are those of `mutations`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.hub.tokenizer import load_tokenizer, read_settings
from clearhead.run.bundle import Bundle
from tests.generate.test_own import ENDS, MODELS, START
from tests.hub.test_beside import KINDS, byte_pairs, sentence_pairs, unigram
from tests.parity import harness, seq2seq
from tests.parity.mutations import ABSENT, first_line, report, values_for

Change = tuple[str, str, Any]  # a file, a field of it (or its place in a list), the value
Judge = Callable[[Path], tuple[str, str]]


def judged(
    theirs: Callable[[], Any], ours: Callable[[], Any], gap: Callable[[Any, Any], str]
) -> tuple[str, str]:
    """Return the verdict on what both sides compute, and why; `gap` says how two results differ."""
    try:
        wanted = theirs()
    except BaseException as error:  # whatever the reference says, a panic of its tokenizer too
        return "reference", first_line(error)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = ours()
    except ClearheadError as error:
        return "refused", str(error)
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    difference = gap(found, wanted)
    spoken = [str(one.message) for one in seen if "transformers" in str(one.message)]
    if difference and spoken:
        return "refused", spoken[0]  # not refused, but said
    return ("silent", difference) if difference else ("equal", "")


# Generation -------------------------------------------------------------------------------------------------

NEW = 10
GENERATION: dict[str, list[Any]] = {
    **{"eos_token_id": [7, [2, 7], [], -1, 99, "7"], "bos_token_id": [5], "pad_token_id": [2]},
    **{"decoder_start_token_id": [5, [5]], "forced_bos_token_id": [5], "forced_eos_token_id": [7, [7]]},
    **{"repetition_penalty": [1.7, 0.5, 1], "no_repeat_ngram_size": [1, 2], "min_length": [3, 30]},
    **{"encoder_no_repeat_ngram_size": [1], "encoder_repetition_penalty": [2.0, 1.0]},
    **{"bad_words_ids": [[[5], [6]], [[5, 6], [2]]], "min_new_tokens": [4], "max_time": [60.0]},
    **{"suppress_tokens": [[5, 6, 7, 8], [99]], "begin_suppress_tokens": [[5, 6, 7, 8], []]},
    **{"num_beams": [1, 2, 3], "length_penalty": [0.0, 3.0], "early_stopping": [True, "never"]},
    **{"num_beam_groups": [2], "diversity_penalty": [0.5], "constraints": [[]], "force_words_ids": [[[5]]]},
    **{"max_length": [5, 40], "max_new_tokens": [3], "num_return_sequences": [2], "do_sample": [True]},
    **{"temperature": [0.5], "top_k": [3], "top_p": [0.3], "min_p": [0.1], "typical_p": [0.5]},
    **{"renormalize_logits": [True], "remove_invalid_values": [True], "guidance_scale": [1.5, 1]},
    **dict(sequence_bias=[[[[5], 9.0]]], exponential_decay_length_penalty=[[2, 1.5]], dola_layers=["low"]),
    **{"penalty_alpha": [0.6, 0.0], "watermarking_config": [{"bias": 5.0}], "token_healing": [True]},
    **{"use_cache": [False], "cache_implementation": ["static", "hybrid"], "prompt_lookup_num_tokens": [2]},
    **{"output_scores": [True], "return_dict_in_generate": [True], "low_memory": [True], "top_h": [0.5]},
    **{"epsilon_cutoff": [0.1], "eta_cutoff": [0.1], "stop_strings": ["x"], "is_assistant": [True]},
    **{"assistant_confidence_threshold": [0.9], "some_field": [1], "prefill_chunk_size": [2]},
}
PROMPT = [[4, 9, 13, 6, 4, 11]]


def generation_subject(name: str, folder: Path) -> tuple[list[tuple[Change, ...]], Judge]:
    """Write a random model with a generation_config.json; return the mutations to try, and the judge."""
    kind, config = MODELS[name]
    both = config.is_encoder_decoder
    model = (seq2seq if both else harness).reference(kind, config, folder, 1)
    base = dict(ENDS, transformers_version="5.0.0") | ({"decoder_start_token_id": START} if both else {})
    (folder / "generation_config.json").write_text(json.dumps(base))
    names = dict.fromkeys([*base, *GENERATION, *transformers.GenerationConfig().to_dict()])
    names = [one for one in names if not one.startswith("_")]
    one_by_one = [
        (key, value)
        for key in names
        for value in [ABSENT, None, *GENERATION.get(key, values_for(key, base.get(key))[:3])]
        if key in base or value is not ABSENT
    ]
    found: list[tuple[Change, ...]] = [(("generation_config.json", *one),) for one in one_by_one]
    away = ("generation_config.json", "", ABSENT)
    found += [(away, ("config.json", *one)) for one in one_by_one if one[0] in GENERATION]
    ids = torch.tensor(PROMPT)

    def theirs() -> list[int]:
        reference = type(model).from_pretrained(folder, dtype=torch.float32).eval()
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
        made = reference.generate(ids, num_return_sequences=1, **options)
        made = (made if isinstance(made, torch.Tensor) else made.sequences)[0].tolist()
        made = made[1 if both else ids.shape[1] :]
        stops = reference.generation_config.eos_token_id
        stops = stops if isinstance(stops, list) else [stops]
        return made[: next((place for place, token in enumerate(made) if token in stops), len(made))]

    def judge(_: Path) -> tuple[str, str]:
        return judged(theirs, lambda: ch.load(folder).generate(PROMPT[0], NEW).ids, differ)

    return found, judge


def differ(found: Any, wanted: Any) -> str:
    """Say how two results of the same kind differ, in a few words; nothing where they do not."""
    if isinstance(wanted, torch.Tensor):
        if found.shape != wanted.shape:
            return f"shape {tuple(found.shape)} for {tuple(wanted.shape)}"
        both = found.isnan() & wanted.isnan()
        off = float((found - wanted).masked_fill(both, 0).abs().max()) if wanted.numel() else 0.0
        return "" if off <= 1e-5 else f"off by {off:.1e}"
    if isinstance(wanted, dict):
        for key in wanted:
            if found[key] != wanted[key]:
                if isinstance(wanted[key], dict):
                    return f"{key}: {sorted(found[key].items() ^ wanted[key].items())}"[:200]
                return f"{key}: {str(found[key])[:160]} for {str(wanted[key])[:160]}"
        return ""
    return "" if found == wanted else f"{found} for {wanted}"


# Tokenizers -------------------------------------------------------------------------------------------------

CAMEMBERT = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>", "<mask>"]
DEBERTA = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
# The vocabulary, the model_type of config.json, the class that tokenizer_config.json names, and the files.
TOKENIZERS: dict[str, tuple[Any, str, str | None, str]] = {
    "BERT": (KINDS["Bert"][0], "bert", "BertTokenizer", "json"),
    "BERT vocab.txt": (KINDS["Bert"][0], "bert", None, "vocabulary"),
    "DistilBERT": (KINDS["Bert"][0], "distilbert", "DistilBertTokenizer", "json"),
    "MPNet": (KINDS["Bert"][0], "mpnet", "MPNetTokenizer", "vocabulary"),
    "MPNet json": (KINDS["Bert"][0], "mpnet", None, "json"),
    "GPT-2": (byte_pairs(), "gpt2", None, "json"),
    "GPT-2 vocab.json": (byte_pairs(), "gpt2", "GPT2Tokenizer", "vocabulary"),
    "OPT": (byte_pairs(), "opt", "GPT2Tokenizer", "json"),
    "RoBERTa": (byte_pairs(), "roberta", None, "json"),
    "RoBERTa vocab.json": (byte_pairs(), "roberta", "RobertaTokenizer", "vocabulary"),
    "BART": (byte_pairs(), "bart", "BartTokenizer", "json"),
    "Qwen2": (byte_pairs(), "qwen2", "Qwen2Tokenizer", "json"),
    "Qwen2 vocab.json": (byte_pairs(), "qwen3", "Qwen2Tokenizer", "vocabulary"),
    "GPT-NeoX": (byte_pairs(), "gpt_neox", "GPTNeoXTokenizer", "json"),
    "GPT-NeoX vocab.json": (byte_pairs(), "gpt_neox", None, "vocabulary"),
    "T5": (unigram(["<pad>", "</s>", "<unk>"]), "t5", "T5Tokenizer", "json"),
    "XLM-RoBERTa": (
        unigram(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]),
        "xlm-roberta",
        "XLMRobertaTokenizer",
        "json",
    ),
    "CamemBERT": (unigram(CAMEMBERT), "camembert", "CamembertTokenizer", "json"),
    "ALBERT": (KINDS["Albert"][0], "albert", None, "json"),
    "BigBird": (KINDS["BigBird"][0], "big_bird", None, "json"),
    "DeBERTa": (unigram(["<unk>", *DEBERTA]), "deberta-v2", "DebertaV2Tokenizer", "json"),
    "Llama": (KINDS["Llama"][0], "llama", "LlamaTokenizer", "json"),
    "CodeLlama": (KINDS["Llama"][0], "llama", "CodeLlamaTokenizer", "json"),
    "Gemma": (sentence_pairs(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]), "gemma", None, "json"),
    "as it stands": (byte_pairs(), "gpt2", "PreTrainedTokenizerFast", "json"),
}
TEXTS = [
    *("", " ", "the king of England", "  two  spaces at  both ends  ", "The KING's cafe\u0301 É 中文 12345"),
    *(
        "<s>a</s><pad> <mask> [MASK] [CLS] b [SEP] [PAD]",
        "good<tool> king <tool> <|im_end|>lord<|endoftext|> x",
    ),
    *(
        "def f(x):\n    return x\n",
        "▁ ▁<PRE> a ▁<SUF>b ## ##ing\u200b",
        "Lordking Lord <extra_id_0>",
    ),
]
TOKEN = [
    None,
    "",
    "<tool>",
    "<s>",
    {"content": "<tool>", "lstrip": True},
    {"content": "king", "normalized": True},
]
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
TOKENS: dict[str, list[Any]] = {
    **{f"{role}_token": TOKEN for role in ROLES},
    **{name: [True, False, None] for name in ("do_lower_case", "strip_accents", "tokenize_chinese_chars")},
    **{name: [True, False, None] for name in ("keep_accents", "add_prefix_space", "add_bos_token", "legacy")},
    **{name: [True, False, None] for name in ("add_eos_token", "split_special_tokens", "trim_offsets")},
    **{name: [True, False, None] for name in ("split_by_punct", "clean_up_tokenization_spaces", "use_fast")},
    **dict(
        model_max_length=[4, 6, None, 0, -1, "6", 1e30], truncation_side=["left", "right", None, "middle"]
    ),
    **{"padding_side": ["left"], "truncation": [True], "max_length": [5], "stride": [2], "extra_ids": [3, 0]},
    "extra_special_tokens": [["<tool>"], [], None, {"tool_token": "<tool>"}, {"tool_token": None}],
    "additional_special_tokens": [["<tool>", "Lord"], [], None, ["<s>"]],
    "added_tokens_decoder": [
        *({}, None, {"900": {"content": "<tool>"}}, {"3": {"content": "<tool>", "special": True}}),
        {"900": {"content": "Lord", "special": True}, "901": {"content": "<|im_end|>", "lstrip": True}},
    ],
    **{"image_token": ["<image>", None], "prefix_token": [None, "<tool>"], "fill_token": [None]},
    "tokenizer_class": [None, "PreTrainedTokenizerFast", "NoSuchTokenizer"],
    **{"model_input_names": [["input_ids"]], "some_field": [1], "name_or_path": ["x"], "vocab_size": [3]},
}
MAP: dict[str, list[Any]] = {
    **{f"{role}_token": ["<tool>", None, {"content": "<tool>", "rstrip": True}] for role in ROLES},
    "additional_special_tokens": [["<tool>"], None],
    "some_token": ["<tool>"],
}
ADDED = {"<tool>": [900, 3, None], "Lord": [901]}


def tokenizer_subject(name: str, folder: Path) -> tuple[list[tuple[Change, ...]], Judge]:
    """Write a tokenizer; return the mutations to try, and the judge."""
    made, model_type, named, form = TOKENIZERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    if form == "json":
        made.save(str(folder / "tokenizer.json"))
    else:
        made.model.save(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    stated = {} if named is None else {"tokenizer_class": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    files = {"tokenizer_config.json": TOKENS, "special_tokens_map.json": MAP, "added_tokens.json": ADDED}
    found = [((file, key, value),) for file, keys in files.items() for key in keys for value in keys[key]]
    config = ch.ModelConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=2, max_positions=512)
    model = ch.Transformer(config)

    def theirs() -> dict[str, Any]:
        reference = transformers.AutoTokenizer.from_pretrained(folder)
        cut = reference(TEXTS, truncation=True, max_length=7)["input_ids"]
        pairs = [
            reference(a, b, truncation=True, max_length=9)["input_ids"]
            for a, b in itertools.pairwise(TEXTS[2:])
        ]
        whole = [reference(text, truncation=False)["input_ids"] for text in TEXTS]
        return {"vocabulary": reference.get_vocab(), "ids": whole, "cut": cut, "pairs": pairs}

    def ours() -> dict[str, Any]:
        m = Bundle(model, load_tokenizer(folder), settings=read_settings(folder))
        pairs = [m.framed(a, b, max_length=9).ids for a, b in itertools.pairwise(TEXTS[2:])]
        vocabulary = m.text_tokenizer.get_vocab()
        return {"vocabulary": vocabulary, "ids": m.encode(TEXTS), "cut": m.encode(TEXTS, 7), "pairs": pairs}

    return found, lambda _: judged(theirs, ours, differ)


# Sentences --------------------------------------------------------------------------------------------------

WORDS = ["the", "cat", "sat", "on", "mat", "a", "dog", "query", "passage", ":", "not"]
SENTENCES = ["the cat", "  a dog sat on the mat not on a cat ", "The Dog", "a cat sat on the mat . " * 4]
LISTED = ["Transformer", "Pooling", "Normalize"]
POOLINGS = (
    "cls_token",
    "max_tokens",
    "mean_tokens",
    "mean_sqrt_len_tokens",
    "weightedmean_tokens",
    "lasttoken",
)
SENTENCE: dict[str, dict[str, list[Any]]] = {
    "sentence_bert_config.json": {
        "max_seq_length": [ABSENT, None, 4, 6, 20, 40, 0, -1, "6", 6.0],
        "do_lower_case": [True, False, None, 0],
        **dict(transformer_task=["text-generation", "fill-mask"], module_output_name=["sentence_embedding"]),
        **{"query_length": [3], "document_length": [3], "unpad_inputs": [True], "query_expansion": [{}]},
        **{"model_args": [{}, {"dtype": "float16"}], "tokenizer_args": [{}, {"model_max_length": 5}]},
        **{"config_args": [{"num_hidden_layers": 0}], "model_kwargs": [{"dtype": "float16"}, {}]},
        **{"processor_kwargs": [{"model_max_length": 5}], "config_kwargs": [{"hidden_act": "relu"}]},
        **{"processing_kwargs": [{"text": {"max_length": 4}}], "modality_config": [{}], "some_field": [1]},
    },
    "config_sentence_transformers.json": {
        "truncate_dim": [4, 8, 9, 1, None, 0, -2, "4", 4.0],
        "prompts": [
            ABSENT,
            None,
            {},
            {"query": "query : "},
            {"query": None},
            {"query": 3},
            {"document": "a "},
        ],
        "default_prompt_name": [ABSENT, None, "query", "passage", "nobody", ""],
        **{"similarity_fn_name": ["dot", None, "euclidean"], "some_field": [1], "__version__": [{}]},
        **{"model_type": ["SparseEncoder", "CrossEncoder", "SentenceTransformer", None]},
        "requirements": [["numpy>99"], []],
    },
    "1_Pooling/config.json": {
        **{f"pooling_mode_{name}": [True, False, None, ABSENT] for name in POOLINGS},
        "pooling_mode": ["cls", "lasttoken", ["mean", "max"], ["mean"], [], None, "no_such"],
        "word_embedding_dimension": [4, 16, None, ABSENT, "8"],
        **{"embedding_dimension": [4, 8], "include_prompt": [False, True, None, ABSENT], "some_field": [1]},
    },
    "2_Normalize/config.json": {"module_input_name": ["token_embeddings", None], "p": [1], "some_field": [1]},
    "tokenizer_config.json": {
        **dict(model_max_length=[4, 12, None, ABSENT], truncation_side=["left", None], do_lower_case=[False]),
        **{"pad_token": [None, "[UNK]"], "padding_side": ["left"], "model_input_names": [["input_ids"]]},
    },
    "config.json": {"max_position_embeddings": [24], "hidden_act": ["relu"]},
}
MODULES: list[Callable[[list[dict[str, Any]]], Any]] = [
    *(lambda each: each[:2], lambda each: each[:1], lambda each: each[::-1], lambda each: each[1:]),
    *(lambda each: [each[0], each[2], each[1]], lambda each: [*each, each[2]], lambda each: []),
    lambda each: [dict(one, idx=7 - one["idx"]) for one in each],
    lambda each: [dict(one, name="0") for one in each],
    lambda each: [dict(one, type=one["type"].replace("models.", "")) for one in each],
    lambda each: [dict(one, type=f"elsewhere.{one['type']}") for one in each],
    lambda each: [each[0], dict(each[1], path=""), each[2]],
    lambda each: [each[0], dict(each[1], path="no_such"), each[2]],
    lambda each: [dict(one, kwargs=["task"]) for one in each],
    lambda each: [{"type": one["type"], "path": one["path"]} for one in each],
    lambda each: [dict(each[0], path="1_Pooling"), *each[1:]],
]


def sentence_subject(pooling: str, folder: Path) -> tuple[list[tuple[Change, ...]], Judge]:
    """Write a directory of sentence-transformers; return the mutations to try, and the judge."""
    import sentence_transformers

    folder.mkdir(parents=True, exist_ok=True)
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*marks, *WORDS]) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt"), model_max_length=16).save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.BertConfig(vocab_size=len(marks) + len(WORDS), max_position_embeddings=32, **size)
    transformers.BertModel(config).save_pretrained(folder)
    types = [f"sentence_transformers.models.{kind}" for kind in LISTED]
    paths = ["", "1_Pooling", "2_Normalize"]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(zip(paths, types))
    ]
    modes = {f"pooling_mode_{name}": name.startswith(pooling) for name in POOLINGS if name in POOLINGS[:4]}
    prompts = {"query": "query : ", "passage": "passage not : "}
    written = {
        "modules.json": listed,
        "1_Pooling/config.json": {"word_embedding_dimension": 8, **modes},
        "2_Normalize/config.json": {},
        "sentence_bert_config.json": {"max_seq_length": 24, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": prompts, "default_prompt_name": None},
    }
    for name, value in written.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    found: list[tuple[Change, ...]] = [
        ((file, key, value),) for file, keys in SENTENCE.items() for key in keys for value in keys[key]
    ]
    found += [((file, "", ABSENT),) for file in (*written, "tokenizer_config.json") if file != "modules.json"]
    found += [(("modules.json", "", change(copy.deepcopy(listed))),) for change in MODULES]

    def judge(_: Path) -> tuple[str, str]:
        def theirs() -> torch.Tensor:
            library = sentence_transformers.SentenceTransformer(
                str(folder), device="cpu", local_files_only=True
            )
            # One by one: padded on the left, or without a mask, it makes of a text what its batch allows.
            return library.encode(SENTENCES, batch_size=1, convert_to_tensor=True).float()

        return judged(theirs, lambda: ch.load(folder).embed(SENTENCES), differ)

    return found, judge


# All --------------------------------------------------------------------------------------------------------

SUBJECTS: dict[str, tuple[Callable[[str, Path], tuple[list[tuple[Change, ...]], Judge]], tuple[str, ...]]] = {
    "generation": (generation_subject, tuple(MODELS)),
    "tokenizer": (tokenizer_subject, tuple(TOKENIZERS)),
    "sentences": (sentence_subject, ("mean", "cls")),
}


def apply(folder: Path, changes: tuple[Change, ...]) -> None:
    """Write the files with these changes; a change of the field "" replaces, or removes, the whole file."""
    for file, key, value in changes:
        path = folder / file
        if key == "":
            path.unlink(missing_ok=True) if value is ABSENT else path.write_text(json.dumps(value))
            continue
        stated = json.loads(path.read_text()) if path.exists() else {}
        stated = {name: old for name, old in {**stated, key: value}.items() if old is not ABSENT}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(stated))


def run(
    kind: str,
    name: str,
    root: Path,
    share: float = 1.0,
    pairs: int = 0,
    fields: tuple[str, ...] = (),
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Judge a share of the mutations of one subject, all those of some fields, and random pairs."""
    prepare, _ = SUBJECTS[kind]
    folder, kept = root / "model", root / "kept"
    single, judge = prepare(name, folder)
    shutil.copytree(folder, kept)
    draw = random.Random(f"{seed} {kind} {name}")
    chosen = [one for one in single if draw.random() < share or any(change[1] in fields for change in one)]
    both = [(*draw.choice(single), *draw.choice(single)) for _ in range(pairs)]
    for changes in [(), *chosen, *both]:
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        apply(folder, changes)
        verdict, why = judge(folder)
        stated = {f"{file} {key}": "absent" if value is ABSENT else value for file, key, value in changes}
        yield {"subject": f"{kind}: {name}", "changes": stated, "verdict": verdict, "why": why}


def main() -> None:
    """Judge mutations and print those that are silent or raw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=SUBJECTS, help="files of these kinds")
    parser.add_argument("--subjects", nargs="*", help="these subjects of each kind")
    parser.add_argument("--share", type=float, default=1.0, help="of the mutations of one field, judge this")
    parser.add_argument("--pairs", type=int, default=0, help="judge so many pairs of mutations as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the table of verdicts as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    rows = []
    for kind in options.only or SUBJECTS:
        for name in SUBJECTS[kind][1]:
            if options.subjects is None or name in options.subjects:
                with tempfile.TemporaryDirectory() as root:
                    rows += list(run(kind, name, Path(root), options.share, options.pairs, (), options.seed))
    report(rows, options.out)


if __name__ == "__main__":
    main()
