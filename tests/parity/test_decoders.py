"""Decoders of Llama's kin and of GPT's, each against its reference in transformers."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import clearhead as ch
from clearhead.errors import CheckpointError
from clearhead.hub.files import read_json
from clearhead.hub.registry import ARCHITECTURES
from clearhead.learn.losses import balance_loss
from clearhead.variants.routing import Experts
from tests.parity.harness import (
    GRADIENTS,
    HIDDEN,
    LOGITS,
    batch,
    check_decoder,
    close,
    config_of,
    positions_of,
    reference,
)

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
ODD = {
    **SMALL,
    "vocab_size": 53,
    "hidden_size": 30,
    "intermediate_size": 37,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
}
DEEP = {**GROUPED, "num_hidden_layers": 7, "head_dim": 8}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
HALF = {"partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def check(kind, options, tmp_path, fresh=None):
    """Run all of `check_decoder`.

    `fresh` names the architecture that the config alone leads to, where another is asked first and says the
    same.
    """
    config = config_of(kind, options)
    model = reference(f"{kind}ForCausalLM", config, tmp_path / "reference")
    check_decoder(model, tmp_path / "reference", tmp_path)
    assert read_json(tmp_path / "fresh" / "config.json")["model_type"] == (fresh or config.model_type)


def options(**cases):
    return pytest.mark.parametrize("options", cases.values(), ids=cases.keys())


@pytest.mark.ledger("L2")
@options(
    plain=SMALL,
    sequential_tied={
        **SMALL,
        **TIED,
        "use_parallel_residual": False,
        "rotary_pct": 0.5,
        "hidden_act": "gelu_new",
    },
    odd_no_bias={**ODD, "attention_bias": False, "rotary_pct": 0.7, "rotary_emb_base": 700.0},
    scaled={**SMALL, "rotary_pct": 1.0, "rope_scaling": LINEAR},
)
def test_gpt_neox(options, tmp_path):
    check("GPTNeoX", {key: value for key, value in options.items() if key != "num_key_value_heads"}, tmp_path)


@pytest.mark.ledger("L3")
@options(
    window={**GROUPED, "sliding_window": 7},
    odd_tied={**ODD, **TIED, "sliding_window": 11, "head_dim": 8},
    scaled={
        **GROUPED,
        "sliding_window": 9,
        "rope_theta": 500.0,
        "rope_scaling": LLAMA3,
        "hidden_act": "gelu",
    },
    no_window={**GROUPED, "sliding_window": None},
)
def test_mistral(options, tmp_path):
    check("Mistral", options, tmp_path, fresh=None if options["sliding_window"] else "llama")


WINDOW = {"use_sliding_window": True, "sliding_window": 6}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.ledger("L3")
@options(
    plain=GROUPED,
    odd_tied_late_windows={**ODD, **TIED, **WINDOW, "max_window_layers": 1},
    all_windows={**GROUPED, **WINDOW, "max_window_layers": 0, "rope_theta": 1e6},
    layer_types={**GROUPED, **WINDOW, "layer_types": KINDS},
)
def test_qwen2(options, tmp_path):
    check("Qwen2", options, tmp_path)


@pytest.mark.ledger("L3")
@options(
    plain={**GROUPED, "head_dim": 8},
    odd_tied_biases={**ODD, **TIED, "head_dim": 10, "attention_bias": True},
    windows={**DEEP, **WINDOW, "max_window_layers": 3},
)
def test_qwen3(options, tmp_path):
    check("Qwen3", options, tmp_path)


@pytest.mark.ledger("L3")
@options(
    plain={**GROUPED, "head_dim": 10},
    odd_untied_biases={**ODD, **UNTIED, "head_dim": 6, "attention_bias": True},
    said_gelu={**GROUPED, "head_dim": 10, "hidden_act": "gelu", "rope_theta": 500.0, "rope_scaling": LINEAR},
)
def test_gemma(options, tmp_path):
    check("Gemma", options, tmp_path)


# So that most scores feel the cap.
TIGHT = {**DEEP, "query_pre_attn_scalar": 1, "attn_logit_softcapping": 0.5}


@pytest.mark.ledger("L3")
@options(
    plain={**GROUPED, "head_dim": 10, "sliding_window": 8, "query_pre_attn_scalar": 17},
    odd_untied_no_cap={
        **ODD,
        **UNTIED,
        "head_dim": 8,
        "sliding_window": 5,
        "attn_logit_softcapping": None,
        "query_pre_attn_scalar": 8,
    },
    tight_cap={**TIGHT, "sliding_window": 6, "final_logit_softcapping": None, "attention_bias": True},
    no_window={**GROUPED, "head_dim": 10, "layer_types": ["full_attention"] * 3},
)
def test_gemma2(options, tmp_path):
    check("Gemma2", options, tmp_path)


@pytest.mark.ledger("L3")
@options(
    five_of_six={**DEEP, "sliding_window": 8, "query_pre_attn_scalar": 9},
    scaled_old_keys={
        **DEEP,
        "sliding_window": 6,
        "rope_scaling": LINEAR,
        "rope_theta": 5e5,
        "rope_local_base_freq": 90.0,
    },
    odd_untied_no_window={
        **ODD,
        **UNTIED,
        "head_dim": 8,
        "layer_types": ["full_attention"] * 3,
        "final_logit_softcapping": 4.0,
    },
    one_base={
        **DEEP,
        "sliding_window": 6,
        "layer_types": [*KINDS, *KINDS, KINDS[0]],
        "rope_theta": 300.0,
        "rope_local_base_freq": 300.0,
    },
)
def test_gemma3(options, tmp_path):
    check("Gemma3", options, tmp_path)


OSS = {**GROUPED, "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": True,
    "original_max_position_embeddings": 16,
}
NEOX_KEYS = {"rotary_pct": 0.5, "rotary_emb_base": 700.0}
QWEN_KEYS = {**WINDOW, "max_window_layers": 2, "rope_theta": 5e5}
GEMMA3_KEYS = {
    "rope_theta": 5e5,
    "rope_local_base_freq": 90.0,
    "rope_scaling": LINEAR,
    "sliding_window_pattern": 3,
    "sliding_window": 8,
}


@pytest.mark.ledger("L2", "L3")
@pytest.mark.parametrize(
    ("kind", "options", "keys", "expected"),
    [
        ("GPTNeoX", SMALL, NEOX_KEYS, {"rope_fraction": 0.5, "rope_base": 700.0}),
        ("Qwen2", GROUPED, QWEN_KEYS, {"window": (None, None, 6), "rope_base": 5e5}),
        (
            "Gemma2",
            {**GROUPED, "head_dim": 10},
            {"sliding_window": 8},
            {"window": (8, None, 8), "logit_softcap": 30.0},
        ),
        (
            "Gemma3",
            {**DEEP},
            GEMMA3_KEYS,
            {"window": (8, 8, None, 8, 8, None, 8), "rope_base": 5e5, "rope_local_base": 90.0},
        ),
        (
            "GptOss",
            OSS,
            {"rope_theta": 500.0, "rope_scaling": YARN},
            {"window": (7, None, 7), "rope_base": 500.0, "gated_clamp": 7.0},
        ),
        (
            "Qwen3Next",
            {**SMALL, "num_hidden_layers": 6, "mlp_only_layers": [0]},
            {"partial_rotary_factor": 0.5, "full_attention_interval": 3, "decoder_sparse_step": 2},
            {
                "attention": (
                    *(["gated-delta(key_heads=16, value_heads=32, d_key=128, d_value=128)"] * 2),
                    "full",
                )
                * 2,
                "rope_fraction": 0.5,
                "dense_layers": (0, 2, 4),
            },
        ),
    ],
    ids=["GPT-NeoX", "Qwen 2", "Gemma 2", "Gemma 3", "gpt-oss", "Qwen3-Next"],
)
def test_keys_of_older_files(kind, options, keys, expected):
    config = config_of(kind, {**options, **keys})
    architecture = ARCHITECTURES[config.model_type]
    theirs = json.loads(config.to_json_string())
    new = architecture.read(theirs)
    old = architecture.read(
        {
            **{key: value for key, value in theirs.items() if key not in ("rope_parameters", "layer_types")},
            **keys,
        }
    )
    assert old == new
    assert {name: getattr(new, name) for name in expected} == expected


# The reference's experts want rows of whole 16 bytes.
EVEN = {**ODD, "hidden_size": 40, "intermediate_size": 36}


@pytest.mark.ledger("L6", "D5")
@options(
    two_of_five={**GROUPED, "num_local_experts": 5, "num_experts_per_tok": 2},
    tied_all_of_three={**EVEN, **TIED, "num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 8},
    one_of_four={
        **GROUPED,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "head_dim": 10,
        "rope_theta": 500.0,
    },
)
def test_mixtral(options, tmp_path):
    check("Mixtral", options, tmp_path)


@pytest.mark.ledger("L6", "D5")
@options(
    two_of_five=OSS,
    no_attention_bias_tied={**OSS, **TIED, "attention_bias": False, "num_experts_per_tok": 5},
    scaled={**OSS, "rope_theta": 500.0, "rope_scaling": YARN, "num_experts_per_tok": 1},
    full_narrow_limit={
        **OSS,
        "layer_types": ["full_attention"] * 3,
        "swiglu_limit": 0.02,  # so that most gates feel it
        "swiglu_alpha": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    },
)
def test_gpt_oss(options, tmp_path):
    check("GptOss", options, tmp_path)


NEXT = {
    **GROUPED,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
FULL, DELTA = ["full_attention"], ["linear_attention"]


@pytest.mark.ledger("L6", "D5", "J2")
@options(
    two_of_five=NEXT,
    tied_every_other={
        **{**NEXT, **TIED, **HALF, "num_hidden_layers": 3, "layer_types": FULL + DELTA * 2},
        **{
            "decoder_sparse_step": 2,
            "num_experts_per_tok": 5,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_theta": 500.0,
        },
        **{"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2},
    },
    dense={**NEXT, "layer_types": FULL + DELTA, "num_experts": 0},
)
def test_qwen3_next(options, tmp_path):
    check("Qwen3Next", options, tmp_path)


@pytest.mark.ledger("L6", "J2", "M1")
def test_qwen3_next_continues_unequal_rows_as_the_reference_does(tmp_path):
    """Prompts of other lengths in one batch, which the reference pads on the left."""
    torch.manual_seed(0)
    theirs = transformers.Qwen3NextForCausalLM(config_of("Qwen3Next", NEXT)).eval()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    theirs.save_pretrained(tmp_path)
    m, prompts, new = ch.load(tmp_path), [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9]], 12
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    said = theirs.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    ours = m.generate(prompts, new, min_new_tokens=new)
    assert [row.ids for row in ours] == said[:, longest:].tolist()


def test_qwen3_next_has_its_published_size():
    """80 billion parameters, of which a token meets 3 billion, without the token table and the output."""
    config = config_of("Qwen3Next", {})
    with torch.device("meta"):
        model = transformers.Qwen3NextForCausalLM(config)
    counts = ch.cost(ARCHITECTURES["qwen3_next"].read(config.to_dict()), 64).parameters
    assert counts.total == sum(p.numel() for p in model.parameters())
    assert counts.total == pytest.approx(80e9, rel=0.01)
    assert counts.active - counts.embedding - counts.head == pytest.approx(3e9, rel=0.15)


def test_a_head_for_several_tokens_is_carried(tmp_path):
    """Released files have tensors `mtp.*`, which the reference leaves out: they are written back."""
    model = reference("Qwen3NextForCausalLM", config_of("Qwen3Next", NEXT), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"mtp.fc.weight": torch.randn(32, 64), "mtp.layers.0.mlp.gate.weight": torch.randn(5, 32)}
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    ours = ch.load(tmp_path)
    ids = batch(model.config)[0]
    with torch.no_grad():
        close("logits", ours.model(ids).logits, model(ids).logits, LOGITS)
    ours.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == {**tensors, **more}.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in {**tensors, **more}.items())


@pytest.mark.ledger("I1")
@pytest.mark.parametrize(
    ("layers", "experts", "total", "active"),
    [(24, 32, 20_914_757_184, 3.61e9), (36, 128, 116_829_156_672, 5.13e9)],
    ids=["20b", "120b"],
)
def test_gpt_oss_has_its_published_size(layers, experts, total, active):
    """Active parameters are published without the token table."""
    config = config_of("GptOss", {"num_hidden_layers": layers, "num_local_experts": experts})
    counts = ch.cost(ARCHITECTURES["gpt_oss"].read(config.to_dict())).parameters
    assert counts.total == total
    assert counts.active - counts.embedding == pytest.approx(active, rel=1e-3)


@options(
    no_betas={"beta_fast": 0.0, "beta_slow": 0},
    null_truncate={"truncate": None},
    ends_crossed={"original_max_position_embeddings": 1},
)
def test_yarn_at_its_edges(options, tmp_path):
    """0 stands for the usual beta, null for no rounding; with ends that cross, nothing is interpolated."""
    config = config_of("Llama", {**GROUPED, "rope_parameters": {**YARN, "truncate": False, **options}})
    model = reference("LlamaForCausalLM", config, tmp_path)
    ids, _ = batch(config)
    with torch.no_grad():
        close("logits", ch.load(tmp_path).model(ids).logits, model(ids).logits, LOGITS)


def test_a_scaling_without_its_factor_is_refused():
    theirs = config_of("Llama", {**GROUPED, "rope_parameters": YARN}).to_dict()
    theirs["rope_parameters"]["factor"] = None
    with pytest.raises(CheckpointError, match="rope_type yarn and no factor"):
        ARCHITECTURES["llama"].read(theirs)


@options(
    plain=SMALL,
    query_norm_tied={
        **GROUPED,
        **TIED,
        "hidden_size": 40,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": True,
    },
    odd={**ODD, "hidden_act": "relu", "partial_rotary_factor": 1.0, "rope_theta": 900.0},
)
def test_phi(options, tmp_path):
    check("Phi", options, tmp_path)


@pytest.mark.parametrize(
    ("options", "fresh"),
    [
        (GROUPED, "llama"),
        ({**ODD, **TIED, "sliding_window": 7}, "mistral"),
        ({**GROUPED, **HALF}, "phi3"),
    ],
    ids=["plain", "odd, tied, window", "partial rotation"],
)
def test_phi3(options, fresh, tmp_path):
    check("Phi3", options, tmp_path, fresh)


@pytest.mark.parametrize(
    "factor",
    [{}, {"factor": 6.0}, {"attention_factor": 1.2}],
    ids=["by length", "factor", "attention factor"],
)
def test_phi3_beyond_its_trained_length(factor, tmp_path):
    scaling = {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.5, 2.0],
        "long_factor": [1.0, 2.0, 3.0, 5.0],
        **factor,
    }
    options = {**GROUPED, "rope_scaling": scaling, "original_max_position_embeddings": 32}
    check("Phi3", options, tmp_path, "llama")  # whose greedy tokens cross that length


@options(
    grouped=GROUPED,
    odd_tied_biases={**ODD, **TIED, "attention_bias": True},
    scaled={**SMALL, "rope_theta": 500.0, "rope_scaling": LINEAR, "rms_norm_eps": 1e-3},
)
def test_olmo2(options, tmp_path):
    check("Olmo2", options, tmp_path)


@pytest.mark.ledger("L9")
@options(
    grouped={**GROUPED, **HALF},
    parallel_multi_query={**GROUPED, **TIED, "num_key_value_heads": 1, "use_parallel_residual": True},
    odd_biases={**ODD, "partial_rotary_factor": 1.0, "use_qkv_bias": True, "layer_norm_eps": 1e-3},
)
def test_stablelm(options, tmp_path):
    check("StableLm", options, tmp_path)


@options(
    factors={
        **GROUPED,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
        "logits_scaling": 7.0,
    },
    odd_tied_biases={**ODD, **TIED, "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.1},
    divided={**GROUPED, "logits_scaling": 3.0, "rope_theta": 500.0},
)
def test_granite(options, tmp_path):
    check("Granite", options, tmp_path)


@options(
    every_fourth={**GROUPED, "num_hidden_layers": 5},
    odd_untied_biases={
        **ODD,
        **UNTIED,
        "no_rope_layers": [0, 1, 0],
        "attention_bias": True,
        "mlp_bias": True,
    },
    windows={**GROUPED, **WINDOW, "no_rope_layer_interval": 2, "rope_theta": 500.0},
)
def test_smollm3(options, tmp_path):
    check("SmolLM3", options, tmp_path)


FALCON = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}


@pytest.mark.ledger("L9")
@pytest.mark.parametrize(
    ("options", "fresh"),
    [
        (FALCON, None),
        ({**FALCON, **NEW, **UNTIED, "bias": True}, None),
        ({**FALCON, **NEW, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 37}, None),
        ({**FALCON, "multi_query": False}, None),
        ({**FALCON, "parallel_attn": False, "activation": "relu", "rope_theta": 500.0}, None),
        ({**FALCON, "multi_query": False, "parallel_attn": False, "bias": True}, "gpt_neox"),
    ],
    ids=[
        "multi-query",
        "new",
        "new, one norm",
        "all heads",
        "sequential, multi-query",
        "sequential, all heads",
    ],
)
def test_falcon(options, fresh, tmp_path):
    check("Falcon", options, tmp_path, fresh)


# Other heads ------------------------------------------------------------------------------------------------


@pytest.mark.ledger("L2", "L3", "L6")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", GROUPED),
        ("GPTNeoX", SMALL),
        ("Qwen2", {**GROUPED, **WINDOW, "max_window_layers": 1}),
        ("Gemma2", {**GROUPED, "head_dim": 10, "sliding_window": 6}),
        ("Mixtral", {**GROUPED, "num_local_experts": 3}),
        ("GptOss", OSS),
        ("Qwen3Next", NEXT),
        ("Falcon", FALCON),
        (
            "GPT2",
            {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_classifiers(kind, options, side, tmp_path):
    """Sequences (read at the last real token) and tokens."""
    for head in ("ForSequenceClassification", "ForTokenClassification"):
        folder = tmp_path / head
        model = reference(kind + head, config_of(kind, {**options, "num_labels": 5}), folder)
        ours = ch.load(folder)
        ids, mask = batch(model.config, side=side)
        ids[~mask] = 0  # the reference finds the last real token by the padding id
        keep = slice(None) if "Sequence" in head else mask

        def logits(other, ids=ids, mask=mask, keep=keep):
            return other(ids, attention_mask=mask.long(), position_ids=positions_of(mask)).logits[keep]

        theirs = logits(model)
        said = ours.model(ids, mask).logits[keep]
        close(f"{kind}{head}", said, theirs, LOGITS)
        for name, save in (("saved", ours), ("fresh", ch.Model(ours.model))):
            save.save(folder / name)
            again, info = type(model).from_pretrained(
                folder / name, output_loading_info=True, attn_implementation="eager"
            )
            assert not info["missing_keys"] and not info["unexpected_keys"]
            again.config.pad_token_id = 0  # which a config of ours does not know
            close(f"{name}, read back", logits(again.eval()), theirs, 1e-6)
            assert torch.equal(ch.load(folder / name).model(ids, mask).logits[keep], said)


@pytest.mark.ledger("L2", "L3", "L6")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LlamaModel", GROUPED),
        ("GPTNeoXModel", SMALL),
        ("Gemma3TextModel", {**DEEP, "sliding_window": 8}),
        ("MixtralModel", {**GROUPED, "num_local_experts": 3}),
        ("GptOssModel", OSS),
        ("Qwen3NextModel", NEXT),
        ("FalconModel", {**FALCON, **NEW}),
        ("PhiModel", SMALL),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_base_models(kind, options, tmp_path):
    """No head, and names without the prefix that they have under one."""
    model = reference(kind, config_of(kind.removesuffix("Model"), options), tmp_path / "reference")
    ours = ch.load(tmp_path / "reference")
    ids, mask = batch(model.config, side="left")
    theirs = model(ids, attention_mask=mask.long(), position_ids=positions_of(mask)).last_hidden_state[mask]
    close(kind, ours.model(ids, mask).hidden[mask], theirs, HIDDEN)
    assert torch.equal(ours.model(ids, mask).logits, ours.model(ids, mask).hidden)
    for name, save in (("saved", ours), ("fresh", ch.Model(ours.model))):
        save.save(tmp_path / name)
        again, info = type(model).from_pretrained(
            tmp_path / name, output_loading_info=True, attn_implementation="eager"
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        read = again.eval()(
            ids, attention_mask=mask.long(), position_ids=positions_of(mask)
        ).last_hidden_state[mask]
        close(f"{name}, read back", read, theirs, 1e-6)


# Files that do not fit --------------------------------------------------------------------------------------


@pytest.mark.ledger("L3", "L6")
@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        ("Qwen3", {**GROUPED, "head_dim": 8}, "model.layers.1.self_attn.q_norm.weight"),
        (
            "Mixtral",
            {**GROUPED, "num_local_experts": 3},
            "model.layers.2.block_sparse_moe.experts.1.w3.weight",
        ),
        ("GptOss", OSS, "model.layers.1.mlp.experts.gate_up_proj"),
        ("GptOss", OSS, "model.layers.2.mlp.experts.down_proj_bias"),
        ("Qwen3Next", NEXT, "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        ("Qwen3Next", NEXT, "model.layers.1.self_attn.q_proj.weight"),
        ("Qwen3Next", NEXT, "model.layers.1.mlp.shared_expert.up_proj.weight"),
        ("GPTNeoX", SMALL, "gpt_neox.layers.0.attention.query_key_value.bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_and_an_unknown_tensor_are_named(kind, options, key, tmp_path):
    reference(f"{kind}ForCausalLM", config_of(kind, options), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    value = tensors.pop(key)
    save_file(tensors, tmp_path / "model.safetensors")
    layer = key.split("layers.")[1][0]
    with pytest.raises(CheckpointError, match=rf"no tensor fills decoder\.blocks\.{layer}\."):
        ch.load(tmp_path)
    save_file({**tensors, key: value, key + "_extra": value.clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"reads the tensor {key}_extra"):
        ch.load(tmp_path)
    save_file({**tensors, key: value[:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {key} has shape"):
        ch.load(tmp_path)


@pytest.mark.ledger("L3")
@pytest.mark.parametrize(
    ("kind", "options", "changes", "said"),
    [
        (
            "Llama",
            GROUPED,
            {"partial_rotary_factor": 0.5, "rope_parameters": None},
            "partial_rotary_factor 0.5",
        ),
        (
            "Gemma2",
            {**GROUPED, "head_dim": 10},
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention True",
        ),
        ("StableLm", GROUPED, {"qk_layernorm": True}, "qk_layernorm True"),
        ("Falcon", FALCON, {"alibi": True}, "alibi True"),
        ("Falcon", FALCON, {**NEW, "parallel_attn": False}, "not supported together"),
        ("Mixtral", {**GROUPED, "num_local_experts": 3}, {"num_local_experts": 0}, "num_local_experts 0"),
        ("GptOss", OSS, {"swiglu_alpha": 1.5}, 'swiglu_alpha "1.5": supported are 1.702, 1.0'),
        ("GptOss", OSS, {"swiglu_limit": 0.0}, "gated_clamp 0.0 must be above 0"),
        ("Qwen3Next", NEXT, {"hidden_act": "gelu"}, 'hidden_act "gelu": supported are silu'),
        (
            "Qwen3Next",
            NEXT,
            {"layer_types": ["sliding_attention"] * 2},
            r"layer_types \['sliding_attention'\]",
        ),
        ("Qwen3Next", NEXT, {"layer_types": FULL}, "1 layer_types for 2 layers"),
        ("Qwen3Next", NEXT, {"linear_num_key_heads": 3}, "value heads that are no multiple"),
        ("Qwen3Next", NEXT, {"linear_conv_kernel_dim": 1}, "kernel 1: it must be a whole number, 2 or more"),
        ("Qwen3Next", NEXT, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0"),
    ],
)
def test_what_cannot_be_said_is_refused(kind, options, changes, said, tmp_path):
    theirs = {**config_of(kind, options).to_dict(), "architectures": [f"{kind}ForCausalLM"], **changes}
    with pytest.raises(CheckpointError, match=said):
        ARCHITECTURES[theirs["model_type"]].read(theirs)


# Mixture of experts -----------------------------------------------------------------------------------------


@pytest.fixture
def mixtral(tmp_path):
    config = config_of(
        "Mixtral", {**GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2, "output_router_logits": True}
    )
    return reference("MixtralForCausalLM", config, tmp_path / "reference"), tmp_path


@pytest.mark.ledger("L6", "D5")
def test_every_token_visits_the_same_experts(mixtral):
    model, folder = mixtral
    ours = ch.load(folder / "reference")
    ids, mask = batch(model.config, side="left")
    positions = positions_of(mask)
    theirs = model(ids, attention_mask=mask.long(), position_ids=positions)
    with ch.record(ours.model, "blocks.*.feedforward.router") as seen:
        ours.model(ids, mask)
    for layer, routed in enumerate(theirs.router_logits):
        logits = seen[f"blocks.{layer}.feedforward.router"].flatten(0, 1)[mask.flatten()]
        close(f"router of layer {layer}", logits, routed[mask.flatten()], LOGITS)
        weights, chosen = ours.model.decoder.blocks[layer].feedforward.choose(logits)
        top, wanted = routed[mask.flatten()].softmax(-1).topk(2)
        assert torch.equal(chosen, wanted)
        close(f"weights of layer {layer}", weights, top / top.sum(-1, keepdim=True), 1e-6)


@pytest.mark.ledger("L6", "D5")
@pytest.mark.parametrize("padded", [False, True])
def test_the_balance_loss_and_its_router_gradients(mixtral, padded):
    model, folder = mixtral
    ours = ch.load(folder / "reference")
    ids, mask = batch(model.config)
    given = mask if padded else None
    theirs = model(
        ids,
        attention_mask=given.long() if padded else None,
        position_ids=positions_of(mask) if padded else None,
    )
    ours.model.train()
    ours.model(ids, given)
    loss = balance_loss(ours.model, given)
    close("balance loss", loss, theirs.aux_loss, 1e-5)
    close("as a function", loss, load_balancing_loss_func(theirs.router_logits, 6, 2, given), 1e-5)
    loss.backward()
    theirs.aux_loss.backward()
    mixtures = [part for part in ours.model.modules() if isinstance(part, Experts)]
    for layer, part in enumerate(mixtures):
        wanted = model.model.layers[layer].mlp.gate.weight.grad
        assert float(wanted.abs().max()) > 0
        close(f"router gradient of layer {layer}", part.router.weight.grad, wanted, GRADIENTS)


@pytest.mark.ledger("L6")
def test_fused_experts_are_read(mixtral):
    """Transformers 5 can write its experts as it holds them: one tensor for all."""
    model, folder = mixtral
    model.save_pretrained(folder / "fused", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(folder / "fused" / "model.safetensors")
    ids, _ = batch(model.config)
    plain, fused = ch.load(folder / "reference"), ch.load(folder / "fused")
    assert torch.equal(plain.model(ids).logits, fused.model(ids).logits)
    tensors = load_file(folder / "fused" / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    save_file({**tensors, name: tensors[name][:5].clone()}, folder / "fused" / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {name} has shape"):
        ch.load(folder / "fused")


def test_layers_that_skip_the_rotation_must_exist():
    with pytest.raises(ch.ConfigError, match="rope_skips names layer 3, and there are layers 0 to 2"):
        ch.ModelConfig(vocab_size=7, n_layers=3, positions="rope", rope_skips=(0, 3))
