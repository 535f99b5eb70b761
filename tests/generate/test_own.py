"""The model's own rules: generation_config.json is obeyed as transformers obeys it, or refused by name."""

from __future__ import annotations

import json
import os
import random

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.app.cli import main
from clearhead.run.generate.own_rules import UNKNOWN
from tests.parity import harness, seq2seq

VOCABULARY, EOS, START = 23, 2, 3
COUNT = int(os.environ.get("CLEARHEAD_OWN_CONFIGS", "4"))  # of each model; 40 take about a minute in all
ENDS = {"eos_token_id": EOS, "pad_token_id": 1, "bos_token_id": 0}
SIZE = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
BOTH = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64, **ENDS},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": VOCABULARY},
    **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": START},
}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
MODELS = {
    "gpt2": (
        "GPT2LMHeadModel",
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64, **ENDS
        ),
    ),
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig(**SIZE, **HEADS, **ENDS)),
    "qwen2": ("Qwen2ForCausalLM", transformers.Qwen2Config(**SIZE, **HEADS, **ENDS)),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        transformers.GPTNeoXConfig(**SIZE, num_attention_heads=2, max_position_embeddings=64, **ENDS),
    ),
    "bart": ("BartForConditionalGeneration", transformers.BartConfig(**BOTH)),
    "mbart": ("MBartForConditionalGeneration", transformers.MBartConfig(**BOTH)),
    "marian": (
        "MarianMTModel",
        transformers.MarianConfig(
            **BOTH, decoder_vocab_size=VOCABULARY, share_encoder_decoder_embeddings=True
        ),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        transformers.T5Config(**T5, decoder_start_token_id=START, **ENDS),
    ),
}


def random_rules(draw: random.Random) -> dict[str, object]:
    """Return a generation_config.json: about half of the rules, with values that matter."""

    def some(most: int) -> list[int]:
        return [draw.randrange(4, VOCABULARY) for _ in range(draw.randint(1, most))]

    rules = {
        "bad_words_ids": [
            *(some(3) for _ in range(draw.randint(1, 4))),
            *([[EOS]] * draw.randint(0, 1)),
            [1],
        ],
        "forced_bos_token_id": draw.choice([0, 5]),
        "forced_eos_token_id": draw.choice([EOS, [EOS]]),
        "suppress_tokens": some(4),
        "begin_suppress_tokens": some(6),
        "min_length": draw.randint(1, 9),
        "min_new_tokens": draw.randint(1, 7),
        "no_repeat_ngram_size": draw.randint(2, 3),
        "encoder_no_repeat_ngram_size": draw.randint(1, 3),
        "repetition_penalty": draw.choice([0.8, 1.3, 2.0]),
        "num_beams": draw.choice([1, 2, 3, 4]),
        "early_stopping": draw.choice([True, False, "never"]),
        "length_penalty": draw.choice([-1.0, 0.0, 0.6, 2.0]),
        "renormalize_logits": True,
    }
    kept = {name: value for name, value in rules.items() if draw.random() < 0.45}
    if {"suppress_tokens", "forced_bos_token_id"} <= kept.keys():
        kept["suppress_tokens"] = [token for token in kept["suppress_tokens"] if token != 5] or [6]
    eos = draw.choice([EOS, [EOS, 7]])
    return kept | {**ENDS, "eos_token_id": eos}


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("name", MODELS)
def test_generation_config_is_obeyed(name, tmp_path):
    kind, config = MODELS[name]
    ends, both = set(), config.is_encoder_decoder
    reference = (seq2seq if both else harness).reference(kind, config, tmp_path / "model", 1)
    for seed in range(COUNT):
        draw = random.Random(f"{name} {seed}")
        rules = random_rules(draw) | ({"decoder_start_token_id": START} if both else {})
        ids = torch.tensor([[draw.randrange(3, VOCABULARY) for _ in range(draw.choice([1, 4, 9]))]])
        new = draw.randint(4, 14)
        reference.generation_config = transformers.GenerationConfig(**rules)
        wanted = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new)[0].tolist()
        wanted = wanted[1 if both else ids.shape[1] :]
        stops = rules["eos_token_id"] if isinstance(rules["eos_token_id"], list) else [EOS]
        cut = next((place for place, token in enumerate(wanted) if token in stops), len(wanted))
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps(rules))
        m = ch.load(tmp_path / "model")
        made = m.generate(ids[0], new)
        assert made.ids == wanted[:cut], (seed, rules, ids, new)
        assert m.generate([ids[0].tolist(), [5, 6, 7]], new)[0].ids == made.ids
        if both:
            own = {} if "num_beams" in rules else {"num_beams": 1}
            assert m.translate(ids[0], new, **own).ids == made.ids
        ends.add(made.stop_reason)
    assert ends == {"eos", "length"} or COUNT < 40


def small(**stated: object) -> ch.Model:
    torch.manual_seed(0)
    config = ch.preset("micro-decoder").replace(vocab_size=VOCABULARY)
    return ch.Model(ch.Transformer(config).eval(), generation=stated)


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_what_is_not_known_is_refused_by_name(name):
    with pytest.raises(ch.ClearheadError, match=rf"generation_config.json: {name} .* not known"):
        small(**{name: 1.5}).generate([1, 2], 3)
    assert small(**{name: UNKNOWN[name]}).generate([1, 2], 3).ids


def test_what_the_caller_says_goes_before_the_file():
    m = small(num_beams=3, num_beam_groups=3, diversity_penalty=0.5, repetition_penalty=1.7)
    plain = small()
    assert m.generate([1, 2, 3], 8).score is not None
    alone = m.generate([1, 2, 3], 8, num_beams=1, repetition_penalty=1.0)
    assert alone.ids == plain.generate([1, 2, 3], 8).ids and alone.score is None
    assert m.generate([1, 2, 3], 8, logprobs=True).logprobs  # beams give way to what they cannot do
    drawn = m.generate([1, 2, 3], 8, temperature=1.0, repetition_penalty=1.0).ids
    assert drawn == plain.generate([1, 2, 3], 8, temperature=1.0).ids


def test_a_bad_value_of_the_file_is_said_in_one_line():
    for name, value in (
        ("num_beams", "four"),
        ("min_length", -1),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", 3),
    ):
        with pytest.raises(ch.ClearheadError, match=r"^generation_config.json: "):
            small(**{name: value}).generate([1], 2)


def test_without_the_file_config_json_has_the_rules(tmp_path):
    """As in directories older than the file."""
    kind, config = MODELS["marian"]
    reference = seq2seq.reference(kind, config, tmp_path / "model", 1)
    (tmp_path / "model" / "generation_config.json").unlink()
    path = tmp_path / "model" / "config.json"
    rules = dict(bad_words_ids=[[1], [15]], forced_eos_token_id=EOS, num_beams=3, no_repeat_ngram_size=2)
    path.write_text(json.dumps(json.loads(path.read_text()) | rules))
    reference.generation_config = transformers.GenerationConfig(**rules, **ENDS, decoder_start_token_id=START)
    wanted = reference.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9)[0].tolist()[1:]
    m = ch.load(tmp_path / "model")
    for made in (m.generate([5, 6, 7], 9), m.translate([5, 6, 7], 9)):
        assert made.ids == wanted[: wanted.index(EOS)]
    m.save(tmp_path / "saved")
    assert ch.load(tmp_path / "saved").generate([5, 6, 7], 9).ids == made.ids


def test_the_command_obeys_too(tmp_path, capsys, byte_tokenizer):
    torch.manual_seed(0)
    config = ch.preset("micro-decoder").replace(vocab_size=256)
    m = ch.Model(ch.Transformer(config).eval(), byte_tokenizer)
    first = m.generate("a", 4).ids[0]
    m.generation = {"bad_words_ids": [[first]], "repetition_penalty": 1.4, "num_beams": 2}
    m.save(tmp_path)

    def ids(*more: str) -> list[int]:
        main(["generate", str(tmp_path), "a", "--max-new-tokens", "4", "--json", *more])
        return json.loads(capsys.readouterr().out)["ids"]

    assert ids() == m.generate("a", 4).ids
    plain = ["--beams", "1", "--repetition-penalty", "1"]
    assert ids(*plain) == m.generate("a", 4, num_beams=1, repetition_penalty=1.0).ids
    m.generation = {"sequence_bias": [[[1], 2.0]]}
    m.save(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        ids()
    assert "sequence_bias" in capsys.readouterr().err


def test_the_command_writes_past_the_positions_and_says_so_once(tmp_path, capsys, byte_tokenizer):
    torch.manual_seed(0)
    config = ch.preset("micro-decoder").replace(vocab_size=256, max_positions=16, positions="learned")
    m = ch.Model(ch.Transformer(config).eval(), byte_tokenizer)
    m.save(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("abc\ndef\n" * 3)
    options = ["--file", str(tmp_path / "prompts.txt"), "--batch-size", "2", "--json"]
    main(["generate", str(tmp_path / "model"), *options, "--overflow", "slide"])
    out, err = capsys.readouterr()
    assert [len(json.loads(line)["ids"]) for line in out.splitlines()] == [50] * 6
    assert err.splitlines() == [
        "warning: texts passed the model's 16 positions: past them, it read the last 16 tokens"
    ]
    with pytest.raises(SystemExit, match="1"):
        main(["generate", str(tmp_path / "model"), *options])
    assert "or choose overflow slide" in capsys.readouterr().out  # of each row
