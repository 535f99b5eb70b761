"""Check what a config can choose beyond the matrix.

Widths, norms and caps in attention, sharing, pruning, dropout, fronts, heads.
"""

from __future__ import annotations

import math

import pytest
import torch

import clearhead as ch
from clearhead.errors import InputError
from tests.harness import V, build, config, differing, gradients, pad, some_ids, worst

TOLERANCE = 1e-5
every_family = pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])


def given_for(family: str) -> dict:
    return {"source": some_ids(2, 5, seed=3)} if family == "encoder-decoder" else {}


# Attention --------------------------------------------------------------------------------------------------


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
        {"n_experts": 4},
        {"attention_sink": True, "n_kv_heads": 2, "positions": "rope", "window": 3},
        {"attention_sink": True, "attention_softcap": 5.0, "positions": "alibi"},
    ],
    ids=lambda choices: "-".join(choices),
)
def test_every_variant_is_cached_padded_and_fused(family, choices):
    assert not differing(build(family=family, **choices), some_ids(), **given_for(family))


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
    assert not differing(model, some_ids(), source=some_ids(2, 5, vocab=7))


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
    assert not differing(shared, some_ids(), **given)


@pytest.mark.ledger("W6")
def test_looped_layers(tmp_path):
    """A span used n times equals its layers written out, with n chosen at run time, and from a cache."""
    m = ch.Model(build(n_layers=6, loop=(1, 2, 2), positions="rope").eval())
    assert len(m.model.main.blocks) == 4
    weights, ids = m.model.state_dict(), some_ids()
    m.save(tmp_path)
    for times in (1, 2, 3):
        looped, order = m.looped(times).model, [0, *[1, 2] * times, 3]
        plain = build(n_layers=len(order), positions="rope").eval()
        copied = {}
        for name in plain.state_dict():
            parts = name.split(".")
            if "blocks" in parts:
                at = parts.index("blocks") + 1
                parts[at] = str(order[int(parts[at])])
            copied[name] = weights[".".join(parts)]
        plain.load_state_dict(copied)
        assert torch.equal(looped(ids).logits, plain(ids).logits)
        made, wanted = (
            ch.Model(model).generate([1, 2, 3], max_new_tokens=6).ids for model in (looped, plain)
        )
        assert made == wanted
        assert not differing(looped, ids)
        assert looped.head.out.weight is m.model.head.out.weight
        loaded = ch.load(tmp_path, device=str(ids.device)).looped(times).model
        assert torch.equal(loaded(ids).logits, plain(ids).logits)
    with pytest.raises(InputError, match="no loop of layers"):
        ch.Model(build()).looped(2)


# Pruning ----------------------------------------------------------------------------------------------------


@pytest.mark.ledger("C4")
@every_family
def test_a_pruned_model_is_cached_padded_and_takes_the_bias_of_its_heads(family):
    whole, given, ids = build(family=family, positions="rope"), given_for(family), some_ids()
    smaller = ch.prune(
        whole, ["0.0", "0.1", "1.2", *(["cross.1.3"] if family == "encoder-decoder" else [])]
    ).model
    edits = {
        f"{name}.z": lambda z, heads=heads: z.index_fill(1, torch.tensor(heads), 0.0)
        for name, heads in smaller.config.pruned_heads.items()
    }
    bias = torch.randn(1, 4, 8, 8)
    with ch.edit(whole, edits), torch.no_grad():
        masked, biased = whole(ids, **given).logits, whole(ids, bias=bias, **given).logits
    assert worst(smaller(ids, **given).logits, masked) <= TOLERANCE
    assert worst(smaller(ids, bias=bias, **given).logits, biased) <= TOLERANCE
    assert not differing(smaller, ids, **given)


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

PATCHES = dict(family="encoder", input="patches", image_size=(12, 8), patch_size=4, n_channels=3, n_classes=5)


@pytest.mark.ledger("E4", "E3")
def test_an_image_can_be_a_source():
    shape = {**PATCHES, "family": "encoder-decoder", "n_classes": 0, "head": "lm"}
    assert not differing(build(**shape), some_ids(), source=torch.randn(2, 3, 12, 8))


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
    assert not differing(model, ids, source=x)
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
