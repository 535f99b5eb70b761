"""Weights of few bits: grids, methods, products in C, directories, and what still works on such a model."""

import json

import pytest
import torch
from safetensors import safe_open

import clearhead as ch
from clearhead.core.cache import Cache
from clearhead.errors import ClearheadError
from clearhead.inside.quantize import weight_bytes
from clearhead.run.generate.decode import greedy
from clearhead.run.kernels import library
from clearhead.run.kernels.native import NativeBlock, NativeQuantized, NativeTable
from clearhead.run.kernels.parts import like
from clearhead.run.kernels.prepare import prepared
from clearhead.run.quant import methods
from clearhead.run.quant.apply import dequantized, drawn_sizes, quantize_model
from clearhead.run.quant.grid import BLOCK, Grid, fitted, nearest_codes, pack, unpack
from clearhead.run.quant.layers import QuantizedLinear, QuantizedTable, quantized_parts, rounding_bound
from clearhead.run.quant.methods import METHODS, output_error
from tests.harness import GROUPED_EXPERTS, LATENT

DECODER = ch.preset("micro-decoder").replace(d_model=48, n_heads=4, n_layers=2, vocab_size=61, d_ff=84)
LLAMA = {"norm": "rmsnorm", "gated": True, "positions": "rope", "bias": False, "activation": "silu"}
CONFIGS = {
    "GPT-2": DECODER,
    "Llama, grouped, untied": DECODER.replace(**LLAMA, n_kv_heads=2, tie_embeddings=False),
    "encoder": ch.preset("micro-encoder").replace(d_model=48, n_heads=4, n_layers=1, vocab_size=61),
    "encoder-decoder": ch.preset("micro-encoder-decoder").replace(
        d_model=48, n_heads=4, n_layers=1, vocab_size=61
    ),
    "experts": DECODER.replace(n_experts=3, n_active_experts=2),
    "latent": DECODER.replace(
        **{**LLAMA, **LATENT, **GROUPED_EXPERTS, "attention": "latent(36, query_rank=40)", "d_value": 8}
    ),
}
STATES = {  # state-space layers, and others that keep a state
    "Mamba-2": {"attention": "mamba2(6, d_state=10, groups=2)", "feedforward_skips": (0, 1), "n_heads": 6},
    "Falcon-H1": {"attention": "hybrid(groups=2, d_state=5, norm=groups, norm_first=True)", "n_kv_heads": 2},
    "Nemotron-H": {"attention": ("mamba2(4, d_state=6)", "full"), "n_kv_heads": 2},
    "LFM2": {"attention": ("conv(3)", "full"), "n_kv_heads": 2},
    "Qwen3-Next": {"attention": ("gated-delta", "full"), "n_kv_heads": 2},
}
CONFIGS |= {name: DECODER.replace(**{**LLAMA, **changes}) for name, changes in STATES.items()}
PLANS = (
    ch.QuantPlan(4, 64, symmetric=False),
    ch.QuantPlan(8, method="rtn"),
    ch.QuantPlan(4, symmetric=True, method="rtn"),
    ch.QuantPlan.named("int4"),
)


def drawn(config):
    torch.manual_seed(3)
    return ch.Transformer(config).eval()


def inputs(config):
    torch.manual_seed(1)
    ids = torch.randint(61, (3, 9))
    return {"ids": ids, "source": ids.flip(1)} if config.family == "encoder-decoder" else {"ids": ids}


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, 32, True), (4, 64, False), (8, 128, False)])
def test_codes_are_the_nearest_numbers_of_each_group_and_are_kept_as_the_format_says(bits, group, symmetric):
    torch.manual_seed(0)
    weight = torch.randn(7, 100) * torch.rand(7, 1)
    made = nearest_codes(Grid(bits, group, symmetric), weight)
    numbers = made.weight()
    codes = range(-127, 128) if bits == 8 else range(-8, 8)
    for n in range(7):  # a plain loop: tile n // 4, and in it row n % 4
        for d in range(100):
            g = d // group
            scale = float(made.scales[n // 4, g, n % 4])
            offset = 0.0 if symmetric else float(made.offsets[n // 4, g, n % 4])
            options = torch.tensor([scale * code + offset for code in codes])
            best = (options - weight[n, d]).abs().min()
            assert abs(float(numbers[n, d] - weight[n, d])) <= float(best) + 1e-6
    tile = made.codes.view(2, 4, -1, 4, 4)[1, 2]  # of rows 4 to 7, columns 64 to 95
    byte = int(tile[1, 2, 3])  # tile 1 of 32 columns, row 6, column 3
    low = byte if bits == 8 else (byte & 15) - 8
    scale, offset = made.scales[1, 64 // group, 2], 0 if symmetric else made.offsets[1, 64 // group, 2]
    assert low * float(scale) + float(offset) == pytest.approx(float(numbers[6, 71]), abs=1e-6)
    whole = torch.randint(-8, 8, (8, 64), dtype=torch.int8)
    assert torch.equal(unpack(pack(whole)), whole)
    rows = torch.tensor([6, 0, 3, 6])
    assert torch.equal(made.of_rows(rows, torch.float32), numbers[rows])


@pytest.mark.parametrize("symmetric", [True, False])
def test_each_method_lowers_the_error_that_it_is_for(symmetric):
    torch.manual_seed(0)
    weight = torch.randn(64, 160) * 0.05
    weight[:, ::17] *= 4
    mixing = torch.randn(160, 160) * torch.linspace(0.05, 1, 160)
    mixing[:, 9] *= 12  # one input is large
    x = torch.randn(2000, 160) @ mixing
    moment, grid = x.t() @ x / len(x), Grid(4, 32, symmetric)
    made = {name: method(grid, weight, moment).weight for name, method in METHODS.items()}
    errors = {name: output_error(weight - found, moment) for name, found in made.items()}
    measured = {
        name: float((x @ (weight - found).t()).square().sum()) / len(x) for name, found in made.items()
    }
    assert errors == pytest.approx(measured, rel=1e-3)
    # Of inputs drawn by four seeds the worst shares were 0.366 and 0.962, symmetric or not.
    assert errors["gptq"] < 0.4 * errors["rtn"] and errors["awq"] < 0.97 * errors["rtn"]
    weighed = {name: float(((weight - w).square() * moment.diagonal()).sum()) for name, w in made.items()}
    assert weighed["imatrix"] < 0.95 * weighed["rtn"]
    sizes = {name: float((weight - found).abs().pow(0.7).sum()) for name, found in made.items()}
    assert sizes["hqq"] < sizes["rtn"]


def test_without_data_a_decoder_finds_its_large_inputs_by_itself_and_the_plan_says_what_was_done():
    model = drawn(CONFIGS["Llama, grouped, untied"])
    with torch.no_grad():  # one channel of what the queries of block 0 read is large
        model.decoder.blocks[0].attention_residual.before.weight[5] = 40.0
    name, grid = "decoder.blocks.0.attention.q", Grid(4, 32, False)
    sizes = drawn_sizes(model, [name])[name]
    with ch.record(model, "blocks.0.resid_pre") as seen, torch.no_grad():
        length = min(256, model.config.max_positions)
        model(torch.randint(61, (1, length), generator=torch.Generator().manual_seed(0)))
        reads = model.decoder.blocks[0].attention_residual.before(seen["blocks.0.resid_pre"])
    torch.testing.assert_close(sizes, reads.square().mean((0, 1)))
    done = quantize_model(model, ch.QuantPlan.named("int4"))
    weight, layer = model.get_submodule(name).weight.detach(), done.model.get_submodule(name)
    plain = nearest_codes(grid, weight).weight()
    errors = [float((reads @ (weight - w).t()).square().sum()) for w in (layer.weight, plain)]
    assert errors[0] < 0.3 * errors[1] and done.plan.method == "imatrix"
    assert quantize_model(drawn(CONFIGS["encoder"]), ch.QuantPlan()).plan.method == "hqq"
    assert quantize_model(model, ch.QuantPlan(8)).plan.method == "rtn"


def test_gptq_chooses_the_codes_of_the_formula_and_fits_grids_by_least_squares():
    torch.manual_seed(0)
    weight, x = torch.randn(5, 70) * 0.1, torch.randn(300, 70) @ torch.randn(70, 70)
    moment, grid = x.t() @ x / len(x), Grid(4, 32, False)
    order = moment.diagonal().argsort(descending=True)
    scales, offsets = fitted(grid, grid.split(weight), torch.ones(3, 32))
    damped = moment + methods.DAMPING * moment.diagonal().mean() * torch.eye(70)
    root = methods._inverse_root(damped[order][:, order])
    codes = methods._codes(grid, weight, root, order, scales, offsets)
    left = weight.double().clone()  # the plain formula: the inverse loses each column that was rounded
    inverse = (
        moment.double() + methods.DAMPING * moment.diagonal().double().mean() * torch.eye(70)
    ).inverse()
    for d in order.tolist():
        scale, offset = scales[:, d // 32].double(), offsets[:, d // 32].double()
        code = ((left[:, d] - offset) / scale).round().clamp(-8, 7)
        assert torch.equal(codes[:, d].double(), code)
        error = (left[:, d] - code * scale - offset) / inverse[d, d]
        left -= error[:, None] * inverse[d]
        inverse -= inverse[:, d, None] * inverse[d] / inverse[d, d]
    # Of one group, the best scale and offset are those of a least-squares fit to the outputs.
    weight, codes, x = weight[:, :32], codes[:, :32], x[:, :32]
    first = scales[:, :1], offsets[:, :1]
    found = methods._refitted(grid, weight, codes, x.t() @ x / len(x), *first)
    for n in range(5):
        basis = torch.stack([x @ codes[n], x.sum(1)], 1).double()
        best = torch.linalg.lstsq(basis, (x @ weight[n]).double()[:, None]).solution[:, 0]
        assert float(found[0][n]) == pytest.approx(float(best[0]), rel=2**-8)
        assert float(found[1][n]) == pytest.approx(float(best[1]), rel=2**-6, abs=1e-3)


@pytest.mark.cpu
@pytest.mark.skipif(library.library() is None, reason="no C compiler, or other threads than GNU's")
@pytest.mark.parametrize("width", [(5, 33), (64, 172), (9, 64)])
def test_products_in_c_keep_to_the_error_they_state_and_each_row_is_as_if_alone(width):
    torch.manual_seed(0)
    for grid in (Grid(8, 32), Grid(4, 32), Grid(4, 64, False), Grid(8, 128, False)):
        weight, x = torch.randn(width), torch.randn(6, width[1]) * torch.logspace(-3, 3, 6)[:, None]
        layer = QuantizedLinear(
            nearest_codes(grid, weight), torch.randn(width[0]), torch.rand(width[1]) + 0.5
        )
        fast = like(layer, NativeQuantized)
        exact = (x.double() @ layer.weight.double().t() + layer.bias.double()).float()
        assert ((fast(x) - exact).abs() <= rounding_bound(layer, x) + 1e-5 * (1 + exact.abs())).all()
        assert (fast(x) - exact).abs().max() > 0  # it rounds, and the bound is about that
        assert torch.equal(fast(x), torch.cat([fast(row[None]) for row in x]))
        x[2, 1] = torch.nan
        assert fast(x)[2].isnan().all() and not fast(x)[1].isnan().any()


def routed(model, ids):
    """Logits, and the experts of every token in every layer."""
    with torch.no_grad(), ch.record(model, "*.router") as seen:
        logits = model(ids).logits
    active = model.config.n_active_experts
    return logits, torch.stack([one.topk(active, -1).indices.sort(-1).values for one in seen.values()])


@pytest.mark.cpu
@pytest.mark.skipif(library.library() is None, reason="no C compiler, or other threads than GNU's")
def test_a_mixture_sends_tokens_where_the_model_does():
    """Inputs of 8 bits sent 19 of 1,536 tokens another way: what they leave over is added."""
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 4, "vocab_size": 61, "d_ff": 128, "init": "xavier"}
    config = DECODER.replace(**sizes, **LLAMA, n_experts=2, n_active_experts=1, tie_embeddings=False)
    torch.manual_seed(2)
    model = quantize_model(ch.Transformer(config).eval(), ch.QuantPlan(8, method="rtn")).model
    ids = torch.randint(61, (8, 48))
    exact, chosen = routed(model, ids)
    _, ours = routed(prepared(model), ids)
    assert chosen.numel() == 1536 and int((chosen != ours).sum()) <= 3
    with torch.inference_mode():
        fast, cache = prepared(model), Cache()
        steps = torch.cat([fast(ids[:, place : place + 1], cache=cache).logits for place in range(48)], dim=1)
    below = exact.amax(-1) - exact.gather(-1, steps.argmax(-1, keepdim=True))[..., 0]
    assert below.quantile(0.99) < 0.02 * exact.abs().max()
    for name, layer in quantized_parts(model).items():
        if isinstance(layer, QuantizedLinear) and name.startswith("decoder"):
            x = torch.randn(5, layer.in_features)
            allowed = rounding_bound(layer, x) / 50 + 1e-5 * (1 + layer(x).abs())
            assert type(fast.get_submodule(name)) is NativeQuantized and fast.get_submodule(name).twice
            assert ((fast.get_submodule(name)(x) - layer(x)).abs() <= allowed).all()
    assert type(fast.head.out) is NativeQuantized and not fast.head.out.twice  # nothing is routed after it


@pytest.mark.cpu
@pytest.mark.skipif(library.library() is None, reason="no C compiler, or other threads than GNU's")
@pytest.mark.parametrize("plan", PLANS)
def test_rows_of_a_table_are_the_same_numbers_in_c(plan):
    model = quantize_model(drawn(DECODER.replace(d_model=44)), plan).model
    table, ids = model.main.embedding.front.tokens, torch.tensor([[0, 3, 60], [7, 7, 1]])
    fast = prepared(model).main.embedding.front.tokens
    assert type(fast) is NativeTable and torch.equal(fast(ids), table(ids))
    with pytest.raises(IndexError, match="61 rows"):
        fast(torch.tensor([61]))


@pytest.mark.skipif(library.library() is None, reason="no C compiler, or other threads than GNU's")
def test_an_expert_without_tokens_costs_nothing(monkeypatch):
    """A step of one row chooses one expert of three: the weights of the others are not spelled out."""
    model = quantize_model(drawn(DECODER.replace(n_experts=3, n_active_experts=1)), PLANS[1]).model
    fast, ids = prepared(model), torch.randint(61, (1, 6))

    def written() -> list[torch.Tensor]:
        cache = Cache()
        return [fast(ids[:, place : place + 1], cache=cache).logits for place in range(6)]

    with torch.inference_mode():
        expected = written()
    monkeypatch.setattr(QuantizedLinear, "weight", property(lambda layer: pytest.fail("spelled out")))
    with torch.inference_mode():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(written(), expected, strict=True))


def test_no_router_is_rounded():
    experts = DECODER.replace(n_experts=3, gated=True, d_shared_expert=20, dense_layers=(0,))
    for config, routers in (
        (experts, ("router", "shared_gate")),
        (DECODER.replace(depth_capacity=0.5), ("score",)),
    ):
        model = quantize_model(drawn(config), ch.QuantPlan(8, method="rtn")).model
        names = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
        assert sorted({name.rsplit(".", 1)[1] for name in names}) == sorted(routers)


@pytest.mark.cpu
@pytest.mark.parametrize("name", CONFIGS)
def test_a_directory_gives_the_same_model_back(name, tmp_path):
    model, given = drawn(CONFIGS[name]), inputs(CONFIGS[name])
    ch.Model(model).save(tmp_path / "wide")
    for plan in PLANS[2:] if name == "GPT-2" else PLANS[:2]:
        m = ch.load(tmp_path / "wide", quantize=plan)
        logits = m.model(**given).logits
        assert torch.equal(logits, dequantized(m.model)(**given).logits)
        assert 0 < (logits - model(**given).logits).abs().max() < (0.05 if plan.bits == 8 else 1)
        m.save(tmp_path / "small")
        again = ch.load(tmp_path / "small")
        assert torch.equal(again.model(**given).logits, logits)
        assert len(quantized_parts(again.model)) == len(quantized_parts(m.model))
        again.save(tmp_path / "twice")
        first, second = (tmp_path / folder / "model.safetensors" for folder in ("small", "twice"))
        assert first.read_bytes() == second.read_bytes()
        for part_name, part in quantized_parts(m.model).items():  # to the byte: tiles of 4 rows, runs of 32
            rows, columns = (part.out_features + 3) // 4 * 4, (part.in_features + 31) // 32 * 32
            bits = 8 if part_name.endswith((".tokens", "head.out")) else plan.bits
            groups, kept = -(-part.in_features // plan.group), [part.scales]
            if plan.symmetric is False or (plan.symmetric is None and bits == 4):
                kept.append(part.offsets)
            else:
                assert part.offsets is None
            assert part.codes.numel() == rows * columns * bits // 8
            assert [one.numel() * one.element_size() for one in kept] == [2 * rows * groups] * len(kept)
        with safe_open(first, "pt") as file:
            stored = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
        header = 8 + int.from_bytes(first.read_bytes()[:8], "little")
        assert first.stat().st_size == stored + header and stored == weight_bytes(m.model)
    if name == "Llama, grouped, untied":
        rows = ch.check(again)
        assert len(rows) > 15 and not [row for row in rows if row.verdict != "equal"]


def rounded_inputs(layer, given):
    """The inputs that a product in C works with: 8 bits by runs of 32, as `rounding_bound` states."""
    x = given[0] if layer.smooth is None else given[0] * layer.smooth
    runs = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = runs.abs().amax(-1, keepdim=True) / 127
    made = ((runs / scale).round() * scale).flatten(-2)[..., : x.shape[-1]]
    return (made if layer.smooth is None else made / layer.smooth,)


@pytest.mark.cpu
@pytest.mark.skipif(library.library() is None, reason="no C compiler, or other threads than GNU's")
def test_generation_goes_through_c_and_stays_near_the_model():
    config = CONFIGS["Llama, grouped, untied"]
    plan = ch.QuantPlan(4, method="rtn", wide=("decoder.blocks.1.attention.*",))
    made = quantize_model(drawn(config), plan)
    assert {layer.bits for layer in made.layers if "1.attention" in layer.name} == {8}
    model, fast = made.model, prepared(made.model)
    assert {type(part) for part in fast.decoder.blocks} == {NativeBlock}
    ids, cache, ours = torch.randint(61, (3, 12)), Cache(), []
    with torch.inference_mode():
        for token in range(12):
            ours.append(fast(ids[:, token : token + 1], cache=cache).logits)
        exact, alone = model(ids).logits, fast(ids[1:2]).logits
        for part in model.modules():
            if isinstance(part, QuantizedLinear):
                part.register_forward_pre_hook(rounded_inputs)
        wanted = model(ids).logits
    size, steps = exact.abs().max(), torch.cat(ours, 1)
    # Its products are those of inputs rounded to 8 bits by runs of 32, and nothing else is rounded. Where an
    # input lies between two codes, float32 sums may send it to the other one: in one row or none.
    apart = (steps - wanted).abs().amax((1, 2)).sort().values / size
    assert apart[1] < 1e-5 and apart[2] < 0.01
    assert 1e-4 < (steps - exact).abs().max() / size < 0.01
    assert (steps[1] - alone[0]).abs().max() < 1e-5 * size
    rows = [greedy(fast, ids[row : row + 1], 8) for row in range(3)]
    assert torch.equal(torch.cat(rows), greedy(fast, ids, 8))


@pytest.mark.cpu
@pytest.mark.skipif(library.library() is None, reason="no C compiler, or other threads than GNU's")
@pytest.mark.parametrize("name", STATES)
def test_layers_with_a_state_take_rounded_weights_step_by_step(name):
    """Decode steps with a state are one pass of the quantized model, and near the dequantized one."""
    model = quantize_model(drawn(CONFIGS[name]), PLANS[0]).model
    kept = {part_name for part_name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    assert not kept, "a projection keeps its wide weights"
    fast, cache, ids = prepared(model), Cache(), torch.randint(61, (3, 12))
    with torch.inference_mode():
        steps = torch.cat([fast(ids[:, t : t + 1], cache=cache).logits for t in range(12)], 1)
        exact = dequantized(model)(ids).logits
        for part in quantized_parts(model).values():
            if isinstance(part, QuantizedLinear):
                part.register_forward_pre_hook(rounded_inputs)
        wanted = model(ids).logits
    size = exact.abs().max()
    apart = (steps - wanted).abs().amax((1, 2)).sort().values / size  # see above: one row may go another way
    assert apart[1] < 1e-5 and apart[2] < 0.01 and (steps - exact).abs().max() / size < 0.03
    m = ch.Model(model)
    ids = m.generate([5, 3, 8], 6).ids
    assert len(ids) == 6 and m.generate([[5, 3, 8], [7, 1, 2]], 6)[0].ids == ids


def test_looking_inside_works_and_training_and_pruning_are_refused_by_name(tmp_path):
    m = ch.Model(quantize_model(drawn(DECODER), PLANS[2]).model)
    assert isinstance(m.model.decoder.embedding.front.tokens, QuantizedTable)
    plain = ch.Model(dequantized(m.model))
    ids = [5, 3, 8, 1]
    with ch.record(m.model, "blocks.*.feedforward.post") as seen, ch.record(plain.model, "*.post") as wanted:
        m.model(torch.tensor([ids])), plain.model(torch.tensor([ids]))
    assert all(torch.equal(seen[name], wanted[name]) for name in seen)
    with ch.edit(m.model, {"blocks.0.attention.z": torch.zeros_like}):
        assert not torch.equal(m.model(torch.tensor([ids])).logits, plain.model(torch.tensor([ids])).logits)
    assert len(ch.trace(m, ids).steps) == len(ch.trace(plain, ids).steps)
    m.to("float64")
    assert m.model(torch.tensor([ids])).logits.dtype == torch.float64
    m.to("float32").save(tmp_path / "small")
    (tmp_path / "text.txt").write_text("a b c d\n" * 50)
    base = {"model.base": str(tmp_path / "small")}
    with pytest.raises(ClearheadError, match="cannot be trained: use the model that it was made from"):
        ch.train(tmp_path / "text.txt", out=tmp_path / "run", settings=base)
    with pytest.raises(ClearheadError, match="cannot be quantized again"):
        ch.load(tmp_path / "small", quantize="int8")
    from clearhead.inside.pruning import prune

    with pytest.raises(ClearheadError, match="cannot be pruned"):
        prune(m, ["0.1"])


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda body: body["layers"].update({"head.out": [3, 32, True]}), "bits 3 is not known"),
        (lambda body: body["layers"].update({"head.out": "int4"}), "must have layers"),
        (
            lambda body: body["layers"].update({"decoder.blocks.9.x": [4, 32, True]}),
            "which this model has not",
        ),
        (lambda body: body["layers"].update({"head.out": [8, 64, True]}), "head.out.scales"),
        (lambda body: body["layers"].pop("head.out"), "head.out.codes"),
        (lambda body: body.update(quant_method="other"), "other"),
    ],
)
def test_a_config_that_does_not_fit_the_codes_is_refused(tmp_path, change, wrong):
    ch.Model(quantize_model(drawn(DECODER), PLANS[1]).model).save(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    change(theirs["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(ClearheadError, match=wrong):
        ch.load(tmp_path)


def test_a_report_measures_on_text_that_was_not_calibrated_on(tmp_path):
    m = ch.Model(drawn(DECODER.replace(max_positions=32)))
    torch.manual_seed(0)
    ids = torch.randint(61, (600,)).tolist()
    micro = ch.Model(ch.Transformer(ch.preset("micro-decoder")))
    poor = ch.quantize(micro, text=[1, 2, 3, 4] * 300).after  # moments of a low rank
    assert poor.divergence < 0.1
    found = ch.quantize(m, text=ids, wide=1, calibration=128, evaluation=96)
    assert found.method == "gptq" and len(found.wide) == 1 and len(found.sensitivity) == 4
    assert found.wide[0] == f"{found.sensitivity[0].part}.*" and found.before.divergence == 0
    with torch.no_grad():
        log = found.model.model(torch.tensor([ids[300:332]])).logits[0].log_softmax(-1)
    assert found.after.tokens == 3 * 31 and found.after.divergence > 0
    first = float(-log[:-1].gather(1, torch.tensor(ids[301:332])[:, None]).mean())
    assert abs(first - found.after.loss) < 0.5
    assert all(layer.output_error is not None for layer in found.layers)
    with pytest.raises(ClearheadError, match="method awq needs a text"):
        ch.quantize(m, method="awq")
    with pytest.raises(ClearheadError, match='quantize "int3" is not known'):
        ch.load(tmp_path, quantize="int3")
