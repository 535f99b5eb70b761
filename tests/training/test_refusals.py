"""What a recipe cannot mean is refused in one line before anything is trained; what it can mean is taken."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

import clearhead as ch
from clearhead.app.cli import main
from clearhead.errors import ClearheadError, ConfigError, InputError
from clearhead.learn.batches.batch import Batch
from clearhead.learn.evaluation.evaluate import data_plan
from clearhead.learn.losses import batch_loss
from clearhead.learn.recipe import Recipe, read_recipe
from clearhead.learn.tasks.table import TASKS
from clearhead.learn.training.build import base_of, build
from clearhead.run.api import Model
from tests.harness import build as micro
from tests.harness import some_ids

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
    "data.span_length=0": "span_length 0 must be 1 or more",
    "data.span_length=-2": "span_length -2 must be 1 or more",
    "data.stride=-2": "stride -2 must be 0 or more",
    "data.mask_share=1": "mask_share 1 must lie between 0 and 1",
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
    settings = [
        "train.betas=0,0",
        "train.seed=4294967295",
        "train.decay=1",
        "train.floor=1",
        "train.layer_decay=1",
        "train.warmup=0",
    ]
    settings += [
        "train.loss_chunk=0",
        "train.samples=0",
        "data.stride=0",
        "data.span_length=1",
        "generate.temperature=0",
    ]
    recipe = read_recipe(None, [*settings, "generate.top_p=1"])
    assert (recipe.train.seed, recipe.train.floor, recipe.data.stride, recipe.generate.top_p) == (
        4294967295,
        1,
        0,
        1,
    )
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
    table = {
        "train.steps": 30,
        "train.betas": (0.9, 0.98),
        "train.compile": False,
        "train.freeze": ["head.*"],
        "data.columns": {"text": "review"},
        "model.base": Path("my-model"),
        "model.d_model": 16,
        "train.lr": 1,
    }
    strings = [
        "train.steps=30",
        "train.betas=0.9,0.98",
        "train.compile=false",
        "train.freeze=head.*",
        'data.columns={text = "review"}',
        "model.base=my-model",
        "model.d_model=16",
        "train.lr=1",
    ]
    assert read_recipe(None, table) == read_recipe(None, strings)
    for one in ("held.txt", Path("held.txt"), ["held.txt"]):  # of a list, one value may stand alone
        assert read_recipe(None, {"data.validation": one}).data.validation == ("held.txt",)
    assert read_recipe("original-transformer", {"data.batch_size": 2}).data.batch_tokens is None
    changed = read_recipe(read_recipe(None, {"train.epochs": 2.0, "train.seed": 5}), {"train.steps": 7})
    assert (changed.train.steps, changed.train.epochs, changed.train.seed) == (7, None, 5)


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
    again = ch.train(
        tmp_path / "text.txt",
        recipe=ch.read_recipe(done.folder / "train.toml"),
        out=tmp_path / "again",
        settings={"train.steps": 1},
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


MEASURED = {
    "lm": "",
    "mlm": "",
    "denoise": "",
    "seq2seq": "exact bleu chrf",
    "classify": "accuracy macro_f1",
    "image": "accuracy macro_f1",
    "tag": "accuracy span_f1",
    "answer": "exact",
}


@pytest.mark.parametrize("task", MEASURED)
def test_a_metric_fits_its_task(task):
    allowed = {"loss", *MEASURED[task].split()}
    for metric in (None, *allowed):
        TASKS[task].check_metric(metric)
    for metric in {metric for spec in TASKS.values() for metric in spec.metrics} - allowed:
        with pytest.raises(
            ConfigError, match=f"train.metric {metric} is not measured for task {task}: choose loss"
        ):
            TASKS[task].check_metric(metric)


# Bases ------------------------------------------------------------------------------------------------------


def words(size: int) -> Tokenizer:
    return Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))


def loaded(**changes) -> Model:
    model = micro(**changes)
    return Model(
        model, words(model.config.vocab_size) if model.config.vocab_size else None, folder=Path("the-base")
    )


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("encoder", "lm"),
        ("decoder", "seq2seq"),
        ("decoder", "mlm"),
        ("encoder-decoder", "lm"),
        ("decoder", "denoise"),
    ],
)
def test_a_base_of_another_family_is_refused(family, task):
    base = loaded(family=family)
    with pytest.raises(
        ConfigError,
        match=(
            f"base the-base has family {family} and reads tokens, and task {task} needs family .*: one such"
        ),
    ):
        build(Recipe(model={"base": "the-base"}), task, base.tokenizer, {}, base=base)
    with pytest.raises(ConfigError, match=rf"\[model\] has family {family}"):
        build(Recipe(model={"family": family}), task, base.tokenizer, {})


def test_a_decoder_may_learn_classes_and_a_reader_of_pictures_no_text():
    made = build(
        Recipe(model={"base": "the-base"}), "classify", words(13), {}, labels=("a", "b"), base=loaded()
    )
    assert (made.config.family, made.config.n_classes) == ("decoder", 2)
    pictures = Recipe(model={"base": "vit-tiny"})
    with pytest.raises(
        ConfigError,
        match=r"base vit-tiny has family encoder and reads patches, and task classify needs .* tokens",
    ):
        build(pictures, "classify", words(13), {}, labels=("a", "b"))


@pytest.mark.parametrize("image", [(16, 8, 3), (8, 8, 1)], ids=["size", "channels"])
def test_a_base_for_other_pictures_names_both_sizes(image):
    base = loaded(
        family="encoder",
        vocab_size=0,
        input="patches",
        image_size=(8, 8),
        patch_size=4,
        n_classes=2,
        max_positions=5,
    )
    recipe, shape = Recipe(model={"base": "the-base"}), " x ".join(map(str, image))
    with pytest.raises(
        ConfigError,
        match=rf"the-base reads images of 8 x 8 x 3 \(.*\), and those of the data are {shape}: convert",
    ):
        build(recipe, "image", None, {}, labels=("a", "b"), image=image, base=base)
    assert (
        build(recipe, "image", None, {}, labels=("a", "b"), image=(8, 8, 3), base=base).config.n_classes == 2
    )


def test_a_base_with_a_smaller_vocabulary_names_both():
    recipe, base = Recipe(model={"base": "the-base"}), loaded()
    with pytest.raises(
        ConfigError,
        match=(
            r"the-base has a vocabulary of 13, and the tokenizer of \[tokens\] model 14: "
            r"leave tokens.model"
        ),
    ):
        build(recipe, "lm", words(14), {}, base=base)
    assert build(recipe, "lm", words(12), {}, base=base).config.vocab_size == 13


@pytest.mark.parametrize("base", [(), ("model.base=gpt2",)], ids=["none", "a preset"])
def test_low_rank_updates_need_a_trained_model(base):
    with pytest.raises(
        ConfigError,
        match=r"train.lora 8 updates a trained model, and \[model\] base names no directory of one",
    ):
        base_of(read_recipe("lora-finetune", base))


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"patch_size": 0}, "patch_size 0 must be 1 or more"),
        ({"d_model": 0}, "d_model 0 must be 1 or more"),
        ({"d_model": -16}, "d_model -16 must be 1 or more"),
    ],
)
def test_a_size_of_nothing_is_named(model, line):
    task, tokenizer, image = (
        ("image", None, (8, 8, 3)) if "patch_size" in model else ("denoise", words(13), None)
    )
    base = {} if image else {"base": "transformer-base"}  # whose embedding is scaled by the root of its width
    with pytest.raises(ClearheadError) as caught:
        build(Recipe(model={**base, **model}), task, tokenizer, {}, labels=("a", "b"), image=image)
    assert str(caught.value) == line


# Two texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"family": "encoder"}, {"family": "encoder", "n_types": 1}],
    ids=["decoder", "none", "one"],
)
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
    draws = np.random.default_rng(0).integers(0, 2, (30, 2))
    rows = [
        f"it is {'red' if a else 'old'}\tit is {'red' if b else 'old'}\t{'same' if a == b else 'other'}"
        for a, b in draws
    ]
    (tmp_path / "pairs.tsv").write_text("\n".join(["premise\thypothesis\tlabel", *rows]))
    settings = [
        "model.base=gpt2",
        "model.d_model=16",
        "model.n_layers=1",
        "model.n_heads=2",
        "model.max_positions=32",
    ]
    done = ch.train(
        tmp_path / "pairs.tsv",
        out=tmp_path / "run",
        settings=[*settings, "train.steps=2", "data.batch_size=4"],
    )
    assert done.step == 2 and done.model.labels == ("other", "same")


# eval -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "line"),
    [(["--seed", "-1"], "seed -1 must be 0 or more"), (["--beams", "0"], "num_beams 0 must be 1 or more")],
)
def test_eval_names_what_is_wrong(tmp_path, capsys, wrong, line):
    (tmp_path / "pairs.tsv").write_text("w1 w2\tw2 w1\nw3\tw3\n")
    made = Model(
        micro(family="encoder-decoder"), words(13), special={"bos": 0, "eos": 1, "pad": 2, "decoder_start": 0}
    )
    made.save(tmp_path / "model")
    with pytest.raises(SystemExit, match="2"):
        main(["eval", str(tmp_path / "model"), str(tmp_path / "pairs.tsv"), "--device", "cpu", *wrong])
    assert line in capsys.readouterr().err
