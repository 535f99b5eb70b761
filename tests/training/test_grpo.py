"""Tuning by reward: losses against a loop and trl, samples with the trainer's bits, resumed runs, rewards."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import clearhead as ch
from clearhead.errors import ConfigError, InputError
from clearhead.hub.tokens.tools import functions_of, tools_of
from clearhead.hub.weights import open_tensors
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.recipe import GrpoPlan
from clearhead.learn.rewards import reward, rewards_named
from clearhead.learn.tasks.generation import chat_ids
from clearhead.learn.tasks.rollouts import Rollouts
from clearhead.learn.tasks.table import TASKS
from tests import harness

ROWS = [{"prompt": f"{n}", "completion": f"{n}!", "answer": f"{n}!"} for n in range(12)]
SFT = {
    "model.d_model": 32, "model.n_layers": 1, "model.n_heads": 2, "model.max_positions": 64,
    "tokens.kind": "char", "model.dropout": 0.1, "train.device": "cpu", "train.lr": 5e-3,
    "train.epochs": None, "train.steps": 20, "train.samples": 0, "data.batch_size": 8,
}  # fmt: skip
RUN = {
    "grpo.reward": ["exact", "length=4"], "grpo.group": 4, "grpo.updates": 2, "grpo.kl": 0.1,
    "train.device": "cpu", "train.lr": 1e-3, "train.steps": 7, "train.validate_every": 7,
    "train.save_every": 3, "train.samples": 1, "data.batch_size": 3, "generate.max_new_tokens": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo") / "base"
    ch.train(
        [{k: row[k] for k in ("prompt", "completion")} for row in ROWS],
        recipe="sft",
        out=folder,
        settings=SFT,
    )
    return folder


def run(base, out, events=None, stop=None, **settings):
    more = {} if stop is None else {"stop": stop}
    events = [] if events is None else events
    return ch.train(
        [{k: row[k] for k in ("prompt", "answer")} for row in ROWS], recipe="grpo", out=out,
        settings={"model.base": base, **RUN, **settings}, on_event=events.append, **more,
    )  # fmt: skip


def lines(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_model_that_reads_images_is_refused():
    with pytest.raises(InputError, match="sampled to prompts of text alone"):
        Rollouts(TASKS["grpo"], SimpleNamespace(image_encoder=object()), [], 1, 0, True)


def batch_of(seed=0):
    """Answers of unequal length, with log-probabilities near those of sampling."""
    random = torch.Generator().manual_seed(seed)
    where = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1], [1, 1, 1, 1, 0]]).bool()
    logprobs = -torch.rand(4, 5, generator=random, dtype=torch.float64)
    near = logprobs + 0.3 * torch.randn(4, 5, generator=random, dtype=torch.float64)
    apart = logprobs + 0.5 * torch.randn(4, 5, generator=random, dtype=torch.float64)
    advantages = torch.randn(4, generator=random, dtype=torch.float64)
    ids = torch.zeros(4, 5, dtype=torch.long)
    targets = torch.where(where, 1, IGNORE)
    return logprobs, Batch(ids, targets, sampled=near, reference=apart, advantages=advantages)


def by_loop(logprobs, batch, plan, most):
    """The mean loss of the batch, one token at a time."""
    sums = []
    for row in range(len(batch)):
        total, count = 0.0, 0
        for place in range(batch.targets.shape[1]):
            if batch.targets[row, place] == IGNORE:
                continue
            now, then, base = (
                float(values[row, place]) for values in (logprobs, batch.sampled, batch.reference)
            )
            ratio, better = math.exp(now - then), float(batch.advantages[row])
            high = plan.clip if plan.clip_high is None else plan.clip_high
            clipped = min(max(ratio, 1 - plan.clip), 1 + high)
            total -= min(ratio * better, clipped * better)
            total += plan.kl * (math.exp(base - now) - (base - now) - 1)
            count += 1
        sums.append((total, count))
    if plan.loss == "grpo":
        return sum(total / count for total, count in sums) / len(sums)
    divisor = sum(count for _, count in sums) if plan.loss == "dapo" else len(sums) * most
    return sum(total for total, _ in sums) / divisor


PLANS = [GrpoPlan(loss=loss, kl=kl, clip_high=high) for loss in ("dapo", "grpo", "dr_grpo")
         for kl, high in ((0.0, None), (0.1, 0.28))]  # fmt: skip


def ours(plan, logprobs, batch, most=5):
    task = TASKS["grpo"].with_values(plan=plan, measured={})
    shown = batch if plan.kl else replace(batch, reference=None)
    counts = {"dapo": int((batch.targets != IGNORE).sum()), "grpo": len(batch), "dr_grpo": len(batch) * most}
    return task.loss(logprobs, shown) / counts[plan.loss]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.loss}-{plan.kl}")
def test_the_loss_is_that_of_a_loop_over_tokens(plan):
    logprobs, batch = batch_of()
    assert abs(float(ours(plan, logprobs, batch)) - by_loop(logprobs, batch, plan, 5)) < 1e-12


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.loss}-{plan.kl}")
def test_the_loss_and_its_gradient_are_trls(plan):
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="trl is not installed").GRPOTrainer
    logprobs, batch = batch_of()
    found, wanted = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    made = ours(plan, found, batch)
    mask = (batch.targets != IGNORE).double()
    inputs = {
        "prompt_ids": batch.ids[:, :0], "prompt_mask": batch.ids[:, :0], "completion_ids": batch.ids,
        "completion_mask": mask, "advantages": batch.advantages, "old_per_token_logps": batch.sampled,
        "ref_per_token_logps": batch.reference, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    high = plan.clip if plan.clip_high is None else plan.clip_high
    itself = lambda value, *rest, **named: value  # noqa: E731
    self = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *given, **named: (wanted, torch.zeros_like(wanted), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=plan.kl,
        importance_sampling_level="token", loss_type=plan.loss, epsilon_low=plan.clip, epsilon_high=high,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=False, model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1, max_completion_length=5,
        accelerator=SimpleNamespace(num_processes=1, gather=itself, reduce=itself, gather_for_metrics=itself),
        _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    theirs = trainer._compute_loss(self, None, inputs)
    assert abs(float((made - theirs).detach())) < 1e-12
    made.backward()
    theirs.backward()
    assert harness.worst(found.grad, wanted.grad) < 1e-12


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    folder, events = tmp_path_factory.mktemp("grpo") / "run", []
    run(base, folder, events)
    return folder, events


@pytest.mark.ledger("W7")
def test_sampled_tokens_have_the_trainers_log_probabilities_to_the_bit(base, tuned):
    folder, events = tuned
    figures = [event.figures for event in events if getattr(event, "figures", None)]
    first = figures[::2]  # of two updates of a batch, the weights of the first are those of sampling
    assert len(figures) == 7 and all(each["logprob_difference"] == 0.0 for each in first)
    assert all(each["logprob_difference"] > 0 and each["kl"] >= 0 for each in figures[1::2])
    m = ch.load(base)
    for line in lines(folder)[:4]:  # and the base itself gives these, as far as floats go
        prompt = chat_ids(m, [{"role": "user", "content": line["prompt"]}], {})
        scored = m.score([*prompt, *line["tokens"]]).logprobs[len(prompt) :]
        assert max(abs(a - b) for a, b in zip(scored, line["logprobs"])) < 1e-5
    validated = [
        event.metrics for event in events if hasattr(event, "metrics") and not hasattr(event, "reason")
    ]
    assert all(row["reward"] == -row["loss"] for row in validated)


def draft_wrongly(monkeypatch):
    """Let drafts be of the wrong tokens, in training: each is drawn again by the trainer's forward pass."""

    def wrong(self, numbers, answers, rolls):
        for number, answer in zip(numbers, answers):
            if not self.ended(number, answer):
                answer.add([min(self.stops)], True)

    honest = Rollouts.draft
    monkeypatch.setattr(
        Rollouts, "draft", lambda self, *given: (wrong if self.training else honest)(self, *given)
    )


ONE_STEP = {"train.steps": 1, "train.validate_every": 1, "train.save_every": 1}


def test_what_drafts_decides_no_token(base, tuned, tmp_path, monkeypatch):
    draft_wrongly(monkeypatch)
    events = []
    run(base, tmp_path / "run", events, **ONE_STEP)
    kept = [line for line in lines(tuned[0]) if line["round"] == 0]
    assert lines(tmp_path / "run") == kept
    figures = next(event.figures for event in events if getattr(event, "figures", None))
    assert figures["redrawn"] > 0 and figures["logprob_difference"] == 0.0


def test_a_run_that_is_stopped_goes_on_to_the_same_bits(base, tuned, tmp_path):
    """Stopped between two updates of one batch of answers."""
    seen = []

    def stop():
        seen.append(1)
        return len(seen) == 3

    stopped = run(base, tmp_path / "run", stop=stop)
    assert stopped.reason == "stopped"
    ch.train(resume=tmp_path / "run")
    for name in ("model", "training"):
        once, twice = (open_tensors(folder / "last", name) for folder in (tuned[0], tmp_path / "run"))
        assert once.keys() == twice.keys()
        assert all(torch.equal(once[key].read(), twice[key].read()) for key in once)
    assert lines(tmp_path / "run") == lines(tuned[0])


def test_low_rank_updates_have_the_frozen_weights_as_their_reference(base, tmp_path):
    events = []
    run(
        base,
        tmp_path / "run",
        events,
        **{"train.lora": 2, "grpo.updates": 1, "train.steps": 3, "train.lr": 0.02},
    )
    figures = [event.figures for event in events if getattr(event, "figures", None)]
    assert [each["logprob_difference"] for each in figures] == [0.0] * 3
    assert figures[0]["kl"] == 0.0 < figures[2]["kl"]
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"generate.top_p": 0.9}, "top_p 0.9.*set it to 1"),
        ({"generate.temperature": 0.0}, "temperature 0"),
        ({"grpo.reward": []}, "grpo.reward is empty"),
        ({"grpo.reward": ["exakt"]}, "exakt.*exact"),
        ({"grpo.weights": [1.0]}, "1 numbers.*one for each"),
        ({"grpo.group": 1}, "group 1 must be 2 or more"),
        ({"generate.max_new_tokens": 60}, "no prompt fits"),
        ({"grpo.tools": "none.py"}, "grpo.tools .*none.py is not a Python file"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(base, settings, says, tmp_path):
    with pytest.raises((ConfigError, InputError), match=says):
        run(base, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_its_section_is_refused_by_other_tasks(tmp_path):
    settings = {**SFT, "grpo.group": 4}
    with pytest.raises(ConfigError, match=r"\[grpo\] is for tuning by reward"):
        ch.train(ROWS, recipe="sft", out=tmp_path / "run", settings=settings)
    with pytest.raises(InputError, match="names tools"):
        ch.train([{"prompt": "a", "tools": [{"name": "x"}]}] * 4, recipe="grpo", out=tmp_path / "run",
                 settings={"grpo.reward": ["exact"]})  # fmt: skip


# Tools ------------------------------------------------------------------------------------------------------

TOOLS = '''
def twice(n: int) -> int:
    """Double."""
    return 2 * n
'''
CALLED = [{**row, "answer": f"{2 * n}"} for n, row in enumerate(ROWS[:3])]


def called(n):
    """A conversation in which the tool is called and its result repeated."""
    call = {"function": {"name": "twice", "arguments": {"n": n}}}
    asked, answer = {"role": "user", "content": f"{n}"}, {"role": "assistant", "content": f"{2 * n}"}
    return [
        asked,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": f"{2 * n}"},
        answer,
    ]


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A file of tools, and a model that has nearly learned to call it."""
    folder = tmp_path_factory.mktemp("caller")
    (folder / "tools.py").write_text(TOOLS)
    tools = [tool.entry for tool in tools_of([*functions_of(folder / "tools.py", "tools").values()])]
    settings = {
        **SFT, "model.max_positions": 400, "model.n_layers": 2, "model.dropout": 0.0, "train.lr": 8e-3,
        "train.steps": 90, "data.batch_size": 3, "data.max_length": 400, "tokens.template": "chatml",
    }  # fmt: skip
    given = [{"messages": called(n), "tools": tools} for n in range(3)]
    ch.train(given, recipe="sft", out=folder / "base", settings=settings)
    return folder


def call_run(folder, out, events=None, stop=None, **settings):
    more = {} if stop is None else {"stop": stop}
    events = [] if events is None else events
    return ch.train(
        [{key: row[key] for key in ("prompt", "answer")} for row in CALLED], recipe="grpo", out=out,
        settings={
            **RUN, "model.base": folder / "base", "grpo.tools": folder / "tools.py", "grpo.reward": ["exact"],
            "train.steps": 4, "train.validate_every": 4, "generate.max_new_tokens": 90, **settings,
        },
        on_event=events.append, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def called_tools(caller, tmp_path_factory):
    folder, events = tmp_path_factory.mktemp("called") / "run", []
    call_run(caller, folder, events)
    return folder, events


@pytest.mark.slow
def test_answers_call_tools_and_only_sampled_tokens_are_learned(caller, called_tools):
    folder, events = called_tools
    figures = [event.figures for event in events if getattr(event, "figures", None)]
    assert all(each["logprob_difference"] == 0.0 for each in figures[::2]) and figures[0]["calls"] > 0.5
    m = ch.load(caller / "base")
    tools = [tool.entry for tool in tools_of([*functions_of(caller / "tools.py", "tools").values()])]
    said = [(line, [turn["content"] for turn in line["turns"]]) for line in lines(folder)]
    once = [line for line, texts in said if len(texts) == 2 and texts[1].isdecimal()]
    assert len(once) > 4
    for line in once:
        call, result = line["turns"][0]["tool_calls"][0]["function"], line["turns"][1]["content"]
        assert result == str(2 * json.loads(call["arguments"])["n"])
        added = [token for token, own in zip(line["tokens"], line["sampled"]) if not own]
        written = m.text_tokenizer.decode(added, skip_special_tokens=False)
        assert written == f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
        # The base gives each sampled token its log-probability, after all tokens before it.
        prompt = chat_ids(m, [{"role": "user", "content": line["prompt"]}], {"tools": tools})
        scored = m.score([*prompt, *line["tokens"]]).logprobs[len(prompt) :]
        own = [value for value, sampled in zip(scored, line["sampled"]) if sampled]
        assert len(own) == len(line["logprobs"])
        if line["round"] == 0:
            assert max(abs(a - b) for a, b in zip(own, line["logprobs"])) < 1e-5


def test_tools_are_called_whatever_drafts(caller, called_tools, tmp_path, monkeypatch):
    draft_wrongly(monkeypatch)
    call_run(caller, tmp_path / "run", **ONE_STEP)
    assert lines(tmp_path / "run") == [line for line in lines(called_tools[0]) if line["round"] == 0]


def test_a_run_with_tools_goes_on_to_the_same_bits(caller, called_tools, tmp_path):
    seen = []
    stopped = call_run(caller, tmp_path / "run", stop=lambda: seen.append(1) or len(seen) == 3)
    assert stopped.reason == "stopped"
    ch.train(resume=tmp_path / "run")
    assert lines(tmp_path / "run") == lines(called_tools[0])
    once, twice = (open_tensors(folder / "last", "model") for folder in (called_tools[0], tmp_path / "run"))
    assert all(torch.equal(once[key].read(), twice[key].read()) for key in once)


# Rewards ----------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object", "required": ["name"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "answer", "row", "value"),
    [
        ("exact", " 12 ", {"answer": 12}, 1.0),
        ("exact", "13", {"answer": 12}, 0.0),
        (r"regex=\d+", "12", {}, 1.0),
        ("regex", "12 a", {"regex": r"\d+"}, 0.0),
        ("length=4", "123456", {}, -0.5),
        ("length=4", "1234", {}, 0.0),
        ("json_schema", '{"name": "a", "age": 3}', {"schema": SCHEMA}, 1.0),
        ("json_schema", '{"name": "a", "age": 3.5}', {"schema": json.dumps(SCHEMA)}, 0.0),
        ("json_schema", '{"name": "a", "x": 1}', {"schema": SCHEMA}, 0.0),
        ("json_schema", '{"name": ', {"schema": SCHEMA}, 0.0),
        ("unit_tests", "```python\ndef f(x):\n    return x + 1\n```", {"tests": "assert f(1) == 2"}, 1.0),
        ("unit_tests", "def f(x): return x", {"tests": "assert f(1) == 2"}, 0.0),
        ("unit_tests", "import os; os._exit(0)", {"tests": "pass"}, 0.0),
        ("unit_tests", "x = bytearray(1 << 30)", {"tests": "pass"}, 0.0),
    ],
)
def test_ready_rewards(name, answer, row, value):
    ((name, function),) = rewards_named([name]).items()
    assert reward(name, function, answer, row) == value


def test_a_file_gives_its_functions(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def _no(a, b): ...\ndef longer(answer, row):\n    return len(answer) / row['n']\n"
                    "def bad(answer, row):\n    return None\n")  # fmt: skip
    rewards = rewards_named([f"{file}:longer", "exact"])
    assert (
        list(rewards) == ["longer", "exact"] and reward("longer", rewards["longer"], "abc", {"n": 2}) == 1.5
    )
    with pytest.raises(InputError, match="the reward bad failed on the answer 'x'"):
        reward("bad", rewards_named([str(file)])["bad"], "x", {})
    with pytest.raises(InputError, match=r"`answer`.*prompt"):
        reward("exact", rewards["exact"], "x", {"prompt": "a"})
    with pytest.raises(InputError, match=r"keyword.*minimun"):
        rewards_named(["json_schema"])["json_schema"]("3", {"schema": {"minimun": 3}})
