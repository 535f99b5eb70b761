"""Tasks: classify, tag, fill, answer and translate give what transformers gives; a batch is its rows."""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import clearhead as ch
from clearhead.learn.data.conll import by_labels
from clearhead.learn.tasks.reading import spans_of, tag
from clearhead.learn.tasks.results import Word

pytestmark = pytest.mark.ledger("A4", "E1", "E3", "E4")
transformers.logging.set_verbosity_error()

PROSE = """the river runs past a quiet town where old boats wait and children count birds over grey water
in autumn anna lives near berlin with two dogs while peter writes long letters from oslo about
rain and trains"""
WORDS = PROSE.split()
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "Anna lives near Berlin.",
    "the old boats wait",
    "rain",
    "Peter, with two dogs, writes long letters from Oslo about autumn rain and unfamiliar townspeople!",
]


def wordpiece() -> Tokenizer:
    """A small WordPiece tokenizer: some words are whole, others come in pieces."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *".,!", *WORDS[::2]]
    tokens += ["##s", "##ing", "##ar"]
    tokenizer = Tokenizer(
        models.WordPiece({token: n for n, token in enumerate(dict.fromkeys(tokens))}, unk_token="[UNK]")
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    return tokenizer


def saved(folder: pathlib.Path, kind: str, positions: int = 128, **changes) -> pathlib.Path:
    """A random BERT of transformers' own with a tokenizer, saved by transformers."""
    torch.manual_seed(3)
    tokenizer = wordpiece()
    fast = transformers.BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=positions)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sizes |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": positions}
    config = transformers.BertConfig(**sizes, initializer_range=0.5, pad_token_id=0, **changes)
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def pipeline(task: str, folder: pathlib.Path, **options):
    return transformers.pipeline(task, model=str(folder), tokenizer=str(folder), **options)


# Classify ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [None, "multi_label_classification", "regression"])
def test_classes_are_transformers(tmp_path, problem):
    labels = ["bad", "fair", "good"]
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: n for n, name in enumerate(labels)}}
    folder = saved(tmp_path, "BertForSequenceClassification", problem_type=problem, **names)
    m = ch.load(folder)
    theirs = pipeline("text-classification", folder, top_k=None)(TEXTS)
    for ours, wanted in zip(m.classify(TEXTS), theirs):
        assert ours.scores == pytest.approx({row["label"]: row["score"] for row in wanted}, abs=1e-5)
        assert ours.label == wanted[0]["label"]
        assert ours.probability == pytest.approx(wanted[0]["score"], abs=1e-5)
    assert len({one.scores["bad"] for one in m.classify(TEXTS)}) == len(TEXTS)


def test_pairs_and_batches(tmp_path):
    folder = saved(tmp_path, "BertForSequenceClassification", num_labels=4)
    m = ch.load(folder)
    pairs = [("Anna lives near Berlin", "two dogs"), ("rain", "rain, rain and trains"), (TEXTS[3], TEXTS[0])]
    asked = [{"text": a, "text_pair": b} for a, b in pairs]
    theirs = pipeline("text-classification", folder, top_k=None)(asked)
    together = m.classify(pairs, batch_size=2)
    for pair, ours, wanted in zip(pairs, together, theirs):
        assert ours.scores == pytest.approx({row["label"]: row["score"] for row in wanted}, abs=1e-5)
        assert m.classify(pair).scores == pytest.approx(ours.scores, abs=1e-5)
    assert m.classify(("rain", "dogs")).scores != pytest.approx(m.classify(("dogs", "rain")).scores, abs=1e-3)
    assert m.classify([]) == []


def test_a_long_text_is_cut_as_transformers_cuts_it(tmp_path):
    folder = saved(tmp_path, "BertForSequenceClassification", positions=24, num_labels=4)
    long = " ".join(WORDS * 3)
    theirs = pipeline("text-classification", folder, top_k=None)
    m = ch.load(folder)
    for ours, given in (
        (m.classify(long), long),
        (m.classify((long, "two dogs")), {"text": long, "text_pair": "two dogs"}),
    ):
        wanted = theirs([given], truncation=True)[0]
        assert ours.scores == pytest.approx({row["label"]: row["score"] for row in wanted}, abs=1e-5)


@pytest.fixture
def vit(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"image_size": 28, "patch_size": 7, "num_labels": 3}
    config = transformers.ViTConfig(**sizes, initializer_range=0.5)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": 28, "width": 28}}
    settings |= {"do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.5]}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))
    return tmp_path / "vit"


def test_images_are_transformers(vit, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 28, 28, 3), dtype=np.uint8)
    theirs = transformers.pipeline("image-classification", model=str(vit))
    m = ch.load(vit)
    ours = m.classify(list(pixels), batch_size=3)
    for image, made in zip(pixels, ours):
        wanted = {row["label"]: row["score"] for row in theirs(Image.fromarray(image))}
        assert made.scores == pytest.approx(wanted, abs=1e-5)
        for one in (image, torch.from_numpy(image).permute(2, 0, 1)):
            assert m.classify(one).scores == pytest.approx(made.scores, abs=1e-5)
    assert len({one.probability for one in ours}) == 4
    slope = np.add.outer(np.arange(40) * 3, np.arange(50) * 2)[..., None] + [0, 20, 40]
    smooth = np.clip(slope, 0, 255).astype(np.uint8)
    Image.fromarray(smooth).save(tmp_path / "image.png")
    wanted = {row["label"]: row["score"] for row in theirs(Image.fromarray(smooth))}
    # The picture is resized: equal to one level of 256.
    assert m.classify(str(tmp_path / "image.png")).scores == pytest.approx(wanted, abs=0.02)
    m.save(tmp_path / "again")
    again = ch.load(tmp_path / "again").classify(smooth).scores
    assert again == pytest.approx(m.classify(smooth).scores, abs=1e-5)


def test_images_that_do_not_fit(vit, tmp_path):
    m = ch.load(vit)
    (tmp_path / "text.png").write_text("no image")
    os.mkfifo(tmp_path / "pipe.png")
    for image, words in (
        (tmp_path / "pipe.png", "it is a directory or a device"),
        (np.zeros((28, 28, 5), dtype=np.uint8), "[3, H, W]"),
        (torch.zeros(3, 10, 10), "[3, 28, 28]"),
        (np.full((28, 28, 3), 300), "0 and 255"),
        (tmp_path / "text.png", "cannot be read as an image"),
        (tmp_path / "none.png", "cannot be read as an image"),
    ):
        with pytest.raises(ch.InputError) as error:
            m.classify(image)
        assert words in str(error.value)


# Tag --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tagger(tmp_path):
    numbers = {name: number for number, name in enumerate(LABELS)}
    return saved(tmp_path, "BertForTokenClassification", id2label=dict(enumerate(LABELS)), label2id=numbers)


def test_spans_are_transformers(tagger):
    theirs = pipeline("token-classification", tagger, aggregation_strategy="first")
    m = ch.load(tagger)
    count = 0
    for text in TEXTS:
        made = m.tag(text)
        wanted = theirs(text)
        spans = [(row["entity_group"], row["start"], row["end"]) for row in wanted]
        assert [(span.label, span.start, span.end) for span in made.spans] == spans
        scores = [float(row["score"]) for row in wanted]
        assert [span.score for span in made.spans] == pytest.approx(scores, abs=1e-5)
        assert all(span.text == text[span.start : span.end] for span in made.spans)
        assert all(word.text == text[word.start : word.end] for word in made.words)
        count += len(made.spans)
    assert count >= 5


def test_words_and_batches(tagger):
    m = ch.load(tagger)
    words = ["Peter", "writes", "unfamiliar", "letters"]
    split, joined = (
        [(word.text, word.label) for word in m.tag(given).words] for given in (words, " ".join(words))
    )
    assert split == joined
    assert [(word.start, word.end) for word in m.tag(words).words] == [(0, 5), (6, 12), (13, 23), (24, 31)]
    assert [word.label for word in m.tag(["Peter", "\u200b\x00", "writes"]).words][1] == "O"
    for together, text in zip(tag(m, TEXTS, batch_size=3), TEXTS):
        alone = m.tag(text)
        assert [word.label for word in together.words] == [word.label for word in alone.words]
        scores = [word.score for word in alone.words]
        assert [word.score for word in together.words] == pytest.approx(scores, abs=1e-5)
    assert m.tag([["rain"], ["old", "boats"]])[1].words[0].text == "old"


def test_a_long_text_is_tagged_to_its_end(tmp_path):
    folder = saved(tmp_path, "BertForTokenClassification", positions=32, num_labels=5)
    m = ch.load(folder)
    text = " ".join(WORDS * 4)
    made = m.tag(text)
    assert [word.text for word in made.words] == WORDS * 4
    assert len({word.label for word in made.words}) > 1
    ids = m.encode([text])[0]
    with torch.no_grad():  # the first window, by itself
        first = m.model(torch.tensor([[*ids[:31], ids[-1]]])).logits[0]
    starts = [token for token, word in enumerate(m.tokenizer.encode(text).word_ids) if word in (0, 1, 2)]
    assert made.words[0].label == m.labels[int(first[starts[0]].argmax())]


def test_classes_without_names():
    config = ch.ModelConfig(
        family="encoder", head="tagger", n_classes=3, vocab_size=200, d_model=16, n_layers=1, n_heads=2
    )
    m = ch.Model(ch.Transformer(config), wordpiece())
    assert m.tag("rain").words[0].label in ("LABEL_0", "LABEL_1", "LABEL_2")


def test_spans_from_tags():
    text = "a b c d e f"
    tags = ["B-X", "I-X", "B-X", "O", "I-Y", "I-X"]
    words = [Word(text[2 * i], tag, 2 * i, 2 * i + 1, 0.5) for i, tag in enumerate(tags)]
    spans = [(span.label, span.text) for span in spans_of(words, text, by_labels(tags))]
    assert spans == [("X", "a b"), ("X", "c"), ("Y", "e"), ("X", "f")]


# Fill -------------------------------------------------------------------------------------------------------


def test_masks_are_filled_as_transformers_fills_them(tmp_path):
    folder = saved(tmp_path, "BertForMaskedLM")
    theirs, m = pipeline("fill-mask", folder), ch.load(folder)
    texts = [
        "the [MASK] boats wait",
        "[MASK] lives near berlin",
        "two dogs and [MASK]",
        "the river [MASK] past a quiet old town in autumn",
    ]
    for text, together in zip(texts, m.fill(texts, k=7, batch_size=3)):
        wanted, made = theirs(text, top_k=7), m.fill(text, k=7)
        assert [one.id for one in made] == [row["token"] for row in wanted] == [one.id for one in together]
        assert [one.probability for one in made] == pytest.approx([row["score"] for row in wanted], abs=1e-5)
        probabilities = [one.probability for one in made]
        assert [one.probability for one in together] == pytest.approx(probabilities, abs=1e-5)
        plain = [(one, row) for one, row in zip(made, wanted) if one.token.isalpha()]
        assert all(one.text == row["sequence"] for one, row in plain)
        assert plain
    both = m.fill("the [MASK] and the [MASK]", k=3)
    wanted = theirs("the [MASK] and the [MASK]", top_k=3)
    assert [[one.id for one in mask] for mask in both] == [[row["token"] for row in mask] for mask in wanted]
    assert both[0][0].text.count("[MASK]") == 1
    assert m.fill("Old [MASK] Wait")[0].text.startswith("Old")  # what is not masked stays as it was given


def test_a_mask_that_takes_the_space_before_it(tmp_path):
    """RoBERTa's way: byte-level pieces, and a mask token that swallows the space to its left."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [" ".join(WORDS)] * 3, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(["<pad>", AddedToken("<mask>", lstrip=True)])
    config = ch.ModelConfig(
        family="encoder", head="mlm", vocab_size=tokenizer.get_vocab_size(), d_model=16, n_layers=1, n_heads=2
    )
    torch.manual_seed(0)
    m = ch.Model(
        ch.Transformer(config), tokenizer, special={"mask": tokenizer.token_to_id("<mask>"), "pad": 0}
    )
    words = {one.token: one.text for one in m.fill("the <mask> wait", k=config.vocab_size)}
    assert words["Ġriver"] == "the river wait"
    assert words["s"] == "thes wait"


# Answer -----------------------------------------------------------------------------------------------------


def reference_answer(
    folder: pathlib.Path, question: str, context: str, window: int, stride: int, most: int
) -> tuple[int, int, float, float]:
    """The best span by trying every one, from transformers' model and its tokenizer's own windows."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    cut = {"truncation": "only_second", "max_length": window, "stride": stride}
    returned = {"return_overflowing_tokens": True, "return_offsets_mapping": True}
    batch = tokenizer(question, context, **cut, **returned)
    best, nothing = (0, 0, -1.0), 1.0
    for number, ids in enumerate(batch["input_ids"]):
        with torch.no_grad():
            out = model(torch.tensor([ids]), token_type_ids=torch.tensor([batch["token_type_ids"][number]]))
        inside = [part == 1 for part in batch.sequence_ids(number)]
        seen = [0] + [i for i, yes in enumerate(inside) if yes]
        sides = (out.start_logits, out.end_logits)
        start, end = (dict(zip(seen, scores[0, seen].softmax(-1).tolist())) for scores in sides)
        nothing = min(nothing, start[0] * end[0])
        for i in seen[1:]:
            for j in seen[1:]:
                if i <= j < i + most and start[i] * end[j] > best[2]:
                    spans = batch["offset_mapping"][number]
                    best = (spans[i][0], spans[j][1], start[i] * end[j])
    return *best, nothing


def test_answers_by_trying_every_span(tmp_path):
    folder = saved(tmp_path, "BertForQuestionAnswering", positions=48)
    m = ch.load(folder)
    questions = ["where lives Anna", "who writes letters", "what runs past"]
    contexts = [TEXTS[0], " ".join(WORDS * 3), "The river runs past a quiet town. " * 2]
    together = m.answer(questions, contexts, stride=10, max_tokens=6, batch_size=4)
    for question, context, found in zip(questions, contexts, together):
        start, end, score, nothing = reference_answer(folder, question, context, 48, 10, 6)
        assert (found.start, found.end, found.text) == (start, end, context[start:end])
        assert found.score == pytest.approx(score, abs=1e-5)
        alone = m.answer(question, context, stride=10, max_tokens=6)
        assert (alone.text, alone.score) == (found.text, pytest.approx(found.score, abs=1e-5))
        empty = m.answer(question, context, stride=10, max_tokens=6, none=True)
        assert empty.text == ("" if nothing >= score else found.text)
        assert empty.score == pytest.approx(max(nothing, score), abs=1e-5)


def test_no_answer_can_win(tmp_path):
    m = ch.load(saved(tmp_path, "BertForQuestionAnswering"))
    question, context = "who writes", TEXTS[0]
    with torch.no_grad():  # the state of [CLS] begins and ends everything
        ids = torch.tensor([m.tokenizer.encode(question, context).ids])
        types = torch.tensor([m.tokenizer.encode(question, context).type_ids])
        first = m.model(ids, types=types, logits="none").hidden[0, 0]
        m.model.head.out.weight.copy_((first / first.norm()).expand(2, -1) * 5)
    assert m.answer(question, context, none=True).text == ""
    assert m.answer(question, context).text != ""


# Translate --------------------------------------------------------------------------------------------------


@pytest.fixture
def two_stacks():
    tokenizer = wordpiece()
    config = ch.preset("micro-encoder-decoder").replace(vocab_size=tokenizer.get_vocab_size(), init_std=0.4)
    torch.manual_seed(0)
    return ch.Model(
        ch.Transformer(config).eval(), tokenizer, special={"decoder_start": 2, "eos": 3, "pad": 0}
    )


def test_translate_is_generate_with_beams(two_stacks):
    m = two_stacks
    made = m.translate(TEXTS[:2], max_new_tokens=8)
    alone = [m.generate(text, 8, num_beams=4, length_penalty=1.0).ids for text in TEXTS[:2]]
    assert [one.ids for one in made] == alone
    m.generation = {"num_beams": 1, "max_length": 6}
    assert m.translate("rain").ids == m.generate("rain", 5).ids
    assert m.translate("rain", max_new_tokens=3).ids == m.generate("rain", 3).ids
    m.generation = {"num_beams": 3, "length_penalty": 0.2, "max_new_tokens": 7}
    assert m.translate("rain").ids == m.generate("rain", 7, num_beams=3, length_penalty=0.2).ids
    drawn = {"temperature": 1.0, "seed": 4}
    assert m.translate("rain", **drawn).ids == m.generate("rain", 7, **drawn).ids


# Mistakes ---------------------------------------------------------------------------------------------------


def test_the_wrong_head_is_one_clear_line(tagger, two_stacks):
    m = ch.load(tagger)
    calls = [
        (lambda: m.classify("a"), "head classifier", "tag and embed"),
        (lambda: m.fill("a [MASK]"), "head mlm", "tag and embed"),
        (lambda: m.answer("a", "b"), "head span", "tag and embed"),
        (lambda: m.translate("a"), "encoder-decoder", "tag and embed"),
        (lambda: two_stacks.tag("a"), "head tagger", "translate, generate and score"),
        (lambda: two_stacks.fill("a [MASK]"), "head mlm", "translate, generate and score"),
    ]
    for call, needs, has in calls:
        with pytest.raises(ch.InputError) as error:
            call()
        assert needs in str(error.value) and has in str(error.value)
        assert "\n" not in str(error.value)


def test_other_mistakes(tmp_path):
    m = ch.load(saved(tmp_path / "fill", "BertForMaskedLM", positions=16))
    spans = ch.load(saved(tmp_path / "answer", "BertForQuestionAnswering", positions=16))
    classes = ch.load(saved(tmp_path / "classes", "BertForSequenceClassification"))
    calls = [
        (lambda: m.fill("no mask"), "[MASK]"),
        (lambda: m.fill("[MASK] " * 40), "16"),
        (lambda: m.fill("[MASK]", k=0), "between 1 and"),
        (lambda: spans.answer("", "b"), "empty"),
        (lambda: spans.answer(["a"], ["b", "c"]), "one context for each"),
        (lambda: spans.answer("rain " * 30, "b"), "shorten"),
        (lambda: spans.answer("rain", "b", stride=-1), "stride -1"),
        (lambda: classes.classify([("a", "b", "c")]), "a pair of texts"),
        (lambda: classes.classify("a", batch_size=0), "batch_size 0"),
    ]
    for call, words in calls:
        with pytest.raises(ch.InputError) as error:
            call()
        assert words in str(error.value)
