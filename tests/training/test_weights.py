"""Low-rank updates change nothing at first, are trained alone, and can be merged and taken out.

Averaged weights against sums written out.
"""

from __future__ import annotations

import copy
import json
from functools import partial

import pytest
import torch

import clearhead as ch
from clearhead.errors import CheckpointError, ConfigError, InputError
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.training.optim import make_optimizer
from clearhead.learn.training.run import rehearse
from clearhead.learn.training.weights import Ema, adapted_note, average
from clearhead.run.kernels.lora import LoraLinear, add_lora, merge, merged, unmerge
from clearhead.run.kernels.prepare import prepared
from clearhead.run.quant.apply import QuantPlan, dequantized, quantize_model
from clearhead.run.quant.layers import QuantizedLinear
from tests.harness import build, config, some_ids, worst

pytestmark = pytest.mark.ledger("H7", "H9")
MODELS = {
    "decoder": ({}, ("q", "v"), 4),
    "gated, every layer": ({"gated": True}, ("q", "k", "v", "out", "up", "gate", "down"), 14),
    "encoder-decoder": ({"family": "encoder-decoder"}, ("q", "v"), 12),
    "experts, no biases": ({"n_experts": 3, "bias": False}, ("up", "router"), 8),
}


def updated(changes: dict, targets: tuple[str, ...], rank: int = 3) -> tuple[ch.Transformer, ch.Transformer]:
    """A model, and the same with updates that are not zero."""
    plain = build(**changes)
    model = copy.deepcopy(plain)
    add_lora(model, rank, 6.0, targets)
    with torch.no_grad():
        for name, tensor in lora_state(model).items():
            tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return plain, model


def lora_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The update matrices alone, by name."""
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, LoraLinear)]
    return {f"{name}.{end}": getattr(part, end).detach() for name, part in parts for end in ("a", "b")}


def inputs(model: ch.Transformer) -> dict:
    both = model.config.encoder and model.config.decoder
    return {"ids": some_ids(), **({"source": some_ids(seed=5)} if both else {})}


@pytest.mark.parametrize(("changes", "targets", "count"), MODELS.values(), ids=MODELS)
def test_at_first_nothing_changes_and_only_updates_are_trained(changes, targets, count):
    plain = build(**changes)
    model = copy.deepcopy(plain)
    assert len(add_lora(model, 3, 6.0, targets)) == count
    given = inputs(model)
    assert torch.equal(model(**given).logits, plain(**given).logits)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == lora_state(model).keys() and len(trained) == 2 * count
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, TrainPlan(lr=0.01), torch.device("cpu"))
    for _ in range(2):  # at the first step A has no gradient, because B is zero
        model(**given).logits.logsumexp(-1).sum().backward()
        optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    idle = {name for name in trained - moved if ".experts." in name}  # an expert that no token visited
    assert moved == trained - idle and len(idle) < len(trained) / 2


def test_an_updated_layer_is_the_formula():
    layer = torch.nn.Linear(5, 4)
    lora = LoraLinear(layer, 2, 8.0)
    lora.b.data.normal_()
    x = torch.randn(7, 5)
    wanted = torch.stack([layer.weight @ row + layer.bias + 8.0 / 2 * lora.b @ (lora.a @ row) for row in x])
    assert worst(lora(x), wanted) < 1e-6
    assert worst(lora.weight, layer.weight + 4 * lora.b @ lora.a) < 1e-6


@pytest.mark.parametrize(("changes", "targets", "count"), MODELS.values(), ids=MODELS)
def test_merged_is_updated_and_unmerged_is_what_was(changes, targets, count, differences):
    plain, model = updated(changes, targets)
    given = inputs(model)
    before, state = model(**given).logits, {name: x.clone() for name, x in model.state_dict().items()}
    kept = merge(model)
    assert len(kept) == count
    gap = differences.see("merged", model(**given).logits / before.abs().max(), before / before.abs().max())
    assert gap < 1e-6
    assert worst(before, plain(**given).logits) > 0.01  # the updates do something
    kinds = [[(name, type(part)) for name, part in one.named_modules()] for one in (model, plain)]
    assert kinds[0] == kinds[1]
    assert list(model.state_dict()) == list(plain.state_dict())
    ch.Transformer(model.config).load_state_dict(model.state_dict())  # it saves and loads as any other
    unmerge(model, kept)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert torch.equal(model(**given).logits, before)
    kept = {name: x for name, x in model.state_dict().items() if name not in lora_state(model)}
    bare = {name.replace(".base.", "."): x for name, x in kept.items()}
    # The base was never touched.
    assert all(torch.equal(x, bare[name]) for name, x in plain.state_dict().items())


def test_merged_for_a_while():
    _, model = updated({}, ("q", "v"))
    with merged(model):
        assert not any(isinstance(part, LoraLinear) for part in model.modules())
    assert sum(isinstance(part, LoraLinear) for part in model.modules()) == 4
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == lora_state(model).keys()


def test_the_fast_copy_has_the_updates():
    _, model = updated({"gated": True}, ("q", "v", "up", "out"))
    with torch.inference_mode():
        assert worst(prepared(model)(some_ids()).logits, model(some_ids()).logits) < 1e-5


def test_a_new_head_can_be_trained_along():
    model = build(family="encoder", n_classes=3)
    add_lora(model, 2, 4.0, ("q",), also=("head.*",))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {*lora_state(model), "head.out.weight", "head.out.bias"}


def test_wrong_targets_and_ranks_say_what_is_right():
    model = ch.Transformer(config())
    line = r'"q_proj" names no linear layer.*: choose from down, k, out, q, up, v'
    with pytest.raises(InputError, match=line):
        add_lora(model, 2, 4.0, ("q_proj",))
    with pytest.raises(InputError, match="lora_targets is empty"):
        add_lora(model, 2, 4.0, ())
    with pytest.raises(InputError, match="choose 1 to 16"):
        add_lora(model, 17, 4.0, ("q",))
    assert all(parameter.requires_grad for parameter in model.parameters())  # nothing was frozen on the way
    names = add_lora(model, 2, 4.0, ("out",))
    assert "head.out" not in names  # in the blocks alone


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("experts", [0, 2])
def test_all_linear_follows_the_model(gated, experts):
    """Every matrix of attention and feed-forward has an update, the gate too; a router has none."""
    config = ch.ModelConfig(
        vocab_size=32, d_model=16, n_layers=2, n_heads=2, gated=gated, n_experts=experts or 0,
        **({"n_active_experts": 1} if experts else {}),
    )  # fmt: skip
    model = ch.Transformer(config)
    names = add_lora(model, 2, 4.0, ["all-linear"])
    wanted = {"q", "k", "v", "out", "up", "down"} | ({"gate"} if gated else set())
    assert {name.rpartition(".")[2] for name in names} == wanted
    assert len(names) == 2 * (4 + (len(wanted) - 4) * max(experts, 1))
    line = adapted_note(names, 2)
    assert line.startswith(f"low-rank updates of rank 2 in {len(names)} layers: ")
    assert ("gate" in line) is gated
    assert not any(letter.isdigit() for letter in line.partition(": ")[2])


def test_sft_lora_adapts_the_gate_and_its_adapter_opens_in_peft(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    chats = [{"prompt": f"say {word}", "completion": word} for word in "abcdefgh"]
    small = {"train.device": "cpu", "train.precision": "float32", "train.samples": 0, "train.steps": 2}
    shape = {"model.base": "llama-1b-like", "model.d_model": 32, "model.n_layers": 1, "model.n_heads": 2}
    more = {"model.n_kv_heads": 2, "model.d_ff": 64, "model.max_positions": 128, "data.max_length": 128}
    ch.train(chats, out=tmp_path / "base", settings={**small, **shape, **more, "data.task": "chat"})
    notes: list = []
    given = {**small, "train.steps": 4, "train.lora": 2, "model.base": str(tmp_path / "base")}
    done = ch.train(
        chats, recipe="sft-lora", out=tmp_path / "run", settings={**given, "data.max_length": 128},
        on_event=lambda event: notes.append(str(event)),
    )  # fmt: skip
    assert any(
        "low-rank updates of rank 2 in 7 layers" in line and "feedforward.gate" in line for line in notes
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    theirs = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
    targets = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert "gate_proj" in str(targets)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert worst(done.model.model(ids).logits, theirs(ids).logits) < 1e-4


# On quantized weights ---------------------------------------------------------------------------------------


@pytest.mark.ledger("W8")
@pytest.mark.parametrize("bits", [4, 8])
def test_updates_on_quantized_weights_have_the_gradients_of_the_dequantized_model(bits):
    small = quantize_model(build(gated=True, bias=bits == 4), QuantPlan(bits, method="rtn")).model
    models = {"quantized": small, "dequantized": dequantized(small)}
    found = {}
    for name, model in models.items():
        torch.manual_seed(0)
        add_lora(model, 3, 6.0, ["all-linear"])
        with torch.no_grad():
            for tensor in lora_state(model).values():
                tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        logits = model(some_ids()).logits
        logits.square().mean().backward()
        found[name] = {key: part.grad for key, part in model.named_parameters() if part.requires_grad}
        found[name]["logits"] = logits.detach()
    assert found["quantized"].keys() == found["dequantized"].keys() and len(found["quantized"]) > 20
    for key, wanted in found["dequantized"].items():
        assert worst(found["quantized"][key], wanted) <= 1e-6, key
    frozen = [part for part in small.modules() if isinstance(part, QuantizedLinear)]
    assert frozen and not any(part.requires_grad for layer in frozen for part in layer.parameters())


@pytest.mark.ledger("W8")
def test_a_run_on_int4_weights_learns_resumes_and_leaves_an_adapter_of_the_base(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    chats = [{"prompt": f"say {word}", "completion": word} for word in "abcdefgh"]
    given = {"train.device": "cpu", "train.samples": 1, "data.max_length": 96, "generate.max_new_tokens": 4}
    shape = {"model.base": "llama-1b-like", "model.d_model": 32, "model.n_layers": 1, "model.n_heads": 2}
    more = {"model.n_kv_heads": 2, "model.d_ff": 64, "model.max_positions": 128, "data.task": "chat"}
    base = tmp_path / "base"
    ch.train(chats, out=base, settings={**given, **shape, **more, "train.steps": 10})
    given |= {"model.base": str(base), "train.lora": 2, "train.quantize": "int4", "train.lr": 0.02}
    given |= {"train.steps": 30, "train.log_every": 1, "train.save_every": 15}
    events: list = []

    def run(name: str, stop=lambda: False):
        train = partial(ch.train, recipe="sft-lora", out=tmp_path / name, settings=given, stop=stop)
        return train(chats, on_event=events.append)

    once, count = run("once"), iter(range(9))
    losses = [event.loss for event in events if hasattr(event, "norm")]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert any("frozen weights" in getattr(event, "line", "") for event in events)
    assert run("twice", lambda: next(count) == 2).reason == "stopped"
    twice = ch.train(resume=tmp_path / "twice")
    for name, tensor in once.model.model.state_dict().items():
        assert torch.equal(tensor, twice.model.model.state_dict()[name]), name
    # The adapter opens on the unquantized base, and there adds what the run has learned.
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    theirs = PeftModel.from_pretrained(model, tmp_path / "once" / "adapter").eval()
    ours, ids = ch.load(base).model, torch.tensor([[1, 2, 3, 4]])
    rounded = dequantized(quantize_model(ours, QuantPlan(4, method="hqq")).model)
    weights = dict(once.model.model.named_parameters())
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            if weight.ndim == 2:
                weight += weights[name] - dict(rounded.named_parameters())[name]
        assert worst(ours(ids).logits, theirs(ids).logits) < 1e-4
    planned = rehearse(chats, recipe="sft-lora", out=tmp_path / "plan", settings=given).sizes
    small = quantize_model(ch.load(base).model, QuantPlan(4, method="hqq")).model
    add_lora(small, 2, 16.0, ch.read_recipe("sft-lora").train.lora_targets)
    tensors = {x.data_ptr(): x for x in (*small.parameters(), *small.buffers()) if x.numel()}.values()
    learned = sum(x.numel() for x in small.parameters() if x.requires_grad)
    held = sum(x.numel() * x.element_size() for x in tensors) + 12 * learned  # gradients and two moments
    assert planned["bytes of weights, gradients and moments"] == pytest.approx(held, rel=0.05)
    with pytest.raises(ConfigError, match=r"set train.lora too"):
        ch.read_recipe(None, {"train.quantize": "int4"})


def stepped(model: ch.Transformer, step: int) -> None:
    """Other weights."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_a_moving_average_is_the_sum_by_hand(decay):
    model = build()
    ema, name = Ema(model, decay), "decoder.blocks.0.attention.q.weight"
    weight = dict(model.named_parameters())[name]
    wanted = weight.detach().double()
    for step in range(1, 31):
        stepped(model, step)
        ema.update(model)
        kept = min(decay, step / (step + 9))
        wanted = kept * wanted + (1 - kept) * weight.detach().double()
    assert worst(ema.weights[name].double(), wanted) < 1e-5


def test_applied_weights_are_the_average_and_go_away_again():
    model, ids = build(), some_ids()
    ema = Ema(model, 0.5)
    stepped(model, 1)
    ema.update(model)
    before, own = {name: x.clone() for name, x in model.state_dict().items()}, model(ids).logits
    expected = build()
    tied = {"head.out.weight": ema.weights["decoder.embedding.front.tokens.weight"]}
    expected.load_state_dict({**model.state_dict(), **ema.weights, **tied})
    with ema.applied(model):
        assert torch.equal(model(ids).logits, expected(ids).logits)
        assert worst(model(ids).logits, own) > 0.01
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(model(ids).logits, own)
    with pytest.raises(ch.InputError), ema.applied(model):
        model(ids + 1000)
    assert torch.equal(model(ids).logits, own)  # an error inside leaves nothing behind


def test_a_moving_average_goes_on_from_its_state():
    models = [build(), build()]
    emas = [Ema(model, 0.9) for model in models]
    for step in range(6):
        for model, ema in zip(models, emas):
            stepped(model, step)
            ema.update(model)
        if step == 2:
            saved = {name: tensor.clone() for name, tensor in emas[1].state().items()}
            emas[1] = Ema(models[0], 0.9)
            emas[1].restore(saved)
    assert all(torch.equal(weight, emas[1].weights[name]) for name, weight in emas[0].weights.items())
    with pytest.raises(CheckpointError, match="updates"):
        emas[0].restore(emas[0].weights)


def test_frozen_and_half_precision_weights():
    model = build().bfloat16()
    model.decoder.embedding.requires_grad_(False)
    ema = Ema(model, 0.999)
    assert "decoder.embedding.front.tokens.weight" not in ema.weights
    # Small moves are not rounded away.
    assert {weight.dtype for weight in ema.weights.values()} == {torch.float32}
    ema.update(model)
    with ema.applied(model):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_an_average_of_checkpoints_is_their_mean():
    states = [ch.Transformer(config()).state_dict() for _ in range(3)]
    found = average(dict(state) for state in states)
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, torch.stack([state[name] for state in states]).double().mean(0).float())
    ch.Transformer(config()).load_state_dict(found)
    assert average([{"count": torch.tensor(3)}, {"count": torch.tensor(4)}])["count"] == 4
    assert average([{"w": torch.ones(1, dtype=torch.bfloat16)}] * 2)["w"].dtype == torch.bfloat16


def test_checkpoints_that_do_not_fit_together():
    with pytest.raises(CheckpointError, match="b is not in all of them"):
        average([{"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}])
    with pytest.raises(CheckpointError, match=r"a has shapes \(2,\) and \(3,\)"):
        average([{"a": torch.ones(2)}, {"a": torch.ones(3)}])
    with pytest.raises(CheckpointError, match="no checkpoint to average"):
        average([])
