"""Preference tuning: losses by their formulas, the reference that is the model itself, a run that learns."""

import json
import math

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import ConfigError
from clearhead.learn.batches.batch import Batch
from clearhead.learn.tasks.entries.chats import PREFERENCE, preference_losses
from clearhead.learn.tasks.table import TASKS
from tests import harness

SETTINGS = {
    "tokens.kind": "char", "train.lr": 3e-3, "data.batch_size": 4, "train.epochs": None, "train.steps": 30,
    "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 4, "model.max_positions": 64,
    "model.dropout": 0.1, "train.device": "cpu", "train.samples": 1, "train.validate_every": 15,
}  # fmt: skip


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def formula(kind: str, chosen: float, rejected: float, beta: float, wrong: float) -> float:
    """The losses of the papers, for one pair, in Python's own floats."""
    margin = beta * (chosen - rejected)
    log = math.log
    if kind == "exo_pair":  # the divergence of the model's choice from the label's
        wrong, win = wrong or 1e-3, sigmoid(margin)
        return win * log(win / (1 - wrong)) + (1 - win) * log((1 - win) / wrong)
    conservative = -(1 - wrong) * log(sigmoid(margin)) - wrong * log(sigmoid(-margin))
    robust = (1 - wrong) * -log(sigmoid(margin)) - wrong * -log(sigmoid(-margin))
    mix = sigmoid(margin / 0.05)
    return {
        "sigmoid": conservative,
        "sigmoid_norm": conservative,
        "hinge": max(0.0, 1 - margin),
        "ipo": (chosen - rejected - 1 / (2 * beta)) ** 2,
        "robust": robust / (1 - 2 * wrong),
        "nca_pair": -log(sigmoid(beta * chosen))
        - 0.5 * (log(sigmoid(-beta * chosen)) + log(sigmoid(-beta * rejected))),
        "bco_pair": -log(sigmoid(beta * chosen)) - log(sigmoid(-beta * rejected)),
        "sppo_hard": (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2,
        "apo_zero": 1 - sigmoid(beta * chosen) + sigmoid(beta * rejected),
        "apo_down": sigmoid(beta * chosen) + 1 - sigmoid(margin),
        "discopop": -log(sigmoid(margin)) * (1 - mix) + math.exp(-margin) * mix,
    }[kind]


@pytest.mark.parametrize("kind", PREFERENCE)
def test_losses_equal_the_formulas(kind):
    """And trl's own: benchmarks/dpo_trl.py holds them against its trainer on the same batch."""
    random = np.random.default_rng(0)
    pairs = random.normal(0, 3, (20, 2))
    for beta, wrong in ((0.1, 0.0), (0.5, 0.2)):
        chosen, rejected = torch.tensor(pairs, dtype=torch.float64).T
        found = preference_losses(kind, chosen, rejected, beta, wrong)
        wanted = [formula(kind, *pair, beta, wrong) for pair in pairs]
        assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64), atol=1e-9)


def rows(count: int = 12) -> list[dict]:
    words = ("red", "blue", "green", "black")
    return [
        {"prompt": f"say {words[n % 4]} {n}", "chosen": f"{words[n % 4]}!", "rejected": f"not {words[n % 3]}"}
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A run of 30 steps, its notes and its events."""
    folder, events = tmp_path_factory.mktemp("dpo") / "run", []
    given = {"train": [*rows(), {"prompt": "x", "chosen": "a", "rejected": ""}], "validation": rows(4)}
    ch.train(given, recipe="dpo", out=folder, settings=SETTINGS, on_event=events.append)
    return folder, events


def test_a_run_begins_at_its_reference_and_learns_the_pairs(tuned):
    folder, events = tuned
    notes = [event.line for event in events if hasattr(event, "line")]
    assert "1 row without two different answers left out" in notes
    assert any(note.startswith("reference: the model itself before its first step; off by") for note in notes)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    first = next(line for line in log if line["event"] == "stepped")
    validated = [line["metrics"] for line in log if line["event"] == "validated"]
    assert abs(first["loss"] - math.log(2)) < 0.05  # dropout is all that is apart
    assert validated[-1]["loss"] < 0.3 and validated[-1]["accuracy"] == 1.0 and validated[-1]["margin"] > 0.5


def test_the_loss_is_that_of_each_conversation_alone(tuned, tmp_path):
    """The two answers of a row do not see each other: their log-probabilities are those of `score`."""
    m = ch.load(tuned[0])
    from clearhead.learn.data.corpus import open_corpus
    from clearhead.learn.data.plan import DataPlan
    from clearhead.learn.tasks.chat import chat_ids, chat_template

    path, task = tmp_path / "rows.jsonl", TASKS["prefer"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(5)))
    corpus = open_corpus(DataPlan(paths=(str(path),)), split=False)
    assert corpus.shape == "preferences"
    encoded = task.encode_corpus(
        corpus,
        "validation",
        m.tokenizer,
        (),
        tmp_path,
        special=m.special,
        template=chat_template(m),
    )
    batches = task.make_batches(
        encoded, DataPlan(batch_size=5), special=m.special, length=64, seed=0, training=False
    )
    (batch,) = batches.all()
    with torch.no_grad():
        found = task.outputs_of(m.model, batch)
        chunked = task.outputs_of(m.model, batch, 7)
    for number, pair in zip(batch.numbers.tolist(), found.tolist()):
        for side, made in zip(("chosen", "rejected"), pair):
            row = rows(5)[number]
            prompt = chat_ids(m, [{"role": "user", "content": row["prompt"]}], {})
            answer = m.tokenizer.encode(f" {row[side]}", add_special_tokens=False).ids
            scored = m.score([*prompt, *answer, m.special["eos"]])
            alone = sum(scored.logprobs[-len(answer) - 1 :])
            assert abs(alone - made) < 1e-4
    assert harness.worst(found, chunked) < 1e-5
    judged = ch.evaluate(m, path)
    assert judged.task == "prefer" and 0 <= judged.metrics["accuracy_per_token"] <= 1


def test_a_resumed_run_keeps_the_reference_it_began_with(tmp_path):
    """Stopped after 4 steps and resumed, it ends with the weights of a run in one go."""
    settings = {**SETTINGS, "train.steps": 8, "train.validate_every": 4, "train.samples": 0}
    weights = []
    for stop in (False, True):
        folder, steps = tmp_path / str(stop), []

        def seen(event, steps=steps):
            steps.extend([event.step] if type(event).__name__ == "Validated" else [])

        ch.train(
            rows(), recipe="dpo", out=folder, settings=settings, on_event=seen,
            stop=lambda steps=steps, stop=stop: stop and bool(steps),
        )  # fmt: skip
        if stop:
            ch.train(resume=folder)
        weights.append(ch.load(folder / "last").model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train.preference": "dpo"}, "no loss of pairs.*choose from sigmoid"),
        ({"train.preference": "hinge", "train.label_smoothing": 0.1}, "not taken by hinge"),
        ({"train.preference": "robust", "train.label_smoothing": 0.6}, "below 0.5"),
        ({"train.beta": 0.0}, "beta.* must be above 0"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(settings, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        ch.train(rows(), recipe="dpo", out=tmp_path / "run", settings={**SETTINGS, **settings})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("beta", [0.05, 0.1, 2.0])
def test_the_margin_has_beta_as_trls_rewards_have(beta):
    """trl: rewards are beta · (log-probability - that of the reference), margins chosen - rejected."""
    random = torch.Generator().manual_seed(0)
    logprobs, reference = (torch.randn(5, 2, generator=random) for _ in range(2))
    ids = torch.zeros(5, 4, dtype=torch.long)
    batch = Batch(ids, ids, documents=torch.tensor([[0, 0, 1, 1]] * 5), reference=reference)
    task = TASKS["prefer"].with_values(beta=beta)
    said, meant = task.answers(logprobs, batch)
    rewards = beta * (logprobs - reference)
    found = {name: metric(*sides) for name, (metric, *sides) in task.score(said, meant, ()).items()}
    assert found["margin"] == pytest.approx(float((rewards[:, 0] - rewards[:, 1]).mean()), abs=1e-6)
    assert found["accuracy"] == pytest.approx(float((rewards[:, 0] > rewards[:, 1]).float().mean()))
