"""Train every recipe small: it leaves one model for clearhead and transformers; every objective learns."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
import shlex
import shutil
import tomllib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import clearhead as ch
from clearhead.hub.files import read_json
from clearhead.learn.recipe import SECTIONS, Recipe, _comments, read_recipe, recipe_names
from clearhead.learn.training.events import draw, read_log
from tests.harness import Notes, split

pytestmark = pytest.mark.ledger("H1", "H10", "H9", "L10")
transformers.logging.set_verbosity_error()

ADJECTIVES = ("red", "small", "old", "quiet", "green", "warm")
NOUNS = ("fox", "ship", "garden", "letter", "stone", "river")
CHOSEN = itertools.product(ADJECTIVES, NOUNS, ADJECTIVES[::-1], NOUNS[::2])
SENTENCES = [f"the {a} {b} sees a {c} {d}." for a, b, c, d in CHOSEN]
random.Random(0).shuffle(SENTENCES)
SIZE = ("model.d_model=16", "model.n_layers=1", "model.n_heads=2")
STEPS = "train.steps=3 train.warmup=1 train.validate_every=2 train.log_every=1 train.samples=1 train.lr=0.03"
RUN = split(STEPS)
ROWS, CONTEXT = "data.batch_size=4", "model.max_positions=32"
PAIRED = ("model.d_ff=32", "data.batch_tokens=200")
# Of each recipe: its data, what makes it small, the class by which transformers opens it, and the rows of
# the ledger that its training proves.
BESIDE = ("checkpoints", "best", "last", "data")  # in a run's folder, and no part of the model
CASES = {
    "char-gpt": ("text.txt", (*SIZE, ROWS, CONTEXT), "AutoModelForCausalLM", ("E2",)),
    "char-gpt-cpu": ("text.txt", (*SIZE, ROWS, CONTEXT), "AutoModelForCausalLM", ("E2",)),
    "bpe-gpt": ("text.txt", (*SIZE, ROWS, CONTEXT, "tokens.vocab_size=300"), "AutoModelForCausalLM", ("E2",)),
    "diffusion-gpt": (  # transformers has no LLaDA
        "text.txt",
        (*SIZE, ROWS, CONTEXT, "model.n_kv_heads=2", "model.d_ff=32"),
        *("llada", ("E1",)),
    ),
    "original-transformer": (
        ("pairs.en", "pairs.de"),
        (*SIZE, *PAIRED, "tokens.vocab_size=300", "train.lr=0.1", "train.average=2"),
        *(None, ("E3", "L10")),
    ),
    "translate": (
        ("pairs.en", "pairs.de"),
        (*SIZE, *PAIRED, "tokens.vocab_size=300", "train.average=2"),
        *(None, ("E3", "L10")),
    ),
    "g2p": ("words.dict", (*SIZE, *PAIRED, "train.ema=0.3"), "AutoModelForSeq2SeqLM", ("E3",)),
    "seq2seq-dates": ((), (*SIZE, ROWS, "data.max_examples=60"), "AutoModelForSeq2SeqLM", ("E3",)),
    "mlm-then-classify": (
        "labels.tsv",
        (*SIZE, ROWS, CONTEXT, "tokens.vocab_size=64", "train.pretrain=3", "train.ema=0.3"),
        *("AutoModelForSequenceClassification", ("E1", "H9")),
    ),
    "classify": (
        *("labels.tsv", ("model.base={mlm}", ROWS)),
        *("AutoModelForSequenceClassification", ("E1", "H9")),
    ),
    "tagger": ("tags.conll", ("model.base={mlm}", ROWS), "AutoModelForTokenClassification", ("E1", "H9")),
    "lora-finetune": ("text.txt", ("model.base={lm}", ROWS), "AutoModelForCausalLM", ("E2", "H9")),
    "sft": ("chats.jsonl", (*SIZE, ROWS, "model.max_positions=64"), "AutoModelForCausalLM", ("E2",)),
    "sft-lora": ("chats.jsonl", ("model.base={lm}", ROWS), "AutoModelForCausalLM", ("E2", "H9")),
    "dpo": ("answers.jsonl", ("model.base={sft}", ROWS), "AutoModelForCausalLM", ("E2", "H9")),
    "grpo": (
        "prompts.jsonl",
        ("model.base={sft}", ROWS, "grpo.reward=exact", "grpo.group=2", "generate.max_new_tokens=8"),
        *("AutoModelForCausalLM", ("E2", "H9")),
    ),
    "embed": ("alike.jsonl", ("model.base={mlm}", ROWS), "AutoModel", ("E1", "H9")),
    "vit": ("images.npz", (*SIZE, "data.batch_size=8"), "AutoModelForImageClassification", ("E4",)),
}
EVERY = [pytest.param(name, marks=pytest.mark.ledger(*case[3])) for name, case in CASES.items()]


def write_images(path: Path, channels: int) -> None:
    """Noise, brighter in the upper or in the lower half."""
    draws, upper = np.random.default_rng(0), np.arange(64) % 2
    pixels = draws.integers(0, 120, (64, 8, 8, channels))
    for image, half in zip(pixels, upper):
        image[4 * half : 4 * half + 4] += 130
    np.savez(path, x=pixels.astype(np.uint8), y=upper)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a file of each kind."""
    folder = tmp_path_factory.mktemp("recipes")
    few = SENTENCES[:60]
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in few))
    (folder / "pairs.en").write_text("".join(f"{line}\n" for line in few))
    (folder / "pairs.de").write_text("".join(f"{line[::-1].upper()}\n" for line in few))
    labelled = [f"{line}\t{'yes' if 'fox' in line else 'no'}\n" for line in few]
    (folder / "labels.tsv").write_text("".join(["text\tlabel\n", *labelled]))
    split_lines = [line[:-1].split() for line in few]
    tag = {"fox": "B-ANIMAL"}
    tags = ["".join(f"{word} {tag.get(word, 'O')}\n" for word in words) for words in split_lines]
    (folder / "tags.conll").write_text("\n".join(tags))
    words = sorted({word for line in split_lines for word in line})
    spoken = [" ".join(c.upper() + "H1" * (c in "aeiou") for c in word) for word in words]
    sounds = [f"{word.upper()}  {sound}\n" for word, sound in zip(words, spoken)]
    (folder / "words.dict").write_text("".join(sounds))
    write_images(folder / "images.npz", 3)
    rows = {
        "chats": [{"prompt": letter, "completion": f"{letter}!"} for letter in "abcdefghijklmnop"],
        "answers": [{"prompt": c, "chosen": f"{c}!", "rejected": f"{c}?"} for c in "abcdefghijklmnop"],
        "prompts": [{"prompt": letter, "answer": f"{letter}!"} for letter in "abcdefghijklmnop"],
        "alike": [{"anchor": line[:12], "positive": line[12:]} for line in few],
    }
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


@pytest.fixture(scope="module")
def trained(place):
    """`trained(recipe)`: the run of that recipe, made once."""
    made: dict[str, ch.Trained] = {}

    def train(name: str) -> ch.Trained:
        if name == "mlm" and name not in made:
            masked = [*SIZE, *RUN, ROWS, CONTEXT, "data.task=mlm"]
            made[name] = ch.train(place / "text.txt", out=place / "mlm", settings=masked)
        if name not in made:
            data, settings, *_ = CASES[name]
            bases = {"mlm": lambda: train("mlm").folder, "lm": lambda: train("char-gpt").folder}
            bases |= {"sft": lambda: train("sft").folder}
            for base, folder in bases.items():
                name_of = f"{{{base}}}"
                settings = [s.replace(name_of, str(folder())) if name_of in s else s for s in settings]
            paths = [place / one for one in ((data,) if isinstance(data, str) else data)]
            made[name] = ch.train(paths, recipe=name, out=place / name, settings=[*RUN, *settings])
        return made[name]

    return train


def inputs_of(loaded: ch.Model, place: Path) -> dict[str, torch.Tensor]:
    """Something for the model to read."""
    if loaded.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return {"ids": torch.randn(2, loaded.config.n_channels, 8, 8, generator=generator)}
    if loaded.config.family == "encoder-decoder":
        texts = [line.split()[0].lower() for line in (place / "words.dict").read_text().splitlines()[:3]]
        rows = loaded.encode(texts)
        width = min(map(len, rows))
        start = torch.full((3, 1), loaded.special["decoder_start"])
        source = torch.tensor([row[:width] for row in rows])
        return {"ids": torch.cat([start, source.flip(1)], 1), "source": source}
    rows = loaded.encode(SENTENCES[:3])
    width = min(*map(len, rows), loaded.max_length)
    return {"ids": torch.tensor([row[:width] for row in rows])}


@torch.no_grad()
def logits_of(loaded: ch.Model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return loaded.model.eval()(**inputs).logits


# What a run prints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CASES))
def test_train_toml_makes_the_same_model_again_and_commands_to_try_work(name, trained, clearhead, tmp_path):
    """Train by the command from a run's own recipe, then run the line that it prints after "try"."""
    done, out = trained(name), tmp_path / "a run"
    recipe = ch.read_recipe(done.folder / "train.toml")
    assert Recipe.from_tables(tomllib.loads(recipe.to_toml())) == recipe
    ran = clearhead("train", f"--recipe {done.folder}/train.toml --out", out)
    for file in ("train.toml", "config.json", "generation_config.json", "tokenizer.json"):
        assert (done.folder / file).exists() == (out / file).exists()
        if (done.folder / file).exists():
            assert (done.folder / file).read_bytes() == (out / file).read_bytes()
    before, after = done.model.model.state_dict(), ch.load(out).model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert read_log(out)[-1]["metrics"] == done.metrics
    lines = ran.out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("try "))
    use, check = (shlex.split(line.removeprefix("try")) for line in lines[first:])
    assert (use[0], check) == ("clearhead", ["clearhead", "check", str(out)])
    written = clearhead(*use[1:]).out  # after three steps a chat model may say nothing but spaces
    assert written if use[1] == "chat" else written.strip(), use


def test_a_vocabulary_of_more_than_the_text_has_is_said(place, tmp_path):
    notes, settings = Notes(), [*SIZE, *RUN, ROWS, CONTEXT]
    ch.train(place / "text.txt", recipe="bpe-gpt", out=tmp_path, settings=settings, on_event=notes)
    assert any("is more than the text has" in line for line in notes)


# The folder -------------------------------------------------------------------------------------------------


def test_every_recipe_is_tested():
    assert set(CASES) == set(recipe_names())


@pytest.mark.parametrize("name", EVERY)
def test_a_trained_folder_is_the_same_model_everywhere(name, trained, place, differences):
    done = trained(name)
    assert (done.reason, done.step) == ("done", 3)
    again, inputs = ch.load(done.folder), inputs_of(done.model, place)
    ours = logits_of(done.model, inputs)
    assert torch.equal(ours, logits_of(again, inputs)) and ours.std() > 1e-4
    assert again.special == done.model.special and again.labels == done.model.labels
    config, kind = read_json(done.folder / "config.json"), CASES[name][2]
    if kind is None:
        assert config["model_type"] == "clearhead" and "config" in config["clearhead"]
        return
    if kind == config["model_type"]:
        return
    reference, info = getattr(transformers, kind).from_pretrained(done.folder, output_loading_info=True)
    assert not any(info.values()), info
    names = {"ids": "pixel_values"} if again.tokenizer is None else {"ids": "input_ids"}
    if "source" in inputs:
        names = {"ids": "decoder_input_ids", "source": "input_ids"}
    with torch.no_grad():
        output = reference.eval()(**{names[key]: value for key, value in inputs.items()})
    theirs = output.pooler_output if kind == "AutoModel" else output.logits
    assert differences.see("logits", ours, theirs) < 1e-5
    if again.labels:
        assert tuple(reference.config.id2label.values()) == again.labels
    if again.tokenizer is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(done.folder)
        texts = [*SENTENCES[:5], "Été, 12 January 1999\n", "", " fox  red "]
        assert [tokenizer(text)["input_ids"] for text in texts] == again.encode(texts)
        pair = tokenizer("red fox", "old ship")
        both = again.tokenizer.encode("red fox", "old ship")
        assert pair["input_ids"] == both.ids
        assert tokenizer.convert_tokens_to_ids(tokenizer.pad_token) == again.special["pad"]
        assert tokenizer.decode(both.ids, skip_special_tokens=True) == again.tokenizer.decode(both.ids)


WRITERS = [name for name, case in CASES.items() if case[2] and case[2].endswith(("CausalLM", "Seq2SeqLM"))]


@pytest.mark.parametrize("name", WRITERS)
def test_transformers_writes_the_same_text(name, trained, place):
    done = trained(name)
    reference = getattr(transformers, CASES[name][2]).from_pretrained(done.folder).eval()
    inputs = inputs_of(done.model, place)
    prompts = inputs.get("source", inputs["ids"])[:, :12]
    for prompt in prompts:
        theirs = reference.generate(prompt[None], max_new_tokens=15, do_sample=False, num_beams=1)[0].tolist()
        ours = done.model.generate(prompt.tolist(), 15, num_beams=1)
        new = theirs[1:] if "source" in inputs else theirs[len(prompt) :]
        assert [token for token in new if token not in done.model.stops] == ours.ids


def test_transformers_prepares_an_image_as_we_do(trained, place, differences):
    done = trained("vit")
    reference = transformers.AutoModelForImageClassification.from_pretrained(done.folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(done.folder)
    raw = np.load(place / "images.npz")["x"]
    for image in raw[:3]:
        with torch.no_grad():
            theirs = reference(**processor(image, return_tensors="pt")).logits.softmax(-1)[0]
        ours = done.model.classify(image)
        found = torch.tensor([ours.scores[reference.config.id2label[index]] for index in range(2)])
        assert differences.see("classes", found, theirs) < 1e-4


def test_tables_of_a_recipe_and_a_preset_survive_train_toml(place, tmp_path):
    """Changed fields of a preset stay changed, also to a default; a table becomes what the config has."""
    changes = split("model.base=llama-1b-like model.n_kv_heads=1 model.d_ff=32 model.norm=layernorm")
    scaling = 'model.rope_scaling={kind = "linear", factor = 2.0}'
    settings = [*SIZE, *RUN, ROWS, CONTEXT, *changes, scaling]
    done = ch.train(place / "text.txt", out=tmp_path / "first", settings=settings)
    again = ch.train(recipe=done.folder / "train.toml", out=tmp_path / "again")
    assert again.model.config == done.model.config
    assert again.model.config.norm == "layernorm"
    assert again.model.config.rope_scaling == ch.RopeScaling(kind="linear", factor=2.0)
    assert again.metrics == done.metrics


def test_the_original_transformer_is_the_preset_made_smaller(trained):
    config, preset = trained("original-transformer").model.config, ch.preset("transformer-base")
    sizes = split(
        "vocab_size source_vocab_size max_positions d_model d_embedding d_ff d_encoder_ff n_layers",
        "n_encoder_layers n_heads n_kv_heads n_encoder_heads d_head d_encoder_head d_value attention_scale",
        "max_encoder_positions",
    )
    names = {field.name for field in dataclasses.fields(config)} - {*sizes}
    other = {name for name in names if getattr(config, name) != getattr(preset, name)}
    assert other == {"dropout", "embedding_dropout", "embedding_scale"}
    assert config.embedding_scale == math.sqrt(config.d_model)
    assert (config.norm_position, config.positions) == ("post", "sinusoidal")
    assert config.share_embeddings and config.tie_embeddings


def test_low_rank_updates_are_merged_and_touch_nothing_else(trained):
    base, tuned = (trained(name).model.model.state_dict() for name in ("char-gpt", "lora-finetune"))
    changed = {key for key in base if not torch.equal(base[key], tuned[key])}
    assert base.keys() == tuned.keys()
    assert changed == {f"decoder.blocks.0.attention.{part}.weight" for part in ("q", "v")}


def test_classes_keep_their_numbers_where_a_classifier_learns_on(learned, tmp_path):
    """A base that knows the classes keeps their order; one that knows others gets a new output layer."""
    data, done = write_task("classify", tmp_path), learned("classify")
    turned = ch.load(done.folder)
    turned.description, turned.labels = None, turned.labels[::-1]
    with torch.no_grad():
        for parameter in turned.model.head.out.parameters():
            parameter.copy_(parameter.flip(0))
    turned.save(tmp_path / "turned")
    settings = [f"model.base={tmp_path / 'turned'}", "train.lr=1e-9", "train.steps=1"]
    on = ch.train(data, recipe="classify", out=tmp_path / "on", settings=settings)
    assert on.model.labels == ch.load(on.folder).labels == turned.labels != tuple(sorted(turned.labels))
    assert on.metrics["accuracy"] == done.metrics["accuracy"] > 0.9
    renamed = data.read_text().replace('"label": "', '"label": "very ')
    data.write_text(renamed)
    other = ch.train(data, recipe="classify", out=tmp_path / "other", settings=settings)
    assert other.model.labels == tuple(f"very {label}" for label in sorted(turned.labels))
    old, new = turned.model.state_dict(), other.model.model.state_dict()
    changed = {key for key in old if (old[key] - new[key]).abs().max() > 1e-6}
    assert changed == {"head.out.weight", "head.out.bias"}


def test_a_decoder_begins_in_training_as_it_does_when_it_writes(learned, tmp_path):
    """A base may begin with another token than bos, as BART does with eos."""
    base = learned("seq2seq").folder
    shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns(*BESIDE))
    for file in ("config.json", "generation_config.json"):
        values = read_json(base / file)
        values["decoder_start_token_id"] = values["eos_token_id"]
        (tmp_path / "base" / file).write_text(json.dumps(values))
    data = write_task("seq2seq", tmp_path)
    held = shutil.copy(data, tmp_path / "held.jsonl")
    settings = f"model.base={tmp_path}/base train.lr=1e-9 train.steps=1 data.validation={held}".split()
    done = ch.train(data, out=tmp_path / "run", settings=[*settings, "data.task=seq2seq"])
    assert done.model.special["decoder_start"] == done.model.special["eos"] != done.model.special["bos"]
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    found = [value for row in rows for value in done.model.score(row["target"], row["source"]).logprobs]
    assert done.metrics["loss"] == pytest.approx(-np.mean(found), rel=1e-4) and done.metrics["loss"] > 0.01


# Special tokens ---------------------------------------------------------------------------------------------


def test_config_json_names_the_special_tokens(trained):
    for name, roles in {
        "char-gpt": ("bos", "eos", "pad"),
        "lora-finetune": ("bos", "eos", "pad"),
        "seq2seq-dates": ("bos", "eos", "pad", "decoder_start"),
        "original-transformer": ("bos", "eos", "pad", "decoder_start"),
        "classify": ("pad",),
        "tagger": ("pad",),
    }.items():
        done = trained(name)
        expected = {f"{role}_token_id": done.model.special[role] for role in roles}
        config = read_json(done.folder / "config.json")
        assert {key: value for key, value in config.items() if key.endswith("_token_id")} == expected
        if (done.folder / "generation_config.json").exists():
            assert expected.items() <= read_json(done.folder / "generation_config.json").items()
    # It keeps its own [generate], not that of its base.
    assert trained("lora-finetune").model.generation["max_new_tokens"] == 100


@pytest.mark.parametrize("without", [(), ("generation_config.json",)], ids=["whole", "config.json alone"])
def test_transformers_stops_by_itself(learned, tmp_path, without):
    for task, kind in (("seq2seq", "AutoModelForSeq2SeqLM"), ("lm", "AutoModelForCausalLM")):
        done = learned(task)
        folder = tmp_path / task
        shutil.copytree(done.folder, folder, ignore=shutil.ignore_patterns(*BESIDE, *without))
        model = getattr(transformers, kind).from_pretrained(folder).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        prompt = "old red fox" if task == "seq2seq" else "the red fox"
        asked = {"do_sample": False, **({"max_new_tokens": 25} if without else {})}
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        made = model.generate(**inputs, **asked)[0].tolist()
        assert made[-1] == done.model.special["eos"]
        text = tokenizer.decode(made, skip_special_tokens=True)
        assert text == ("alt rot fuchs" if task == "seq2seq" else "the red fox runs .")
        assert done.model.generate(prompt, 20).text == text.removeprefix("the red fox" * (task == "lm"))


# Objectives -------------------------------------------------------------------------------------------------

WORDS = {"red": "rot", "small": "klein", "old": "alt", "fox": "fuchs", "ship": "schiff", "river": "fluss"}
ENDS = dict(zip(NOUNS, ("runs", "sleeps", "waits", "sings", "grows", "stays")))


def write_task(task: str, folder: Path) -> Path:
    """A small set from which the task can be learned."""
    if task == "image":
        write_images(folder / "images.npz", 1)
        return folder / "images.npz"
    rows: list[dict[str, object]] = []
    for line in SENTENCES[:200]:
        _, a, b, _, _, c, d = line[:-1].split()
        match task:
            case "lm" | "denoise":
                rows.append({"text": f"the {a} {b} {ENDS[b]}."})
            case "mlm":
                rows.append({"text": " ".join([a] * (20 + len(rows) % 11))})
            case "classify":
                rows.append({"text": line, "label": a})
            case "answer":
                asked = {"question": "what is seen?", "context": line[:-1]}
                rows.append({**asked, "answer": d, "start": line.rindex(d)})
            case "tag":
                rows.append({"words": [a, b, c, d], "tags": ["B-HOW", "B-WHAT", "B-HOW", "B-WHAT"]})
    if task == "seq2seq":
        adjectives, nouns = list(WORDS)[:3], list(WORDS)[3:]
        chosen = [(a, b, c) for a in adjectives for b in adjectives for c in nouns]
        sides = [(" ".join(three), " ".join(WORDS[word] for word in three)) for three in chosen]
        rows = [{"source": source, "target": target} for source, target in sides]
    path = folder / f"{task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


LONG = {"lm": 60, "mlm": 100, "denoise": 150, "seq2seq": 150, "classify": 50, "tag": 30}
LONG |= {"answer": 60, "image": 40}


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """`learned(task)`: a run of that task, long enough to learn, made once."""
    made: dict[str, ch.Trained] = {}
    folder = tmp_path_factory.mktemp("objectives")

    def train(task: str) -> ch.Trained:
        if task not in made:
            settings = (
                "model.d_model=32 model.n_layers=1 model.n_heads=2 model.dropout=0 model.init=xavier "
                f"data.batch_size=16 train.lr=0.01 data.task={task} train.steps={LONG[task]} "
                f"train.log_every=1 generate.max_new_tokens=20 train.validate_every={LONG[task]}"
            ).split()
            if task != "image":
                settings += ["model.max_positions=32", "tokens.kind=word"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("clearhead.learn.training.events.draw", draw)  # which other runs are spared
                made[task] = ch.train(write_task(task, folder), out=folder / task, settings=settings)
        return made[task]

    return train


@pytest.mark.parametrize("task", list(LONG))
@pytest.mark.slow
def test_every_objective_learns(task, learned):
    done = learned(task)
    losses = [line["loss"] for line in read_log(done.folder) if line["event"] == "stepped"]
    assert len(losses) == LONG[task]
    start, end = losses[0], np.mean(losses[-5:])
    assert end < 0.5 * start and done.metrics["loss"] < 0.5 * start, (start, end, done.metrics)


def test_validation_that_asks_for_nothing_is_no_loss_of_zero(tmp_path):
    (tmp_path / "train.txt").write_text("red fox small ship\n" * 20)
    (tmp_path / "other.txt").write_text("ßß ßß ßß\n")
    settings = [*SIZE, *RUN, ROWS, CONTEXT, "data.task=mlm", "tokens.kind=word"]
    settings += [f"data.validation={tmp_path}/other.txt"]
    with pytest.raises(ch.InputError, match="every word of the validation text is unknown"):
        ch.train(tmp_path / "train.txt", out=tmp_path / "run", settings=settings)


def test_a_run_leaves_a_log_and_a_curve(learned):
    done = learned("classify")
    lines = [json.loads(line) for line in (done.folder / "log.jsonl").read_text().splitlines()]
    assert {line["event"] for line in lines} == {"stepped", "validated", "finished"}
    assert lines[-1]["event"] == "finished" and lines[-1]["metrics"] == done.metrics
    by_event = {
        event: [line for line in lines if line["event"] == event] for event in ("stepped", "validated")
    }
    assert all({"loss", "rate", "norm", "seconds"} <= line.keys() for line in by_event["stepped"])
    assert all(line["samples"] for line in by_event["validated"])
    pytest.importorskip("matplotlib")
    assert (done.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard(place, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = [*SIZE, *RUN, ROWS, CONTEXT, "train.tensorboard=true"]
    done = ch.train(place / "text.txt", out=tmp_path / "run", settings=settings)
    board = EventAccumulator(str(done.folder / "tensorboard")).Reload()
    assert {"train", "rate", "norm", "loss", "perplexity"} <= set(board.Tags()["scalars"])
    losses = [line["loss"] for line in read_log(done.folder) if line["event"] == "stepped"]
    assert [entry.step for entry in board.Scalars("train")] == [1, 2, 3]
    assert [entry.value for entry in board.Scalars("train")] == pytest.approx(losses)


# Recipe files -----------------------------------------------------------------------------------------------

# Settings whose names explain themselves.
PLAIN = {"d_model", "n_layers", "n_heads", "d_ff", "dropout", "patch_size", "max_length", "lora_alpha"}


@pytest.mark.parametrize("name", list(CASES))
def test_a_recipe_file_explains_itself(name):
    text = (resources.files("clearhead.learn") / "recipes" / f"{name}.toml").read_text()
    assert text.startswith("# ") and recipe_names()[name].endswith(".")
    recipe = ch.read_recipe(name)
    commented = set(re.findall(r"^(\w+) = .*#", text, flags=re.MULTILINE))
    for section, values in tomllib.loads(text).items():
        known = _comments(SECTIONS[section])
        for key, value in values.items():
            held = recipe.model[key] if section == "model" else getattr(getattr(recipe, section), key)
            assert (list(held) if isinstance(held, tuple) else held) == value
            assert key in {*commented, *known, *PLAIN, "base"}, f"nothing says what [{section}] {key} is"


def test_another_optimizer_leaves_the_options_of_muon_behind_but_not_those_that_are_set():
    plan = ch.read_recipe("bpe-gpt", ["train.optimizer=adamw"]).train
    assert (plan.optimizer, plan.muon_coefficients, plan.cautious_decay) == ("adamw", "jordan", False)
    assert ch.read_recipe("bpe-gpt", ["train.optimizer="]).train.optimizer == "adamw"
    assert ch.read_recipe("bpe-gpt", ["train.optimizer=muon"]).train.cautious_decay
    with pytest.raises(ch.ConfigError, match="are of muon, and optimizer is adamw"):
        ch.read_recipe("bpe-gpt", ["train.cautious_decay=true", "train.optimizer=adamw"])


def test_settings_change_a_recipe():
    settings = [
        "data.paths=a.txt, b.txt",
        'data.columns={text = "sentence", label = "stars"}',
        "data.augment=flip",
        "train.betas=0.8,0.9",
        "train.freeze=encoder.*,decoder.positions.*",
        "train.lora_targets=[\"q\", 'k']",
        "train.epochs=2",
        "tokens.pattern=[a-z]+,?",
        "model.image_size=8,16",
        "model.window=8",
        "model.base=gpt2",
        "generate.temperature=0",
    ]
    recipe = ch.read_recipe("char-gpt", settings)
    assert recipe.data.paths == ("a.txt", "b.txt") and recipe.data.augment == ("flip",)
    assert recipe.data.columns == {"text": "sentence", "label": "stars"}
    assert recipe.train.betas == (0.8, 0.9) and recipe.train.lora_targets == ("q", "k")
    assert recipe.train.freeze == ("encoder.*", "decoder.positions.*")
    assert (recipe.train.epochs, recipe.train.steps) == (2, None)
    assert recipe.tokens.pattern == "[a-z]+,?"
    model = {"image_size": [8, 16], "window": 8, "base": "gpt2"}
    assert {key: recipe.model[key] for key in model} == model and recipe.generate.temperature == 0
    assert Recipe.from_tables(tomllib.loads(recipe.to_toml())) == recipe


@pytest.mark.parametrize("recipe", ["classify", "mlm-then-classify"])
@pytest.mark.parametrize(
    ("task", "metric"), [("classify", "accuracy"), ("multilabel", "micro_f1"), ("regress", "loss")]
)
def test_the_metric_of_a_recipe_follows_its_task(tmp_path, recipe, task, metric):
    labels = {"classify": ("a", "b"), "multilabel": ("a|b", "b"), "regress": ("1.5", "3")}[task]
    rows = [{"text": f"word {i}", "label": labels[i % 2]} for i in range(40)]
    small = "train.steps=1 train.samples=0 train.pretrain=0 model.max_positions=16 tokens.vocab_size=100"
    settings = [f"data.task={task}", *SIZE, *split(small)]
    done = ch.train(rows, recipe=recipe, out=tmp_path / "run", settings=settings)
    assert read_recipe(tmp_path / "run" / "train.toml").train.metric == metric and metric in done.metrics
