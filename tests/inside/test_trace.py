"""The trace: replayed by hand in float64, priced by the cost model, named and shaped by a frozen list."""

from __future__ import annotations

import io
import json
import math
import pathlib

import pytest
import torch
from PIL import Image
from rich.console import Console

import clearhead as ch
from clearhead import InputError
from clearhead.app.commands.prompts import steps_table
from clearhead.inside.trace_words import LEGEND
from tests.harness import GROUPED_EXPERTS, LATENT, PATCHES, build, scramble, some_ids, word_tokenizer, worst
from tests.inside.replay import Replay
from tests.test_cost import ODD

pytestmark = pytest.mark.ledger("F1", "F2", "F3", "I1")
SNAPSHOT = pathlib.Path(__file__).parent / "trace_snapshot.json"
GROUPED = {"n_kv_heads": 2, "positions": "rope", "norm": "rmsnorm", "gated": True, "bias": False}
GROUPED |= {"activation": "silu"}
CLAMPED = {"gated_clamp": 0.4, "gated_shift": 1.0, "activation": "quick_gelu"}
SANDWICH = GROUPED | {"activation": "gelu_tanh", "norm_position": "sandwich", "norm_unit_offset": True}
SANDWICH |= {"embedding_scale": 4.0, "attention_softcap": 5.0, "logit_softcap": 3.0, "window": (3, None)}
SANDWICH |= {"d_head": 6, "attention_scale": 0.3}
BERT = {"family": "encoder", "norm_position": "post", "embedding_norm": True, "n_types": 2, "norm_eps": 1e-12}
T5 = {"family": "encoder-decoder", "positions": "relative", "norm": "rmsnorm", "bias": False}
T5 |= {"attention_scale": 1.0, "activation": "relu", "relative_buckets": 8, "relative_max_distance": 16}
OUTPUT = {"norm_position": "output", "qk_norm": "full", "residual_scale": 0.5, "logit_scale": 0.5}
QK_NORM = {"family": "encoder", "qk_norm": "head", "positions": "rope", "n_classes": 3, "pooler": "tanh"}
REPEATED = {"family": "encoder", "attention": "blocks(2, 1, 1, 1, counted=blocks, repeat=2, full=5)"}
SHAPES = {
    "gpt2": {"activation": "gelu_tanh"},
    "bert": BERT,
    "t5": T5,
    "vit": {**PATCHES, "family": "encoder", "image_size": (8, 12), "n_classes": 3},
    "llama": GROUPED | {"tie_embeddings": False},
    "gemma2": SANDWICH,
    "parallel": {"parallel": True, "positions": "rope", "rope_fraction": 0.5, "rope_layout": "interleaved"},
    "parallel-two-norms": {"parallel": True, "parallel_norms": 2, "positions": "alibi"},
    "experts": GROUPED | {"n_experts": 4, "n_active_experts": 2},
    "clamped": GROUPED | CLAMPED,
    "experts-clamped": GROUPED | CLAMPED | {"n_experts": 4, "bias": True, "router_bias": True},
    "experts-shared": GROUPED
    | {"n_experts": 4, "d_expert": 5, "d_shared_expert": 6, "dense_layers": (0,), "attention_gate": True},
    "experts-softmax-first": {"n_experts": 3, "router_order": "softmax_topk", "router_renormalise": False},
    "output-norm": {**OUTPUT, "d_value": 6},
    "qk-norm": {**QK_NORM, "d_embedding": 8},
    "gate-of-heads": GROUPED | {"head_gate": 5, "qkv_bias": True},
    "repeated": {**REPEATED, "head": "tagger", "n_classes": 3, "head_layer": True},
}


VECTORS = {"input": "vectors", "d_input": 3, "n_classes": 2}
FRAMES = {"input": "frames", "d_input": 3, "family": "encoder-decoder"}
MEMORY = "gated-delta(key_heads=2, value_heads=6, d_key=5, d_value=3)"
TRACED = {**ODD, "gated-delta": ODD["gated-heads"].replace(attention=("full", MEMORY, "full"))}
STATES = ("mamba2(6, groups=2, d_head=3, d_state=5)", "none", "conv(2, bias=True)")
TRACED["state-space"] = ODD["gated-heads"].replace(attention=STATES, feedforward_skips=(2,))
HYBRIDS = (
    "hybrid(6, groups=2, d_head=3, d_state=5, attention_out=0.7, norm=groups, norm_first=True, bias=True)",
    "hybrid(6, groups=2, d_head=3, d_state=5, norm=none, mixer_out=1.2, k_scale=0.3)",
    "full",
)
TRACED["hybrid"] = ODD["clamped"].replace(attention=HYBRIDS, positions="rope", gate_scale=1.3, up_scale=0.7)
TRACED["latent"] = ODD["gated-heads"].replace(**{**LATENT, **GROUPED_EXPERTS, "attention": "latent(6, 5)"})


def given(model: ch.Transformer, length: int = 8, source: int = 5) -> dict:
    """What `trace` takes: for two stacks both rows."""
    config = model.config

    def row(plan, tokens, seed):
        if plan.input == "tokens":
            return some_ids(1, tokens, seed, plan.vocab_size)[0].tolist()
        patches = plan.input == "patches"
        shape = (1, config.n_channels, *config.image_size) if patches else (tokens, config.d_input)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    if config.family == "encoder-decoder":
        return {"given": row(config.encoder, source, 1), "target": row(config.decoder, length, 2)}
    return {"given": row(model.main.spec, length, 1)}


def inputs(model: ch.Transformer, asked: dict) -> tuple[torch.Tensor, dict]:
    """The same as a forward pass takes it."""

    def row(x):
        return torch.tensor([x]) if isinstance(x, list) else x[None] if x.ndim == 2 else x

    both = "target" in asked
    return row(asked["target" if both else "given"]), {"source": row(asked["given"])} if both else {}


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit"])
def test_names_and_shapes_are_frozen(name):
    model = build(**SHAPES[name])
    seen = ch.trace(model, **given(model))
    frozen = json.loads(SNAPSHOT.read_text())[name]
    assert [[step.name, step.symbols, list(step.shape)] for step in seen.steps] == frozen


@pytest.mark.parametrize("chained", [False, True], ids=["recorded", "chained"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_steps_replayed_by_hand_in_float64_give_the_values(name, chained, differences):
    model = build(**SHAPES[name])
    seen = ch.trace(model, **given(model))
    replay = Replay(model, seen, chained)
    found = replay.run()
    assert list(found) == [step.name for step in seen.steps]
    wrong = {step: value for step, value in found.items() if value > 1e-5}
    assert not wrong
    ids, more = inputs(model, given(model))
    logits = next(replay.made[step.name] for step in seen.steps if "logits" in step.taps)
    assert differences.see("logits", logits.float(), model(ids, **more).logits) <= 1e-5
    assert differences.see("walk", seen.logits, model(ids, **more).logits) <= 1e-5


def test_a_wrong_step_would_be_noticed():
    model = build()
    seen = ch.trace(model, **given(model))
    with torch.no_grad():
        model.main.blocks[1].feedforward.up.bias[0] += 1e-3
    wrong = {name for name, value in Replay(model, seen, chained=False).run().items() if value > 1e-5}
    assert wrong == {"blocks.1.feedforward.up"}


@pytest.mark.parametrize("name", [*ODD, *(name for name in ch.PRESETS if name.startswith("micro"))])
def test_totals_are_those_of_the_cost_model(name):
    config = ODD.get(name) or ch.PRESETS[name]
    model = scramble(ch.Transformer(config)).eval()
    seen = ch.trace(model, **given(model, 12, 7))
    images = config.input == "patches"
    both = config.family == "encoder-decoder"
    length, source = None if images and not both else 12, 7 if both and not images else None
    figures = ch.cost(config, length, batch=1, source_length=source)
    assert seen.parameters == figures.parameters.total == sum(p.numel() for p in model.parameters())
    assert seen.flops == figures.flops.forward.total

    # Each step of the cost model belongs to exactly one step here.
    taken = [cost for step in seen.steps for cost in step.costs]
    assert sorted(taken) == sorted(step.name for step in figures.steps)
    priced = {step.name: step for step in figures.steps}
    for step in seen.steps:
        assert step.parameters == sum(priced[cost].parameters for cost in step.costs)
        assert step.flops == sum(priced[cost].forward for cost in step.costs)
    for part in ("blocks.0", "blocks.0.attention", "head"):  # and to the part that it belongs to
        inside = [row for row in seen.rows(depth=3) if row.name == part]
        names = [part] if part != "blocks.0.attention" or config.parallel else [part, f"{part}_residual"]
        if inside and not (part == "blocks.0.attention" and config.parallel):
            steps = [step for name in names for step in figures.within(name)]
            assert inside[0].flops == sum(step.forward for step in steps)
            # This pass does not run MTP layers: their weights are counted with its last step.
            unread = figures.within("mtp") if part == "head" else []
            assert inside[0].parameters == sum(step.parameters for step in [*steps, *unread])
    assert seen.difference <= 1e-5


def sizes(model: ch.Transformer, step, length: int, source: int) -> dict[str, int]:
    """What each letter stands for at a step, from the config."""
    config = model.config
    plan = config.encoder if step.path[0] == "encoder" else config.decoder or config.encoder
    T = source if plan.prefix else length
    if plan.input == "patches":
        T = config.n_patches + config.class_token
    frames = T
    if plan.input == "frames":
        T = -(-T // config.conv_stride)
    known = {"B": 1, "1": 1, "2": 2, "T": T, "S": T, "Tin": frames, "V": config.vocab_size}
    known |= {"D": config.d_model, "W": config.d_embedding, "I": config.d_input}
    known |= {"H": plan.n_heads, "K": plan.n_kv_heads, "E": plan.d_head, "Ev": plan.d_value}
    known |= {"F": plan.d_ff, "Fx": plan.d_expert, "Fs": plan.d_shared_expert}
    known |= {"Kd": 2, "Hd": 6, "Ed": 5, "Vd": 3, "Cd": 2 * 2 * 5 + 6 * 3}  # of MEMORY
    known |= {"Cl": 6, "Cq": 5}  # of latents
    known |= {"X": config.n_experts, "A": config.n_active_experts}
    known |= {"R": int(plan.d_head * config.rope_fraction)}
    known |= {"patch": config.patch_size, "channels": config.n_channels}
    known["C"] = 2 if config.head == "span" else config.n_classes
    choices = known["C"] if config.n_classes else config.vocab_size
    known["top"] = min(3, T if config.head == "span" else choices)
    if config.image_size:
        known |= {"height": config.image_size[0], "width": config.image_size[1], "N": config.n_patches}
    part = next((path for path in step.path if path.endswith((".attention", ".cross"))), None)
    if part is not None:
        kept = len(plan.heads_of(part))
        known |= {"H": kept, "K": kept * plan.n_kv_heads // plan.n_heads}
    if part is not None and part.endswith(".cross"):
        encoder = config.encoder
        known["S"] = config.n_patches + config.class_token if encoder.input == "patches" else source
        known["S"] = -(-source // config.conv_stride) if encoder.input == "frames" else known["S"]
    return known


@pytest.mark.parametrize("name", list(TRACED))
def test_symbols_say_the_shapes_and_taps_the_values(name):
    model = scramble(ch.Transformer(TRACED[name])).eval()
    asked = given(model, 12, 7)
    seen = ch.trace(model, **asked, top=3)
    for step in seen.steps:
        known = sizes(model, step, 12, 7)
        axes = [axis.split("·") for axis in step.symbols.split()]
        sized = [[int(letter) if letter.isdigit() else known[letter] for letter in axis] for axis in axes]
        assert tuple(map(math.prod, sized)) == step.shape, step.name
        assert tuple(step.value.shape) == step.shape
        assert step.bytes == step.value.numel() * step.value.element_size()
        assert step.why.endswith(".") and step.title and step.formula
        assert "{" not in step.formula and "None" not in step.formula
    assert set(seen.legend) <= set(LEGEND)
    assert len({step.name for step in seen.steps}) == len(seen.steps)

    ids, more = inputs(model, asked)
    with torch.no_grad(), ch.record(model, "*") as recorded:
        model(ids, **more)
    tapped = [tap for step in seen.steps for tap in step.taps]
    assert sorted(tapped) == sorted(tap for tap in ch.tap_names(TRACED[name]) if ".experts." not in tap)
    for step in seen.steps:
        for tap in step.taps:
            assert worst(step.value, recorded[tap]) <= 1e-5, tap
    if TRACED[name].n_experts:
        config, experts = TRACED[name], "blocks.0.feedforward.experts"
        before = "gate_clamped" if config.gated_clamp else "gate" if config.gated else "up"
        ends = {"pre": before, "post": "gated" if config.gated else "activated", "out": "down"}
        for tap, step in ends.items():
            each = [recorded[f"{experts}.{number}.{tap}"] for number in range(config.n_experts)]
            assert worst(seen[f"{experts}.{step}"].value, torch.cat(each)) <= 1e-5


def test_the_tree_has_sums_at_every_level():
    model = build(family="encoder-decoder")
    seen = ch.trace(model, **given(model))
    assert [row.name for row in seen.rows(depth=1)] == ["encoder", "decoder", "head"]
    titles = [row.title for row in seen.rows(depth=2) if row.name.startswith("blocks")]
    assert titles == ["block 0", "block 1"]
    sublayers = [row.name for row in seen.rows(depth=3) if row.name.startswith("blocks.1.")]
    assert sublayers == ["blocks.1.attention", "blocks.1.cross", "blocks.1.feedforward"]
    assert [row.step for row in seen.rows(depth=4) if row.step is not None] == list(seen.steps)
    for level in (1, 2):
        every = seen.rows(depth=level)
        rows = [row for row in every if row.level == level or (row.step is not None and row.level < level)]
        for figure in ("parameters", "flops", "bytes", "seconds"):
            total = sum(getattr(row, figure) for row in rows)
            assert total == pytest.approx(getattr(seen, figure), rel=1e-12)
    opened = {row.name for row in seen.rows(depth=2, layer=1) if row.level == 4}
    assert opened == {step.name for step in seen.steps if "blocks.1." in step.name}
    for call, says in (
        (lambda: seen.rows(depth=5), "4 all steps"),
        (lambda: seen.rows(layer=2), "0 to 1"),
        (lambda: seen["norms"], "norm"),
    ):
        with pytest.raises(InputError, match=says):
            call()


def test_each_decoding_step_is_shown_as_the_cache_makes_it():
    model = build(family="encoder-decoder")
    m = ch.Model(model, special={"eos": 12, "decoder_start": 3})
    source = some_ids(1, 5)
    seen = ch.trace(m, source[0].tolist(), top=4)
    cache, token, written = ch.Cache(), torch.tensor([[3]]), [3]
    for row in seen.predictions:
        with torch.no_grad():
            out = model(token, source=source if row.position == 0 else None, cache=cache)
        probabilities = out.logits[0, -1].softmax(-1)
        best = probabilities.topk(4)
        assert [choice.id for choice in row.candidates] == best.indices.tolist()
        shares = [choice.probability for choice in row.candidates]
        assert shares == pytest.approx(best.values.tolist(), abs=1e-5)
        assert row.chosen.id == best.indices[0]
        assert row.chosen.probability == pytest.approx(float(best.values[0]), abs=1e-5)
        written.append(row.chosen.id)
        token = best.indices[:1][None]
    assert [str(token) for token in written[:-1]] == list(seen.tokens)
    assert [step.name for step in seen.steps].count("encoder.norm") == 1
    forced = ch.trace(m, source[0].tolist(), target=[3, 7, 1])
    assert [row.chosen.id for row in forced.predictions[:2]] == [7, 1]
    shares = model(torch.tensor([[3, 7, 1]]), source=source).logits.softmax(-1).detach()
    chosen = [row.chosen.probability for row in forced.predictions[:2]]
    assert chosen == pytest.approx([float(shares[0, 0, 7]), float(shares[0, 1, 1])])


@pytest.mark.parametrize(
    ("choices", "at", "spread"),
    [
        ({"n_classes": 3}, ["class"], lambda logits: logits.softmax(-1)),
        ({"n_classes": 1}, ["class"], lambda logits: logits.sigmoid()),
        ({"head": "tagger", "n_classes": 3}, None, lambda logits: logits.softmax(-1)[0]),
        ({"head": "span"}, ["begins", "ends"], lambda logits: logits.softmax(1)[0].T),
        ({}, None, lambda logits: logits.softmax(-1)[0]),
        ({"head": "embedding", "normalise": True}, [], None),
        ({"head": "none"}, [], None),
    ],
)
def test_every_head_says_what_it_finds_likely(choices, at, spread):
    model = build(family="encoder", **choices)
    ids = some_ids(1)[0].tolist()
    seen = ch.trace(model, ids, top=2)
    assert [row.at for row in seen.predictions] == ([str(token) for token in ids] if at is None else at)
    if spread is not None:
        best = spread(model(torch.tensor([ids])).logits).topk(1 if choices.get("n_classes") == 1 else 2)
        for row, values, numbers in zip(seen.predictions, best.values.tolist(), best.indices.tolist()):
            assert [choice.id for choice in row.candidates] == numbers
            assert [choice.probability for choice in row.candidates] == pytest.approx(values, abs=1e-6)


def test_what_is_kept_and_what_is_plain():
    model = build(n_layers=1).train()
    seen = ch.trace(model, [1, 2, 3], keep_values=False)
    assert model.training and all(step.value is None for step in seen.steps)
    plain = json.loads(json.dumps(seen.to_dict(), allow_nan=False))
    assert [step["name"] for step in plain["steps"]] == [step.name for step in seen.steps]
    assert plain["totals"]["flops"] == seen.flops
    assert plain["totals"]["seconds"] == sum(step["seconds"] for step in plain["steps"])
    kept = ch.trace(model, [1, 2, 3])
    for step in (kept["blocks.0.attention.pattern"], kept["head.out"]):
        assert step.peek.mean == pytest.approx(step.value.mean().item(), abs=1e-6)
        assert step.peek.std == pytest.approx(step.value.std(correction=0).item(), abs=1e-6)
        assert (step.peek.min, step.peek.max) == (step.value.min().item(), step.value.max().item())
        assert list(step.peek.first) == step.value.flatten()[:5].tolist()
    scores = kept["blocks.0.attention.scaled"].value.tril()
    seen_scores = torch.cat([scores[:, :, t, : t + 1].flatten() for t in range(3)])
    # The mean is that of the scores which are not hidden.
    assert kept["blocks.0.attention.masked"].peek.mean == pytest.approx(seen_scores.mean().item(), abs=1e-6)
    half = ch.trace(build(n_layers=1).bfloat16(), [1, 2, 3])
    assert half["head.out"].dtype == "bfloat16" and half["head.out"].value.dtype == torch.float32
    assert 2 * half["head.out"].bytes == kept["head.out"].bytes


@pytest.mark.parametrize(
    ("choices", "asked", "says"),
    [
        ({}, {"given": [1], "top": 0}, "1 or more"),
        ({}, {"given": []}, "empty"),
        ({}, {"given": "text"}, "no tokenizer"),
        ({}, {"given": [99]}, "vocab"),
        ({}, {"given": [1], "target": [2]}, "leave it out"),
        ({}, {"given": [1], "pair": "b"}, "leave it out"),
        (VECTORS, {"given": "text"}, "numbers"),
        (VECTORS, {"given": [[1.0, 2.0]]}, "numbers"),
        (FRAMES, {"given": torch.zeros(4, 3)}, "give target"),
        (SHAPES["vit"], {"given": torch.zeros(1, 3, 5, 5)}, "size"),
        (SHAPES["vit"], {"given": "nowhere.png"}, "nowhere.png"),
    ],
)
def test_mistakes_are_said_in_one_line(choices, asked, says):
    with pytest.raises(ch.ClearheadError, match=says) as error:
        ch.trace(build(**choices), **asked)
    assert "\n" not in str(error.value)


WORDS = word_tokenizer(["[UNK]", "the", "[cat]", "[b]", "sat"], "[UNK]")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """A model directory of each kind, and an image."""
    root = tmp_path_factory.mktemp("trace")
    for name in ("gpt2", "t5"):
        special = {"eos": 12, "decoder_start": 3} if name == "t5" else {}
        ch.Model(build(**SHAPES[name]), WORDS, special=special).save(root / name)
    ch.Model(build(**SHAPES["vit"]), labels=("cat", "[b]", "dog")).save(root / "vit")
    Image.new("RGB", (30, 20), (200, 30, 90)).save(root / "image.png")
    return {path.stem: str(path) for path in root.iterdir()}


def test_the_command_prints_a_table_and_json(folders, clearhead):
    text = "the [cat] [b] sat"
    body = clearhead("trace", folders["gpt2"], text, "--json").json
    seen = ch.trace(ch.load(folders["gpt2"]), text)
    assert [step["name"] for step in body["steps"]] == [step.name for step in seen.steps]
    assert [step["name"] for step in body["steps"][:2]] == ["tokenize", "ids"]
    assert body["tokens"] == text.split()
    assert body["totals"]["flops"] == seen.flops == seen.cost.flops.forward.total
    assert seen["tokenize"].value.tolist() == [[0, 3], [4, 9], [10, 13], [14, 17]]

    shown = clearhead("trace", folders["gpt2"], text, "--layer 1 --why").out
    assert "[cat]" in shown
    assert shown.count("softmax(scores)") == 1
    assert "How well each query fits each key." in " ".join(shown.split())
    assert seen.predictions[-1].chosen.label in shown and f"{seen.parameters:,}" in shown
    shown = clearhead("trace", folders["gpt2"], text, "--depth 1").out
    assert "decoder" in shown and "block 0" not in shown
    shown = clearhead("trace", folders["t5"], text, "--target", "sat the").out
    assert all(word in shown for word in ("encoder", "decoder", "cross", "token by token", "position bias"))
    shown = clearhead("trace", folders["vit"], folders["image"]).out
    assert all(word in shown for word in ("pixels", "patches", "class token", "[b]"))


@pytest.mark.parametrize("width", [80, 125, 200])
def test_the_table_fits_the_terminal(width, folders):
    seen = ch.trace(ch.load(folders["gpt2"]), "the [cat]")
    console = Console(width=width, force_terminal=True, file=io.StringIO(), color_system=None)
    console.print(steps_table(seen, seen.rows(), width, why=width > 150))
    lines = console.file.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    assert any("split heads, q" in line for line in lines)
    assert any(f"{seen.parameters:,}" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gpt2", ""], "the text is empty"),
        (["gpt2", "the", "--layer", "7"], "layers are 0 to 1"),
        (["gpt2", "the", "--depth", "0"], "4 all steps"),
        (["gpt2", "the", "--target", "sat"], "leave it out"),
        (["t5", "the", "--pair", "sat"], "leave it out"),
        (["vit", "the cat"], "the cat"),
        (["image", "the"], "is a file and no GGUF file"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, says, folders, clearhead):
    clearhead.refuses(says, "trace", folders[arguments[0]], *arguments[1:])
