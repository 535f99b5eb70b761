"""Presets: the published systems have the published sizes, and the reference library agrees."""

import math

import pytest
import torch

from clearhead import ConfigError, FixedCache, ModelConfig, Transformer
from clearhead.core.attention import eager
from clearhead.core.positions import sinusoid
from clearhead.learn.training.optim import original_schedule
from clearhead.variants.costs import attention_matrix_bytes, cost
from clearhead.variants.presets import PRESETS, preset

# What the systems' authors, or the reference implementation of each, count
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "distilbert": 66_985_530,
    "longformer-base": 148_711_257,
    "xlm-roberta-base": 278_295_186,
    "mpnet-base": 109_518_527,
    "electra-base": 109_483_009,
    "modernbert-base": 149_655_232,
    "llama-1b-like": 1_100_048_384,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "t5-small": 60_506_624,
    "bart-base": 139_420_416,
    "vit-tiny": 5_717_416,
}
ROUNDED = {
    "transformer-base": (65e6, 0.04),
    "transformer-big": (213e6, 0.01),
    "gpt3": (175e9, 0.003),
    "palm-like": (8.63e9, 0.001),
}


@pytest.mark.ledger("I1")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    assert cost(name).parameters.total == PUBLISHED[name]


@pytest.mark.ledger("I1", "L9", "M6", "M8")
@pytest.mark.parametrize("name", ROUNDED)
def test_sizes_published_in_round_numbers(name: str) -> None:
    size, tolerance = ROUNDED[name]
    assert cost(name).parameters.total == pytest.approx(size, rel=tolerance)


@pytest.mark.ledger("I1")
def test_the_reference_library_counts_the_same() -> None:
    """Of the preset whose size is published in round numbers alone."""
    transformers = pytest.importorskip("transformers")
    far = dict(relative_attention=True, position_biased_input=False, share_att_key=True)
    far |= dict(pos_att_type=["p2c", "c2p"], position_buckets=256, norm_rel_ebd="layer_norm")
    sizes = dict(hidden_size=768, num_attention_heads=12, num_hidden_layers=12, intermediate_size=3072)
    with torch.device("meta"):
        reference = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**sizes, **far))
    assert cost("deberta-v3-base").parameters.total == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_configs_that_survive_json(name: str) -> None:
    assert ModelConfig.from_json(preset(name).to_json()) == PRESETS[name]


@pytest.mark.ledger("M8", "B8")
@pytest.mark.parametrize("name", ["transformer-base", "transformer-big"])
def test_the_original_is_the_original(name: str) -> None:
    config = preset(name)
    assert (config.norm_position, config.activation, config.positions, config.init) == (
        "post",
        "relu",
        "sinusoidal",
        "xavier",
    )
    assert config.embedding_scale == pytest.approx(config.d_model**0.5)
    assert (config.d_ff, config.d_head) == (4 * config.d_model, 64)
    model = Transformer(config.replace(n_layers=1, vocab_size=50))
    tables = {
        id(model.encoder.embedding.front.tokens.weight),
        id(model.decoder.embedding.front.tokens.weight),
        id(model.head.out.weight),
    }
    assert len(tables) == 1  # all three embeddings are one


@pytest.mark.ledger("L9")
def test_the_parallel_block_has_one_norm_one_key_head_and_no_biases() -> None:
    config = preset("palm-like").replace(d_model=32, n_layers=1, n_heads=4, d_head=8, vocab_size=20)
    names = dict(Transformer(config).named_parameters())
    assert not [name for name in names if name.endswith("bias")]
    assert [name for name in names if "residual" in name] == [
        "decoder.blocks.0.attention_residual.before.weight"
    ]
    assert names["decoder.blocks.0.attention.k.weight"].shape == (8, 32)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'"gtp2-xl".*did you mean "gpt2-xl"'):
        preset("gtp2-xl")


# Worked numbers of the ledger, explained in docs/worked-numbers.md ------------------------------------------


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    return eager(q[None, None].double(), k[None, None].double(), v[None, None].double(), scale=scale)[0, 0]


@pytest.mark.ledger("M1", "C1")
def test_three_tokens_of_width_four() -> None:
    q = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]])
    k = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0]])
    assert (q @ k.T).tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 2]]
    assert (q @ k.T).tolist() != [[1, 1, 2], [1, 1, 0], [1, 2, 2]]  # as often printed
    weights = attend(q, k, torch.eye(3))  # the identity as values shows the weights
    third = 1 / 3
    low, high = (math.exp(score) / (2 * math.exp(0.5) + math.exp(1)) for score in (0.5, 1))
    torch.testing.assert_close(
        weights, torch.tensor([[third] * 3, [third] * 3, [low, low, high]], dtype=torch.float64)
    )
    assert [round(x, 3) for x in weights[2].tolist()] == [0.274, 0.274, 0.452]


@pytest.mark.ledger("M2", "C1")
def test_two_tokens_of_width_two() -> None:
    x = torch.eye(2)  # queries and keys under identity projections
    weights = attend(x, x, torch.eye(2))
    share = math.exp(2**-0.5) / (math.exp(2**-0.5) + 1)
    torch.testing.assert_close(
        weights, torch.tensor([[share, 1 - share], [1 - share, share]], dtype=torch.float64)
    )
    assert round(share, 2) == 0.67
    same = torch.tensor([[3.0, -1.0], [3.0, -1.0]])
    torch.testing.assert_close(attend(x, x, same), same.double())  # equal values make the weights irrelevant


@pytest.mark.ledger("M3", "B2")
def test_sinusoid_of_width_four() -> None:
    at_one = sinusoid(torch.tensor([1]), 4)[0]
    torch.testing.assert_close(
        at_one, torch.tensor([math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)], dtype=torch.float64)
    )
    assert [round(x, 3) for x in at_one.tolist()] == [0.841, 0.540, 0.010, 1.000]


@pytest.mark.ledger("M4")
def test_bytes_of_the_attention_matrix() -> None:
    assert attention_matrix_bytes(512, "float16") == 512 * 1024
    assert attention_matrix_bytes(4096, "float16") == 32 * 1024**2
    assert attention_matrix_bytes(131_072, "float16") == 32 * 1024**3
    assert attention_matrix_bytes(131_072, "float16") / 1e9 == pytest.approx(34.4, abs=0.05)
    pattern = torch.softmax(torch.zeros(512, 512, dtype=torch.float16), -1)
    assert attention_matrix_bytes(512, "float16") == pattern.numel() * pattern.element_size()


@pytest.mark.ledger("M5")
def test_bytes_of_the_key_value_cache() -> None:
    config = preset("llama-3-70b")
    assert (config.n_layers, config.n_kv_heads, config.d_head) == (80, 8, 128)
    grouped = cost(config, 4096, dtype="float16").memory.kv_cache
    assert grouped == 2 * 80 * 8 * 128 * 4096 * 2
    assert grouped / 1e9 == pytest.approx(1.34, abs=0.005)
    full = cost(config.replace(n_kv_heads=64), 4096, dtype="float16").memory.kv_cache
    assert full / 1e9 == pytest.approx(10.7, abs=0.05)
    assert full / 2 / 1e9 == pytest.approx(5.4, abs=0.05)  # values, not bytes
    held = FixedCache(config, 1, 4096, torch.float16, "meta")
    assert grouped == sum(
        x.numel() * x.element_size() for keys in held.layers.values() for x in (keys.k, keys.v)
    )


@pytest.mark.ledger("M6", "I1")
def test_where_the_parameters_of_gpt3_are() -> None:
    parameters = cost("gpt3").parameters
    assert parameters.feedforward / 1e9 == pytest.approx(116, abs=0.5)
    assert parameters.attention / 1e9 == pytest.approx(58, abs=0.5)
    assert parameters.total / 1e9 == pytest.approx(175, abs=0.5)


@pytest.mark.ledger("M7", "C1")
def test_why_scores_are_scaled() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(20_000, 64, dtype=torch.float64, generator=generator) for _ in range(2))
    products = (q * k).sum(1)
    assert products.std().item() == pytest.approx(8, rel=0.03)
    assert (products / 8).std().item() == pytest.approx(1, rel=0.03)

    def largest_weight_and_gradient(scale: float) -> tuple[float, float]:
        """Return the mean largest of 32 weights, and the median gradient of scores for a random goal."""
        scores = (q[:512] @ k[:32].T * scale).requires_grad_()
        weights = scores.softmax(-1)
        goal = torch.randn(weights.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        (weights * goal).sum().backward()
        return weights.amax(-1).mean().item(), scores.grad.norm(dim=-1).median().item()

    largest, gradient = largest_weight_and_gradient(1 / 8)
    largest_unscaled, gradient_unscaled = largest_weight_and_gradient(1.0)
    assert largest < 0.25
    assert largest_unscaled > 0.8  # one key takes nearly all
    assert gradient_unscaled < gradient  # so that less comes back for most queries
    _, gradient_far = largest_weight_and_gradient(8.0)
    assert gradient_far < 1e-6 * gradient  # and, the further it goes, nothing at all


@pytest.mark.ledger("M8")
def test_the_original_base_model() -> None:
    config = preset("transformer-base")
    assert (config.d_model, config.n_heads, config.d_ff, config.n_layers, config.n_encoder_layers) == (
        512,
        8,
        2048,
        6,
        6,
    )
    d, f, v = 512, 2048, 37_000
    norms, feedforward, attention = 2 * d, 2 * d * f + f + d, 4 * d * d
    encoder, decoder = attention + feedforward + 2 * norms, 2 * attention + feedforward + 3 * norms
    assert cost(config).parameters.total == v * d + 6 * (encoder + decoder) == 63_045_632


@pytest.mark.ledger("M8")
def test_the_original_schedule() -> None:
    rates = [original_schedule(step, 512, 4000) for step in range(20_001)]
    assert rates.index(max(rates)) == 4000
    assert rates[4000] == pytest.approx((512 * 4000) ** -0.5) == pytest.approx(6.99e-4, rel=1e-3)
    assert [rates[0], rates[1000]] == pytest.approx([0, rates[4000] / 4])  # linear up
    assert rates[16_000] == pytest.approx(rates[4000] / 2)  # inverse square root down
