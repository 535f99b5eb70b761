"""Learning on from another model: what the task decides, what the base does, and how long a pass is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import ConfigError
from clearhead.learn.batches.batch import Batch
from clearhead.learn.data.examples import Corpus, Labelled, Tagged
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.recipe import read_recipe
from clearhead.learn.tasks.table import TASKS, open_data
from clearhead.learn.tasks.task import balanced_weights
from clearhead.learn.training.events import Validated, read_log
from tests.harness import Notes, split, worst

pytestmark = pytest.mark.ledger("H8", "H9")
WORDS = ["sea", "ship", "storm", "wind", "sail", "rope", "captain", "island"]
PLAIN = split("train.device=cpu train.precision=float32 train.samples=0 data.batch_size=8 train.steps=2")
SHAPE = split("model.d_model=16 model.n_layers=1 model.n_heads=2 model.max_positions=16")
TINY = [*PLAIN, *SHAPE]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Some text, rows with labels, pairs; and models that learned from them."""
    place = tmp_path_factory.mktemp("bases")
    sentences = [" ".join(WORDS[(i * j) % 8] for j in range(1, 5)) for i in range(48)]
    (place / "text.txt").write_text("\n".join(sentences) + "\n")
    labels = [f"{text} {i}\t{('no', 'yes')[i % 2]}\n" for i, text in enumerate(sentences)]
    pairs = [f"{text} {i}\t{text[::-1]} {i}\n" for i, text in enumerate(sentences)]
    (place / "labels.tsv").write_text("".join(labels))
    (place / "pairs.tsv").write_text("".join(pairs))
    ch.train(place / "text.txt", out=place / "gpt2", settings=TINY)
    masked = [*TINY, "data.task=mlm", "model.base=distilbert"]
    ch.train(place / "text.txt", out=place / "distilbert", settings=masked)
    ch.train(place / "pairs.tsv", out=place / "bart", settings=[*TINY, "model.dropout=0.2"])
    return place


def learn(place: Path, out: Path, data: str, *settings: str, **more):
    return ch.train(place / data, out=out, settings=[*PLAIN, *settings], **more)


@pytest.mark.parametrize("setting", ["model.n_classes=7", "model.head=mlm"])
def test_the_task_decides_the_head_of_a_base(place, tmp_path, setting):
    notes, base = Notes(), f"model.base={place}/distilbert"
    done = learn(place, tmp_path / "run", "labels.tsv", base, setting, on_event=notes)
    assert (done.model.config.head, done.model.labels) == ("classifier", ("no", "yes"))
    assert any("by the data" in line for line in notes)


def test_dropout_holds_wherever_the_base_has_it(place, tmp_path):
    base = ch.load(place / "bart").config
    assert base.dropout == base.feedforward_dropout == 0.2
    bart = f"model.base={place / 'bart'}"
    config = learn(place, tmp_path / "run", "pairs.tsv", bart, "model.dropout=0").model.config
    assert (config.dropout, config.attention_dropout, config.feedforward_dropout) == (0, 0, 0)


@pytest.mark.parametrize("base", ["distilbert", "gpt2", "preset"])
def test_a_classifier_is_one_that_transformers_has(place, tmp_path, base, differences):
    import transformers

    name = f"{'DistilBert' if base == 'distilbert' else 'GPT2'}ForSequenceClassification"
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


def test_pictures_are_classified_by_what_a_base_without_classes_read(place, tmp_path):
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1)
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    done = ch.train("digits", out=tmp_path / "run", settings=[*PLAIN, f"model.base={tmp_path / 'vit'}"])
    names = json.loads((done.folder / "config.json").read_text())["architectures"]
    assert names == ["ViTForImageClassification"]


@pytest.mark.parametrize(("size", "accumulate"), [(8, 4), (16, 4), (8, 1)])
def test_an_epoch_is_a_pass_however_many_batches_make_a_step(place, tmp_path, size, accumulate):
    notes = Notes()
    settings = [*TINY, "train.epochs=8", f"data.batch_size={size}", f"train.accumulate={accumulate}"]
    done = ch.train(place / "labels.tsv", out=tmp_path / "run", settings=settings, on_event=notes)
    rows = next(int(line.split()[0]) for line in notes if "to train on" in line)
    batches = -(-rows // size)
    assert done.step == round(8 * batches / accumulate)


def test_rows_that_run_into_the_next_pass_are_not_counted_twice(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefghijklmno\n" * 10)  # 9 windows of 15 in training
    settings = [*TINY, "model.max_positions=15", "data.batch_size=8", "train.epochs=8"]
    assert ch.train(tmp_path / "text.txt", out=tmp_path / "run", settings=settings).step == 9  # 72 rows


def test_a_single_step_learns(place, tmp_path):
    once = ("train.steps=1", "train.floor=0", "train.schedule=linear")
    done = learn(place, tmp_path / "run", "text.txt", *SHAPE, *once)
    assert read_log(done.folder)[0]["rate"] == 1e-3


def test_a_recipe_that_was_changed_is_not_gone_on_with(place, tmp_path):
    run = learn(place, tmp_path / "run", "pairs.tsv", f"model.base={place / 'bart'}", "train.lora=2").folder
    text = (run / "train.toml").read_text()
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    changes = {"optimizer": ('"adamw"', '"adafactor"'), "metric": ('"loss"', '"chrf"'), "lora": ("2", "4")}
    for key, (old, new) in changes.items():
        assert f"\n{key} = {old}" in text
        changed = text.replace(f"\n{key} = {old}", f"\n{key} = {new}")
        (run / "train.toml").write_text(changed.replace("\nsteps = 2", "\nsteps = 4"))
        with pytest.raises(ch.CheckpointError, match=f"train.{key} has changed since .* began: put it back"):
            ch.train(resume=run)
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


@pytest.mark.parametrize("ema", ["train.ema=0.5", "train.ema=0"])
def test_a_run_with_updates_leaves_an_adapter_of_its_base(place, tmp_path, ema):
    given = (f"model.base={place / 'bart'}", "train.lora=2", "train.lr=0.5", ema)
    run = learn(place, tmp_path / "run", "pairs.tsv", *given).folder
    ids = {"ids": torch.arange(4, 9)[None], "source": torch.arange(4, 12)[None]}
    logits = [ch.load(folder).model(**ids).logits for folder in (run, run / "adapter", place / "bart")]
    assert worst(logits[0], logits[1]) < 1e-4 < worst(logits[0], logits[2])


def test_the_first_stage_learns_all_layers_alike_and_its_tokens_are_those_asked_for(place, tmp_path):
    notes = Notes()
    settings = [*TINY, "train.pretrain=2", "train.layer_decay=0.5", "tokens.kind=char"]
    ch.train(place / "labels.tsv", out=tmp_path / "run", settings=settings, on_event=notes)
    recipes = [read_recipe(tmp_path / "run" / name) for name in ("pretrain/train.toml", "train.toml")]
    assert [recipe.train.layer_decay for recipe in recipes] == [1.0, 0.5]
    assert recipes[0].tokens.kind == "char"
    assert not any("no effect" in line for line in notes)


@pytest.mark.parametrize("base", ["", "bart"])
def test_transformers_writes_no_more_than_the_decoder_has_positions(place, tmp_path, base):
    import transformers

    start = [f"model.base={place / base}"] if base else TINY
    done = learn(place, tmp_path / "run", "pairs.tsv", *start, "generate.max_new_tokens=100")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(done.folder).eval()
    theirs.generation_config.eos_token_id = None  # as a model that has not learned to stop
    # The token that the decoder begins with is one more.
    assert theirs.generate(torch.arange(5, 12)[None]).shape[1] == done.model.config.max_positions + 1


# What a run says of itself ----------------------------------------------------------------------------------


def test_a_base_is_validated_before_the_first_step_and_kept_if_nothing_is_better(place, tmp_path):
    """A rate that ruins the model: the run ends with the weights it began with, and says so."""
    events: list = []
    base = place / "gpt2"
    ruin = (f"model.base={base}", "train.lr=1000", "train.warmup=0")
    done = learn(place, tmp_path / "bad", "text.txt", *ruin, on_event=events.append)
    first = next(event for event in events if isinstance(event, Validated))
    judged = ch.evaluate(ch.load(base), place / "text.txt")
    assert first.step == 0 and first.best and abs(first.metrics["loss"] - judged.metrics["loss"]) < 0.5
    assert [line["step"] for line in read_log(tmp_path / "bad") if line["event"] == "validated"] == [0, 2]
    assert any("nothing improved on the base (loss" in str(event) for event in events)
    assert done.metrics["step"] == 0
    before, after = ch.load(base).model.state_dict(), done.model.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "bad" / "best").resolve().name == "step-0"


def test_a_base_that_is_improved_is_not_kept_and_a_new_model_has_no_baseline(place, tmp_path):
    notes = Notes()
    done = learn(place, tmp_path / "good", "text.txt", f"model.base={place / 'gpt2'}", on_event=notes)
    assert done.metrics["step"] == 2 and not any("nothing improved" in line for line in notes)
    steps = [line["step"] for line in read_log(place / "gpt2") if line["event"] == "validated"]
    assert 0 not in steps


def rare(path: Path) -> Path:
    """Texts of two classes, one of which is a tenth of all."""
    labels = ["rare" if i % 10 == 0 else "usual" for i in range(160)]
    rows = [(f"{WORDS[i % 8]} {label[0]} {i}", label) for i, label in enumerate(labels)]
    path.write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    return path


def test_a_class_that_is_never_predicted_is_named(place, tmp_path):
    notes = Notes()
    data = rare(tmp_path / "rare.tsv")
    settings = [*TINY, "data.validation_share=0.3", "train.steps=20"]
    ch.train(data, out=tmp_path / "run", settings=settings, on_event=notes)
    (line,) = [line for line in notes if "never predicted" in line]
    assert line.startswith("never predicted: rare, ") and "class_weights=balanced" in line
    # With weights both classes have the same share of the loss.
    notes.clear()
    weighted = split("train.class_weights=balanced train.steps=60 train.lr=0.01 train.metric=macro_f1")
    ch.train(data, out=tmp_path / "weighted", settings=[*settings, *weighted], on_event=notes)
    assert not any("never predicted" in line for line in notes)
    assert 'class_weights = "balanced"' in (tmp_path / "weighted" / "train.toml").read_text()


def test_a_tagger_without_spans_says_so(tmp_path):
    tags = [["B-P" if n == i % 8 else "O" for n in range(8)] for i in range(64)]
    rows = [{"words": [*"abcdefg", str(i)], "tags": row} for i, row in enumerate(tags)]
    notes = Notes()
    settings = [*TINY, "train.steps=20", "data.validation_share=0.3"]
    ch.train(rows, out=tmp_path / "run", settings=settings, on_event=notes)
    assert any(line.startswith("no span is predicted, and ") for line in notes)


@pytest.mark.parametrize("kind", ["classes", "tags"])
def test_balanced_weights_are_scikit_learns(kind):
    from sklearn.utils.class_weight import compute_class_weight

    if kind == "classes":
        rows = [Labelled("x", "b" if i % 7 else "a") for i in range(50)]
        names = [row.label for row in rows]
    else:
        rows = [Tagged(tuple("xyz"), ("O", "O", "B-a" if i % 7 else "O")) for i in range(50)]
        names = [tag for row in rows for tag in row.tags]
    labels = sorted(set(names))
    corpus = Corpus("labels", rows, rows, tuple(labels), "", (), 0)
    right = compute_class_weight("balanced", classes=np.array(labels), y=names)
    assert balanced_weights(corpus, labels) == pytest.approx(right.tolist())


def test_weights_are_those_of_cross_entropy_and_not_of_validation():
    logits, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, 1, -100])
    weights = torch.tensor([0.5, 1.0, 3.0])
    task = TASKS["classify"].with_values(weights=weights)
    batch = Batch(torch.zeros(6, 1, dtype=torch.long), targets)
    theirs = torch.nn.functional.cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=0.1)
    assert torch.allclose(task.loss(logits, batch, 0.1), theirs)
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    assert torch.allclose(task.row_losses(logits, batch), plain)


def test_class_weights_are_refused_where_there_are_no_classes(place, tmp_path):
    base = f"model.base={place}/gpt2"
    with pytest.raises(ConfigError, match="class_weights is for tasks that choose one class"):
        learn(place, tmp_path / "run", "text.txt", base, "train.class_weights=balanced")


def test_the_share_that_is_printed_is_the_real_one(tmp_path):
    """Equal texts go together, so that a tenth of few examples is seldom a tenth."""
    data = tmp_path / "rows.tsv"
    for seed in range(5):
        rows = [(f"text {seed} {i // 4}", "ab"[i % 2]) for i in range(40)]
        data.write_text("".join(f"{text}\t{label}\n" for text, label in rows))
        corpus = open_data(DataPlan(paths=(str(data),)))
        share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
        assert any(line.startswith(f"{share * 100:.3g}% of the examples") for line in corpus.notes)
