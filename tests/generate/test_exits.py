"""Early exit: the same tokens and layers as a definition without a cache, and refusals."""

from __future__ import annotations

import json

import pytest
import torch

import clearhead as ch
from clearhead.app.cli import main
from clearhead.inside.lens import stopped_at
from tests.harness import LATENT, build

CASES = {
    "learned": {},
    "rope, grouped": {"positions": "rope", "n_kv_heads": 2, "qk_norm": "head", "norm": "rmsnorm"},
    "window": {"positions": "alibi", "window": 3, "parallel": True},
    "post": {"norm_position": "post"},
    "states": {"attention": ("full", "gated-delta", "linear", "full"), "positions": "rope"},
    "experts": {"n_experts": 3},
    "state spaces": {"attention": ("mamba2(d_state=3)", "conv", "none", "full"), "feedforward_skips": (0,)},
    "latent": LATENT,
    "shared": {"layer_groups": 2, "qk_norm": "full"},
    "looped": {"loop": (1, 1, 2), "positions": "rope"},
}
PROMPT = [1, 2, 3]


def deep(**choices) -> ch.Transformer:
    return build(**{"n_layers": 4, **choices})


def defined(model: ch.Transformer, threshold: float, first: int, count: int) -> tuple[list[int], list[int]]:
    """Greedy tokens and layers, each from one pass over the whole text, without a cache.

    A token that has left after some layer keeps its state in all later ones.
    """
    layers, text, left = model.config.n_layers, list(PROMPT), [model.config.n_layers] * len(PROMPT)
    made, used = [], []
    for _ in range(count):
        states, gone = {}, torch.tensor(left)[None, :, None]
        edits = {
            f"blocks.{n}.resid_pre": lambda x, n=n, states=states: states.update({n: x})
            for n in range(layers)
        }
        edits |= {
            f"blocks.{n}.resid_post": lambda x, n=n, states=states, gone=gone: torch.where(
                gone <= n, states[n], x
            )
            for n in range(layers)
        }
        with torch.no_grad(), ch.edit(model, edits), ch.record(model, "blocks.*.resid_post") as seen:
            logits = model(torch.tensor([text])).logits[0, -1]
        here = left[-1] if len(text) == len(PROMPT) else layers
        if len(text) > len(PROMPT):
            for n in range(first, layers):
                said = stopped_at(model, seen[f"blocks.{n - 1}.resid_post"][:, -1:])[0, -1]
                if float(said.softmax(-1).max()) > threshold:
                    here, logits = n, said
                    break
            left[-1] = here
        made.append(int(logits.argmax()))
        used.append(here)
        text.append(made[-1])
        left.append(layers)
    return made, used


@pytest.mark.ledger("D8")
@pytest.mark.parametrize("name", CASES)
def test_tokens_leave_as_defined(name):
    model = deep(**CASES[name])
    for threshold, first in ((0.3, 1), (0.5, 2)):
        made = ch.Model(model).generate(PROMPT, 6, early_exit=threshold, exit_from=first)
        assert (made.ids, made.layers) == defined(model, threshold, first, 6)
    assert min(made.layers) >= 2


@pytest.mark.ledger("D8")
@pytest.mark.parametrize("name", CASES)
def test_at_threshold_one_nothing_changes(name):
    m = ch.Model(deep(**CASES[name]))
    plain = m.generate(PROMPT, 10, logprobs=True)
    whole = m.generate(PROMPT, 10, logprobs=True, early_exit=1.0)
    assert whole.ids == plain.ids
    assert whole.logprobs == pytest.approx(plain.logprobs, abs=2e-6)  # the layers run one by one
    assert whole.layers == [4] * len(whole.ids)
    assert plain.layers is None


def test_rows_of_a_batch_leave_as_they_would_alone():
    m, prompts = ch.Model(deep(positions="rope")), [PROMPT, [4], [5, 6, 7, 8, 9]]
    for options in ({}, {"temperature": 1.0, "seed": 4}, {"stop_tokens": [3]}):
        together = m.generate(prompts, 8, early_exit=0.3, exit_from=1, **options)
        alone = [m.generate(prompt, 8, early_exit=0.3, exit_from=1, **options) for prompt in prompts]
        assert [(row.ids, row.layers) for row in together] == [(row.ids, row.layers) for row in alone]
        assert all(len(row.ids) == len(row.layers) for row in together)
    assert len({count for row in together for count in row.layers}) > 1


def test_two_stacks_and_streams_leave_early():
    both = ch.Model(deep(family="encoder-decoder", n_encoder_layers=2))
    made = both.generate(PROMPT, 8, early_exit=0.3, exit_from=1)
    assert made.layers[0] == 4 and min(made.layers) < 4
    m = ch.Model(deep(positions="rope", max_positions=8))
    options = {"overflow": "stream", "sinks": 1, "stream_window": 6}
    streamed = m.generate(PROMPT, 20, early_exit=1.0, **options)
    assert streamed.ids == m.generate(PROMPT, 20, **options).ids
    assert min(m.generate(PROMPT, 20, early_exit=0.3, exit_from=1, **options).layers) < 4


def test_where_longrope_reads_a_text_anew_all_layers_are_counted():
    """The token after the trained length comes from a prefill, and no row leaves it early."""
    factors = {"short_factor": (1.0, 2.0), "long_factor": (3.0, 9.0), "original_positions": 6}
    m = ch.Model(deep(positions="rope", rope_scaling=ch.RopeScaling(kind="longrope", **factors)))
    made = m.generate(PROMPT, 8, early_exit=0.01, exit_from=1)
    assert made.layers == [4, 1, 1, 1, 4, 1, 1, 1]


def test_the_first_half_of_the_layers_is_not_asked():
    m = ch.Model(deep())
    assert min(m.generate(PROMPT, 12, early_exit=0.01).layers) == 2


WRONG = [
    ({"early_exit": 0.0}, "early_exit 0.0 is outside"),
    ({"early_exit": 1.5}, "early_exit 1.5 is outside"),
    ({"exit_from": 2}, "exit_from 2 without early_exit"),
    (
        {"early_exit": 0.9, "exit_from": 4, "max_new_tokens": 5},
        "exit_from 4 leaves no layer to skip: this model has 4",
    ),
    ({"early_exit": 0.9, "num_beams": 2}, "num_beams with early_exit"),
    ({"early_exit": 0.9, "lookup": 2}, "lookup with early_exit"),
    ({"early_exit": 0.9, "reuse": True}, "reuse with early_exit"),
    ({"early_exit": 0.9, "compile": True}, "compile with early_exit"),
    ({"early_exit": 0.9, "max_new_tokens": 60, "overflow": "slide"}, "early_exit with a text that slides"),
]


@pytest.mark.parametrize(("options", "says"), WRONG, ids=[says for _, says in WRONG])
def test_what_early_exit_cannot_serve_is_refused(options, says):
    m = ch.Model(deep())
    with pytest.raises(ch.InputError, match=says) as error:
        m.generate(PROMPT, **options)
    assert "\n" not in str(error.value)


def test_early_exit_is_refused_where_nobody_would_see_it():
    m = ch.Model(deep())
    with pytest.raises(ch.InputError, match="draft with early_exit"):
        m.generate(PROMPT, 4, early_exit=0.9, draft=m)
    with ch.record(m, "logits"), pytest.raises(ch.InputError, match="nobody can listen to"):
        m.generate(PROMPT, 4, early_exit=0.9)
    with pytest.raises(ch.InputError, match="this model has one"):
        ch.Model(build(n_layers=1)).generate(PROMPT, 4, early_exit=0.9)


def test_the_command_says_how_many_layers(tmp_path, capsys):
    model = deep(positions="rope")
    ch.Model(model).save(tmp_path / "m")
    flags = ["--early-exit", "0.3", "--exit-from", "1", "--max-new-tokens", "6", "--ids", "--json"]
    main(["generate", str(tmp_path / "m"), "1 2 3", *flags])
    body = json.loads(capsys.readouterr().out)
    made = ch.load(tmp_path / "m").generate(PROMPT, 6, early_exit=0.3, exit_from=1)
    assert (body["ids"], body["layers"]) == (made.ids, made.layers)
