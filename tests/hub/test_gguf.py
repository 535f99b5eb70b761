"""GGUF files: ours opened by llama.cpp with the same tokens, and read back here, for each architecture."""

from __future__ import annotations

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import clearhead as ch

gguf = pytest.importorskip("gguf")

WORDS = ["It's a test of 1234 words, isn't it?\n", "the quick brown fox jumps over the lazy dog "] * 20
BASE = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {**BASE, "intermediate_size": 96, "max_position_embeddings": 128}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GROUPED = {**SIZES, "num_key_value_heads": 2, **ENDS}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": transformers.LlamaConfig(**GROUPED, rope_theta=5e4),
    "llama wide heads, biases": transformers.LlamaConfig(
        **GROUPED, head_dim=24, attention_bias=True, tie_word_embeddings=True
    ),
    "llama 3": transformers.LlamaConfig(
        **GROUPED, rope_scaling={**LLAMA3, "original_max_position_embeddings": 128}
    ),
    "llama linear": transformers.LlamaConfig(**GROUPED, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "mixtral": transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=32),
    "gpt2": transformers.GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=128, **ENDS),
    "gemma": transformers.GemmaConfig(**GROUPED, head_dim=32),
    "gemma2": transformers.Gemma2Config(**GROUPED, head_dim=32, query_pre_attn_scalar=32, sliding_window=8),
    "gemma3": transformers.Gemma3TextConfig(
        **{**GROUPED, "num_hidden_layers": 7}, head_dim=32, query_pre_attn_scalar=32, sliding_window=8
    ),
    "neox": transformers.GPTNeoXConfig(**SIZES, **ENDS),
    "neox in turn": transformers.GPTNeoXConfig(**SIZES, **ENDS, use_parallel_residual=False),
    "falcon": transformers.FalconConfig(**BASE, **ENDS, new_decoder_architecture=False),
    "falcon new": transformers.FalconConfig(**BASE, **ENDS, new_decoder_architecture=True, num_kv_heads=2),
    "phi": transformers.PhiConfig(**GROUPED),
    "phi3": transformers.Phi3Config(**GROUPED),
    "olmo2": transformers.Olmo2Config(**GROUPED),
    "stablelm": transformers.StableLmConfig(**GROUPED, use_qkv_bias=True),
    "granite": transformers.GraniteConfig(
        **GROUPED,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "smollm3": transformers.SmolLM3Config(**{**GROUPED, "num_hidden_layers": 5}),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer of 320 tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    return made


def opened(config: transformers.PretrainedConfig, tokenizer: Tokenizer, tmp_path) -> ch.Model:
    """A model of theirs with numbers that matter, opened here."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.ndim == 1 and "bias" not in name))
    theirs.save_pretrained(tmp_path / "theirs")
    m = ch.load(tmp_path / "theirs")
    m.tokenizer, m.special = tokenizer, {"bos": 0, "eos": 1, "pad": 2}
    m.settings["chat_template"] = "{{ messages[0]['content'] }}"
    return m


@pytest.mark.ledger("P2")
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_written_file_is_the_same_model_here_and_in_llama_cpp(config, tokenizer, tmp_path, differences):
    m = opened(config, tokenizer, tmp_path)
    m.save(tmp_path / "ours.gguf", "F32")
    back = ch.load(tmp_path / "ours.gguf")
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert differences.see("read back", back.model(ids).logits, m.model(ids).logits) < 1e-4
    assert back.special == m.special and back.settings["chat_template"] == m.settings["chat_template"]
    assert back.encode(WORDS[:2]) == m.encode(WORDS[:2])
    pytest.importorskip("xllamacpp")
    from benchmarks.quantize import llama_greedy, llama_server

    server, compared = llama_server(tmp_path / "ours.gguf", 128), 0
    for length in range(3, 40, 4):
        prompt = list(range(3, 3 + length))
        theirs, scores = llama_greedy(server, prompt, 1)
        with torch.no_grad():
            ours = m.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        assert theirs == [int(ours.argmax())]
        if scores:  # of a token that ends a character
            # Its GELU is a table in half precision.
            assert differences.see("llama.cpp", ours.max()[None], torch.tensor(scores)) < 5e-3
            compared += 1
    assert compared > 2
