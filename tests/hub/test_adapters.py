"""PEFT adapters: theirs read exactly, ours read by them exactly, several at once, and refusals by name."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import clearhead as ch
from clearhead.app.cli import main
from clearhead.errors import CheckpointError
from clearhead.hub.peft import trained_updates, write_adapter
from clearhead.run.kernels.lora import add_lora
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.sequence import ServeOptions
from tests.later import later

peft = later("peft")

SIZES = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 64}
ENDS = {"pad_token_id": None, "eos_token_id": None, "bos_token_id": None}
BASES = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "phi3": transformers.Phi3Config(**LLAMA, **ENDS),
    "gpt2": transformers.GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=4, n_positions=64),
    "neox": transformers.GPTNeoXConfig(**{**SIZES, "num_attention_heads": 3}, intermediate_size=40),
    "bart": transformers.BartConfig(
        vocab_size=61, d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=64,
    ),
}  # fmt: skip
# Base, and what of PEFT's settings is not as usual.
ADAPTERS = [
    ("llama", {"target_modules": ["q_proj", "v_proj"], "r": 3, "lora_alpha": 7}),
    ("llama", {"target_modules": "all-linear", "r": 2, "use_rslora": True}),
    ("llama", {"target_modules": ["q_proj", "down_proj"], "r": 4, "rank_pattern": {"1.mlp.down_proj": 1}}),
    ("llama", {"target_modules": ["o_proj"], "r": 5, "alpha_pattern": {"o_proj": 3.5}, "lora_alpha": 16}),
    ("llama", {"target_modules": r".*\.1\.self_attn\.(k|q)_proj", "r": 2}),
    ("llama", {"target_modules": ["up_proj"], "layers_to_transform": [1], "r": 2}),
    ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 3, "lora_alpha": 5}),
    ("gpt2", {"target_modules": ["c_attn", "c_fc"], "r": 3, "fan_in_fan_out": True}),
    ("neox", {"target_modules": ["query_key_value", "dense_4h_to_h"], "r": 2, "lora_alpha": 3}),
    ("bart", {"target_modules": ["q_proj", "fc1"], "r": 2, "exclude_modules": ["encoder.layers.0.fc1"]}),
]  # fmt: skip
NAMED = [f"{number}-{base}" for number, (base, _) in enumerate(ADAPTERS)]


def drawn(model: torch.nn.Module, seed: int) -> None:
    """Give the updates numbers that matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


def base_model(kind: str, tmp_path) -> tuple[torch.nn.Module, ch.Model]:
    """One model of theirs, and ours loaded from it."""
    torch.manual_seed(0)
    classes = {"bart": transformers.AutoModelForSeq2SeqLM}
    theirs = classes.get(kind, transformers.AutoModelForCausalLM).from_config(BASES[kind]).eval()
    theirs.save_pretrained(tmp_path / "base")
    return theirs, ch.load(tmp_path / "base")


def inputs(kind: str) -> tuple[dict, dict]:
    ids = torch.arange(3, 17)[None]
    return (
        ({"input_ids": ids, "decoder_input_ids": ids[:, :9]}, {"ids": ids[:, :9], "source": ids})
        if kind == "bart"
        else ({"input_ids": ids}, {"ids": ids})
    )


@torch.no_grad()
@pytest.mark.ledger("P3", "H9")
@pytest.mark.parametrize(("kind", "settings"), ADAPTERS, ids=NAMED)
def test_an_adapter_of_theirs_is_the_same_here_and_back(kind, settings, tmp_path, differences):
    theirs, m = base_model(kind, tmp_path)
    plain = {name: weight.clone() for name, weight in m.model.state_dict().items()}
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(**settings))
    drawn(adapted, len(str(settings)))
    adapted.save_pretrained(tmp_path / "adapter")
    given, ours = inputs(kind)
    before, wanted = m.model(**ours).logits, adapted(**given).logits
    m.adapters.add("theirs", tmp_path / "adapter")
    m.adapters.use("theirs")
    assert differences.see("logits", m.model(**ours).logits, wanted) < 1e-5
    assert (wanted - before).abs().max() > 1e-3
    m.adapters.save("theirs", tmp_path / "back")
    back, stated = (
        load_file(tmp_path / "back/adapter_model.safetensors"),
        load_file(tmp_path / "adapter/adapter_model.safetensors"),
    )
    assert back.keys() == stated.keys() and all(torch.equal(back[name], stated[name]) for name in stated)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(adapted.unload()), tmp_path / "back").eval()
    assert torch.equal(again(**given).logits, wanted)  # ours, read by them
    m.adapters.use("theirs", merged=True)
    m.save(tmp_path / "merged")
    merged = again.merge_and_unload().state_dict()
    saved = type(theirs).from_pretrained(tmp_path / "merged").state_dict()
    assert max((saved[name] - merged[name]).abs().max() for name in merged) == 0
    m.adapters.use()
    assert all(torch.equal(weight, plain[name]) for name, weight in m.model.state_dict().items())
    assert torch.equal(m.model(**ours).logits, before)


# Base, rank and layers of ours.
OURS = [
    *[("llama", rank, ("q", "v", "down")[:rank]) for rank in (1, 2, 3)],
    *[("phi3", rank, ("q", "gate", "out")[:rank]) for rank in (1, 3)],
    *[("gpt2", 2, ("q",)), ("gpt2", 3, ("q", "k", "v", "up")), ("neox", 2, ("k", "out"))],
    *[("bart", 2, ("q", "up")), ("neox", 4, ("v", "up", "down"))],
]


@torch.no_grad()
@pytest.mark.ledger("P3", "H9")
@pytest.mark.parametrize(("kind", "rank", "targets"), OURS, ids=[f"{a}-{b}-{c}" for a, b, c in OURS])
def test_updates_trained_here_are_the_same_there(kind, rank, targets, tmp_path, differences):
    theirs, m = base_model(kind, tmp_path)
    add_lora(m.model, rank, 6.0, targets)
    for name, parameter in m.model.named_parameters():
        if name.endswith((".a", ".b")):
            parameter.data = (
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.4
            )
    given, ours = inputs(kind)
    architecture = m.description.architecture
    write_adapter(
        tmp_path / "adapter", trained_updates(m.model, 6.0), m.config, architecture, tmp_path / "base"
    )
    wanted = m.model(**ours).logits
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    assert differences.see("logits", adapted(**given).logits, wanted) < 1e-5
    m.save(tmp_path / "merged")
    merged, saved = adapted.merge_and_unload().state_dict(), type(theirs).from_pretrained(tmp_path / "merged")
    assert max((saved.state_dict()[name] - merged[name]).abs().max() for name in merged) == 0
    again = ch.load(tmp_path / "adapter")  # with the model that it names
    assert differences.see("read back", again.model(**ours).logits, wanted) < 2e-6


@torch.no_grad()
def test_several_at_once_add_up_and_are_served_and_merged(tmp_path, capsys, differences):
    theirs, m = base_model("llama", tmp_path)
    adapted = theirs
    for number, name in enumerate(("one", "two")):
        settings = peft.LoraConfig(**ADAPTERS[number][1])
        if number:
            adapted.add_adapter(name, settings)
        else:
            adapted = peft.get_peft_model(theirs, settings, adapter_name=name)
        drawn(adapted, 5)
    adapted.save_pretrained(tmp_path)
    given, ours = inputs("llama")
    m.special.clear()
    seqs, engine = {}, None
    for names in (("one",), ("two",), ("one", "two"), ()):
        adapted.base_model.set_adapter(list(names)) if names else adapted.base_model.disable_adapter_layers()
        for name in names:
            m.adapters.add(name, tmp_path / name)
        m.adapters.use(*names)
        assert differences.see(" ".join(names), m.model(**ours).logits, adapted(**given).logits) < 1e-5
        seqs[names] = m.generate(list(range(3, 17)), 12).ids
    assert len({tuple(ids) for ids in seqs.values()}) > 1
    updates = {name: m.adapters.scaled_matrices(name) for name in m.adapters.known}
    engine = ServeEngine(m, adapters=updates)
    waiting = {
        name: engine.submit(list(range(3, 17)), {"max_new_tokens": 12}, ServeOptions(adapter=name))
        for name in ("", "one", "two")
    }
    while engine.busy:
        engine.step()
    assert {name: seq.wait(0).ids for name, seq in waiting.items()} == {
        name: seqs[(name,) if name else ()] for name in waiting
    }
    stated = json.loads((tmp_path / "one/adapter_config.json").read_text())
    (tmp_path / "one/adapter_config.json").write_text(
        json.dumps({**stated, "base_model_name_or_path": "../base"})
    )
    main(["convert", str(tmp_path / "one"), str(tmp_path / "out")])
    m.adapters.use("one", merged=True)
    assert torch.equal(ch.load(tmp_path / "out").model(**ours).logits, m.model(**ours).logits)


STEM = "base_model.model."
BROKEN = {
    "use_dora": ({"use_dora": True}, {}, "has use_dora True: not supported"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, {}, r"has modules_to_save \['lm_head'\]: not"),
    "another kind": ({"peft_type": "IA3"}, {}, "has peft_type 'IA3': only LORA"),
    "pissa": ({"init_lora_weights": "pissa"}, {}, "has init_lora_weights 'pissa'"),
    "rank": ({"r": 5}, {}, r"has shapes \(3, 24\) and \(24, 3\), and the model and rank 5 need"),
    "huge rank": ({"r": 10**12}, {}, "rank 1000000000000 need"),
    "targets": ({"target_modules": ["q_proj"]}, {}, "does not name model.layers.0.self_attn.v_proj"),
    "no target": ({"target_modules": ["attn"]}, {}, "does not name model.layers.0.self_attn.q_proj"),
    "expression": ({"target_modules": "(("}, {}, r"has the expression '\(\('"),
    "slow": ({"target_modules": "(.*)*(.*)*(.*)*x"}, {}, "repeats a repetition"),
    "slow rank": ({"rank_pattern": {"((a|b+)c)+": 2}}, {}, "repeats a repetition"),
    "many": ({"target_modules": ".*.*.*.*.*.*.*x"}, {}, "more than 6 of them"),
    "excluded": ({"exclude_modules": 5}, {}, "has exclude_modules 5: they must be names"),
    "layers": ({"layers_to_transform": [0, "1"]}, {}, r"has layers_to_transform \[0, '1'\]: it must be"),
    "pattern": ({"layers_to_transform": [0], "layers_pattern": ["(("]}, {}, r"has the expression '\(\('"),
    "groups": ({"layers_to_transform": [0], "layers_pattern": "(a)"}, {}, "groups in it are not supported"),
    "pattern of ranks": ({"rank_pattern": {"((": 2}}, {}, r"has the expression '\(\('"),
    "huge factor": ({"lora_alpha": 10**400}, {}, "a factor in lora_alpha or alpha_pattern that is no number"),
    "whole numbers": ({}, {f"{STEM}model.layers.0.self_attn.q_proj.lora_A.weight": torch.int32},
                      "q_proj has numbers of int32: they must be floating-point"),
    "not finite": ({}, {f"{STEM}model.layers.0.self_attn.q_proj.lora_A.weight": torch.nan},
                   "q_proj holds NaN or infinite numbers"),
    "half of a pair": ({}, {f"{STEM}model.layers.0.self_attn.q_proj.lora_B.weight": None}, "only one of"),
    "another model": ({}, {f"{STEM}h.0.attn.lora_{x}.weight": 1.0 for x in "AB"},
                      "updates h.0.attn, which is no linear layer of this model"),
    "embedding": ({}, {f"{STEM}model.embed_tokens.lora_embedding_A": 1.0}, "supported are the low-rank"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "tensors", "said"), BROKEN.values(), ids=BROKEN)
def test_what_is_not_honoured_is_refused_by_name(settings, tensors, said, tmp_path):
    theirs, m = base_model("llama", tmp_path)
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(**ADAPTERS[0][1]))
    adapted.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    stored |= {
        name: torch.zeros(3, 24, dtype=kind) if isinstance(kind, torch.dtype) else torch.full((3, 24), kind)
        for name, kind in tensors.items()
        if kind
    }
    kept = {name: one for name, one in stored.items() if tensors.get(name, 1)}
    save_file(kept, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        m.adapters.add("broken", tmp_path / "adapter")
    assert not m.adapters.known
    with pytest.raises(CheckpointError, match=r'no adapter is called "other".*: there are none'):
        m.adapters.use("other")
