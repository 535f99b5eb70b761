"""MTP layers in files of DeepSeek-V3, GLM-4-MoE and Qwen3-Next: drafts as by hand, written back as they were.

transformers skips these tensors. The reference is what the paper (arXiv 2412.19437, section 2.2) and servers
compute: the norms of embedding and state, side by side, one projection, a layer of transformers, a norm and
the model's own output layer.
"""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

import clearhead as ch
from tests.parity.harness import LOGITS, close, config_of, reference
from tests.parity.test_decoders import DELTA, FULL, GROUPED, GROUPS, LATENT, NEXT, SPARSE, TIED

LAYERS = 2  # of the model; the reference has more, which are the blocks of the MTP layers
CASES = {
    "DeepseekV3": dict(LATENT | GROUPS, first_k_dense_replace=1),
    "Glm4MoeLite": dict(LATENT | TIED),
    "Glm4Moe": dict(GROUPED | SPARSE, use_qk_norm=True, head_dim=8, num_key_value_heads=2),
    "Qwen3Next": dict(NEXT, layer_types=DELTA + FULL + FULL),
}


def with_head(kind, folder, depths=1):
    """Save a model of two layers with MTP layers; return the model of all of them that it is made of."""
    options = dict(CASES[kind], num_hidden_layers=LAYERS + depths)
    whole = reference(f"{kind}ForCausalLM", config_of(kind, options), folder)
    tensors, D = load_file(folder / "model.safetensors"), whole.config.hidden_size
    generator = torch.Generator().manual_seed(7)
    apart, more, parts = kind == "Qwen3Next", {}, []
    names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    names = names if apart else ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    shapes = ((D, 2 * D), (D,), (D,), (D,))
    for last in (f"model.layers.{LAYERS + depth}" for depth in range(depths)):
        prefix = "mtp" if apart else last
        own = {
            f"{prefix}.{name}.weight": torch.randn(shape, generator=generator)
            * (0.2 if len(shape) > 1 else 1)
            for name, shape in zip(names, shapes)
        }
        parts.append([own[f"{prefix}.{name}.weight"] for name in names])
        more |= own
        if apart:
            tensors = {name.replace(last, "mtp.layers.0"): tensor for name, tensor in tensors.items()}
        else:
            table = tensors["model.embed_tokens.weight"]
            more[f"{last}.embed_tokens.weight"] = table.clone()
            more[f"{last}.shared_head.head.weight"] = tensors.get("lm_head.weight", table).clone()
    save_file({**tensors, **more}, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": depths}
    for key in ("layer_types", "mlp_layer_types"):
        if settings.get(key):
            settings[key] = settings[key][:LAYERS]
    (folder / "config.json").write_text(json.dumps(settings))
    return whole, parts


def deeper(whole, depth, parts, states, ids, offset):
    """The states of the next depth: of each state with the token so many places later."""
    (project, token_norm, hidden_norm, norm), eps = parts, whole.config.rms_norm_eps

    def rms(x, weight):
        return F.rms_norm(x, x.shape[-1:], weight + offset, eps)

    T = ids.shape[1] - 1 - depth
    tokens = whole.model.embed_tokens(ids[:, 1 + depth :])
    x = torch.cat([rms(tokens, token_norm), rms(states[:, :T], hidden_norm)], -1)
    x, positions = x @ project.T, torch.arange(T)[None]
    x = whole.model.layers[LAYERS + depth](
        x,
        attention_mask=torch.full((1, 1, T, T), float("-inf")).triu(1),
        position_embeddings=whole.model.rotary_emb(x, positions),
        position_ids=positions,
    )
    return rms(x[0] if isinstance(x, tuple) else x, norm)


@torch.no_grad()
@pytest.mark.ledger("L6", "W2")
@pytest.mark.parametrize(("kind", "depths"), [*((kind, 1) for kind in CASES), ("DeepseekV3", 5)])
def test_the_layers_of_a_file_draft_and_are_written_back(kind, depths, tmp_path):
    whole, parts = with_head(kind, tmp_path, depths)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    m = ch.load(tmp_path)
    ids = torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(3))
    ours, states = m.model(ids, mtp=True), theirs.model(ids).last_hidden_state
    assert m.config.n_mtp_layers == len(ours.mtp) == depths
    close("logits", ours.logits, theirs(ids).logits, LOGITS)
    for depth, (own, found) in enumerate(zip(parts, ours.mtp)):
        states = deeper(whole, depth, own, states, ids, float(kind == "Qwen3Next"))
        drafts = m.model.head(found[:, : states.shape[1]], None)
        close(f"drafts {depth}", drafts, whole.lm_head(states), LOGITS)
    m.save(tmp_path / "saved")
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "saved"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert settings["num_nextn_predict_layers"] == depths
    if kind == "Qwen3Next":
        with pytest.raises(ch.InputError, match="cannot take a rejected token back"):
            m.generate([5, 6, 7], 4, draft="mtp")
    else:
        assert m.generate([5, 6, 7], 24, draft="mtp").ids == m.generate([5, 6, 7], 24).ids


def test_more_layers_than_a_family_has_are_saved_under_our_own_names(tmp_path):
    """Qwen3-Next has one."""
    with_head("Qwen3Next", tmp_path)
    config = ch.load(tmp_path).config.replace(n_mtp_layers=2)
    m = ch.Model(ch.Transformer(config))
    m.save(tmp_path / "saved")
    saved, ours = ch.load(tmp_path / "saved").model.state_dict(), m.model.state_dict()
    assert saved.keys() == ours.keys() and all(torch.equal(saved[name], ours[name]) for name in ours)


@torch.no_grad()
@pytest.mark.parametrize("change", ["another table", "another block", "none"])
def test_a_layer_that_cannot_be_ours_is_carried(change, tmp_path):
    """Its own embedding, a block unlike the model's; and a key without tensors, as transformers saves it."""
    with_head("DeepseekV3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "another table":
        tensors[f"model.layers.{LAYERS}.embed_tokens.weight"] += 1
    elif change == "another block":
        del tensors[f"model.layers.{LAYERS}.mlp.gate.weight"]
    else:
        tensors = {n: value for n, value in tensors.items() if not n.startswith(f"model.layers.{LAYERS}.")}
    save_file(tensors, tmp_path / "model.safetensors")
    m = ch.load(tmp_path)
    assert m.config.n_mtp_layers == 0
    m.save(tmp_path / "saved")
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert tensors.keys() == after.keys() and all(torch.equal(tensors[name], after[name]) for name in after)
