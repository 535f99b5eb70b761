"""Check what a config can choose beyond the matrix.

Widths, norms and caps in attention, sharing, pruning, dropout, fronts, heads.
"""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as nnf
from torch import nn

import clearhead as ch
from clearhead.core.attention import KERNELS, Attention
from clearhead.core.masks import View
from tests.harness import V, build, chunks, config, gradients, in_pieces, pad, scramble, some_ids, worst

TOLERANCE = 1e-5
every_family = pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])


def given_for(family: str) -> dict:
    return {"source": some_ids(2, 5, seed=3)} if family == "encoder-decoder" else {}


def holds(model: ch.Transformer, **given) -> torch.Tensor:
    """Cached = recomputed, padded = unpadded, fused = eager; gives the logits."""
    ids = some_ids()
    with torch.no_grad():
        logits = model(ids, **given).logits
        if model.config.decoder is not None:
            for cache in (ch.Cache(), ch.FixedCache(model.config, 2, 8)):
                assert worst(in_pieces(model, ids, chunks(8, 3), cache, **given), logits) <= TOLERANCE
        for where in ("left", "gaps"):
            padded, mask = pad(ids, where)
            assert worst(model(padded, mask=mask, **given).logits[mask].view_as(logits), logits) <= TOLERANCE
        with ch.attending(model, "eager"):
            assert worst(model(ids, **given).logits, logits) <= TOLERANCE
    return logits


# Attention --------------------------------------------------------------------------------------------------


@pytest.mark.ledger("C1", "C3", "C4")
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_equals_its_formula(kv_heads, qk_norm, softcap):
    """Check norms on queries and keys, cap, scale, another value width in one formula, head by head."""
    shape = config(
        n_kv_heads=kv_heads,
        qk_norm=qk_norm,
        attention_softcap=softcap,
        attention_scale=0.9,
        d_head=6,
        d_value=5,
        norm="rmsnorm",
    )
    part = scramble(Attention(shape.main, "blocks.0.attention")).eval()
    x = torch.randn(2, 7, 16)
    q, k, v = part.q(x), part.k(x), part.v(x)
    if qk_norm == "full":
        q, k = part.q_norm(q), part.k_norm(k)
    mixed = []
    for head in range(4):
        shared = head * kv_heads // 4
        one_q, one_k = q[..., 6 * head : 6 * head + 6], k[..., 6 * shared : 6 * shared + 6]
        if qk_norm == "head":
            one_q, one_k = part.q_norm(one_q), part.k_norm(one_k)
        scores = one_q @ one_k.transpose(1, 2) * 0.9
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
        mixed.append(scores.softmax(-1) @ v[..., 5 * shared : 5 * shared + 5])
    assert worst(part(x, View(causal=True)), part.out(torch.cat(mixed, -1))) <= 2e-6
    if qk_norm != "none":
        assert part.q_norm.weight.shape[0] == (24 if qk_norm == "full" else 6)


@pytest.mark.ledger("C1", "C3", "C4")
@every_family
@pytest.mark.parametrize(
    "choices",
    [
        {"d_value": 7, "n_kv_heads": 2},
        {"qk_norm": "head", "positions": "rope"},
        {"qk_norm": "full", "norm": "rmsnorm", "n_kv_heads": 1},
        {"attention_softcap": 2.0, "logit_softcap": 3.0, "n_kv_heads": 2},
        {"attention_scale": 1.0, "positions": "relative"},
        {"d_head": 8, "bias": False},
        {"norm_position": "output", "final_norm": False},
        {"norm_unit_offset": True, "norm": "rmsnorm", "norm_position": "sandwich"},
        {"positions": "rope", "rope_fraction": 0.5, "rope_layout": "interleaved"},
        {"window": (3, None), "positions": "rope", "rope_local_base": 100.0},
    ],
    ids=lambda choices: "-".join(choices),
)
def test_every_variant_is_cached_padded_and_fused(family, choices):
    holds(build(family=family, **choices), **given_for(family))


@pytest.mark.ledger("C1")
def test_the_default_scale_is_one_over_the_root_of_the_head_width():
    assert config(d_head=9).attention_scale == pytest.approx(1 / 3)
    with ch.record(model := build(positions="none", n_layers=1), "*.q", "*.k", "*.scores") as seen:
        model(some_ids())
    scores = seen["blocks.0.attention.q"] @ seen["blocks.0.attention.k"].transpose(2, 3) / 2
    allowed = torch.ones(8, 8).tril().bool()
    assert worst(scores[..., allowed], seen["blocks.0.attention.scores"][..., allowed]) <= 1e-6


@pytest.mark.ledger("E3")
def test_stacks_of_different_shapes():
    model = build(
        family="encoder-decoder",
        n_encoder_layers=3,
        n_encoder_heads=2,
        d_encoder_ff=10,
        source_vocab_size=7,
        share_embeddings=False,
    )
    assert len(model.encoder.blocks) == 3
    assert model.encoder.blocks[0].attention.n_heads == 2
    assert model.encoder.blocks[0].attention.d_head == 8  # the encoder's heads divide d_model too
    assert model.encoder.blocks[0].feedforward.up.out_features == 10
    assert holds(model, source=some_ids(2, 5, vocab=7)).shape == (2, 8, V)


# Embedding and sharing --------------------------------------------------------------------------------------


@pytest.mark.ledger("B8")
@every_family
def test_tied_weights_are_one_tensor(family):
    model = ch.Transformer(config(family=family))
    table = model.main.embedding.front.tokens.weight
    assert model.head.out.weight is table
    if family == "encoder-decoder":
        assert model.encoder.embedding.front.tokens.weight is table
    count = sum(p.numel() for p in model.parameters())
    untied = ch.Transformer(config(family=family, tie_embeddings=False, share_embeddings=False))
    assert untied.head.out.weight is not untied.main.embedding.front.tokens.weight
    copies = 2 if family == "encoder-decoder" else 1
    assert sum(p.numel() for p in untied.parameters()) == count + copies * V * 16
    gradient = gradients(model, model(some_ids(), **given_for(family)).logits.square().sum())
    assert any(x is not None and x.any() for x in gradient.values())
    model.load_state_dict(model.state_dict())
    assert model.head.out.weight is model.main.embedding.front.tokens.weight  # loading keeps the tie


@pytest.mark.ledger("B8", "E3")
def test_tied_but_not_shared():
    model = ch.Transformer(config(family="encoder-decoder", share_embeddings=False))
    assert model.head.out.weight is model.decoder.embedding.front.tokens.weight
    assert model.encoder.embedding.front.tokens.weight is not model.decoder.embedding.front.tokens.weight


@pytest.mark.ledger("B1")
@every_family
def test_embedding_equals_its_formula(family):
    """Narrow table, scale, segments, positions, norm, projection: in that order."""
    model = build(
        family=family,
        d_embedding=6,
        embedding_scale=3.0,
        n_types=2,
        embedding_norm=True,
        tie_embeddings=False,
    )
    ids, types, given = some_ids(), some_ids(vocab=2), given_for(family)
    part, where = model.main.embedding, model.main.positions
    with ch.record(model, "embedding") as seen, torch.no_grad():
        model(ids, types=types, **given)
        x = part.front.tokens.weight[ids] * 3.0 + part.types.weight[types] + where.table.weight[:8]
        assert worst(part.project(part.norm(x)), seen["embedding"]) <= 1e-6
        model(ids, **given)
        # Without types, all are type 0.
        x = part.front.tokens.weight[ids] * 3.0 + part.types.weight[0] + where.table.weight[:8]
        assert worst(part.project(part.norm(x)), seen["embedding"]) <= 1e-6
    holds(model, **given)


@pytest.mark.ledger("B1", "B8")
def test_a_narrow_table_can_be_tied():
    model = build(family="encoder", d_embedding=6)
    assert model.head.out.weight is model.encoder.embedding.front.tokens.weight
    assert model.head.transform.weight.shape == (6, 16)
    holds(model)


@pytest.mark.ledger("D6")
@every_family
def test_shared_layers(family):
    """Four layers from two sets of weights equal four layers with those weights copied."""
    shared = build(family=family, n_layers=4, layer_groups=2, positions="rope")
    copied = build(family=family, n_layers=4, positions="rope")
    weights = {}
    for name in copied.state_dict():
        parts = name.split(".")
        if "blocks" in parts:
            at = parts.index("blocks") + 1
            parts[at] = str(int(parts[at]) // 2)
        weights[name] = shared.state_dict()[".".join(parts)]
    copied.load_state_dict(weights)
    given = given_for(family)
    assert torch.equal(shared(some_ids(), **given).logits, copied(some_ids(), **given).logits)
    assert len(shared.main.blocks) == 2
    holds(shared, **given)


# Pruning ----------------------------------------------------------------------------------------------------


def prune(weights: dict, pruned: dict, n_heads: int, n_kv_heads: int, width: int) -> dict:
    """The state dict without the rows and columns of the pruned heads."""
    weights = dict(weights)
    for name, heads in pruned.items():
        stack = name if name.startswith("encoder.") else f"decoder.{name}"
        stack = stack if f"{stack}.q.weight" in weights else f"encoder.{name}"
        kept = [head for head in range(n_heads) if head not in heads]
        groups = sorted({head * n_kv_heads // n_heads for head in kept})
        rows = torch.cat([torch.arange(width) + width * head for head in kept])
        shared = torch.cat([torch.arange(width) + width * group for group in groups])
        for part, which in (("q", rows), ("k", shared), ("v", shared)):
            for kind in ("weight", "bias"):
                weights[f"{stack}.{part}.{kind}"] = weights[f"{stack}.{part}.{kind}"][which]
        weights[f"{stack}.out.weight"] = weights[f"{stack}.out.weight"][:, rows]
    return weights


@pytest.mark.ledger("C4")
@every_family
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("positions", ["learned", "rope", "alibi", "relative"])
def test_pruned_equals_masked(family, kv_heads, positions):
    """Pruned heads equal heads whose z is zeroed, whole groups at a time; cached and padded too."""
    pruned = {"blocks.0.attention": (0, 1), "blocks.1.attention": (2, 3)}
    if kv_heads == 4:
        pruned["blocks.1.attention"] = (1,)
    if family == "encoder-decoder":
        pruned |= {"blocks.1.cross": (2, 3), "encoder.blocks.0.attention": (0, 1)}
    shape = {"family": family, "n_kv_heads": kv_heads, "positions": positions}
    whole, smaller = build(**shape), build(pruned_heads=pruned, **shape)
    smaller.load_state_dict(prune(whole.state_dict(), pruned, 4, kv_heads, 4))

    def without(heads):
        return lambda z: z.index_fill(1, torch.tensor(heads), 0.0)

    given, ids = given_for(family), some_ids()
    with ch.edit(whole, {f"{name}.z": without(heads) for name, heads in pruned.items()}), torch.no_grad():
        masked = whole(ids, **given).logits
        bias = torch.randn(1, 4, 8, 8)
        biased = whole(ids, bias=bias, **given).logits
    assert worst(holds(smaller, **given), masked) <= TOLERANCE
    assert worst(smaller(ids, bias=bias, **given).logits, biased) <= TOLERANCE
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in whole.parameters())


# Dropout ----------------------------------------------------------------------------------------------------


@pytest.mark.ledger("C7", "D4")
@every_family
@pytest.mark.parametrize("kernel", ["eager", "fused"])
@pytest.mark.parametrize(
    "name", ["dropout", "attention_dropout", "embedding_dropout", "feedforward_dropout", "layer_drop"]
)
def test_dropout_in_training_only(family, kernel, name):
    model, twin, ids, given = (
        build(family=family, **{name: 0.5}),
        build(family=family),
        some_ids(),
        given_for(family),
    )
    with ch.attending(model, kernel):
        # Nothing is dropped in evaluation.
        assert worst(model(ids, **given).logits, twin(ids, **given).logits) <= TOLERANCE
        model.train()
        torch.manual_seed(1)
        first = model(ids, **given).logits
        assert worst(first, twin(ids, **given).logits) > 1e-3
        assert worst(first, model(ids, **given).logits) > 1e-3  # each pass draws anew
        torch.manual_seed(1)
        assert torch.equal(model(ids, **given).logits, first)  # from torch's seed


@pytest.mark.ledger("C7", "D4")
def test_dropout_keeps_the_mean():
    """Over many draws, what is dropped and scaled up averages to what there was."""
    for choices in ({"dropout": 0.3}, {"layer_drop": 0.3}):
        block = build(**choices).decoder.blocks[0].train()
        x, y = torch.zeros(4000, 1, 16), torch.ones(4000, 1, 16)
        assert block.attention_residual.add(x, y).mean().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.ledger("D4")
def test_layer_drop_skips_whole_rows():
    residual = build(layer_drop=0.5).decoder.blocks[0].attention_residual.train()
    added = residual.add(torch.zeros(400, 3, 16), torch.ones(400, 3, 16))
    per_row = added.flatten(1)
    assert (per_row.amin(1) == per_row.amax(1)).all()
    assert set(per_row[:, 0].tolist()) == {0.0, 2.0}
    assert 0.4 < (per_row[:, 0] == 0).float().mean() < 0.6


@pytest.mark.ledger("C7")
def test_attention_dropout_drops_weights_not_values():
    model = build(attention_dropout=0.5, n_layers=1, positions="none").train()
    with ch.record(model, "*.pattern", "*.v", "*.z") as seen:
        model(some_ids())
    # The recorded pattern is that before dropout.
    assert worst(seen["blocks.0.attention.pattern"].sum(-1), torch.ones(2, 4, 8)) <= 1e-6
    undropped = seen["blocks.0.attention.pattern"] @ seen["blocks.0.attention.v"]
    assert worst(undropped, seen["blocks.0.attention.z"]) > 1e-2


# Initialisation ---------------------------------------------------------------------------------------------


@pytest.mark.ledger("D7")
@pytest.mark.parametrize("init", ["xavier", "gpt2", "bert"])
def test_initialisation_statistics(init):
    torch.manual_seed(0)
    model = ch.Transformer(
        ch.ModelConfig(
            vocab_size=500,
            d_model=256,
            n_layers=4,
            n_heads=4,
            init=init,
            max_positions=128,
            tie_embeddings=False,
        )
    )
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if name.endswith("bias"):
            assert not values.any(), name
        elif values.ndim == 1:
            assert (values == 1).all(), name
        elif init == "xavier" and "table" not in name and "tokens" not in name:
            bound = math.sqrt(6 / sum(values.shape))
            assert values.abs().max() <= bound, name
            assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03), name
        else:
            std = 256**-0.5 if init == "xavier" else 0.02
            writes = name.endswith(("attention.out.weight", "down.weight"))
            std = std / math.sqrt(8) if init == "gpt2" and writes else std
            assert values.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(values.mean().item()) < 5 * std / math.sqrt(values.numel()), name


@pytest.mark.ledger("D7")
def test_seeds_decide_the_weights():
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(ch.Transformer(config()).state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert not torch.equal(
        models[0]["decoder.blocks.0.attention.q.weight"], models[2]["decoder.blocks.0.attention.q.weight"]
    )


# Fronts -----------------------------------------------------------------------------------------------------

PATCHES = {
    "family": "encoder",
    "input": "patches",
    "image_size": (12, 8),
    "patch_size": 4,
    "n_channels": 3,
    "n_classes": 5,
}


@pytest.mark.ledger("E4")
@pytest.mark.parametrize("class_token", [False, True])
def test_patches_equal_a_convolution(class_token):
    model, pixels = build(**PATCHES, class_token=class_token, positions="none"), torch.randn(2, 3, 12, 8)
    front = model.encoder.embedding.front
    convolved = (
        nnf.conv2d(pixels, front.project.weight.view(16, 3, 4, 4), front.project.bias, stride=4)
        .flatten(2)
        .transpose(1, 2)
    )
    found = front(pixels)
    if class_token:
        assert torch.equal(found[:, 0], front.class_token.expand(2, -1))
        found = found[:, 1:]
    assert worst(found, convolved) <= 1e-5


@pytest.mark.ledger("E4")
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rope", "none"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_vision(pooling, positions):
    """The class token, or the mean over patches, decides; without positions the order does not matter."""
    model = build(**PATCHES, class_token=pooling == "cls", pooling=pooling, positions=positions)
    pixels = torch.randn(2, 3, 12, 8)
    with torch.no_grad():
        out = model(pixels)
        pooled = out.hidden[:, 0] if pooling == "cls" else out.hidden.mean(1)
        assert worst(model.head.out(pooled), out.logits) <= 1e-6
        swapped = model(torch.cat([pixels[:, :, 4:8], pixels[:, :, :4], pixels[:, :, 8:]], 2)).logits
        assert (worst(swapped, out.logits) <= TOLERANCE) == (positions == "none")
        with ch.attending(model, "eager"):
            assert worst(model(pixels).logits, out.logits) <= TOLERANCE


@pytest.mark.ledger("E4", "E3")
def test_an_image_can_be_a_source():
    shape = {**PATCHES, "family": "encoder-decoder", "n_classes": 0, "head": "lm"}
    holds(build(**shape), source=torch.randn(2, 3, 12, 8))


@pytest.mark.ledger("E6")
@pytest.mark.cpu
def test_frames_equal_two_convolutions():
    model = build(family="encoder", input="frames", d_input=5, n_classes=3, conv_stride=2, positions="none")
    front, x = model.encoder.embedding.front, torch.randn(2, 9, 5)
    first, second = nn.Conv1d(5, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1, stride=2)
    first.load_state_dict(front.first.state_dict())
    second.load_state_dict(front.second.state_dict())
    expected = nnf.gelu(second(nnf.gelu(first(x.transpose(1, 2))))).transpose(1, 2)
    assert worst(front(x), expected) == 0


@pytest.mark.ledger("E6", "A4")
@pytest.mark.parametrize("head", ["classifier", "tagger"])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("length", [5, 6, 7, 8])
def test_frames_padded_on_the_right(length, stride, head):
    """Each row of a batch of recordings of unequal length equals itself alone, whatever the padding holds."""
    model = build(
        family="encoder",
        input="frames",
        d_input=5,
        n_classes=3,
        conv_stride=stride,
        head=head,
        pooling="mean",
    )
    x = torch.randn(2, 12, 5)
    mask = torch.arange(12)[None] < torch.tensor([[12], [length]])
    with torch.no_grad():
        both = model(x, mask=mask).logits
        whole, short = model(x[:1]).logits, model(x[1:, :length]).logits
    assert worst(both[:1], whole) <= TOLERANCE
    assert worst(both[1:] if head == "classifier" else both[1:, : short.shape[1]], short) <= TOLERANCE


@pytest.mark.ledger("E6", "E3")
def test_frames_as_a_source():
    model = build(family="encoder-decoder", input="frames", d_input=5, conv_stride=2)
    x, ids = torch.randn(2, 12, 5), some_ids()
    holds(model, source=x)
    mask = torch.arange(12)[None] < torch.tensor([[12], [7]])
    with torch.no_grad():
        both = model(ids, source=x, source_mask=mask).logits
        assert worst(both[1:], model(ids[1:], source=x[1:, :7]).logits) <= TOLERANCE


@pytest.mark.ledger("E6")
@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_vectors_padded_and_cached(family):
    model = build(family=family, input="vectors", d_input=5, head="tagger", n_classes=3)
    x, mask = torch.randn(2, 10, 5), torch.ones(2, 10, dtype=torch.bool)
    mask[:, [0, 4]] = False
    with torch.no_grad():
        alone = model(x[:, mask[0]]).logits
        assert worst(model(x, mask=mask).logits[:, mask[0]], alone) <= TOLERANCE
        if family == "decoder":
            cache = ch.Cache()
            pieces = [
                model(x[:, a:b], mask=mask[:, a:b], cache=cache).logits for a, b in ((0, 5), (5, 6), (6, 10))
            ]
            assert worst(torch.cat(pieces, 1)[:, mask[0]], alone) <= TOLERANCE


# Heads ------------------------------------------------------------------------------------------------------


@pytest.mark.ledger("E1", "E2")
@pytest.mark.parametrize("pooler", ["none", "tanh", "relu"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize("head", ["classifier", "embedding"])
@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_pooling_by_hand(family, head, pooling, pooler):
    """First, mean, last of the real tokens, wherever the padding stands."""
    model = build(family=family, head=head, n_classes=3, pooling=pooling, pooler=pooler, normalise=True)
    ids, mask = some_ids(3, 8), torch.ones(3, 8, dtype=torch.bool)
    mask[0, 6:], mask[1, :3], mask[2, [0, 4, 7]] = False, False, False
    with torch.no_grad():
        out = model(ids, mask=mask)
        for row in range(3):
            hidden = out.hidden[row, mask[row]]
            pooled = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1]}[pooling]
            if pooler != "none":
                pooled = getattr(torch, pooler)(model.head.pooler(pooled))
            said = model.head.out(pooled) if head == "classifier" else pooled / pooled.norm()
            assert worst(out.logits[row], said) <= 2e-6
            assert worst(model(ids[row : row + 1, mask[row]]).logits[0], out.logits[row]) <= TOLERANCE


@pytest.mark.ledger("E1")
def test_masked_language_head_by_hand():
    model = build(family="encoder")
    head, hidden = model.head, torch.randn(1, 3, 16)
    expected = nnf.linear(
        head.norm(nnf.gelu(head.transform(hidden))),
        model.encoder.embedding.front.tokens.weight,
        head.out.bias,
    )
    assert worst(head(hidden, None), expected) <= 1e-6


@pytest.mark.ledger("E2", "C4")
def test_logit_scale_and_softcap():
    plain, scaled = (
        build(tie_embeddings=False),
        build(tie_embeddings=False, logit_scale=0.5, logit_softcap=2.0),
    )
    ids = some_ids()
    assert worst(scaled(ids).logits, 2.0 * torch.tanh(plain(ids).logits * 0.5 / 2.0)) <= 1e-6


@pytest.mark.ledger("E2", "G1")
@pytest.mark.parametrize("where", ["none", "left", "right", "gaps"])
def test_logits_of_the_last_token_alone(where):
    model, ids, mask = build(), some_ids(), torch.ones(2, 8, dtype=torch.bool)
    if where != "none":
        ids, mask = pad(ids, where)
    last = torch.where(mask, torch.arange(mask.shape[1]), 0).amax(1)
    with torch.no_grad():
        every = model(ids, mask=None if where == "none" else mask).logits
        said = model(ids, mask=None if where == "none" else mask, logits="last").logits
        assert said.shape == (2, 1, V)
        assert worst(said[:, 0], every[torch.arange(2), last]) <= 1e-6
        nothing = model(ids, mask=mask, logits="none")
        assert nothing.logits is None
        assert worst(nothing.hidden, model(ids, mask=mask).hidden) == 0


SINKS = {
    "decoder": {},
    "grouped, windows, rotary": {"n_kv_heads": 2, "positions": "rope", "window": 3},
    "soft-cap": {"attention_softcap": 5.0, "positions": "alibi"},
    "encoder": {"family": "encoder"},
    "encoder-decoder": {"family": "encoder-decoder", "positions": "relative"},
    "pruned": {"pruned_heads": {"blocks.0.attention": (1,)}},
}


def with_sinks(**options) -> ch.Transformer:
    """A model whose sinks differ from head to head."""
    model = build(attention_sink=True, **options)
    sinks = [part.sink for part in model.modules() if isinstance(part, Attention)]
    assert all(sink.numel() and sink.ndim == 1 for sink in sinks)
    with torch.no_grad():
        for number, sink in enumerate(sinks):
            sink.copy_(torch.linspace(-1, 2, sink.numel()) + 0.1 * number)
    return model


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kernel", ["eager", "fused"])
def test_a_sink_is_a_column_before_the_softmax_as_in_transformers(kernel, masked, differences):
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    torch.manual_seed(1)
    q, k, v, sink = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(4)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None] if masked else None
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 2, sink
    added = (
        None if mask is None else torch.zeros(1, 1, 5, 5).masked_fill(~mask, torch.finfo(torch.float32).min)
    )
    theirs, pattern = eager_attention_forward(module, q, k, v, added, scaling=0.3)
    ours = KERNELS[kernel](q, k, v, mask, None, 0.3, sink=sink)
    assert differences.see("sink", ours, theirs.transpose(1, 2)) <= 1e-6
    assert float(pattern.sum(-1).max()) < 1  # something went to the sink


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("name", list(SINKS))
def test_a_model_with_sinks_is_the_same_however_it_is_run(name):
    model = with_sinks(**SINKS[name])
    rows = ch.check(model)
    assert {row.name for row in rows} >= {"model = formula", "fused = eager"}
    assert [row for row in rows if not row.passed] == []


def test_without_weight_a_sink_is_nothing_and_its_gradient_is_right():
    plain, model, ids = build(), build(attention_sink=True), some_ids()
    weights = {**model.state_dict(), **plain.state_dict()}
    model.load_state_dict(
        {name: torch.full_like(x, -1e4) if name.endswith("sink") else x for name, x in weights.items()}
    )
    with torch.no_grad():
        assert worst(model(ids).logits, plain(ids).logits) <= 1e-6
    q, k, v, sink = (torch.randn(*size).double().requires_grad_() for size in ((1, 2, 3, 4),) * 3 + ((2,),))
    assert torch.autograd.gradcheck(lambda *x: KERNELS["eager"](*x[:3], sink=x[3]), (q, k, v, sink))


def test_sinks_are_saved_pruned_and_generated_with(tmp_path):
    model = with_sinks(
        n_kv_heads=2, positions="rope", norm="rmsnorm", gated=True, activation="silu", bias=False
    )
    m = ch.Model(model)
    m.save(tmp_path / "saved")
    ids = some_ids(1, 6)
    again = ch.load(tmp_path / "saved", device=str(ids.device))
    assert worst(again.model(ids).logits, model(ids).logits) == 0
    made = m.generate(ids[0].tolist(), 8).ids
    row = ids[0].tolist()
    for _ in range(8):
        row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
    assert made == row[6:]
    assert again.generate([ids[0].tolist()] * 2, 8)[1].ids == made


@every_family
def test_a_model_is_exported(family):
    """`torch.export` takes the model as it is: its output is a tree of tensors."""
    model, given = build(family=family), given_for(family)
    exported = torch.export.export(model, (some_ids(),), given).module()
    ids = some_ids(seed=7)
    ours, theirs = model(ids, **given), exported(ids, **given)
    assert type(theirs) is ch.Output
    assert worst(theirs.logits, ours.logits) <= TOLERANCE and worst(theirs.hidden, ours.hidden) <= TOLERANCE
    leaves = torch.utils._pytree.tree_leaves(ours)
    assert len([leaf for leaf in leaves if leaf is not None]) == (3 if given else 2)


def test_a_model_is_copied_and_pickled_after_it_has_generated():
    m = ch.Model(build())
    made = m.generate([1, 2, 3], 6).ids
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert other.generate([1, 2, 3], 6).ids == made
        assert next(other.model.parameters()) is not next(m.model.parameters())
