import pytest

from tests.parity.harness import check_decoder, config_of, reference

SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


@pytest.mark.ledger("L3")
@pytest.mark.parametrize(
    "options",
    [
        {**SMALL, "num_key_value_heads": 2},
        {
            **SMALL,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        {**SMALL, "head_dim": 10, "rope_theta": 500.0, "hidden_act": "gelu"},
        {**SMALL, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        {**SMALL, "max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {
            **SMALL,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        {
            **SMALL,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
        {
            **SMALL,
            "rope_scaling": {
                "rope_type": "longrope",
                "factor": 4.0,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [2.0, 3.0, 4.0],
                "original_max_position_embeddings": 32,
            },
        },
    ],
    ids=[
        "grouped",
        "multi-query, biases, tied",
        "head_dim, base",
        "linear",
        "dynamic",
        "llama3",
        "yarn",
        "longrope",
    ],
)
def test_llama(options, tmp_path):
    model = reference("LlamaForCausalLM", config_of("Llama", options), tmp_path / "reference")
    # Llama's cached keys keep the angles of a shorter length; Phi-3, which has longrope, reads all anew.
    more = {"use_cache": False} if "longrope" in str(options) else {}
    check_decoder(model, tmp_path / "reference", tmp_path, **more)
