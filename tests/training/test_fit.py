"""Defaults by the data: without a recipe, and nothing that the user has set."""

from __future__ import annotations

import random

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

import clearhead as ch
from clearhead.learn.data.examples import Corpus, Labelled
from clearhead.learn.recipe import read_recipe, recipe_names
from clearhead.learn.training.build import expected_config
from clearhead.learn.training.events import Note
from clearhead.learn.training.fit import FAR, PATIENCE, PATTERN, POINTS, fitted, names_of


def corpus(size: int, rows: int = 1) -> Corpus:
    return Corpus("text", [None] * rows, [], (), "", (), size)


def test_a_point_is_met_and_steps_lie_between_two():
    first, second = POINTS["lm"][:2]
    recipe, line = fitted(read_recipe(None), frozenset(), "lm", corpus(first.amount))
    assert recipe.model["d_model"] == first.width and recipe.train.steps == first.steps
    assert recipe.train.patience == PATIENCE and f"{first.steps:,} steps at most" in line
    assert "an n-gram model was better on our file of this size" in line
    middle = round((first.amount * second.amount) ** 0.5)
    steps = fitted(read_recipe(None), frozenset(), "lm", corpus(middle))[0].train.steps
    assert steps == pytest.approx((first.steps + second.steps) / 2, abs=1)


@pytest.mark.parametrize("settings", [{"model.d_model": 64}, {"model.base": "gpt2"}])
def test_a_model_of_the_users_own_is_left_alone(settings):
    recipe = read_recipe(None, settings)
    assert fitted(recipe, names_of(settings), "lm", corpus(1000)) == (recipe, "")


def test_a_recipe_is_left_alone_whatever_the_data():
    for name in recipe_names():
        recipe = read_recipe(name)
        assert fitted(recipe, None, recipe.data.task or "lm", corpus(1000)) == (recipe, "")


def test_for_much_text_and_on_a_gpu_the_architecture_alone_is_chosen():
    plain = read_recipe(None)
    much = corpus(int(POINTS["lm"][-1].amount * FAR * 1.1))
    for data, on_gpu, width in ((much, False, 128), (much, True, 384), (corpus(1000), True, 384)):
        recipe, line = fitted(plain, frozenset(), "lm", data, on_gpu)
        assert "Qwen3's parts, trained by NorMuon" in line
        assert (recipe.model["d_model"], recipe.train.optimizer, recipe.train.steps) == (
            width,
            "normuon",
            None,
        )
        config = expected_config(recipe)
        assert (config.positions, config.norm, config.qk_norm, config.gated) == (
            "rope",
            "rmsnorm",
            "head",
            True,
        )
    settings = ["train.optimizer=adamw"]
    recipe, line = fitted(read_recipe(None, settings), names_of(settings), "lm", much)
    assert line.endswith("Qwen3's parts") and not recipe.train.cautious_decay


def test_what_is_set_stays_and_far_from_every_point_nothing_is_chosen():
    settings = ["train.lr=0.5", "train.epochs=3"]
    recipe, line = fitted(read_recipe(None, settings), names_of(settings), "lm", corpus(1000))
    assert (recipe.train.lr, recipe.train.epochs, recipe.train.steps) == (0.5, 3, None)
    assert recipe.train.patience is None and "rate 0.5" in line and "steps" not in line
    plain, little = read_recipe(None), corpus(int(POINTS["lm"][0].amount / FAR * 0.9))
    assert fitted(plain, frozenset(), "lm", little) == (plain, "")


def test_few_rows_choose_no_weights_and_hidden_tokens_go_with_the_tokens():
    few = Corpus("labels", [Labelled("a", "b")] * 90, [], (), "", (), 1000)
    recipe, line = fitted(read_recipe(None), frozenset(), "classify", few)
    assert "model was better" not in line
    assert recipe.train.validate_every == recipe.train.steps == POINTS["classify"][0].steps
    assert recipe.data.token_dropout and recipe.tokens.kind == "word"
    settings = ["tokens.kind=byte"]  # has no unknown token
    recipe, _ = fitted(read_recipe(None, settings), names_of(settings), "classify", few)
    assert recipe.tokens.kind == "byte" and recipe.tokens.pattern is None
    assert not recipe.data.token_dropout and recipe.model["d_model"] == POINTS["classify"][0].width
    many = Corpus("labels", [Labelled("a", "b")] * POINTS["classify"][-1].amount, [], (), "", (), 1000)
    for plan, pairs in (((), True), (["parallel.tensor=2"], False)):  # a mesh divides no vectors of pairs
        assert (
            "bigrams" in fitted(read_recipe(None, plan), names_of(plan), "classify", many)[0].model
        ) == pairs
    apart = read_recipe(None, ["data.packing=isolated"])
    assert fitted(apart, frozenset({"data.packing"}), "lm", corpus(1000)) == (apart, "")


def test_scripts_without_spaces_have_a_token_for_each_letter():
    split = Split(Regex(PATTERN), "removed", invert=True)
    words = [word for word, _ in split.pre_tokenize_str("It is 漢字abc, ไทย.")]
    assert words == ["It", "is", "漢", "字", "abc", ",", "ไ", "ท", "ย", "."]


def test_a_run_without_a_recipe_says_what_it_chose(tmp_path):
    draw = random.Random(0)
    rows = [{"text": f"size {size}", "label": 100.0 * size} for size in draw.choices(range(9), k=400)]
    notes = []
    settings = {"data.task": "regress", "train.steps": 20, "train.validate_every": 20, "train.samples": 0}
    done = ch.train(rows, out=tmp_path / "run", settings=settings, on_event=notes.append)
    lines = [event.line for event in notes if isinstance(event, Note)]
    assert any(line.startswith("by the data, ") and "rows: 2 layers of width 64" in line for line in lines)
    assert done.model.config.d_model == 64 and done.step == 20
    assert read_recipe(tmp_path / "run" / "train.toml").train.standardise
