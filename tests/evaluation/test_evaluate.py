"""`evaluate`: losses equal transformers' and a plain loop's, figures equal hand counts.

Every example counts once.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
import torch.nn.functional as nnf
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import clearhead as ch
from clearhead.errors import InputError
from clearhead.learn.batches.batch import IGNORE, Batch, Batches
from clearhead.learn.data.examples import Pair
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.evaluation.evaluate import data_plan, examine
from clearhead.learn.evaluation.metrics import Figures, count_classes
from clearhead.learn.losses import batch_loss
from clearhead.learn.tasks.table import TASKS, open_data
from clearhead.variants.presets import preset
from tests.harness import byte_tokenizer
from tests.test_tasks import LABELS, WORDS, saved

transformers.logging.set_verbosity_error()


def words(*specials: str, template: str = "$A") -> Tokenizer:
    """A token for each word, whatever stands between them."""
    vocab = {word: number for number, word in enumerate(dict.fromkeys([*specials, "<unk>", *WORDS]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens([*specials, "<unk>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(name, vocab[name]) for name in specials]
    )
    return tokenizer


def prose(count: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def hugging(folder: Path, model: transformers.PreTrainedModel, tokenizer: Tokenizer, **roles: str) -> Path:
    """A directory as transformers writes it."""
    model.eval().save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(folder)
    return folder


@pytest.fixture
def gpt2(tmp_path):
    torch.manual_seed(1)
    tokenizer = words("<|endoftext|>")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=tokenizer.get_vocab_size(), **sizes)
    config.initializer_range = 0.4
    return hugging(
        tmp_path / "gpt2", transformers.GPT2LMHeadModel(config), tokenizer, eos_token="<|endoftext|>"
    )


@pytest.fixture
def t5(tmp_path):
    torch.manual_seed(2)
    tokenizer = words("<pad>", "</s>", template="$A </s>")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=tokenizer.get_vocab_size(), decoder_start_token_id=0, **sizes)
    config.initializer_factor = 3.0
    model = transformers.T5ForConditionalGeneration(config)
    return hugging(tmp_path / "t5", model, tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(("\t".join(row) if isinstance(row, tuple) else row) + "\n" for row in rows))
    return path


# Text -------------------------------------------------------------------------------------------------------


def test_text_has_the_loss_of_transformers_and_of_a_plain_loop(tmp_path, gpt2):
    text = prose(75)
    data = write(tmp_path / "text.txt", [text])
    m = ch.load(gpt2)
    found = ch.evaluate(m, data)
    ids = torch.tensor(m.encode([text])[0])
    reference = transformers.GPT2LMHeadModel.from_pretrained(gpt2)
    exact = ch.load(gpt2, torch.float64).model.eval()
    theirs = plain = 0.0
    for start in range(0, len(ids) - 1, 16):  # windows of 16 tokens, each token but the first a target once
        window = ids[None, start : start + 17]
        with torch.no_grad():
            logits = reference(window[:, :-1]).logits[0]
            theirs += float(nnf.cross_entropy(logits, window[0, 1:], reduction="sum"))
            logits = exact(window[:, :-1]).logits[0]
        for place, token in enumerate(window[0, 1:].tolist()):
            plain += math.log(sum(math.exp(x) for x in logits[place].tolist())) - float(logits[place, token])
    assert (found.task, found.targets, found.examples, found.outputs) == ("lm", 74, 5, ())
    assert found.metrics["loss"] == pytest.approx(theirs / 74, abs=1e-5)
    assert ch.evaluate(ch.load(gpt2, torch.float64), data).metrics["loss"] == pytest.approx(
        plain / 74, abs=1e-12
    )
    assert found.metrics["perplexity"] == pytest.approx(math.exp(theirs / 74), rel=1e-5)
    bits = theirs / 74 * 75 / math.log(2)
    assert found.metrics["bits_per_byte"] == pytest.approx(bits / len(data.read_bytes()), rel=1e-5)
    assert all(low < found.metrics[name] < high for name, (low, high) in found.intervals.items())
    assert set(found.intervals) == set(found.metrics)
    # A perplexity of 117 has the rounding of a loss of 4.8 a hundredfold.
    assert ch.evaluate(m, data, batch_size=2).metrics == pytest.approx(found.metrics, rel=1e-6, abs=1e-5)
    assert ch.evaluate(m, data) == found


def test_a_tokenizer_that_begins_texts_makes_their_first_token_a_target(tmp_path, gpt2):
    m = ch.load(gpt2)
    data = write(tmp_path / "text.txt", [prose(40)])
    m.tokenizer = words("<|endoftext|>", template="<|endoftext|> $A")
    found = ch.evaluate(m, data)
    assert found.targets == 40
    ids = torch.tensor([m.encode([data.read_text().strip()])[0]])
    total = 0.0
    for start, stop in ((0, 16), (16, 32), (32, 40)):
        with torch.no_grad():
            logits = m.model.eval()(ids[:, start:stop]).logits[0]
        total += float(nnf.cross_entropy(logits, ids[0, start + 1 : stop + 1], reduction="sum"))
    assert found.metrics["loss"] == pytest.approx(total / 40, abs=1e-5)


def test_intervals_shrink_with_more_data(tmp_path, gpt2):
    m = ch.load(gpt2)
    widths = []
    for count in (160, 2560):
        low, high = ch.evaluate(m, write(tmp_path / "text.txt", [prose(count, seed=3)])).intervals["loss"]
        widths.append(high - low)
    assert 2 < widths[0] / widths[1] < 8  # as the root of 16, roughly


def test_masked_text(tmp_path):
    m = ch.load(saved(tmp_path / "model", "BertForMaskedLM", positions=32))
    data = write(tmp_path / "text.txt", [prose(300)])
    found = ch.evaluate(m, data)
    assert found.task == "mlm" and ch.evaluate(m, data) == found
    ids = m.text_tokenizer.encode(data.read_text(), add_special_tokens=False).ids
    assert 0.08 < found.targets / len(ids) < 0.25
    assert ch.evaluate(m, data, seed=1).metrics["loss"] != found.metrics["loss"]


# Pairs ------------------------------------------------------------------------------------------------------


def pairs(count: int) -> list[tuple[str, str]]:
    draw = random.Random(5)
    ends = ((2, 7), (1, 6))
    return [tuple(" ".join(draw.choices(WORDS, k=draw.randint(*end))) for end in ends) for _ in range(count)]


def test_pairs_have_the_loss_of_transformers_and_sacrebleus_scores(tmp_path, t5):
    rows = pairs(12)
    data = write(tmp_path / "pairs.tsv", rows)
    m = ch.load(t5)
    options = {"num_beams": 2, "max_new_tokens": 8, "tokenize": "none", "lowercase": True}
    found = ch.evaluate(m, data, DataPlan(header=False), **options)
    reference = transformers.T5ForConditionalGeneration.from_pretrained(t5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(t5)
    total = count = 0
    outputs = []
    for source, target in rows:
        ids, labels = (tokenizer(text, return_tensors="pt").input_ids for text in (source, target))
        with torch.no_grad():
            total += float(reference(input_ids=ids, labels=labels).loss) * labels.numel()
            made = reference.generate(ids, num_beams=2, max_new_tokens=8, early_stopping=False)
        count += labels.numel()
        outputs.append(tokenizer.decode(made[0], skip_special_tokens=True))
    assert found.targets == count and found.metrics["loss"] == pytest.approx(total / count, abs=1e-5)
    assert list(found.outputs) == outputs and any(outputs)
    targets = [target for _, target in rows]
    for name, metric in {
        "bleu": sacrebleu.BLEU(tokenize="none"),
        "bleu_lowercase": sacrebleu.BLEU(tokenize="none", lowercase=True),
        "chrf": sacrebleu.CHRF(),
    }.items():
        assert found.metrics[name] == pytest.approx(metric.corpus_score(outputs, [targets]).score, abs=1e-9)
        assert found.signatures[name] == str(metric.get_signature())
    assert all(low <= found.metrics[name] <= high for name, (low, high) in found.intervals.items())


def test_targets_that_begin_with_a_special_token_have_the_loss_of_transformers(tmp_path):
    """BART: the decoder reads </s> <s> a b and is to say <s> a b </s>."""
    tokenizer = words("<s>", "<pad>", "</s>", template="<s> $A </s>")
    sizes = {"d_model": 16, "max_position_embeddings": 32, "init_std": 0.5}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_ffn_dim": 24, f"{side}_attention_heads": 2}
    config = transformers.BartConfig(vocab_size=tokenizer.get_vocab_size(), **sizes)
    model = transformers.BartForConditionalGeneration(config)
    folder = hugging(
        tmp_path / "bart", model, tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>"
    )
    rows = pairs(9)
    data, plan = write(tmp_path / "pairs.tsv", rows), DataPlan(header=False)
    found = ch.evaluate(ch.load(folder), data, plan, num_beams=1, max_new_tokens=3)
    total = count = 0
    for source, target in rows:
        ids, labels = (torch.tensor([tokenizer.encode(text).ids]) for text in (source, target))
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * labels.numel()
        count += labels.numel()
    assert found.targets == count and found.metrics["loss"] == pytest.approx(total / count, abs=1e-5)


def test_a_source_with_several_targets_is_one_example(tmp_path, t5):
    m = ch.load(t5)
    sources = [source for source, _ in pairs(4)]
    first = write(tmp_path / "a.tsv", [(source, "rain") for source in sources])
    said = ch.evaluate(m, first, DataPlan(header=False), max_new_tokens=5).outputs
    right = [(source, text or "rain") for source, text in zip(sources, said)]
    rows = [(sources[0], "two dogs"), right[0], *right[1:3], (sources[3], "birds birds birds"), right[0]]
    found = ch.evaluate(m, write(tmp_path / "b.tsv", rows), DataPlan(header=False), max_new_tokens=5)
    assert found.examples == 4 and found.outputs == said and any(said[:3])
    hits = [bool(text) for text in said[:3]]
    assert found.metrics["exact"] == sum(hits) / 4
    assert "nrefs:var" in found.signatures["bleu"]


def test_figures_of_texts_by_hand():
    figures = Figures(0)
    figures.texts(["a b c", "d e", "f"], [["a b c", "x"], ["d x e"], ["g h"]], None, False)
    assert figures.metrics["exact"] == pytest.approx(1 / 3)
    assert figures.metrics["token_error"] == pytest.approx((0 + 1 + 2) / (3 + 3 + 2))
    letters = Figures(0)
    letters.texts(["abc"], [["abd"]], None, False)
    assert letters.metrics["token_error"] == pytest.approx(1 / 3)
    assert "characters" in letters.notes[0]
    assert not letters.intervals


# Classes, tags, answers, pictures ---------------------------------------------------------------------------


def test_classes_by_hand_and_by_transformers(tmp_path):
    folder = saved(tmp_path / "model", "BertForSequenceClassification", num_labels=3)
    draw = random.Random(7)
    rows = [(" ".join(draw.choices(WORDS, k=draw.randint(1, 9))), str(draw.randrange(3))) for _ in range(40)]
    found = ch.evaluate(ch.load(folder), write(tmp_path / "data.tsv", rows))
    model = transformers.BertForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    losses, said = [], []
    for text, label in rows:
        with torch.no_grad():
            out = model(**tokenizer(text, return_tensors="pt"), labels=torch.tensor([int(label)]))
        losses.append(float(out.loss))
        said.append(int(out.logits.argmax()))
    meant = [int(label) for _, label in rows]
    assert found.metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert found.metrics["accuracy"] == pytest.approx(np.mean([a == b for a, b in zip(said, meant)]))
    f1 = []
    for one in set(said) | set(meant):
        hits = sum(a == b == one for a, b in zip(said, meant))
        f1.append(2 * hits / (said.count(one) + meant.count(one)))
    assert found.metrics["macro_f1"] == pytest.approx(np.mean(f1))
    assert found.outputs == tuple(f"LABEL_{one}" for one in said)
    assert any("their numbers" in line for line in found.notes)
    assert all(low <= found.metrics[name] <= high for name, (low, high) in found.intervals.items())
    assert (found.examples, found.targets) == (40, 40)


def test_pairs_of_texts_with_a_model_that_has_no_segments(tmp_path):
    folder = saved(tmp_path / "model", "BertForSequenceClassification", num_labels=2)
    m = ch.load(folder)
    config = m.config.replace(n_types=0)
    m = ch.Model(ch.Transformer(config), m.tokenizer, special=m.special, labels=("no", "yes"))
    pair = {"sentence1": "anna lives", "sentence2": "two dogs"}
    rows = [{**pair, "label": label} for label in ("yes", "no", "no", "yes")]
    data = write(tmp_path / "data.jsonl", [json.dumps(row) for row in rows])
    assert ch.evaluate(m, data).metrics["accuracy"] == 0.5


def test_tags_by_hand(tmp_path):
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {name: n for n, name in enumerate(LABELS)}}
    m = ch.load(saved(tmp_path / "model", "BertForTokenClassification", positions=24, **names))
    draw = random.Random(9)
    # The last sentence is so long that it is cut.
    sentences = [draw.choices(WORDS, k=draw.randint(1, 8)) for _ in range(15)] + [draw.choices(WORDS, k=60)]
    tags = [[draw.choice(LABELS) for _ in row] for row in sentences]
    blocks = ["".join(f"{word}\t{tag}\n" for word, tag in zip(*both)) for both in zip(sentences, tags)]
    data = write(tmp_path / "data.conll", blocks)
    found = ch.evaluate(m, data)
    said = [[word.label for word in m.tag(row).words] for row in sentences]
    flat = [a == b for row, wanted in zip(said, tags) for a, b in zip(row, wanted)]
    assert found.metrics["accuracy"] == pytest.approx(np.mean(flat)) and len(flat) == sum(map(len, sentences))
    assert found.outputs == tuple(map(" ".join, said))
    assert {"span_f1", "span_precision", "span_recall"} <= set(found.intervals)
    assert any("have no tag" in line for line in found.notes)


def test_a_tag_the_model_does_not_have_is_missed(tmp_path):
    m = ch.load(saved(tmp_path / "model", "BertForTokenClassification", id2label=dict(enumerate(LABELS))))
    known = write(tmp_path / "known.conll", ["rain\tB-PER", "sun\tO", ""])
    data = write(tmp_path / "data.conll", ["rain\tB-PER", "sun\tO", "wind\tB-NEW", ""])
    found = ch.evaluate(m, data)
    said = [word.label for word in m.tag(["rain", "sun", "wind"]).words]
    assert found.metrics["accuracy"] == pytest.approx(np.mean([said[0] == "B-PER", said[1] == "O", False]))
    assert found.targets == 2
    assert any(line.startswith("B-NEW: not among the model's tags, so 1 word") for line in found.notes)
    assert not any("not among" in line for line in ch.evaluate(m, known).notes)
    with pytest.raises(InputError, match="the tag 'NOUN' is none of the model's"):
        ch.evaluate(m, write(tmp_path / "other.conll", ["rain\tNOUN", "sun\tVERB", ""]))


def test_answers_as_squad_judges_them(tmp_path):
    m = ch.load(saved(tmp_path / "model", "BertForQuestionAnswering", positions=48))
    draw = random.Random(11)
    rows = []
    for _ in range(6):
        context = draw.choices(WORDS, k=30)
        start = draw.randrange(26)
        answer = " ".join(context[start : start + 3])
        rows.append({"question": "where", "context": " ".join(context), "answer": answer})
    rows.append({**rows[0], "answer": rows[0]["context"].split()[0]})  # a second right answer
    data = write(tmp_path / "data.jsonl", [json.dumps(row) for row in rows])
    found = ch.evaluate(m, data)
    outputs = [m.answer(row["question"], row["context"]).text for row in rows[:6]]
    assert found.examples == 6 and list(found.outputs) == outputs
    assert found.metrics["token_f1"] >= found.metrics["exact"]
    by_hand = Figures(0)
    for name, metric in (("exact", "answer_exact"), ("token_f1", "answer_f1")):
        by_hand.add(name, ["The cat", "a red dog", ""], [["cat!"], ["dog", "red dog house"], ["x"]], metric)
    assert by_hand.metrics == {"exact": pytest.approx(1 / 3), "token_f1": pytest.approx((1 + 0.8) / 3)}


def test_pictures_are_prepared_as_the_model_says(tmp_path):
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2, "image_size": (8, 8), "patch_size": 4}
    config = ch.preset("vit-tiny").replace(**sizes, n_channels=1, n_classes=3, max_positions=5)
    settings = {"size": {"height": 8, "width": 8}, "do_rescale": True, "rescale_factor": 1 / 255}
    settings |= {"do_normalize": True, "image_mean": [0.4], "image_std": [0.3]}
    m = ch.Model(ch.Transformer(config), labels=("0", "1", "2"), images=settings)
    draw = np.random.default_rng(0)
    pixels, labels = draw.integers(0, 256, (70, 8, 8, 1), dtype=np.uint8), draw.integers(0, 3, 70)
    np.savez(tmp_path / "data.npz", x_train=pixels, y_train=labels)
    found = ch.evaluate(m, tmp_path / "data.npz")
    said = [one.label for one in m.classify(list(pixels))]
    assert list(found.outputs) == said
    assert found.metrics["accuracy"] == pytest.approx(np.mean([a == str(b) for a, b in zip(said, labels)]))
    with torch.no_grad():
        x = torch.from_numpy((pixels.transpose(0, 3, 1, 2) / 255 - 0.4) / 0.3).float()
        loss = nnf.cross_entropy(m.model.eval()(x).logits, torch.from_numpy(labels))
    assert found.metrics["loss"] == pytest.approx(float(loss), abs=1e-5)


@pytest.mark.parametrize("task", ["tag", "answer", "seq2seq"])
def test_rows_judged_one_by_one_have_the_loss_of_their_batch(task):
    heads = {"tag": {"head": "tagger", "n_classes": 3}, "answer": {"head": "span"}, "seq2seq": {}}
    family = preset("bart-base") if task == "seq2seq" else preset("bert-base")
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 24, "vocab_size": 30, "max_positions": 12}
    model = ch.Transformer(family.replace(**sizes, **heads[task]))
    ids, mask = torch.randint(30, (4, 9)), torch.arange(9) < torch.tensor([9, 4, 6, 2])[:, None]
    targets = torch.randint(3, (4, 9)).masked_fill(~mask, IGNORE)
    if task == "answer":
        targets = torch.tensor([[1, 3], [0, 0], [2, 5], [0, 1]])
    batch = Batch(ids, targets, mask, **({"source": ids.flip(1)} if task == "seq2seq" else {}))

    class One(Batches):
        per_epoch = 1

        def at(self, index: int) -> Batch:
            return batch

    (seen,) = examine(model, One(), torch.device("cpu"), TASKS[task])
    with torch.no_grad():
        total, count = batch_loss(model.eval(), batch)
    assert (seen.losses.sum(), seen.counts.sum()) == (pytest.approx(float(total), rel=1e-6), count)
    for row in range(4):
        more = {"source": ids.flip(1)[[row]]} if task == "seq2seq" else {}
        alone = Batch(ids[[row]], targets[[row]], mask[[row]], **more)
        with torch.no_grad():
            assert seen.losses[row] == pytest.approx(float(batch_loss(model, alone)[0]), rel=1e-5)


# The command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [("test",), ("test.en", "test.de"), ("test.de", "test.en"), ("test.de.gz", "test.en")]
)
def test_parallel_files_are_read_the_way_of_the_run(tmp_path, given):
    """Not in the order of names, nor in that in which they are named."""
    (tmp_path / "train.toml").write_text('[data]\npaths = ["gone/train.en", "gone/train.de.gz"]\n')
    for name, text in {"test.en": "a house\n", "test.de": "ein Haus\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    paths = [str(tmp_path / name) for name in given]
    plan = data_plan(tmp_path, paths)
    assert open_data(dataclasses.replace(plan, paths=tuple(paths)), split=False).validation == [
        Pair("a house", "ein Haus")
    ]


def test_other_files_are_not_read_by_the_languages_of_the_run(tmp_path):
    (tmp_path / "train.toml").write_text('[data]\npaths = ["train.en", "train.de"]\n')
    (tmp_path / "pairs.tsv").write_text("source\ttarget\na house\tein Haus\n")
    for name in ("test.fr", "test.en"):
        (tmp_path / name).write_text("x\n")
    for given in (["pairs.tsv"], ["test"], ["test.fr", "test.en"], []):
        assert not data_plan(tmp_path, [tmp_path / name for name in given]).columns


def test_a_runs_own_recipe_says_how_to_read(tmp_path):
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-10"
    checkpoint.mkdir(parents=True)
    (run / "train.toml").write_text(
        '[data]\npaths = ["gone.tsv"]\nlowercase = true\nvalidation = ["gone"]\nbatch_size = 7\n'
        '[data.columns]\ntext = "review"\n'
    )
    (run / "best").symlink_to(checkpoint, target_is_directory=True)
    for folder in (run, checkpoint, run / "best"):
        plan = data_plan(folder)
        assert (plan.lowercase, plan.paths, plan.validation) == (True, (), ())
        assert dict(plan.columns) == {"text": "review"}
        assert data_plan(folder, settings=["data.lowercase=false"]).lowercase is False
    assert data_plan(tmp_path) == DataPlan()


def test_command(tmp_path, clearhead, t5):
    data = write(tmp_path / "pairs.tsv", pairs(5))
    out = tmp_path / "out.txt"
    more = ["--beams", "1", "--max-new-tokens", "4", "--set", "data.header=false"]
    shown = clearhead("eval", t5, data, *more, f"--json --output {out}").json
    assert shown["examples"] == 5
    assert {*shown["metrics"]} == {"loss", "perplexity", "exact", "token_error", "bleu", "chrf"}
    assert len(out.read_text().splitlines()) == 5
    captured = clearhead("eval", t5, data, *more)
    assert f"{shown['metrics']['loss']:.4f}" in captured.out and shown["signatures"]["bleu"] in captured.out
    assert "5 examples" in captured.err


def test_wrong_input_is_one_line(tmp_path, clearhead, gpt2, t5):
    text = write(tmp_path / "text.txt", [prose(40)])
    table = write(tmp_path / "labels.tsv", [(word, label) for word, label in zip(WORDS, ["0", "1"] * 10)])
    bad = write(tmp_path / "bad.tsv", [*[(word, "0") for word in WORDS[:6]], ("rain", "7"), ("rain", "7")])
    classifier = saved(tmp_path / "classifier", "BertForSequenceClassification", num_labels=2)
    number = saved(tmp_path / "number", "BertForSequenceClassification", num_labels=1)
    empty, paired = write(tmp_path / "empty.txt", []), write(tmp_path / "pairs.tsv", pairs(3))
    other = "does not fit a model of family decoder with head lm, which is judged by lm"
    for model, data, more, wanted in (
        (classifier, text, "", "task classify needs labels"),
        (classifier, bad, "", "line 7: the label '7' is none of the model's: LABEL_0, LABEL_1"),
        (number, table, "", "choose one of several classes"),
        (gpt2, text, "--set data.task=seq2seq", other),
        (gpt2, text, "--beams 4", "num_beams is for models that write"),
        (gpt2, text, f"--output {tmp_path}/out", "no answers to write"),
        (gpt2, text, "--batch-size 0", "batch_size 0"),
        (gpt2, tmp_path / "gone.txt", "", "gone.txt"),
        (gpt2, empty, "", "empty"),
        (t5, text, "", "task seq2seq needs pairs"),
        (t5, paired, "--tokenize foo", "tokenize 'foo' cannot be used: choose from"),
        (t5, text, f"--output {tmp_path}/none/out", "cannot be written"),
        (tmp_path / "nothing", text, "", "is not a directory"),
        (gpt2, text, "--recipe foo", 'no recipe is called "foo"'),
    ):
        clearhead.refuses(wanted, "eval", model, data, f"--device cpu {more}")


def test_classes_one_by_one_are_scikit_learns():
    """The table and the matrix of a classifier equal scikit-learn's, for few classes and for many."""
    metrics = pytest.importorskip("sklearn.metrics")
    for labels in (["neg", "pos", "so-so"], [f"c{number}" for number in range(11)]):
        random = np.random.default_rng(len(labels))
        meant, said = (random.integers(len(labels), size=200).tolist() for _ in range(2))
        found = count_classes(said, meant, labels)
        assert np.array_equal(found.confusion, metrics.confusion_matrix(meant, said))
        wanted = metrics.precision_recall_fscore_support(meant, said, zero_division=0)
        figures = [(one.precision, one.recall, one.f1, one.examples) for one in found]
        np.testing.assert_allclose(figures, np.array(wanted).T, atol=1e-12)
        assert [one.label for one in found] == labels
    empty = list(count_classes([0, 0], [0, 0], ["a", "b"]))
    assert (empty[1].precision, empty[1].recall, empty[1].f1, empty[1].examples) == (0, 0, 0, 0)


def test_the_command_shows_classes(tmp_path, clearhead, gpt2):
    torch.manual_seed(0)
    labels = ("neg", "pos")
    config = ch.preset("micro-encoder").replace(head="classifier", n_classes=2, vocab_size=257)
    ch.Model(ch.Transformer(config), byte_tokenizer(), labels=labels).save(tmp_path / "m")
    rows = [
        ("a fine film", "pos"),
        ("a poor film", "neg"),
        ("fine", "pos"),
        ("dull", "neg"),
        ("dull!", "neg"),
    ]
    (tmp_path / "data.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    done = ch.evaluate(ch.load(tmp_path / "m"), tmp_path / "data.tsv")
    wanted = [[0, 0], [0, 0]]
    for (_, label), said in zip(rows, done.outputs):
        wanted[labels.index(label)][labels.index(said)] += 1
    assert [list(row) for row in done.classes.confusion] == wanted
    out = clearhead("eval", tmp_path / "m", tmp_path / "data.tsv", "--json").out
    assert out.count("\n") == 1 and json.loads(out)["classes"]["confusion"] == wanted
    out = clearhead("eval", tmp_path / "m", tmp_path / "data.tsv", f"--plot {tmp_path}/c.png").out
    assert "precision" in out and "taken for" in out and (tmp_path / "c.png").stat().st_size > 1000
    ran = clearhead("eval", gpt2, "x.txt", "--plot c.png")
    assert "--plot c.png draws the confusion matrix" in ran.err


def test_rows_in_memory_are_judged_as_their_file_is(tmp_path):
    """Lists, columns, frames and data sets in parts, as `train` takes them."""
    rows = [{"text": f"{WORDS[n % len(WORDS)]} {n}", "label": ("x", "y")[n % 2]} for n in range(24)]
    tiny = {
        "train.steps": 2, "train.samples": 0, "train.threads": 1, "model.d_model": 16, "model.n_layers": 1,
        "model.n_heads": 2, "model.max_positions": 16,
    }  # fmt: skip
    m = ch.train(rows, out=tmp_path / "run", settings=tiny).model
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = ch.evaluate(m, tmp_path / "rows.jsonl")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    parts = {"train": rows[:4], "validation": rows}
    for data in (rows, iter(rows), columns, [*map(tuple, map(dict.values, rows))], parts):
        found = ch.evaluate(m, data)
        assert (found.metrics, found.outputs) == (wanted.metrics, wanted.outputs)
    assert "the part validation is validated on" in found.notes
