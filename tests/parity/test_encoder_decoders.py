import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import clearhead as ch
from clearhead.variants.presets import preset
from tests.parity.seq2seq import check_encoder_decoder, check_outputs, check_saved, pair, reference

T5 = {
    "vocab_size": 61,
    "d_model": 24,
    "d_kv": 7,
    "d_ff": 37,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "pad_token_id": 0,
}
BART = {
    "vocab_size": 61,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 29,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 64,
}
MARIAN = {**BART, "pad_token_id": 40, "decoder_start_token_id": 40, "eos_token_id": 0}
DEEP = {"encoder_layers": 3, "decoder_layers": 1, "encoder_attention_heads": 3, "decoder_attention_heads": 6}


def untie(model, folder):
    """An output layer of its own: transformers builds none for T5, and reads one where a file has it."""
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * model.config.d_model**-0.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.ledger("L4", "L5", "E3")
@pytest.mark.parametrize("kind", ["T5", "MT5"])
@pytest.mark.parametrize(
    ("options", "own_output"),
    [
        ({"feed_forward_proj": "relu"}, False),
        (
            {
                "feed_forward_proj": "relu",
                "num_layers": 4,
                "num_decoder_layers": None,
                "relative_attention_num_buckets": 10,
            },
            True,
        ),
        ({"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "d_kv": 8}, True),
        (
            {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
            False,
        ),
        (
            {
                "feed_forward_proj": "gelu",
                "num_heads": 5,
                "relative_attention_num_buckets": 8,
                "relative_attention_max_distance": 20,
            },
            False,
        ),
    ],
    ids=["v1.0", "v1.0, untied", "v1.1", "v1.1, tied", "gelu, few buckets"],
)
def test_t5(kind, options, own_output, tmp_path):
    config = getattr(transformers, f"{kind}Config")(**{**T5, **options})
    model = reference(f"{kind}ForConditionalGeneration", config, tmp_path / "reference")
    if own_output:
        untie(model, tmp_path / "reference")
    ours = check_encoder_decoder(model, tmp_path / "reference", tmp_path)
    assert ours.config.tie_embeddings is not own_output


@pytest.mark.ledger("L4", "L5", "E3")
@pytest.mark.parametrize("kind", ["Bart", "MBart"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {**DEEP, "scale_embedding": True, "activation_function": "relu"},
        {"tie_word_embeddings": False, "d_model": 36, "pad_token_id": 5},
    ],
    ids=["tied", "scaled", "nothing shared"],
)
def test_bart(kind, options, tmp_path):
    config = getattr(transformers, f"{kind}Config")(**{**BART, **options})
    model = reference(f"{kind}ForConditionalGeneration", config, tmp_path / "reference")
    check_encoder_decoder(model, tmp_path / "reference", tmp_path)


@pytest.mark.ledger("L4", "L5", "E3")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {**DEEP, "scale_embedding": False, "activation_function": "gelu", "max_position_embeddings": 16},
        {"tie_word_embeddings": False, "pad_token_id": 4},
        {"d_model": 15, "encoder_attention_heads": 5},
    ],
    ids=["scaled", "past its table", "nothing shared, later padding", "odd width"],
)
def test_m2m100(options, tmp_path):
    config = transformers.M2M100Config(**{**BART, **options})
    model = reference("M2M100ForConditionalGeneration", config, tmp_path / "reference")
    check_encoder_decoder(model, tmp_path / "reference", tmp_path)


@pytest.mark.ledger("L4", "L5", "E3")
@pytest.mark.parametrize(
    "options",
    [
        {"scale_embedding": True, "activation_function": "swish"},
        {**DEEP, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 43},
        {
            "share_encoder_decoder_embeddings": False,
            "tie_word_embeddings": False,
            "decoder_vocab_size": 70,
            "d_model": 15,
            "encoder_attention_heads": 5,
        },
    ],
    ids=["shared", "two vocabularies", "nothing tied, odd width"],
)
def test_marian(options, tmp_path):
    model = reference(
        "MarianMTModel", transformers.MarianConfig(**{**MARIAN, **options}), tmp_path / "reference"
    )
    check_encoder_decoder(model, tmp_path / "reference", tmp_path)


@pytest.mark.ledger("L4", "E3")
@pytest.mark.parametrize(
    ("kind", "options"), [("T5", T5), ("MT5", T5), ("Bart", BART), ("MBart", BART), ("M2M100", BART)]
)
def test_without_a_head(kind, options, tmp_path):
    model = reference(
        f"{kind}Model", getattr(transformers, f"{kind}Config")(**options), tmp_path / "reference"
    )
    ours = ch.load(tmp_path / "reference")
    check_outputs(model, ours, "right")
    check_saved(model, ours, tmp_path)


@pytest.mark.ledger("L4", "E3")
@pytest.mark.parametrize("kind", ["T5", "MT5"])
def test_t5_encoder_alone(kind, tmp_path):
    model = reference(
        f"{kind}EncoderModel", getattr(transformers, f"{kind}Config")(**T5), tmp_path / "reference"
    )
    ours = ch.load(tmp_path / "reference")
    source, mask, _, _ = pair(model.config, "left")
    ch.Model(ours.model).save(tmp_path / "fresh")
    ours.save(tmp_path / "saved")
    with torch.no_grad():
        wanted = model(source, attention_mask=mask.long()).last_hidden_state[mask]
        assert (ours.model(source, mask).logits[mask] - wanted).abs().max() <= 2e-5
        for name, opened in (("saved", type(model)), ("fresh", transformers.T5EncoderModel)):
            again, info = opened.from_pretrained(
                tmp_path / name, output_loading_info=True, attn_implementation="eager"
            )
            assert not info["missing_keys"] and not info["unexpected_keys"]
            assert (
                again(source, attention_mask=mask.long()).last_hidden_state[mask] - wanted
            ).abs().max() <= 1e-6


@pytest.mark.ledger("L4")
def test_a_file_without_the_bias_on_logits(tmp_path):
    """Most BART files hold a bias of zeros; some leave it out, and a model trained here need not have one."""
    config = preset("bart-base").replace(
        vocab_size=61, d_model=24, n_layers=2, n_heads=3, d_ff=40, max_positions=64
    )
    model = ch.Transformer(config).eval()
    ch.Model(model).save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "bart"
    again, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    source, target = torch.randint(61, (2, 11)), torch.randint(61, (2, 9))
    with torch.no_grad():
        said = again.eval()(source, decoder_input_ids=target).logits
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
    again, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert (
        type(again).__name__ == "MarianMTModel" and not info["missing_keys"] and not info["unexpected_keys"]
    )
    source, target = torch.randint(61, (2, 40)), torch.randint(61, (2, 37))
    with torch.no_grad():
        assert (
            model(target, source=source).logits - again.eval()(source, decoder_input_ids=target).logits
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
