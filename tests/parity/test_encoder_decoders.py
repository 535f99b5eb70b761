"""Encoder-decoders, each against its reference in transformers."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import clearhead as ch
from clearhead.variants.presets import preset
from tests.parity.harness import LOGITS, check_saved, close, reopened
from tests.parity.seq2seq import check_back, check_encoder_decoder, check_outputs, pair, reference

T5 = {
    **{"vocab_size": 61, "d_model": 24, "d_kv": 7, "d_ff": 37, "num_layers": 2, "num_decoder_layers": 3},
    **{"num_heads": 3, "pad_token_id": 0},
}
BART = {
    **{"vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 29},
    **{"decoder_ffn_dim": 37, "encoder_attention_heads": 4, "decoder_attention_heads": 3},
    "max_position_embeddings": 64,
}
MARIAN = dict(BART, pad_token_id=40, decoder_start_token_id=40, eos_token_id=0)
DEEP = {"encoder_layers": 3, "decoder_layers": 1, "encoder_attention_heads": 3, "decoder_attention_heads": 6}


def untie(model, folder):
    """An output layer of its own: transformers builds none for T5, and reads one where a file has it."""
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * model.config.d_model**-0.5)
    model.save_pretrained(folder)
    return model


T5_OPTIONS = {
    "v1.0": {"feed_forward_proj": "relu"},
    "v1.0, untied": dict(
        feed_forward_proj="relu", num_layers=4, num_decoder_layers=None, relative_attention_num_buckets=10
    ),
    "v1.1, untied": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "d_kv": 8},
    "v1.1": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    "gelu, few buckets": {
        **{"feed_forward_proj": "gelu", "num_heads": 5, "relative_attention_num_buckets": 8},
        "relative_attention_max_distance": 20,
    },
}
BART_OPTIONS = {
    "tied": {},
    "scaled": dict(DEEP, scale_embedding=True, activation_function="relu"),
    "nothing shared": {"tie_word_embeddings": False, "d_model": 36, "pad_token_id": 5},
}
CASES = {
    **{kind: {label: {**T5, **more} for label, more in T5_OPTIONS.items()} for kind in ("T5", "MT5")},
    **{kind: {label: {**BART, **more} for label, more in BART_OPTIONS.items()} for kind in ("Bart", "MBart")},
    "M2M100": {
        "scaled": BART,
        "past its table": dict(
            BART | DEEP, scale_embedding=False, activation_function="gelu", max_position_embeddings=16
        ),
        "nothing shared, later padding": dict(BART, tie_word_embeddings=False, pad_token_id=4),
        "odd width": dict(BART, d_model=15, encoder_attention_heads=5),
    },
    "Marian": {
        "shared": dict(MARIAN, scale_embedding=True, activation_function="swish"),
        "two vocabularies": dict(
            MARIAN | DEEP, share_encoder_decoder_embeddings=False, decoder_vocab_size=43
        ),
        "nothing tied, odd width": {
            **dict(MARIAN, share_encoder_decoder_embeddings=False, tie_word_embeddings=False),
            **{"decoder_vocab_size": 70, "d_model": 15, "encoder_attention_heads": 5},
        },
    },
}


def config_of(kind, options):
    return getattr(transformers, f"{kind}Config")(**options)


@pytest.mark.ledger("L4", "L5", "E3")
@pytest.mark.parametrize(("kind", "label"), [(kind, label) for kind in CASES for label in CASES[kind]])
def test_encoder_decoder(kind, label, tmp_path):
    name = "MarianMTModel" if kind == "Marian" else f"{kind}ForConditionalGeneration"
    model = reference(name, config_of(kind, CASES[kind][label]), tmp_path / "reference")
    own_output = "T5" in kind and "untied" in label
    if own_output:
        untie(model, tmp_path / "reference")
    ours = check_encoder_decoder(model, tmp_path / "reference", tmp_path)
    assert "T5" not in kind or ours.config.tie_embeddings is not own_output


@pytest.mark.ledger("L4", "E3")
@pytest.mark.parametrize(
    ("kind", "options"), [("T5", T5), ("MT5", T5), ("Bart", BART), ("MBart", BART), ("M2M100", BART)]
)
def test_without_a_head(kind, options, tmp_path):
    model = reference(f"{kind}Model", config_of(kind, options), tmp_path / "reference")
    ours = ch.load(tmp_path / "reference")
    check_outputs(model, ours, "right")
    check_back(model, ours, tmp_path)


@pytest.mark.ledger("L4", "E3")
@pytest.mark.parametrize("kind", ["T5", "MT5"])
def test_t5_encoder_alone(kind, tmp_path):
    model = reference(f"{kind}EncoderModel", config_of(kind, T5), tmp_path / "reference")
    ours = ch.load(tmp_path / "reference")
    source, mask, _, _ = pair(model.config, "left")

    def states(one):
        return one(source, attention_mask=mask.long()).last_hidden_state[mask]

    with torch.no_grad():
        close("states", ours.model(source, mask).logits[mask], states(model), LOGITS)
    check_saved(model, ours, tmp_path, states, lambda one: one(source, mask).logits, alike=True)


@pytest.mark.ledger("L4")
def test_a_file_without_the_bias_on_logits(tmp_path):
    """Most BART files hold a bias of zeros; some leave it out, and a model trained here need not have one."""
    config = preset("bart-base").replace(
        vocab_size=61, d_model=24, n_layers=2, n_heads=3, d_ff=40, max_positions=64
    )
    model = ch.Transformer(config).eval()
    ch.Model(model).save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "bart"
    again = reopened(transformers.AutoModelForSeq2SeqLM, tmp_path / "saved")
    source, target = torch.randint(61, (2, 11)), torch.randint(61, (2, 9))
    with torch.no_grad():
        said = again(source, decoder_input_ids=target).logits
        assert (model(target, source=source).logits - said).abs().max() <= 1e-6
    back = ch.load(tmp_path / "saved")
    assert back.config == config


@pytest.mark.ledger("L4", "L5")
def test_older_files(tmp_path):
    """Read files with every alias of one table, or, from earlier releases, with a separate output layer."""
    config = transformers.BartConfig(**BART, tie_word_embeddings=False)
    model = reference("BartForConditionalGeneration", config, tmp_path / "reference")
    with torch.no_grad():
        for stack in (model.model.encoder, model.model.decoder):
            stack.embed_tokens.weight.copy_(model.model.shared.weight)
    state = {name: tensor for name, tensor in model.state_dict().items() if "embed_tokens" not in name}
    save_file(state, tmp_path / "reference" / "model.safetensors", {"format": "pt"})
    check_outputs(model, ch.load(tmp_path / "reference"), "right")

    model = reference("T5ForConditionalGeneration", transformers.T5Config(**T5), tmp_path / "aliases")
    save_file(
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        tmp_path / "aliases" / "model.safetensors",
    )
    ours = ch.load(tmp_path / "aliases")
    assert ours.config.tie_embeddings
    check_outputs(model, ours, "right")


@pytest.mark.ledger("E3")
def test_an_original_transformer_with_sines_first_is_marian(tmp_path):
    config = preset("transformer-base").replace(
        vocab_size=61, n_layers=2, bias=True, norm_eps=1e-5, sinusoid_layout="half"
    )
    config = config.replace(
        qkv_bias=True, attention_out_bias=True, d_model=24, n_heads=3, d_ff=40, embedding_scale=24**0.5
    )
    model = ch.Transformer(config).eval()
    ch.Model(model).save(tmp_path / "saved")
    again = reopened(transformers.AutoModelForSeq2SeqLM, tmp_path / "saved")
    assert type(again).__name__ == "MarianMTModel"
    source, target = torch.randint(61, (2, 40)), torch.randint(61, (2, 37))
    with torch.no_grad():
        assert (
            model(target, source=source).logits - again(source, decoder_input_ids=target).logits
        ).abs().max() <= 2e-5
    assert ch.load(tmp_path / "saved").config == config


@pytest.mark.ledger("E3")
@pytest.mark.parametrize("name", ["transformer-base", "t5-small", "bart-base", "micro-encoder-decoder"])
def test_presets_come_back(name, tmp_path):
    """Saved as the architecture that is exactly it, or under our own names: the same bits either way."""
    known = {"t5-small": "t5", "bart-base": "bart"}
    config = preset(name).replace(vocab_size=61, n_layers=2, max_positions=64)
    torch.manual_seed(0)
    model = ch.Transformer(config).eval()
    ch.Model(model).save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == known.get(
        name, "clearhead"
    )
    back = ch.load(tmp_path / "saved")
    assert back.config == config
    source, target = torch.randint(61, (2, 11)), torch.randint(61, (2, 9))
    with torch.no_grad():
        assert torch.equal(back.model(target, source=source).logits, model(target, source=source).logits)
