import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import clearhead as ch
from tests.parity.encoders import check_text_encoder, text_inputs
from tests.parity.harness import reference

SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "num_labels": 3,
}
DISTIL = {
    "vocab_size": 61,
    "dim": 24,
    "hidden_dim": 40,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 80,
    "num_labels": 3,
}
HEADS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
OPTIONS = {
    "Bert": {
        "plain": SMALL,
        "odd sizes, untied": {
            **SMALL,
            "hidden_size": 35,
            "num_attention_heads": 5,
            "intermediate_size": 51,
            "tie_word_embeddings": False,
        },
        "one head, one type": {
            **SMALL,
            "num_attention_heads": 1,
            "type_vocab_size": 1,
            "hidden_act": "relu",
            "layer_norm_eps": 1e-3,
        },
    },
    "Roberta": {
        "plain": SMALL,
        "odd sizes, untied": {
            **SMALL,
            "hidden_size": 35,
            "num_attention_heads": 5,
            "tie_word_embeddings": False,
            "type_vocab_size": 1,
        },
        "other padding id and activation": {
            **SMALL,
            "pad_token_id": 2,
            "hidden_act": "silu",
            "layer_norm_eps": 1e-5,
            "num_hidden_layers": 1,
        },
    },
    "DistilBert": {
        "plain": DISTIL,
        "odd sizes, untied": {
            **DISTIL,
            "dim": 35,
            "n_heads": 5,
            "hidden_dim": 51,
            "tie_word_embeddings": False,
            "activation": "relu",
        },
        "sinusoidal table": {**DISTIL, "n_heads": 1, "n_layers": 1, "sinusoidal_pos_embds": True},
    },
    "Albert": {
        "plain": {**SMALL, "embedding_size": 10},
        "groups, untied": {
            **SMALL,
            "embedding_size": 13,
            "hidden_size": 35,
            "num_attention_heads": 5,
            "num_hidden_layers": 5,
            "num_hidden_groups": 3,
            "tie_word_embeddings": False,
        },
        "as wide a table, one type": {
            **SMALL,
            "embedding_size": 24,
            "type_vocab_size": 1,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
        },
    },
    "Longformer": {
        "plain": {**SMALL, "attention_window": 8},
        "windows by layer, untied": {
            **SMALL,
            "attention_window": [4, 8, 16],
            "tie_word_embeddings": False,
            "type_vocab_size": 1,
            "hidden_act": "relu",
            "pad_token_id": 2,
            "sep_token_id": 5,
        },
    },
}
CASES = [(name, head, label) for name, options in OPTIONS.items() for head in HEADS for label in options]


def make(name, head, options, folder, **build):
    options = {key: value for key, value in options.items() if key != "num_labels" or head in HEADS[2:4]}
    return reference(f"{name}{head}", getattr(transformers, f"{name}Config")(**options), folder, **build)


@pytest.mark.ledger("L1")
@pytest.mark.ledger("E1")
@pytest.mark.parametrize(("name", "head", "label"), CASES)
def test_text_encoder(name, head, label, tmp_path):
    model = make(name, head, OPTIONS[name][label], tmp_path / "reference")
    check_text_encoder(model, tmp_path / "reference", tmp_path)


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
@pytest.mark.parametrize("name", list(OPTIONS))
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
    ],
)
def test_what_is_not_supported_is_named(name, changes, complaint, tmp_path):
    make(name, "ForMaskedLM", OPTIONS[name]["plain"], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ch.CheckpointError, match=complaint):
        ch.load(tmp_path)


@pytest.mark.ledger("L1")
def test_a_model_no_architecture_is_exactly_keeps_its_own_format(tmp_path):
    """BERT and RoBERTa have segments; an encoder without them can only be DistilBERT, whose eps is fixed."""
    config = ch.ModelConfig(
        family="encoder",
        vocab_size=31,
        d_model=12,
        n_layers=1,
        n_heads=2,
        norm_position="post",
        embedding_norm=True,
        norm_eps=1e-12,
    )
    model = ch.Transformer(config).eval()
    ch.Model(model).save(tmp_path / "distil")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "distil").model_type == "distilbert"
    ch.Model(ch.Transformer(config.replace(norm_eps=1e-5))).save(tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "clearhead"
