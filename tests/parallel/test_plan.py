"""The planner: against real sharded ranks, against closed forms, against published runs, and bad input."""

from __future__ import annotations

import json
import os
import pathlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import planner as published
from torch.distributed.fsdp import fully_shard

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.learn.parallel import ParallelPlan
from clearhead.learn.parallel.division import MeshSizes, Work, read_mesh, stages_of, weights_of
from clearhead.learn.parallel.estimate import (
    DEVICES,
    Cluster,
    device_named,
    estimate,
    read_bytes,
    read_flops,
    read_link,
)
from clearhead.learn.parallel.planner import fits
from clearhead.learn.parallel.shards import local
from clearhead.learn.parallel.world import World, joined
from clearhead.run.kernels.lora import add_lora
from clearhead.run.quant.apply import NAMES, QuantPlan, quantize_model
from clearhead.variants.costs import LEARNING
from tests.parallel import forking

pytestmark = pytest.mark.ledger("I3")
ROOT = pathlib.Path(__file__).resolve().parents[2]
GIB = 2**30
H100 = DEVICES["h100"]
# Sizes that two ranks do not divide: 101 words, width 45, 75 columns, 9 positions and 3 heads of 15.
ODD = {"vocab_size": 101, "d_model": 45, "n_layers": 3, "n_heads": 3, "d_ff": 75, "max_positions": 9}
SHARDED = [
    ODD,
    {**ODD, "tie_embeddings": False, "positions": "rope", "d_head": 14, "bias": False, "norm": "rmsnorm"},
    {**ODD, "n_experts": 3, "n_active_experts": 1, "gated": True, "norm_position": "post"},
]


def planned(config: ch.ModelConfig, mesh: MeshSizes, **more):
    """The cost of a mesh for rows of 8 tokens, a row for each part of the batch."""
    work = Work(config, 8, mesh.rows, "float32", **more)
    return estimate(work, Cluster(H100, mesh.devices, 80e9, 50e9), mesh, 1)


def test_bytes_of_sharded_ranks_are_the_real_ones(tmp_path):
    """`fully_shard` on two gloo ranks: weights, gradients and moments of the first rank, byte by byte."""
    forking.perform(2, tmp_path / "log", record_bytes, SHARDED, tmp_path)
    first, second = (json.loads((tmp_path / f"bytes-{rank}.json").read_text()) for rank in (0, 1))
    for settings, real, other in zip(SHARDED, first, second):
        memory = planned(ch.ModelConfig(**settings), MeshSizes(shard=2)).memory
        assert real == {kind: getattr(memory, kind) for kind in real}
        assert other["weights"] < real["weights"], "the sizes were meant not to divide"


@pytest.mark.parametrize("name", sorted(set(ch.PRESETS) - {"gpt3"}))
def test_on_one_device_it_is_the_cost(name):
    config = ch.preset(name)
    counted = ch.cost(config, dtype="bfloat16")
    work = Work(config, counted.length, 1, "bfloat16")
    [stage] = stages_of(work, MeshSizes(), 1, 80e9)
    assert stage.total.whole == stage.total.stored == counted.parameters.total
    assert stage.total.kept == counted.memory.activations.total
    assert stage.total.matmuls + stage.total.head <= counted.flops.training


def test_layers_for_later_tokens_and_a_second_pass_are_counted():
    config = ch.ModelConfig(vocab_size=50, d_model=16, n_layers=1, n_heads=2, max_positions=9, n_mtp_layers=2)
    for mtp, passes in ((False, 1), (True, 1), (True, 2)):  # two passes keep what twice the rows do
        counted = ch.cost(config, dtype="bfloat16", batch=passes, mtp=mtp)
        work = Work(config, 9, 1, "bfloat16", mtp=mtp, passes=passes)
        [stage] = stages_of(work, MeshSizes(), 1, 80e9)
        assert stage.total.stored == counted.parameters.total
        assert stage.total.kept == counted.memory.activations.total
    for more in ({}, {"lora": 2, "precision": "float32"}):
        without, whole = (ch.plan(config, 1, mtp=mtp, **more).best.memory for mtp in (False, True))
        assert without.activations < whole.activations
    with pytest.raises(ClearheadError, match="tensor 2 does not divide MTP layers"):
        ch.plan(config, 2, mesh="tensor=2")


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "t5-small", "micro-vit"])
def test_ranks_of_tensor_have_all_weights_together(name):
    """Each rank has its share; what is copied is norms, positions, biases behind sums, and few key heads."""
    config, tensor = ch.preset(name), 2
    steps = ch.cost(config).steps
    shares = [weights_of(step, MeshSizes(tensor=tensor), config)[0] for step in steps]
    for step, share in zip(steps, shares):
        matrix = step.weights if step.parameters else 0
        assert share >= step.parameters / tensor
        if matrix and not step.name.startswith(("embedding", "head.transform")):
            assert share <= -(-matrix // tensor) + step.n * 2, step.name
    assert sum(shares) < 0.75 * ch.cost(config).parameters.total or config.d_model < 64


def test_fewer_key_heads_than_ranks_are_copied():
    config = ch.preset("llama-3-8b")
    [key] = [step for step in ch.cost(config).steps if step.name == "blocks.0.attention.k"]
    assert weights_of(key, MeshSizes(tensor=8), config)[0] == key.parameters // 8
    assert weights_of(key, MeshSizes(tensor=32), config)[0] == key.parameters // 8


def test_without_sequence_parallelism_every_rank_has_the_stream_and_the_logits():
    config, mesh = ch.preset("llama-3-8b"), MeshSizes(tensor=8)
    works = (Work(config, 8192, 1, sequence=divided) for divided in (True, False))
    with_it, without = (stages_of(work, mesh, 1, 80e9)[0] for work in works)
    assert without.total.full == pytest.approx(8 * with_it.total.full, rel=0.3)
    assert without.total.kept > with_it.total.kept
    assert without.all_logits == 8 * with_it.all_logits
    assert without.total.stored == with_it.total.stored


def test_experts_are_divided_and_the_rest_is_shared():
    config = ch.preset("micro-decoder").replace(n_experts=4, n_active_experts=2)
    mesh = MeshSizes(expert=4)
    for step in ch.cost(config).steps:
        computed, stored = weights_of(step, mesh, config)
        if ".experts." in step.name:
            assert computed == stored == step.parameters // 4
        else:
            assert computed == step.parameters
            assert stored <= -(-step.parameters // 4) + 3 * 32


def test_traffic_of_sharding_is_its_closed_form():
    """Weights are gathered twice in half precision, gradients scattered once in float32."""
    work = Work(ch.preset("llama-3-8b"), 8192, 64)
    found = estimate(work, Cluster(H100, 64, 80e9, 50e9), MeshSizes(shard=64), 1)
    parameters = ch.cost("llama-3-8b").parameters.total
    assert found.traffic["shard"] == pytest.approx(63 / 64 * parameters * (2 * 2 + 4))
    assert sum(found.traffic.values()) == found.traffic["shard"]


def test_bubble_is_its_closed_form():
    """A pipeline of p stages and m micro-batches waits (p - 1) of every m + p - 1 turns."""
    work = Work(ch.preset("llama-3-8b").replace(vocab_size=32), 8192, 16)
    found = estimate(work, Cluster(H100, 4, 80e9, 50e9), MeshSizes(pipeline=4), 1)
    share = found.time.bubble / (found.time.bubble + found.time.compute)
    assert share == pytest.approx(3 / 19)


@pytest.mark.parametrize("axis", ["shard", "tensor", "pipeline"])
def test_states_are_divided(axis):
    config = ch.preset("gpt2").replace(tie_embeddings=False, vocab_size=50_304)
    one, four = (
        estimate(Work(config, 1024, 8), Cluster(H100, n, 80e9, 50e9), mesh, 1).memory
        for n, mesh in ((1, MeshSizes()), (4, MeshSizes(**{axis: 4})))
    )
    least = {"pipeline": 0.4, "tensor": 0.26}.get(axis, 0.2501)  # the table of words is with one stage
    assert 0.25 <= four.optimizer / one.optimizer < least
    assert one.weights + one.gradients + one.optimizer == LEARNING["adamw"] * ch.cost(config).parameters.total


def test_more_checkpointing_keeps_less_and_takes_longer():
    modes = ("none", "selective", "full")
    found = [ch.plan("llama-3-8b", 64, mesh="shard=64", checkpointing=mode).best for mode in modes]
    assert found[0].memory.activations > found[1].memory.activations > found[2].memory.activations
    assert found[0].time.total < found[1].time.total < found[2].time.total
    assert found[0].mfu > found[2].mfu


def test_published_runs_are_predicted():
    """Memory within 5 % and time within 20 %, but for the runs that docs/parallel.md names."""
    lines = [published.line(run) for run in published.RUNS]
    time = [line["run"] for line in lines if abs(line["rate_error"]) > 0.20]
    memory = [
        line["run"] for line in lines if line["memory_error"] is not None and abs(line["memory_error"]) > 0.05
    ]
    assert len(lines) >= 30
    assert len(time) == 1 and "8B on 64 H100" in time[0]
    assert len(memory) == 3
    page = (ROOT / "docs" / "parallel.md").read_text()
    for line in lines:
        assert f"{line['predicted_memory']:.1f} |" in page, "run benchmarks/run.py planner --save"


def test_the_best_comes_first_and_fits():
    found = ch.plan("llama-3-8b", 16, "80GB", "400Gb", checkpointing="full", batch=64 * 8192)
    times = [mesh.time.total for mesh in found.meshes]
    assert times == sorted(times) and len(times) == 5
    assert all(mesh.fits and mesh.memory.total <= 80e9 and mesh.mesh.devices == 16 for mesh in found.meshes)
    assert found.fitting <= found.tried
    assert json.loads(json.dumps(found.to_dict()))["meshes"][0]["memory"]["total"] == found.best.memory.total
    assert MeshSizes(**tomllib.loads(found.best.recipe)["parallel"]) == found.best.mesh


def test_only_the_axes_asked_for_are_used():
    found = ch.plan("llama-3-8b", 16, checkpointing="full", axes=("data", "tensor"))
    assert all(mesh.mesh.shard == mesh.mesh.pipeline == mesh.mesh.context == 1 for mesh in found.meshes)


def test_sizes_are_chosen_by_memory():
    """Copies where they fit, as few shards of each as fit, all shards where nothing does."""
    work = Work(ch.preset("gpt2"), 1024, 8)
    for shards, memory in ((1, 4e9), (2, 2.4e9), (4, 1.8e9), (8, 1e9)):
        chosen = ParallelPlan().settled(8, lambda plan, memory=memory: fits(work, plan, memory))
        assert (chosen.data, chosen.shard) == (8 // shards, shards)
    assert ParallelPlan(shard=2).settled(8, lambda plan: False).data == 4
    assert ParallelPlan(tensor=2).settled(8).data == 4
    with pytest.raises(ClearheadError, match="asks for 3 processes"):
        ParallelPlan(tensor=3).settled(8)


def test_training_gathers_float32_and_leaves_the_stream_whole():
    """What `train` does takes more than what a trainer with both does."""
    work, mesh = Work(ch.preset("llama-3-8b"), 8192, 64, "bfloat16", "full"), MeshSizes(shard=32, tensor=2)
    cluster = Cluster(H100, 64, 80e9, 50e9)
    usual, trained = (estimate(one, cluster, mesh, 2) for one in (work, work.as_trained))
    assert trained.memory.activations > usual.memory.activations
    assert trained.memory.buffers > usual.memory.buffers
    assert trained.traffic["shard"] == pytest.approx(1.5 * usual.traffic["shard"])  # 12 bytes of each, not 8


def test_a_slower_link_favours_other_meshes():
    fast, slow = (
        ch.plan("llama-3-8b", 64, link=link, checkpointing="full", length=1024) for link in ("400Gb", "10Gb")
    )
    assert slow.best.time.total > fast.best.time.total
    assert slow.best.traffic["shard"] < fast.best.traffic["shard"]


def test_what_would_fit_does():
    with pytest.raises(ClearheadError) as error:
        ch.plan("llama-3-70b", 8)
    line = str(error.value)
    assert "no mesh of 8 devices fits 80.0 GB: the closest, " in line and "optimizer" in line
    devices = int(line.split("it fits with ")[1].split()[0])
    mode = line.rsplit("checkpointing ", 1)[1] if "checkpointing" in line else "none"
    assert devices > 8
    assert ch.plan("llama-3-70b", devices, checkpointing=mode).best.fits


def test_a_mesh_that_does_not_fit_is_explained_anyway():
    found = ch.plan("llama-3-70b", 8, mesh="tensor=8")
    assert not found.best.fits and found.fitting == 0
    assert found.notes[0].startswith("it does not fit: ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0}, "devices 0 must be 1 or more"),
        ({"memory": "80XB"}, 'memory "80XB" is not understood'),
        ({"memory": "-80GB"}, "write a number and a unit"),
        ({"link": "400gb"}, 'link "400gb" is not understood: write bits per second, such as 400Gb'),
        ({"link": "400"}, "is not understood"),
        ({"link": 0}, "is not understood"),
        ({"peak": "h1000x"}, 'no device is called "h1000x"'),
        ({"peak": "989"}, 'peak "989" is not understood'),
        ({"node": "eight"}, 'node "eight" is not understood'),
        ({"node": "8,fast"}, 'link "fast" is not understood'),
        ({"batch": 1000}, "batch 1000 is no multiple of the 1024 tokens of a row: use 1024"),
        ({"length": 5000}, "raise max_positions"),
        ({"precision": "bf16"}, 'precision "bf16" is not known (did you mean "bfloat16"?)'),
        ({"checkpointing": "some"}, "choose from none, selective, full"),
        ({"optimizer": "sgd"}, 'optimizer "sgd" is not known'),
        ({"precision": "float8", "peak": "a100"}, "a100 has no matmuls in float8"),
        ({"mesh": "tensor=8"}, "tensor 8 does not divide heads 12: choose from 1, 2, 3, 4, 6, 12"),
        ({"mesh": "shard=4"}, "mesh shard 4 has 4 devices, and there are 8"),
        ({"mesh": "shards=8"}, 'a mesh has no axis "shards" (did you mean "shard"?)'),
        ({"mesh": "shard 8"}, "write axes and sizes, such as shard=8,tensor=2"),
        ({"mesh": "expert=8"}, "expert 8 does not divide n_experts 1"),
        ({"mesh": "context=8", "length": 1000}, "context 8 must cut rows of 1000 into 16 equal chunks"),
        ({"mesh": "data=8", "batch": 3 * 1024}, "it has 3 rows: use a batch of 8192 tokens"),
        ({"devices": 13, "batch": 1024}, "no mesh of 13 devices divides 1 rows"),
        ({"top": 0}, "top 0 must be 1 or more"),
        ({"quantize": "int4"}, "quantize int4 is for weights under lora"),
        ({"lora": 8}, "lora 8 is planned on one device, and there are 8"),
        ({"lora": 8, "devices": 1, "lora_targets": ["qkv"]}, 'lora_targets "qkv" names no linear layer'),
        ({"axes": ["shard", "tensors"]}, 'a mesh has no axis "tensors" (did you mean "tensor"?)'),
    ],
)
def test_mistakes_are_one_line(options, words):
    given = {"devices": 8, **options}
    with pytest.raises(ClearheadError) as error:
        ch.plan("gpt2", **given)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_sizes_and_rates_are_read_as_people_write_them():
    assert read_bytes("80GB") == read_bytes("80 gb") == 80e9
    assert read_bytes("80GiB") == 80 * GIB
    assert read_link("400Gb") == read_link("400Gb/s") == read_link("400 Gbps") == read_link("50GB") == 50e9
    assert {read_flops(rate) for rate in ("989T", "989TFLOPS", 989e12, "9.89e14")} == {989e12}
    assert device_named("NVIDIA H100 80GB HBM3") is DEVICES["h100"]
    assert device_named("NVIDIA H100 PCIe") is DEVICES["h100 pcie"]
    assert device_named("NVIDIA A10G") is DEVICES["a10"] and device_named("Tesla T4") is DEVICES["t4"]
    assert device_named("NVIDIA GeForce RTX 4090") is device_named("rtx-4090")
    assert read_mesh("tensor=2, shard=8") == MeshSizes(shard=8, tensor=2)


def test_command(tmp_path, clearhead):
    picture = tmp_path / "plan.png"
    shown = clearhead("plan", "llama-3-8b", f"--devices 64 --memory 80GB --link 400Gb --plot {picture}").out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.rstrip().endswith("[parallel]\nshard = 32\ncontext = 2")
    assert picture.stat().st_size > 10_000
    [mesh] = clearhead("plan", "llama-3-8b", "--devices 16 --mesh shard=8,tensor=2 --json").json["meshes"]
    assert mesh["mesh"]["tensor"] == 2 and mesh["memory"]["total"] > 0


def test_command_takes_recipes_and_directories(tmp_path, clearhead):
    found = clearhead("plan", "char-gpt", "--devices 4 --json").json
    assert (found["length"], found["rows"]) == (256, 64)
    ch.Model(ch.Transformer(ch.preset("micro-decoder"))).save(tmp_path / "model")
    for name in ("model", "model/config.json"):
        found = clearhead("plan", tmp_path / name, "--devices 2 --json").json
        assert found["parameters"] == ch.cost("micro-decoder").parameters.total
    recipe = tmp_path / "recipe.toml"
    low_rank = 'lora = 2\nquantize = "int8"\naccumulate_schedule = [1, 3]'
    recipe.write_text(f'[model]\nbase = "micro-decoder"\n[train]\n{low_rank}\n')
    found = [clearhead("plan", recipe, f"--devices 1 --json{more}").json for more in ("", " --lora 0")]
    assert [one["rows"] for one in found] == [32 * 3] * 2  # the largest steps
    weights, whole = (one["meshes"][0]["memory"]["weights"] for one in found)
    assert weights < whole


def test_command_refuses_with_one_line(clearhead):
    for model in ("nothing", "none.toml"):
        clearhead.refuses("", "plan", model, "--devices 8")
    for wrong in ("--link 400MHz", "--peak gpu9000", "--mesh tensor=8", "--plot plan.bmp"):
        clearhead.refuses("", "plan", "gpt2", "--devices 8", wrong)
    clearhead.refuses("", "plan", "llama-3-70b", "--devices 4 --memory 1GB")


def test_more_processes_than_gpus_are_refused_by_name(monkeypatch):
    """They may train on the CPU: `train.device=cpu` is the way out."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ClearheadError, match=r"4 processes .* 1 GPUs: .* train.device=cpu"):
        World(rank=0, size=4).arranged(ParallelPlan(data=4), "cuda", lambda plan: True)


def local_bytes(tensors: Any) -> int:
    """Bytes that this rank has of each tensor."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def record_bytes(configs: list[dict[str, Any]], folder: Path) -> None:
    """Write bytes of weights, gradients and moments, for each config, to `bytes-RANK.json`."""
    torch.set_num_threads(1)
    found = []
    with joined():
        for settings in configs:
            torch.manual_seed(0)
            model = ch.Transformer(ch.ModelConfig(**settings))
            for block in model.decoder.blocks:
                fully_shard(block)
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.arange(8)[None] % 7).logits.square().mean().backward()
            optimizer.step()
            parameters, states = list(model.parameters()), optimizer.state.values()
            moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
            kinds = {
                "weights": parameters,
                "gradients": [parameter.grad for parameter in parameters],
                "optimizer": moments,
            }
            found.append({kind: local_bytes(tensors) for kind, tensors in kinds.items()})
    (folder / f"bytes-{os.environ['RANK']}.json").write_text(json.dumps(found))


# Low-rank updates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantize", "targets", "precision"),
    [("int4", ("q", "v"), "float32"), ("int8", ("all-linear",), "bfloat16"), (None, ("q", "v"), "float32")],
)
@pytest.mark.ledger("W8")
def test_memory_of_low_rank_updates_is_what_a_step_takes(quantize, targets, precision):
    """Within 5 % of the tensors that a step holds: weights, gradients, moments, and those for backward."""
    shape = {"d_model": 64, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2, "d_ff": 160, "vocab_size": 120}
    style = {"positions": "rope", "norm": "rmsnorm", "gated": True, "activation": "silu", "bias": False}
    config = ch.ModelConfig(**shape, **style, max_positions=64)
    size = {"length": 48, "batch": 3 * 48, "precision": precision}
    given = {"lora": 4, "lora_targets": targets, "quantize": quantize}
    planned = ch.plan(config, 1, **size, **given).best
    model = ch.Transformer(config)
    if quantize is not None:
        model = quantize_model(model, QuantPlan(NAMES[quantize], method="rtn")).model
    add_lora(model, 4, 16.0, targets)
    held = {x.untyped_storage().data_ptr(): x for x in (*model.parameters(), *model.buffers()) if x.numel()}
    kept: dict[int, torch.Tensor] = {}

    def keep(x):
        if x.untyped_storage().data_ptr() not in held:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    half = torch.autocast("cpu", getattr(torch, precision), enabled=precision != "float32")
    ids = torch.arange(planned.micro_rows * 48).view(-1, 48) % 120
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), half:
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())
    activations = sum(x.untyped_storage().nbytes() for x in kept.values())
    loss.backward()
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.numel() > 1]
    found = {
        "weights": sum(x.untyped_storage().nbytes() for x in held.values()),
        "gradients": sum(x.grad.nbytes for x in trained),
        "optimizer": sum(x.nbytes for x in moments),
        "activations": activations,
    }
    for kind, bytes in found.items():
        assert getattr(planned.memory, kind) == pytest.approx(bytes, rel=0.05), kind
