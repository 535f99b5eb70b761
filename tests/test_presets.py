"""Presets: the published systems have the published sizes, and the reference library agrees."""

import pytest
import torch

from clearhead import ConfigError, ModelConfig, Transformer
from clearhead.variants.costs import cost
from clearhead.variants.presets import PRESETS, preset

# What the systems' authors, or the reference implementation of each, count
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "distilbert": 66_985_530,
    "longformer-base": 148_711_257,
    "xlm-roberta-base": 278_295_186,
    "mpnet-base": 109_518_527,
    "electra-base": 109_483_009,
    "modernbert-base": 149_655_232,
    "llama-1b-like": 1_100_048_384,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "t5-small": 60_506_624,
    "bart-base": 139_420_416,
    "vit-tiny": 5_717_416,
}
ROUNDED = {
    "transformer-base": (65e6, 0.04),
    "transformer-big": (213e6, 0.01),
    "gpt3": (175e9, 0.003),
    "palm-like": (8.63e9, 0.001),
}


@pytest.mark.ledger("I1")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    assert cost(name).parameters.total == PUBLISHED[name]


@pytest.mark.ledger("I1", "L9", "M6", "M8")
@pytest.mark.parametrize("name", ROUNDED)
def test_sizes_published_in_round_numbers(name: str) -> None:
    size, tolerance = ROUNDED[name]
    assert cost(name).parameters.total == pytest.approx(size, rel=tolerance)


REFERENCES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "gpt2-medium": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "bert-base": ("BertConfig", "BertForMaskedLM", {}),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", {}),
    "longformer-base": (
        "LongformerConfig",
        "LongformerForMaskedLM",
        {"vocab_size": 50_265, "max_position_embeddings": 4098, "type_vocab_size": 1},
    ),
    "mpnet-base": ("MPNetConfig", "MPNetForMaskedLM", {"max_position_embeddings": 514}),
    "electra-base": (
        "ElectraConfig",
        "ElectraForPreTraining",
        {**{"embedding_size": 768, "hidden_size": 768}, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
    "deberta-v3-base": (
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072}
        | {"relative_attention": True, "position_biased_input": False, "share_att_key": True}
        | {"pos_att_type": ["p2c", "c2p"], "position_buckets": 256, "norm_rel_ebd": "layer_norm"},
    ),
    "modernbert-base": ("ModernBertConfig", "ModernBertForMaskedLM", {}),
    "t5-small": ("T5Config", "T5ForConditionalGeneration", {}),
    "bart-base": (
        "BartConfig",
        "BartForConditionalGeneration",
        {
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
        }
        | {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
    ),
    "llama-3-8b": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
        | {"intermediate_size": 14_336, "tie_word_embeddings": False},
    ),
    "vit-tiny": (
        "ViTConfig",
        "ViTForImageClassification",
        {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "num_labels": 1000},
    ),
}


@pytest.mark.ledger("I1")
@pytest.mark.parametrize("name", REFERENCES)
def test_the_reference_library_counts_the_same(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config_name, model_name, options = REFERENCES[name]
    with torch.device("meta"):
        reference = getattr(transformers, model_name)(getattr(transformers, config_name)(**options))
    assert cost(name).parameters.total == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_configs_that_survive_json(name: str) -> None:
    assert ModelConfig.from_json(preset(name).to_json()) == PRESETS[name]


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("micro")])
def test_micro_presets_run(name: str) -> None:
    config = preset(name)
    inputs = (
        torch.randn(2, 1, 8, 8) if config.input == "patches" else torch.randint(config.vocab_size, (2, 9))
    )
    source = torch.randint(config.vocab_size, (2, 7)) if config.family == "encoder-decoder" else None
    assert Transformer(config)(inputs, source=source).logits.isfinite().all()


@pytest.mark.ledger("M8", "B8")
@pytest.mark.parametrize("name", ["transformer-base", "transformer-big"])
def test_the_original_is_the_original(name: str) -> None:
    config = preset(name)
    assert (config.norm_position, config.activation, config.positions, config.init) == (
        "post",
        "relu",
        "sinusoidal",
        "xavier",
    )
    assert config.embedding_scale == pytest.approx(config.d_model**0.5)
    assert (config.d_ff, config.d_head) == (4 * config.d_model, 64)
    model = Transformer(config.replace(n_layers=1, vocab_size=50))
    tables = {
        id(model.encoder.embedding.front.tokens.weight),
        id(model.decoder.embedding.front.tokens.weight),
        id(model.head.out.weight),
    }
    assert len(tables) == 1  # all three embeddings are one


@pytest.mark.ledger("L9")
def test_the_parallel_block_has_one_norm_one_key_head_and_no_biases() -> None:
    config = preset("palm-like").replace(d_model=32, n_layers=1, n_heads=4, d_head=8, vocab_size=20)
    names = dict(Transformer(config).named_parameters())
    assert not [name for name in names if name.endswith("bias")]
    assert [name for name in names if "residual" in name] == [
        "decoder.blocks.0.attention_residual.before.weight"
    ]
    assert names["decoder.blocks.0.attention.k.weight"].shape == (8, 32)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'"gtp2-xl".*did you mean "gpt2-xl"'):
        preset("gtp2-xl")
