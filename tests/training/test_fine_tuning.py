"""Learning on from another model: what the task decides, what the base does, and how long a pass is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.recipe import read_recipe
from clearhead.training.events import Note, read_log
from tests.harness import worst

WORDS = ["sea", "ship", "storm", "wind", "sail", "rope", "captain", "island"]
PLAIN = [
    "train.device=cpu",
    "train.precision=float32",
    "train.samples=0",
    "data.batch_size=8",
    "train.steps=2",
]
TINY = [*PLAIN, "model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.max_positions=16"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Some text, rows with labels, pairs; and models that learned from them."""
    place = tmp_path_factory.mktemp("bases")
    sentences = [" ".join(WORDS[(i * j) % 8] for j in range(1, 5)) for i in range(48)]
    (place / "text.txt").write_text("\n".join(sentences) + "\n")
    (place / "labels.tsv").write_text(
        "".join(f"{text} {i}\t{('no', 'yes')[i % 2]}\n" for i, text in enumerate(sentences))
    )
    (place / "pairs.tsv").write_text(
        "".join(f"{text} {i}\t{text[::-1]} {i}\n" for i, text in enumerate(sentences))
    )
    ch.train(place / "text.txt", out=place / "gpt2", settings=TINY)
    ch.train(
        place / "text.txt",
        out=place / "distilbert",
        settings=[*TINY, "data.task=mlm", "model.base=distilbert"],
    )
    ch.train(place / "pairs.tsv", out=place / "bart", settings=[*TINY, "model.dropout=0.2"])
    return place


def learn(place: Path, out: Path, data: str, *settings: str, **more):
    return ch.train(place / data, out=out, settings=[*PLAIN, *settings], **more)


@pytest.mark.ledger("H9")
@pytest.mark.parametrize("setting", ["model.n_classes=7", "model.head=mlm"])
def test_the_task_decides_the_head_of_a_base(place, tmp_path, setting):
    events = []
    done = learn(
        place,
        tmp_path / "run",
        "labels.tsv",
        f"model.base={place / 'distilbert'}",
        setting,
        on_event=events.append,
    )
    assert (done.model.config.head, done.model.labels) == ("classifier", ("no", "yes"))
    assert any("by the data" in event.line for event in events if isinstance(event, Note))


@pytest.mark.ledger("H9")
def test_dropout_holds_wherever_the_base_has_it(place, tmp_path):
    base = ch.load(place / "bart").config
    assert base.dropout == base.feedforward_dropout == 0.2
    config = learn(
        place, tmp_path / "run", "pairs.tsv", f"model.base={place / 'bart'}", "model.dropout=0"
    ).model.config
    assert (config.dropout, config.attention_dropout, config.feedforward_dropout) == (0, 0, 0)


@pytest.mark.ledger("H9")
@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("distilbert", "DistilBertForSequenceClassification"),
        ("gpt2", "GPT2ForSequenceClassification"),
        ("preset", "GPT2ForSequenceClassification"),
    ],
)
def test_a_classifier_is_one_that_transformers_has(place, tmp_path, base, name, differences):
    import transformers

    start = [*TINY, "model.base=gpt2"] if base == "preset" else [f"model.base={place / base}"]
    done = learn(place, tmp_path / "run", "labels.tsv", *start)
    assert json.loads((done.folder / "config.json").read_text())["architectures"] == [name]
    theirs = getattr(transformers, name).from_pretrained(done.folder).eval()
    ids = torch.arange(5, 19).reshape(2, 7)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    ids[~mask] = theirs.config.pad_token_id
    with torch.no_grad():
        wanted = theirs(input_ids=ids, attention_mask=mask.long()).logits
        assert differences.see("logits", done.model.model.eval()(ids, mask=mask).logits, wanted) < 1e-6


@pytest.mark.ledger("H9")
def test_pictures_are_classified_by_what_a_base_without_classes_read(place, tmp_path):
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.ViTModel(
        transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1)
    ).save_pretrained(tmp_path / "vit")
    done = ch.train("digits", out=tmp_path / "run", settings=[*PLAIN, f"model.base={tmp_path / 'vit'}"])
    assert json.loads((done.folder / "config.json").read_text())["architectures"] == [
        "ViTForImageClassification"
    ]


@pytest.mark.parametrize(("size", "accumulate"), [(8, 4), (16, 4), (8, 1)])
def test_an_epoch_is_a_pass_however_many_batches_make_a_step(place, tmp_path, size, accumulate):
    events = []
    settings = [*TINY, "train.epochs=8", f"data.batch_size={size}", f"train.accumulate={accumulate}"]
    done = ch.train(place / "labels.tsv", out=tmp_path / "run", settings=settings, on_event=events.append)
    rows = next(
        int(event.line.split()[0])
        for event in events
        if isinstance(event, Note) and "to train on" in event.line
    )
    batches = -(-rows // size)
    assert done.step == round(8 * batches / accumulate)


def test_rows_that_run_into_the_next_pass_are_not_counted_twice(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefghijklmno\n" * 10)  # 9 windows of 15 in training
    settings = [*TINY, "model.max_positions=15", "data.batch_size=8", "train.epochs=8"]
    assert ch.train(tmp_path / "text.txt", out=tmp_path / "run", settings=settings).step == 9  # 72 rows


def test_a_single_step_learns(place, tmp_path):
    done = learn(
        place,
        tmp_path / "run",
        "text.txt",
        *TINY[5:],
        "train.steps=1",
        "train.floor=0",
        "train.schedule=linear",
    )
    assert read_log(done.folder)[0]["rate"] == 1e-3


@pytest.mark.ledger("H8")
@pytest.mark.parametrize(
    ("key", "old", "new"),
    [("optimizer", '"adamw"', '"adafactor"'), ("metric", '"loss"', '"chrf"'), ("lora", "2", "4")],
)
def test_a_recipe_that_was_changed_is_not_gone_on_with(place, tmp_path, key, old, new):
    run = learn(place, tmp_path / "run", "pairs.tsv", f"model.base={place / 'bart'}", "train.lora=2").folder
    text = (run / "train.toml").read_text()
    assert f"\n{key} = {old}" in text
    (run / "train.toml").write_text(
        text.replace(f"\n{key} = {old}", f"\n{key} = {new}").replace("\nsteps = 2", "\nsteps = 4")
    )
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    with pytest.raises(ch.CheckpointError, match=f"train.{key} has changed since .* began: put it back"):
        ch.train(resume=run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


@pytest.mark.ledger("H9")
@pytest.mark.parametrize("ema", ["train.ema=0.5", "train.ema=0"])
def test_a_run_with_updates_leaves_an_adapter_of_its_base(place, tmp_path, ema):
    given = (f"model.base={place / 'bart'}", "train.lora=2", "train.lr=0.5", ema)
    run = learn(place, tmp_path / "run", "pairs.tsv", *given).folder
    ids = {"ids": torch.arange(4, 9)[None], "source": torch.arange(4, 12)[None]}
    logits = [ch.load(folder).model(**ids).logits for folder in (run, run / "adapter", place / "bart")]
    assert worst(logits[0], logits[1]) < 1e-4 < worst(logits[0], logits[2])


@pytest.mark.ledger("H9")
def test_the_first_stage_learns_all_layers_alike_and_its_tokens_are_those_asked_for(place, tmp_path):
    events = []
    settings = [*TINY, "train.pretrain=2", "train.layer_decay=0.5", "tokens.kind=char"]
    ch.train(place / "labels.tsv", out=tmp_path / "run", settings=settings, on_event=events.append)
    recipes = [read_recipe(tmp_path / "run" / name) for name in ("pretrain/train.toml", "train.toml")]
    assert [recipe.train.layer_decay for recipe in recipes] == [1.0, 0.5]
    assert recipes[0].tokens.kind == "char"
    assert not any("no effect" in event.line for event in events if isinstance(event, Note))


@pytest.mark.parametrize("base", ["", "bart"])
def test_transformers_writes_no_more_than_the_decoder_has_positions(place, tmp_path, base):
    import transformers

    start = [f"model.base={place / base}"] if base else TINY
    done = learn(place, tmp_path / "run", "pairs.tsv", *start, "generate.max_new_tokens=100")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(done.folder).eval()
    theirs.generation_config.eos_token_id = None  # as a model that has not learned to stop
    # The token that the decoder begins with is one more.
    assert theirs.generate(torch.arange(5, 12)[None]).shape[1] == done.model.config.max_positions + 1
