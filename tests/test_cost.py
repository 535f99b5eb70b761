"""The cost model against real models: built on the meta device, counted by torch, measured byte by byte."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from clearhead import (
    Cache,
    ConfigError,
    FixedCache,
    InputError,
    ModelConfig,
    Transformer,
    WindowCache,
    attending,
    train,
)
from clearhead.core.config import StackSpec
from clearhead.learn.training import optim
from clearhead.run.kernels.training import join_projections
from clearhead.variants.caches import LayerState
from clearhead.variants.costs import Cost, attention_matrix_bytes, cost
from clearhead.variants.presets import PRESETS, preset
from tests.harness import GROUPED_EXPERTS, LATENT

BATCH, LENGTH, SOURCE = 2, 12, 7

small = ModelConfig(vocab_size=23, d_model=32, n_layers=3, n_heads=4, max_positions=24)
encoder = small.replace(family="encoder")
both = small.replace(family="encoder-decoder")
image = encoder.replace(
    input="patches", image_size=(8, 12), patch_size=4, n_channels=2, class_token=True, n_classes=5
)
ODD: dict[str, ModelConfig] = {
    "plain": small,
    "grouped-query": small.replace(
        n_kv_heads=2, positions="rope", norm="rmsnorm", gated=True, activation="silu", bias=False
    ),
    "multi-query": small.replace(n_kv_heads=1, tie_embeddings=False, rope_fraction=0.5, positions="rope"),
    "value-width": small.replace(d_value=12, d_head=4),
    "windows": small.replace(window=(4, None, 8)),
    "alibi": small.replace(positions="alibi"),
    "alibi-both-sides": encoder.replace(positions="alibi", window=(4, None, None)),
    "sinusoidal": small.replace(positions="sinusoidal", embedding_scale=5.6),
    "relative": small.replace(positions="relative"),
    "no-positions": small.replace(positions="none"),
    "post-norm": small.replace(norm_position="post", activation="relu"),
    "sandwich": small.replace(norm_position="sandwich", norm="rmsnorm"),
    "output-norm": small.replace(norm_position="output"),
    "parallel": small.replace(parallel=True),
    "parallel-two-norms": small.replace(parallel=True, parallel_norms=2, norm="rmsnorm"),
    "softcap": small.replace(attention_softcap=10.0, logit_softcap=20.0),
    "qk-norm-head": small.replace(qk_norm="head", positions="rope"),
    "qk-norm-full": small.replace(qk_norm="full", norm="rmsnorm"),
    "relu2": small.replace(activation="relu2"),
    "relu-gated": small.replace(activation="relu", gated=True, feedforward_bias=False),
    "quick-gelu": small.replace(activation="quick_gelu"),
    "clamped": small.replace(gated=True, gated_clamp=0.5, gated_shift=1.0, activation="silu"),
    "shifted-quick-gelu": small.replace(gated=True, gated_shift=1.0, activation="quick_gelu"),
    "factorised": small.replace(d_embedding=8),
    "factorised-tokens": small.replace(d_embedding=8, project_tokens=True, pooler_bias=False),
    "factorised-encoder": encoder.replace(d_embedding=8, embedding_norm=True, n_types=2),
    "factorised-untied": small.replace(d_embedding=8, tie_embeddings=False),
    "experts": small.replace(n_experts=4, n_active_experts=2),
    "experts-gated": small.replace(n_experts=5, n_active_experts=3, gated=True, router_order="softmax_topk"),
    "experts-clamped": small.replace(
        n_experts=4,
        gated=True,
        gated_clamp=0.5,
        gated_shift=1.0,
        activation="quick_gelu",
        router_bias=True,
    ),
    "experts-shared": small.replace(
        n_experts=4, d_expert=24, d_shared_expert=20, gated=True, dense_layers=(1,), activation="silu"
    ),
    "experts-shared-grouped-layers": small.replace(
        n_experts=3, d_shared_expert=20, layer_groups=2, dense_layers=(2,), bias=False
    ),
    "gated-heads": small.replace(attention_gate=True),
    "gated-heads-normed": small.replace(
        **{"attention_gate": True, "n_kv_heads": 2, "positions": "rope", "rope_fraction": 0.5},
        **{"qk_norm": "head", "norm": "rmsnorm", "qkv_bias": False},
    ),
    "smeared": small.replace(smear_gate=5, bigrams=7),
    "pairs": small.replace(bigrams=9, positions="rope"),
    "skips": small.replace(input_skips=True, mirror_skips=True),
    "skips-mirrored": small.replace(mirror_skips=True, n_layers=4, norm="rmsnorm"),
    "values": small.replace(value_residual=True, value_embeddings=(0, 2)),
    "values-grouped": small.replace(value_residual=True, n_kv_heads=2, positions="rope", input_skips=True),
    "gate-of-heads": small.replace(head_gate=5),
    "gate-of-heads-grouped": small.replace(head_gate=3, n_kv_heads=2, positions="rope", bias=False),
    "two-stacks-gated-heads": both.replace(attention_gate=True, pruned_heads={"blocks.0.cross": (1,)}),
    "sink": small.replace(attention_sink=True),
    "sink-grouped-capped-window": small.replace(
        attention_sink=True, attention_softcap=5.0, n_kv_heads=2, window=3, positions="rope"
    ),
    "two-stacks-sink": both.replace(attention_sink=True, pruned_heads={"blocks.0.cross": (1,)}),
    "experts-grouped": small.replace(**GROUPED_EXPERTS),
    "latent": small.replace(**{**LATENT, "attention": "latent(6, 5)"}, n_kv_heads=4),
    "latent-grouped-experts": small.replace(
        **{**LATENT, **GROUPED_EXPERTS, "attention": ("latent(6)", "full", "full")},
        **{"d_value": 6, "n_kv_heads": 4, "dense_layers": (2,), "bias": False},
    ),
    "routed": small.replace(depth_capacity=0.5, n_layers=4),
    "routed-rope": small.replace(depth_capacity=(0.3, 1.0, 1.0), positions="rope", n_kv_heads=2),
    "routed-alibi-window": small.replace(depth_capacity=(1.0, 0.25, 0.5), positions="alibi", window=2),
    "routed-encoder": encoder.replace(depth_capacity=0.5, norm="rmsnorm"),
    "shared-layers": small.replace(layer_groups=2),
    "looped": small.replace(loop=(0, 1, 2)),
    "mtp": small.replace(n_mtp_layers=2),
    "shared-experts": small.replace(layer_groups=1, n_experts=3),
    "pruned": small.replace(pruned_heads={"blocks.0.attention": (0, 2), "blocks.2.attention": (1,)}),
    "pruned-groups": small.replace(n_kv_heads=2, pruned_heads={"blocks.1.attention": (2, 3)}),
    "two-stacks": both.replace(n_encoder_layers=2, n_layers=1, n_encoder_heads=8, d_head=8, d_encoder_ff=48),
    "two-stacks-grouped": both.replace(n_kv_heads=2, d_value=4, norm_position="post"),
    "two-stacks-pruned": both.replace(
        pruned_heads={"encoder.blocks.1.attention": (0,), "blocks.2.cross": (1, 3)}
    ),
    "two-stacks-shared": both.replace(layer_groups=2, n_encoder_layers=1),
    "two-tables": both.replace(share_embeddings=False, source_vocab_size=31),
    "two-tables-untied": both.replace(share_embeddings=False, tie_embeddings=False),
    "two-stacks-relative": both.replace(
        positions="relative", norm="rmsnorm", bias=False, attention_scale=1.0
    ),
    "captions": both.replace(input="patches", image_size=(8, 8), patch_size=4, d_embedding=16),
    "speech": both.replace(input="frames", d_input=6, conv_stride=2, conv_kernel=5, positions="sinusoidal"),
    "mlm-narrow": encoder.replace(tie_embeddings=False, head_bias=False),
    "lm-transform": small.replace(head_transform=True, activation="relu"),
    "pooler": encoder.replace(n_classes=3, pooler="tanh"),
    "mean-pooling": encoder.replace(n_classes=3, pooling="mean"),
    "embedding": encoder.replace(head="embedding", pooler="relu", pooling="mean"),
    "tagger": encoder.replace(head="tagger", n_classes=4),
    "span": encoder.replace(head="span"),
    "span-layer": encoder.replace(head="span", head_layer=True, activation="silu"),
    "headless": encoder.replace(head="none"),
    "decoder-classifier": small.replace(n_classes=3),
    "image": image,
    "image-without-patch-bias": image.replace(patch_bias=False, embedding_norm=True),
    "image-mean": image.replace(class_token=False, pooling="mean", positions="sinusoidal"),
    "vectors": encoder.replace(input="vectors", d_input=6, n_classes=2),
    "vectors-causal": small.replace(input="vectors", d_input=6, head="tagger", n_classes=2),
    "frames": encoder.replace(input="frames", d_input=6, n_classes=2),
    "frames-stride-3": encoder.replace(
        input="frames", d_input=6, conv_kernel=5, conv_stride=3, head="tagger", n_classes=2
    ),
}
HYBRIDS = (
    "hybrid(3, 3, 6, 5, attention_in=1.2, mixer_in=0.9, conv_bias=False)",
    "hybrid(norm=none, conv_bias=False)",
)
SCALED = {"positions": "rope", "gated": True, "gate_scale": 1.3, "up_scale": 0.7, "bias": False}
HYBRID = small.replace(n_layers=2, attention=HYBRIDS, **SCALED)  # activations are not counted to the byte
ALL = {**PRESETS, **ODD, "hybrid": HYBRID}


def meta_model(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def inputs(
    config: ModelConfig, plan: StackSpec, length: int, device: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    if plan.input == "tokens":
        return torch.randint(plan.vocab_size, (BATCH, length), device=device)
    if plan.input == "patches":
        return torch.randn(BATCH, config.n_channels, *config.image_size, device=device, dtype=dtype)
    return torch.randn(BATCH, length, config.d_input, device=device, dtype=dtype)


def run(model: Transformer, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    config = model.config
    source = (
        inputs(config, config.encoder, SOURCE, device, dtype) if config.family == "encoder-decoder" else None
    )
    return model(inputs(config, model.main.spec, LENGTH, device, dtype), source=source).logits


def priced(config: ModelConfig, dtype: str = "float32") -> Cost:
    """The cost of what `run` does."""
    main, one_image = (
        config.decoder or config.encoder,
        config.encoder is not None and config.encoder.input == "patches",
    )
    return cost(
        config,
        None if main.input == "patches" else LENGTH,
        BATCH,
        dtype,
        SOURCE if config.family == "encoder-decoder" and not one_image else None,
    )


@pytest.mark.ledger("I1")
@pytest.mark.parametrize("name", [name for name in ALL if name != "gpt-oss-120b"])  # 20b has all of its parts
@pytest.mark.slow
def test_parameters_are_those_of_the_model(name: str) -> None:
    config = ALL[name]
    model, steps = meta_model(config), cost(config).steps
    assert cost(config).parameters.total == sum(p.numel() for p in model.parameters())
    assert sum(step.parameters for step in steps) == cost(config).parameters.total

    counted: set[int] = set()
    for step in steps:  # and each step has those of its module
        fresh = {id(p): p.numel() for p in owned(model, step.name) if id(p) not in counted}
        assert step.parameters == sum(fresh.values()), step.name
        counted |= set(fresh)


def owned(model: Transformer, name: str) -> list[nn.Parameter]:
    """The parameters of the part of `model` that a step names; none where the step is arithmetic alone."""
    part: nn.Module = model.main
    first, _, rest = name.partition(".")
    if first == "head" or (first == "encoder" and model.decoder is not None):
        part, name = getattr(model, first), rest
    if first == "mtp":
        layer, _, name = rest.partition(".")
        part = model.mtp[int(layer)]
    pieces = name.split(".")
    if pieces[0] == "blocks":
        part, pieces = part.layers()[int(pieces[1])], pieces[2:]
    if "experts" in pieces:
        return [p for expert in part.feedforward.experts for p in getattr(expert, pieces[-1]).parameters()]
    for piece in pieces:
        part = getattr(part, piece, nn.Module())
    return (
        [part]
        if isinstance(part, nn.Parameter)
        else list(part.parameters())
        if isinstance(part, nn.Module)
        else []
    )


@pytest.mark.ledger("I1")
def test_a_token_meets_its_experts_and_no_others() -> None:
    config = ODD["experts-gated"]
    figures = cost(config).parameters
    expert = sum(p.numel() for p in meta_model(config).main.blocks[0].feedforward.experts[0].parameters())
    assert figures.active == figures.total - config.n_layers * 2 * expert
    assert cost(small).parameters.active == cost(small).parameters.total


def shorter(config: ModelConfig, layers: int) -> ModelConfig:
    """Return the config with its first layers alone, and with what it says of each."""
    each = {
        name: value[:layers]
        for name, value in vars(config).items()
        if isinstance(value, tuple) and len(value) == config.n_layers
    }
    return config.replace(n_layers=layers, **each)


@pytest.mark.ledger("I1")
@pytest.mark.parametrize("name", ALL)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    # Layers of presets are all alike, or alternate, and counting is slow.
    config = ALL[name] if name in ODD or ALL[name].n_layers <= 2 else shorter(ALL[name], 2)
    if config.n_experts > 8:  # real numbers, in billions
        config = config.replace(n_experts=5, d_model=64, vocab_size=100)
    # Which expert a token visits depends on real numbers, and of a small model they come quicker than none.
    device = "cpu" if config.n_experts or config.d_model <= 64 else "meta"
    model = Transformer(config) if device == "cpu" else meta_model(config)
    with attending(model, "eager"):
        with FlopCounterMode(display=False) as forward:
            out = run(model, device)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
    figures = priced(config).flops
    assert figures.forward.total == forward.get_total_flops()
    assert figures.backward.total == backward.get_total_flops()
    assert figures.training == figures.forward.total + figures.backward.total
    assert figures.forward_per_token * figures.tokens == pytest.approx(figures.forward.total)


@pytest.mark.ledger("I1")
def test_flops_by_part_are_those_of_the_modules() -> None:
    model = meta_model(small)
    with attending(model, "eager"), FlopCounterMode(display=False) as counter:
        run(model, "meta")
    counts = counter.get_flop_counts()
    figures = priced(small)
    for part in ("attention", "feedforward"):
        measured = sum(
            sum(counts[f"Transformer.decoder.blocks.{layer}.{part}"].values())
            for layer in range(small.n_layers)
        )
        assert getattr(figures.flops.forward, part) == measured
    assert sum(step.forward for step in figures.within("blocks.1")) == sum(
        counts["Transformer.decoder.blocks.1"].values()
    )
    assert figures.flops.forward.head == sum(counts["Transformer.head"].values())


def bytes_kept(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all the storages that autograd keeps of a model as `train` runs it, without the parameters."""
    model = Transformer(config)
    join_projections(model)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in parameters:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    narrow = torch.autocast("cpu", dtype, enabled=dtype is not torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), narrow:
        run(model, "cpu")
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.ledger("I1")
@pytest.mark.parametrize("name", [*ODD, *(name for name in PRESETS if name.startswith("micro"))])
def test_activations_are_the_bytes_that_autograd_keeps(name: str) -> None:
    memory = priced(ALL[name]).memory
    assert memory.activations.total + memory.copies == pytest.approx(
        bytes_kept(ALL[name], torch.float32), rel=0.01
    )


# LayerNorm reads what a product returned: on a CPU in half precision; the figures are those of a GPU.
NARROW_NORMS = {"output-norm", "qk-norm-head", "captions"} | {name for name in ODD if "factorised" in name}


@pytest.mark.ledger("I1")
@pytest.mark.filterwarnings("ignore:mkldnn")
@pytest.mark.parametrize("name", [name for name in ODD if name not in NARROW_NORMS])
def test_activations_in_half_precision(name: str) -> None:
    """They are those of a run under autocast, with the copies that it keeps of the weights."""
    memory = priced(ODD[name], "bfloat16").memory
    assert memory.activations.total + memory.copies == pytest.approx(
        bytes_kept(ODD[name], torch.bfloat16), rel=0.02
    )


@pytest.mark.ledger("I1")
def test_the_loss_keeps_log_probabilities() -> None:
    logits = torch.randn(BATCH * LENGTH, small.vocab_size, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        nn.functional.cross_entropy(logits, torch.zeros(BATCH * LENGTH, dtype=torch.long))
    assert priced(small).memory.loss == max(x.untyped_storage().nbytes() for x in kept)


def held(cache: Cache, cross: bool = False) -> int:
    layers = cache.cross if cross else cache.layers
    return sum(x.untyped_storage().nbytes() for keys in layers.values() for x in keys.tensors())


@pytest.mark.ledger("I1", "M5")
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "grouped-query",
        "multi-query",
        "value-width",
        "latent",
        "latent-grouped-experts",
        "hybrid",
        "pruned",
        "pruned-groups",
        "windows",
        "two-stacks-grouped",
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cache_bytes_are_those_that_the_caches_hold(name: str, dtype: str) -> None:
    config = ALL[name]
    model = Transformer(config).to(getattr(torch, dtype)).eval()
    memory = priced(config, dtype).memory
    fixed, growing, ring = (
        FixedCache(config, BATCH, LENGTH, getattr(torch, dtype)),
        Cache(reserve=LENGTH),
        WindowCache(reserve=LENGTH),
    )
    assert memory.kv_cache == held(fixed)
    source = torch.zeros(BATCH, SOURCE, dtype=torch.long) if config.family == "encoder-decoder" else None
    with torch.no_grad():
        for cache in (growing, ring):
            model(torch.zeros(BATCH, LENGTH, dtype=torch.long), source=source, cache=cache)
    assert memory.kv_cache == held(growing)
    assert memory.window_cache == held(ring)
    assert memory.cross_cache == held(growing, cross=True)
    assert memory.weights == sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_counts_what_the_trainer_allocates(dtype: str, tmp_path, monkeypatch) -> None:
    """Weights, gradients and moments are float32 in every precision."""
    (tmp_path / "text.txt").write_text("one two three four five six seven eight\n" * 40)
    made, right = [], optim.make_optimizer

    def make_optimizer(*given):
        made.append(right(*given))
        return made[-1]

    monkeypatch.setattr(optim, "make_optimizer", make_optimizer)
    sizes = ["model.d_model=16", "model.n_layers=1", "model.n_heads=2", "train.steps=2", "train.device=cpu"]
    done = train(tmp_path / "text.txt", out=tmp_path / "run", settings=[*sizes, f"train.precision={dtype}"])
    weights = [weight for group in made[0].param_groups for weight in group["params"]]
    moments = [x for state in made[0].state.values() for x in state.values() if x.numel() > 1]
    bytes = sum(x.untyped_storage().nbytes() for x in (*weights, *weights, *moments))  # a gradient per weight
    memory = cost(done.model.config, dtype=dtype).memory
    assert memory.learning == bytes
    assert memory.training == bytes + memory.activations.total + memory.copies + memory.loss


@pytest.mark.ledger("I1", "M4")
def test_the_attention_matrix_is_the_largest_pattern() -> None:
    config = both.replace(n_encoder_heads=8, d_head=8)
    assert cost(config, 8, 3, "float16", source_length=10).memory.attention_matrix == attention_matrix_bytes(
        10, "float16", heads=8, batch=3
    )
    assert cost(config, 20, 3, source_length=10).memory.attention_matrix == attention_matrix_bytes(
        20, "float32", heads=4, batch=3
    )


@pytest.mark.ledger("I1")
def test_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a module was built")

    monkeypatch.setattr(nn.Module, "__init__", refuse)
    assert cost("gpt3").parameters.total > 170e9


@pytest.mark.ledger("I1")
def test_the_figures_are_json_and_survive_it() -> None:
    figures = cost("micro-encoder-decoder", 5, 2, "float16", source_length=9)
    plain = json.loads(json.dumps(figures.to_dict()))
    assert (
        plain["parameters"]["total"]
        == figures.parameters.total
        == sum(v for k, v in plain["parameters"].items() if k not in ("total", "active"))
    )
    assert plain["flops"]["training"] == figures.flops.training
    assert plain["memory"]["activations"]["total"] == figures.memory.activations.total
    assert (plain["length"], plain["source_length"], plain["batch"], plain["dtype"]) == (5, 9, 2, "float16")
    assert ModelConfig.from_dict(plain["config"]) == preset("micro-encoder-decoder")


@pytest.mark.ledger("I1")
def test_steps_are_reached_by_name() -> None:
    figures = cost(small, LENGTH)
    names = [step.name for step in figures.within("blocks.1.attention")]
    assert names == [f"blocks.1.attention.{step}" for step in ("q", "k", "v", "scores", "z", "out")]
    assert replace(figures, steps=()).within("blocks") == ()
    assert len({step.name for step in figures.steps}) == len(figures.steps)


@pytest.mark.ledger("I1")
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: cost("gtp2"), ConfigError, 'did you mean "gpt2"'),
        (lambda: cost("gpt2", dtype="float23"), ConfigError, "float32"),
        (lambda: cost("gpt2", length=2048), InputError, "1024"),
        (lambda: cost("gpt2", length=0), InputError, "1 or more"),
        (lambda: cost("gpt2", batch=0), InputError, "1 or more"),
        (lambda: cost("gpt2", source_length=3), InputError, "length alone"),
        (lambda: cost("micro-vit", length=3), InputError, "leave it out"),
    ],
)
def test_mistakes_are_named(call: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


KINDS = {
    "linear": small.replace(attention="linear"),
    "favor": small.replace(attention="linear(favor, 24)"),
    "linear-encoder": encoder.replace(attention="linear(relu)"),
    "low-rank": encoder.replace(attention="low-rank(8)"),
    "gated-delta": small.replace(attention=("full", "gated-delta", "full")),
    "mamba2": small.replace(attention=("full", "mamba2(groups=2, d_state=16)", "none")),
    "mamba2-alone": small.replace(
        attention="mamba2(8, d_head=8, d_state=16, norm=groups)", feedforward_skips=(0, 1, 2), norm="rmsnorm"
    ),
    "conv": small.replace(attention=("conv(3)", "conv(4, bias=True)", "conv(2)")),
    "linear-gated": small.replace(attention="linear", attention_gate=True),
    "sinks": small.replace(attention="window(32, sinks=2)", n_kv_heads=2),
    "dilated": small.replace(attention="dilated(4, 3)"),
    "strided": small.replace(attention="strided(16)", n_kv_heads=2),
    "blocks": encoder.replace(attention="blocks(32, 3, 4, 0, 1)"),
    "blocks-repeated": encoder.replace(attention="blocks(16, 3, 1, 1, counted=blocks, repeat=2, full=40)"),
    "global": encoder.replace(attention="global(12)"),
    "global, none given": encoder.replace(attention="global(12, given)"),
}


@pytest.mark.ledger("I1", "J1", "J2")
@pytest.mark.parametrize("length", [12, 300])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_attention_says_what_it_costs(name, length, monkeypatch) -> None:
    monkeypatch.setattr("tests.test_cost.LENGTH", length)
    config = KINDS[name].replace(max_positions=512, positions="rope")
    model, figures = Transformer(config), priced(config)
    assert figures.parameters.total == sum(weight.numel() for weight in model.parameters())
    kept = figures.memory.activations.total + figures.memory.copies
    assert kept == pytest.approx(bytes_kept(config, torch.float32), rel=0.05)
    if name.startswith("linear"):  # the others have products that PyTorch does not count
        with FlopCounterMode(display=False) as forward:
            run(model, "cpu")
        assert figures.flops.forward.total == forward.get_total_flops()


@pytest.mark.parametrize(
    "name", ["linear", "favor", "gated-delta", "mamba2-alone", "conv", "sinks", "dilated"]
)
def test_caches_of_every_kind_hold_what_is_said(name) -> None:
    config, cache = KINDS[name].replace(max_positions=512), WindowCache()
    model = Transformer(config).eval()
    with torch.no_grad():
        model(torch.zeros(BATCH, 200, dtype=torch.long), cache=cache)
        model(torch.zeros(BATCH, 1, dtype=torch.long), cache=cache)
    held = [
        part
        for keys in cache.layers.values()
        for part in (keys.state if isinstance(keys, LayerState) else (keys.k, keys.v))
    ]
    expected = cost(config, 201, batch=BATCH).memory.window_cache
    if "full" in config.attention:  # a growing layer has room to spare
        assert expected <= sum(part.nbytes for part in held) <= 2 * expected
    else:
        assert expected == sum(part.nbytes for part in held)
