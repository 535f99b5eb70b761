"""Text encoders, each class against its reference in transformers: the same model here and there."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import clearhead as ch
from tests.parity.encoders import check_back, check_backward, check_forward, check_text_encoder, text_inputs
from tests.parity.harness import reference

SMALL = {
    **{"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "max_position_embeddings": 80, "num_labels": 3},
}
DISTIL = dict(
    vocab_size=61, dim=24, hidden_dim=40, n_layers=3, n_heads=4, max_position_embeddings=80, num_labels=3
)
ODD = dict(SMALL, hidden_size=35, num_attention_heads=5, intermediate_size=51)
UNTIED = {"tie_word_embeddings": False}
OTHER_PADDING = dict(SMALL, pad_token_id=2, hidden_act="silu", layer_norm_eps=1e-5, num_hidden_layers=1)
MODERN = dict(SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
FAR = dict(
    SMALL, relative_attention=True, position_biased_input=False, share_att_key=True, pos_att_type="p2c|c2p"
)
HEADS = (
    *("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    "ForQuestionAnswering",
)
OPTIONS = {
    "Bert": {
        "plain": SMALL,
        "odd sizes, untied": {**ODD, **UNTIED},
        "one head, one type": dict(
            SMALL, num_attention_heads=1, type_vocab_size=1, hidden_act="relu", layer_norm_eps=1e-3
        ),
    },
    "Roberta": {
        "plain": SMALL,
        "odd sizes, untied": dict(ODD | UNTIED, type_vocab_size=1),
        "other padding id and activation": OTHER_PADDING,
    },
    "DistilBert": {
        "plain": DISTIL,
        "odd sizes, untied": dict(DISTIL | UNTIED, dim=35, n_heads=5, hidden_dim=51, activation="relu"),
        "sinusoidal table": dict(DISTIL, n_heads=1, n_layers=1, sinusoidal_pos_embds=True),
    },
    "Albert": {
        "plain": dict(SMALL, embedding_size=10),
        "groups, untied": dict(ODD | UNTIED, embedding_size=13, num_hidden_layers=5, num_hidden_groups=3),
        "as wide a table, one type": dict(
            SMALL, embedding_size=24, type_vocab_size=1, hidden_act="gelu", layer_norm_eps=1e-5
        ),
    },
    "Longformer": {
        "plain": dict(SMALL, attention_window=8),
        "windows by layer, untied": {
            **dict(SMALL | UNTIED, attention_window=[4, 8, 16], type_vocab_size=1),
            **{"hidden_act": "relu", "pad_token_id": 2, "sep_token_id": 5},
        },
    },
    "XLMRoberta": {
        "plain": SMALL,
        "odd sizes, untied": dict(ODD | UNTIED, type_vocab_size=1),
        "other padding id and activation": OTHER_PADDING,
    },
    "Camembert": {
        "plain": dict(SMALL, num_attention_heads=1),
        "odd sizes": dict(ODD, pad_token_id=0, hidden_act="relu"),
        "untied": dict(SMALL, tie_word_embeddings=False, type_vocab_size=3, layer_norm_eps=1e-3),
    },
    "MPNet": {
        "plain": SMALL,
        "odd sizes, untied": dict(ODD, tie_word_embeddings=False, max_position_embeddings=57),
        "one head": dict(SMALL, num_attention_heads=1, hidden_act="relu", layer_norm_eps=1e-3),
    },
    "Electra": {
        "plain": dict(SMALL, embedding_size=10),
        "as wide a table, untied": dict(ODD, embedding_size=35, tie_word_embeddings=False),
        "one type, one head": {
            **dict(SMALL, embedding_size=13, num_attention_heads=1, type_vocab_size=1),
            **{"hidden_act": "relu", "layer_norm_eps": 1e-3},
        },
    },
    "ModernBert": {
        "plain": dict(MODERN, local_attention=12),
        "biases, mean, scaled": {
            **dict(MODERN, hidden_size=40, num_attention_heads=5, local_attention=7),
            **{"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True},
            **{"decoder_bias": False, "classifier_pooling": "mean", "classifier_activation": "silu"},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
        },
        "old keys": {
            **dict(MODERN, local_attention=128, global_attn_every_n_layers=2, norm_eps=1e-3),
            **{"hidden_activation": "relu", "global_rope_theta": 333.0, "local_rope_theta": 77.0},
        },
    },
    "DebertaV2": {
        "as v3": dict(FAR, position_buckets=6, norm_rel_ebd="layer_norm"),
        "odd sizes, no buckets": {
            **dict(FAR, hidden_size=35, num_attention_heads=5, max_relative_positions=11),
            **{"pos_att_type": "c2p", "type_vocab_size": 2, "pooler_hidden_act": "tanh"},
            "tie_word_embeddings": False,
        },
        "p2c alone": {
            **dict(FAR, position_buckets=15, max_relative_positions=29, pos_att_type=["p2c"]),
            **{"num_attention_heads": 1, "hidden_act": "relu", "layer_norm_eps": 1e-3},
        },
    },
}
MORE = {"Electra": ("ForPreTraining", "ForPreTraining", "ForPreTraining")}  # heads that the others lack
# Every configuration with the head for masked tokens; every other head with one of them, each in turn.
CASES = [
    (name, head, label)
    for name, options in OPTIONS.items()
    for number, head in enumerate((*HEADS, *MORE.get(name, ())))
    for label in (options if head == "ForMaskedLM" else [[*options][number % len(options)]])
]
# Saved without the config.json it came with, a model is the best known one that is exactly it.
ALIKE = ("XLMRoberta", "Camembert", "Electra")


def make(name, head, options, folder, **build):
    options = {key: value for key, value in options.items() if key != "num_labels" or head in HEADS[2:4]}
    return reference(f"{name}{head}", getattr(transformers, f"{name}Config")(**options), folder, **build)


@pytest.mark.ledger("L1", "E1")
@pytest.mark.parametrize(("name", "head", "label"), CASES)
def test_text_encoder(name, head, label, tmp_path):
    model = make(name, head, OPTIONS[name][label], tmp_path / "reference")
    check_text_encoder(model, tmp_path / "reference", tmp_path, alike=name in ALIKE)


@pytest.mark.ledger("L1")
@pytest.mark.parametrize("name", ["Bert", "Roberta", "Albert", "Longformer"])
def test_base_model_without_its_pooler(name, tmp_path):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**OPTIONS[name]["plain"])
    model = getattr(transformers, f"{name}Model")(config, add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path / "reference")
    ours = check_text_encoder(model, tmp_path / "reference", tmp_path, add_pooling_layer=False)
    assert ours.config.head == "none"


def change(folder, edit):
    """Let `edit` change the tensors of a checkpoint in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def logits(loaded, model):
    with torch.no_grad():
        return loaded.model(**text_inputs(model, "right")[1]).logits


@pytest.mark.ledger("L1")
def test_published_bert_has_old_names_and_tensors_of_other_heads(tmp_path):
    """Read names as in bert-base-uncased: gamma and beta, position ids, a pooler and a next-sentence head."""
    model = make("Bert", "ForMaskedLM", SMALL, tmp_path)
    wanted = logits(ch.load(tmp_path), model)
    others = {
        "bert.pooler.dense.weight": torch.randn(24, 24),
        "bert.pooler.dense.bias": torch.randn(24),
        "cls.seq_relationship.weight": torch.randn(2, 24),
        "cls.seq_relationship.bias": torch.randn(2),
    }

    def edit(tensors):
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            tensors[old] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = torch.arange(80)[None]
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        tensors.update(others)

    change(tmp_path, edit)
    loaded = ch.load(tmp_path)
    assert torch.equal(logits(loaded, model), wanted)
    loaded.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert "bert.embeddings.LayerNorm.weight" in saved
    assert all(torch.equal(saved[name], tensor) for name, tensor in others.items()), (
        "what was learned for other heads is lost"
    )
    assert torch.equal(logits(ch.load(tmp_path / "saved"), model), wanted)


@pytest.mark.ledger("L1")
@pytest.mark.parametrize("name", ["Bert", "Roberta", "DistilBert", "Albert", "Longformer"])
def test_unmatched_and_missing_tensors_are_named(name, tmp_path):
    make(name, "ForSequenceClassification", OPTIONS[name]["plain"], tmp_path)
    change(
        tmp_path,
        lambda tensors: tensors.update({f"{name.lower()}.embeddings.surprise.weight": torch.zeros(3)}),
    )
    with pytest.raises(ch.CheckpointError, match=r"embeddings\.surprise\.weight"):
        ch.load(tmp_path)
    change(
        tmp_path,
        lambda tensors: [
            tensors.pop(key)
            for key in list(tensors)
            if "surprise" in key or key.endswith("embeddings.LayerNorm.bias")
        ],
    )
    with pytest.raises(ch.CheckpointError, match=r"encoder\.embedding\.norm\.bias"):
        ch.load(tmp_path)


@pytest.mark.ledger("L1")
@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("Bert", {"is_decoder": True}, "is_decoder"),
        ("Bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("Bert", {"architectures": ["BertForPreTraining"]}, "BertForPreTraining"),
        ("Albert", {"inner_group_num": 2}, "inner_group_num"),
        ("Roberta", {"hidden_act": "mish"}, "hidden_act"),
        ("Longformer", {"attention_dilation": [1, 2, 1]}, "attention_dilation .1, 2, 1.: only 1"),
        ("Longformer", {"attention_window": 7}, "attention_window 7: give an even number"),
        ("Longformer", {"attention_window": [8, 8]}, "for each of the 3 layers"),
        ("Longformer", {"autoregressive": True}, "autoregressive"),
        ("Longformer", {"architectures": ["LongformerForMultipleChoice"]}, "MultipleChoice"),
        ("XLMRoberta", {"is_decoder": True}, "is_decoder"),
        ("ModernBert", {"layer_types": ["chunked_attention"] * 3}, "only sliding_attention and full_att"),
        ("DebertaV2", {"conv_kernel_size": 3}, "a convolution next to the first layer is not supported"),
        ("DebertaV2", {"share_att_key": False}, "share_att_key False: projections of positions apart"),
        ("DebertaV2", {"position_biased_input": True}, "a table of positions next to disentangled"),
        ("Camembert", {"architectures": ["CamembertForMultipleChoice"]}, "CamembertForMultipleChoice"),
    ],
)
def test_what_is_not_supported_is_named(name, changes, complaint, tmp_path):
    make(name, "ForMaskedLM", next(iter(OPTIONS[name].values())), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ch.CheckpointError, match=complaint):
        ch.load(tmp_path)


@pytest.mark.ledger("L1")
def test_a_model_no_architecture_is_exactly_keeps_its_own_format(tmp_path):
    """BERT and RoBERTa have segments; an encoder without them can only be DistilBERT, whose eps is fixed."""
    sizes = {"family": "encoder", "vocab_size": 31, "d_model": 12, "n_layers": 1, "n_heads": 2}
    config = ch.ModelConfig(**sizes, norm_position="post", embedding_norm=True, norm_eps=1e-12)
    model = ch.Transformer(config).eval()
    ch.Model(model).save(tmp_path / "distil")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "distil").model_type == "distilbert"
    ch.Model(ch.Transformer(config.replace(norm_eps=1e-5))).save(tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "clearhead"


# Images --------------------------------------------------------------------------------------------------


SQUARE = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 4,
    "num_labels": 5,
}
IMAGES = {
    "square": SQUARE,
    "wide, grey, no query bias": dict(
        SQUARE, image_size=[12, 36], num_channels=1, qkv_bias=False, hidden_act="gelu_new"
    ),
    "odd sizes": {
        **SQUARE,
        "hidden_size": 35,
        "num_attention_heads": 5,
        "image_size": [35, 15],
        "patch_size": 5,
        "layer_norm_eps": 1e-3,
        "num_hidden_layers": 1,
    },
}


def check_images(model, folder, tmp_path, **build):
    ours = ch.load(folder)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, ours.config.n_channels, *ours.config.image_size, generator=generator)
    inputs = {"pixel_values": pixels}, {"ids": pixels}
    check_forward(model, ours, *inputs, side="nowhere")
    check_backward(model, ours, *inputs, tmp_path)
    check_back(model, ours, tmp_path, *inputs, **build)
    return ours


@pytest.mark.ledger("L8")
@pytest.mark.ledger("E4")
@pytest.mark.parametrize("kind", ["ViTForImageClassification", "ViTModel"])
@pytest.mark.parametrize("label", list(IMAGES))
def test_vit(kind, label, tmp_path):
    options = {
        key: value for key, value in IMAGES[label].items() if key != "num_labels" or kind != "ViTModel"
    }
    model = reference(kind, transformers.ViTConfig(**options), tmp_path / "reference")
    check_images(model, tmp_path / "reference", tmp_path)


@pytest.mark.ledger("L8")
def test_vit_without_its_pooler(tmp_path):
    torch.manual_seed(0)
    model = transformers.ViTModel(
        transformers.ViTConfig(**dict(SQUARE, num_labels=2)), add_pooling_layer=False
    ).eval()
    model.save_pretrained(tmp_path / "reference")
    ours = check_images(model, tmp_path / "reference", tmp_path, add_pooling_layer=False)
    assert ours.config.head == "none"


@pytest.mark.ledger("L8")
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"patch_size": [4, 2]}, "patch_size"), ({"image_size": 30}, "whole number of patches")],
)
def test_patches_that_do_not_fit_are_named(changes, complaint, tmp_path):
    reference("ViTForImageClassification", transformers.ViTConfig(**{**SQUARE, **changes}), tmp_path)
    with pytest.raises(ch.CheckpointError, match=complaint):
        ch.load(tmp_path)
