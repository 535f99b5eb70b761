import pytest
from transformers import GPT2Config

from tests.parity.harness import check_decoder, reference

SMALL = {"vocab_size": 61, "n_positions": 80, "n_embd": 24, "n_layer": 3, "n_head": 4}


@pytest.mark.ledger("L2")
@pytest.mark.parametrize(
    "options",
    [
        SMALL,
        {
            **SMALL,
            "n_embd": 30,
            "n_head": 5,
            "n_inner": 50,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
        {**SMALL, "n_head": 1, "n_layer": 1, "activation_function": "relu", "layer_norm_epsilon": 1e-3},
    ],
    ids=["plain", "odd sizes, untied", "one head"],
)
def test_gpt2(options, tmp_path):
    model = reference("GPT2LMHeadModel", GPT2Config(**options), tmp_path / "reference")
    check_decoder(model, tmp_path / "reference", tmp_path)
