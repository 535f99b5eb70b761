"""What a recipe cannot mean is refused in one line before anything is trained; what it can mean is taken."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

import clearhead as ch
from clearhead.errors import ClearheadError, ConfigError, InputError
from clearhead.learn.batches.batch import Batch
from clearhead.learn.evaluation.evaluate import data_plan
from clearhead.learn.losses import batch_loss
from clearhead.learn.parallel.world import ALONE
from clearhead.learn.recipe import Recipe, TrainPlan, read_recipe
from clearhead.learn.tasks.table import TASKS
from clearhead.learn.training.build import base_of, build
from clearhead.learn.training.loop import TrainingRun
from clearhead.learn.training.prepare import mistakes_of
from clearhead.run.api import Model
from tests.harness import PATCHES, some_ids, split
from tests.harness import build as micro

WRONG = {
    "train.betas=1.5,0.9": "betas 1.5, 0.9 must each lie in [0, 1)",
    "train.betas=0.9,-0.1": "betas 0.9, -0.1 must each",
    "train.samples=-1": "samples -1 must be 0 or more",
    "train.seed=99999999999999": "seed 99999999999999 must lie between 0 and 4294967295",
    "train.seed=-1": "seed -1 must lie",
    "train.pretrain=-1": "pretrain -1 must be 0 or more",
    "train.weight_decay=-1": "weight_decay -1 must be 0 or more",
    "train.warmup=-5": "warmup -5 must be 0 or more",
    "train.decay=-3": "decay -3 must be above 0, and 1 at most",
    "train.decay=1.5": "decay 1.5 must",
    "train.floor=-1": "floor -1 must lie in [0, 1]",
    "train.floor=5": "floor 5 must lie in [0, 1]",
    "train.layer_decay=-1": "layer_decay -1 must be above 0, and 1 at most",
    "train.layer_decay=0": "layer_decay 0 must",
    "train.loss_chunk=-1": "loss_chunk -1 must be 0 or more",
    "train.lora_alpha=-1": "lora_alpha -1 must be above 0",
    "train.lora=-1": "lora -1 must be 0 or more",
    "train.clip=-1": "clip -1 must be 0 or more",
    "train.z_loss=-1": "z_loss -1 must be 0 or more",
    "train.window_schedule=0,4": "window_schedule 0, 4: each must be 1 or more",
    "train.cautious_decay=true": "muon_coefficients and cautious_decay are of muon, and optimizer is adamw",
    "data.span_length=0": "span_length 0 must be 1 or more",
    "data.span_length=-2": "span_length -2 must be 1 or more",
    "data.stride=-2": "stride -2 must be 0 or more",
    "data.mask_share=1": "mask_share 1 must lie between 0 and 1",
    "data.token_dropout=1": "token_dropout 1 must lie in [0, 1)",
    "data.bpe_dropout=1": "bpe_dropout 1 must lie in [0, 1)",
    "data.validation_share=0": "validation_share 0 must lie between 0 and 1",
    "data.batch_size=0": "batch_size 0 must be 1 or more",
    "data.batch_tokens=0": "batch_tokens 0 must be 1 or more",
    "data.max_length=0": "max_length 0 must be 1 or more",
    "generate.num_beams=0": "num_beams 0 must be 1 or more",
    "generate.temperature=-0.5": "temperature -0.5 must be 0 or more",
    "generate.top_p=0": "top_p 0 must be above 0, and 1 at most",
    "generate.top_p=1.5": "top_p 1.5 must",
    "generate.max_new_tokens=0": "max_new_tokens 0 must be 1 or more",
    "generate.length_penalty=21": "length_penalty 21 must lie in [-20, 20]",
    "model.vocab_size=abc": "[model] vocab_size 'abc' is not allowed: it must be a whole number",
    "model.patch_size=abc": "[model] patch_size 'abc' is not allowed",
    "model.d_model=abc": "[model] d_model 'abc' is not allowed",
    "model.norm=layer": "[model] norm 'layer' is not allowed",
}


@pytest.mark.parametrize(("setting", "line"), WRONG.items(), ids=WRONG)
def test_a_value_that_means_nothing_is_named(setting, line):
    with pytest.raises(ConfigError) as caught:
        read_recipe(None, [setting])
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_the_ends_of_each_range_are_taken():
    ends = {"train.betas": (0, 0), "train.seed": 4294967295, "train.decay": 1, "train.floor": 1}
    ends |= {"train.layer_decay": 1, "train.warmup": 0, "train.loss_chunk": 0, "train.samples": 0}
    ends |= {"data.stride": 0, "data.span_length": 1, "generate.temperature": 0, "generate.top_p": 1}
    recipe = read_recipe(None, ends)
    for name, value in ends.items():
        section, _, key = name.partition(".")
        assert getattr(getattr(recipe, section), key) == value
    torch.manual_seed(recipe.train.seed * 1_000_003 + 10**9)  # the seed of a late step
    assert Recipe.from_tables(tomllib.loads(recipe.to_toml())) == recipe


# Settings ---------------------------------------------------------------------------------------------------


def test_text_stays_text():
    assert read_recipe(None, ["model.base=5"]).model["base"] == "5"
    assert read_recipe(None, ["tokens.model=2024", "tokens.pattern=1"]).tokens.model == "2024"
    with pytest.raises(InputError, match='base "5" is no directory, no GGUF file and no preset'):
        base_of(read_recipe(None, ["model.base=5"]))
    with pytest.raises(ConfigError, match="base 5 is not allowed: it must be text"):
        Recipe(model={"base": 5})


def test_an_empty_value_is_an_empty_list():
    recipe = read_recipe("vit", ["train.freeze=", "data.augment="])
    assert read_recipe("vit").data.augment and (recipe.train.freeze, recipe.data.augment) == ((), ())


def test_any_key_can_be_unset():
    for name, section in (("bpe-gpt", "model"), ("vit", "train"), ("g2p", "data"), ("g2p", "tokens")):
        tables, empty = read_recipe(name), Recipe()
        held = tables.model if section == "model" else vars(getattr(tables, section))
        unset = read_recipe(name, [f"{section}.{key}=" for key in held])
        assert getattr(unset, section) == getattr(empty, section)
    assert read_recipe("bpe-gpt", ["tokens.vocab_size="]).tokens.vocab_size is None
    assert read_recipe("bpe-gpt", ["model.base="]).model["d_model"] == 384
    assert read_recipe(None, ["train.epochs=2", "train.steps="]).train.epochs == 2
    with pytest.raises(ConfigError, match=r'unknown \[tokens\] key "vocab" '):
        read_recipe("bpe-gpt", ["tokens.vocab="])


def test_the_size_of_a_batch_that_was_set_last_counts():
    assert read_recipe("original-transformer").data.batch_tokens == 8192
    assert read_recipe("original-transformer", ["data.batch_size=2"]).data.batch_tokens is None
    both = ["data.batch_size=2", "data.batch_tokens=50"]
    assert read_recipe("original-transformer", both).data.batch_tokens == 50
    assert read_recipe("original-transformer", both[::-1]).data.batch_tokens is None


def test_settings_are_a_dictionary_or_strings():
    table = {"train.steps": 30, "train.betas": (0.9, 0.98), "train.compile": False, "train.lr": 1}
    table |= {"train.freeze": ["head.*"], "data.columns": {"text": "review"}, "model.d_model": 16}
    table |= {"model.base": Path("my-model")}
    strings = split("train.steps=30 train.betas=0.9,0.98 train.compile=false train.lr=1 train.freeze=head.*")
    strings += ['data.columns={text = "review"}', "model.d_model=16", "model.base=my-model"]
    assert read_recipe(None, table) == read_recipe(None, strings)
    for one in ("held.txt", Path("held.txt"), ["held.txt"]):  # of a list, one value may stand alone
        assert read_recipe(None, {"data.validation": one}).data.validation == ("held.txt",)
    assert read_recipe("original-transformer", {"data.batch_size": 2}).data.batch_tokens is None
    changed = read_recipe(read_recipe(None, {"train.epochs": 2.0, "train.seed": 5}), {"train.steps": 7})
    assert (changed.train.steps, changed.train.epochs, changed.train.seed) == (7, None, 5)
    assert read_recipe("sft-lora", {"train.steps": 7, "train.epochs": None}).train.steps == 7


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"train.stepz": 3}, 'unknown [train] key "stepz" (did you mean "steps"?)'),
        ({"trane.steps": 3}, 'unknown section "trane" (did you mean "train"?)'),
        ({"model.d_modl": 3}, 'unknown [model] key "d_modl" (did you mean "d_model"?)'),
        ({"train.steps": "30"}, "steps '30' is not allowed: it must be a whole number"),
        ({"train.steps": 30.0}, "steps 30.0 is not allowed"),
        ({"train.freeze": 5}, "freeze (5,) is not allowed: it must be a list of text"),
        ({"train.steps": 0}, "steps 0 must be 1 or more"),
        ({"steps": 3}, 'setting "steps" is not understood: write section.key=value'),
        ({5: 3}, 'setting "5" is not understood'),
    ],
)
def test_a_wrong_setting_of_a_dictionary_is_one_line(settings, line):
    with pytest.raises(ClearheadError) as caught:
        read_recipe(None, settings)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_train_and_evaluate_take_a_dictionary(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    size = {"model.d_model": 16, "model.n_layers": 1, "model.n_heads": 2, "model.max_positions": 16}
    run = {"train.steps": 2, "train.samples": 0, "data.batch_size": 4}
    done = ch.train(tmp_path / "text.txt", out=tmp_path / "run", settings={**size, **run})
    assert done.step == 2 and done.model.config.d_model == 16
    recipe = ch.read_recipe(done.folder / "train.toml")
    again = ch.train(
        tmp_path / "text.txt", recipe=recipe, out=tmp_path / "again", settings={"train.steps": 1}
    )
    assert again.step == 1 and again.model.config.d_model == 16
    plan = data_plan(done.folder, [tmp_path / "text.txt"], settings={"data.max_length": 8})
    assert plan == data_plan(done.folder, [tmp_path / "text.txt"], settings=["data.max_length=8"])
    assert plan.max_length == 8 and ch.evaluate(done.model, tmp_path / "text.txt", plan).metrics["loss"] > 0
    with pytest.raises(ConfigError, match=r"train.lr cannot change in a run that goes on: .* can"):
        ch.train(resume=done.folder, settings={"train.lr": 4.0})


def test_a_section_that_is_a_value_is_named(tmp_path):
    (tmp_path / "recipe.toml").write_text("model = 5")
    with pytest.raises(ConfigError, match='"model" is a section, not a value'):
        read_recipe(tmp_path / "recipe.toml", ["model.d_model=16"])


MEASURED = {"lm": "", "mlm": "", "denoise": "", "seq2seq": "exact bleu chrf", "answer": "exact"}
MEASURED |= {"classify": "accuracy macro_f1", "image": "accuracy macro_f1", "tag": "accuracy span_f1"}


@pytest.mark.parametrize("task", MEASURED)
def test_a_metric_fits_its_task(task):
    allowed = {"loss", *MEASURED[task].split()}
    for metric in (None, *allowed):
        TASKS[task].check_metric(metric)
    for metric in {metric for spec in TASKS.values() for metric in spec.metrics} - allowed:
        line = f"train.metric {metric} is not measured for task {task}: choose loss"
        with pytest.raises(ConfigError, match=line):
            TASKS[task].check_metric(metric)


TERMS = [
    ("classify", {}, {"z_loss": 0.1}, "z_loss is for tasks that predict tokens"),
    ("mlm", {"family": "encoder"}, {"future_tokens": (0.5,)}, "future_tokens looks ahead"),
    ("lm", {}, {"r_drop": 1.0}, "r_drop compares two passes .* set model.dropout"),
    ("embed", {"dropout": 0.1}, {"r_drop": 1.0}, "r_drop is for tasks that predict tokens or classes"),
    ("grpo", {}, {"accumulate_schedule": (1, 2)}, "accumulate_schedule is not for grpo"),
    ("lm", {"attention": "window(3)"}, {"window_schedule": (2,)}, "window_schedule is for decoders"),
    ("grpo", {}, {"window_schedule": (2,)}, "window_schedule is not for grpo"),
    ("prefer", {}, {"window_schedule": (2,)}, "window_schedule is not for prefer"),
    (
        "lm",
        {"attention": ("full", "window(3)"), "n_layers": 2, "positions": "rope", "rope_local_base": 100.0},
        {"window_schedule": (2,)},
        r"angles of their own \(model.rope_local_base 100.0\)",
    ),
    ("lm", {"dropout": 0.1}, {"r_drop": 1.0, "future_tokens": (0.5,), "window_schedule": (2,)}, ""),
]


@pytest.mark.parametrize(("task", "config", "terms", "line"), TERMS)
def test_terms_and_schedules_fit_their_task(task, config, terms, line):
    wrong = list(mistakes_of(TrainPlan(**terms), TASKS[task], Model(micro(**config), None), ALONE))
    assert re.search(line, wrong[0]) if line else wrong == []


def test_hidden_tokens_fit_their_task_and_its_tokens(tmp_path):
    texts = [f"{word} {number}" for number in range(20) for word in ("good", "bad")]
    rows = {"seq2seq": [(text, text) for text in texts], "classify": [(text, text[:2]) for text in texts]}
    settings = {"data.token_dropout": 0.5, "train.steps": 1, "model.d_model": 16, "model.n_heads": 2}
    for task, more, line in (
        ("seq2seq", {}, "token_dropout is for .* and this is seq2seq"),
        ("classify", {"tokens.kind": "byte"}, "data.token_dropout needs a unk token"),
    ):
        with pytest.raises(ClearheadError, match=line):
            ch.train(rows[task], out=tmp_path / task, settings={**settings, "data.task": task, **more})


def test_skipped_merges_fit_their_task_and_its_tokens(tmp_path):
    texts = [f"{word} {number}" for number in range(20) for word in ("good", "bad")]
    settings = {"data.bpe_dropout": 0.1, "train.steps": 1, "model.d_model": 16, "model.n_heads": 2}
    chats = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": a}]} for a in texts
    ]
    for name, rows, more, line in (
        ("chat", chats, {}, "data.bpe_dropout is for .* and this is chat: leave it out"),
        (
            "pairs",
            [(text, text) for text in texts],
            {"tokens.kind": "word"},
            r"tokenizer \(WordLevel\) has none",
        ),
    ):
        with pytest.raises(ClearheadError, match=line):
            ch.train(rows, out=tmp_path / name, settings={**settings, **more})


def test_windows_of_a_schedule_are_those_of_a_config_and_the_last_part_sees_all():
    model, ids = micro(n_layers=2), some_ids(2, 9)
    windowed = micro(n_layers=2, window=3)
    windowed.load_state_dict(model.state_dict())
    whole, plan = model(ids).logits, TrainPlan(window_schedule=(3,))
    for done, wanted in ((0, windowed(ids).logits), (4, windowed(ids).logits), (5, whole), (9, whole)):
        run = SimpleNamespace(plan=plan, steps=10, state=SimpleNamespace(step=done), model=model)
        with TrainingRun.windowed(run):
            assert torch.equal(model(ids).logits, wanted)
        assert torch.equal(model(ids).logits, whole)
    assert not torch.equal(whole, windowed(ids).logits)


# Bases ------------------------------------------------------------------------------------------------------


def words(size: int) -> Tokenizer:
    return Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))


BASE, CLASSES = Recipe(model={"base": "the-base"}), ("a", "b")


def loaded(**changes) -> Model:
    model = micro(**changes)
    size = model.config.vocab_size
    return Model(model, words(size) if size else None, folder=Path("the-base"))


def refused(line: str, recipe: Recipe, task: str, tokenizer: Tokenizer | None, **more) -> None:
    with pytest.raises(ConfigError, match=line):
        build(recipe, task, tokenizer, {}, **more)


OTHERS = [("encoder", "lm"), ("encoder-decoder", "lm")]
OTHERS += [("decoder", task) for task in ("seq2seq", "mlm", "denoise")]


@pytest.mark.parametrize(("family", "task"), OTHERS)
def test_a_base_of_another_family_is_refused(family, task):
    base = loaded(family=family)
    line = f"base the-base has family {family} and reads tokens, and task {task} needs family .*: one such"
    refused(line, BASE, task, base.tokenizer, base=base)
    refused(rf"\[model\] has family {family}", Recipe(model={"family": family}), task, base.tokenizer)


def test_a_base_that_does_not_fit_the_data_names_both():
    made = build(BASE, "classify", words(13), {}, labels=CLASSES, base=loaded())
    assert (made.config.family, made.config.n_classes) == ("decoder", 2)  # which may learn classes
    line = r"base vit-tiny has family encoder and reads patches, and task classify needs .* tokens"
    refused(line, Recipe(model={"base": "vit-tiny"}), "classify", words(13), labels=CLASSES)
    line = r"the-base has a vocabulary of 13, and the tokenizer of \[tokens\] model 14: leave tokens.model"
    refused(line, BASE, "lm", words(14), base=loaded())
    assert build(BASE, "lm", words(12), {}, base=loaded()).config.vocab_size == 13
    pictures = {**PATCHES, "family": "encoder", "n_classes": 2, "max_positions": 5}
    base = loaded(**pictures)
    for image in ((16, 8, 3), (8, 8, 1)):
        shape = " x ".join(map(str, image))
        line = rf"the-base reads images of 8 x 8 x 3 \(.*\), and those of the data are {shape}: convert"
        refused(line, BASE, "image", None, labels=CLASSES, image=image, base=base)
    made = build(BASE, "image", None, {}, labels=CLASSES, image=(8, 8, 3), base=base)
    assert made.config.n_classes == 2
    line = r"train.lora 8 updates a trained model, and \[model\] base names no directory of one"
    for start in ((), ("model.base=gpt2",)):
        with pytest.raises(ConfigError, match=line):
            base_of(read_recipe("lora-finetune", start))


@pytest.mark.parametrize(("name", "size"), [("patch_size", 0), ("d_model", 0), ("d_model", -16)])
def test_a_size_of_nothing_is_named(name, size):
    kind = ("image", None) if name == "patch_size" else ("denoise", words(13))
    image = (8, 8, 3) if name == "patch_size" else None
    base = {} if image else {"base": "transformer-base"}  # whose embedding is scaled by the root of its width
    line = f"^{name} {size} must be 1 or more$"
    refused(line, Recipe(model={**base, name: size}), *kind, labels=CLASSES, image=image)


# Two texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"family": "encoder"}, {"family": "encoder", "n_types": 1}])
def test_a_model_without_types_learns_from_pairs(changes):
    model, ids, types = micro(n_classes=3, **changes), some_ids(), some_ids(vocab=2)
    targets = torch.tensor([0, 2])
    loss, count = batch_loss(model, Batch(ids, targets, types=types))
    assert count == 2 and torch.equal(loss, batch_loss(model, Batch(ids, targets))[0])
    typed = micro(n_classes=3, family="encoder", n_types=2)
    assert not torch.equal(
        batch_loss(typed, Batch(ids, targets, types=types))[0], batch_loss(typed, Batch(ids, targets))[0]
    )


def test_pairs_are_classified_by_a_decoder(tmp_path):
    draws = np.random.default_rng(0).choice(["red", "old"], (30, 2))
    rows = [f"it is {a}\tit is {b}\t{'same' if a == b else 'other'}" for a, b in draws]
    (tmp_path / "pairs.tsv").write_text("\n".join(["premise\thypothesis\tlabel", *rows]))
    settings = "model.base=gpt2 model.d_model=16 model.n_layers=1 model.n_heads=2 model.max_positions=32"
    more = ["train.steps=2", "data.batch_size=4"]
    done = ch.train(tmp_path / "pairs.tsv", out=tmp_path / "run", settings=[*split(settings), *more])
    assert done.step == 2 and done.model.labels == ("other", "same")


# eval -------------------------------------------------------------------------------------------------------


def test_eval_names_what_is_wrong(tmp_path, clearhead):
    (tmp_path / "pairs.tsv").write_text("w1 w2\tw2 w1\nw3\tw3\n")
    special = {"bos": 0, "eos": 1, "pad": 2, "decoder_start": 0}
    Model(micro(family="encoder-decoder"), words(13), special=special).save(tmp_path / "model")
    for wrong, line in (("--seed -1", "seed -1 must be 0 or more"), ("--beams 0", "num_beams 0 must be 1")):
        asked = ("eval", tmp_path / "model", tmp_path / "pairs.tsv", "--device cpu", wrong)
        assert line in clearhead(*asked).err
