"""CLIP and SigLIP against transformers: vectors, similarities, losses, gradients, pictures, the way back."""

from __future__ import annotations

import json
import pathlib
import zipfile

import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import clearhead as ch
from clearhead.app.cli import main
from clearhead.hub.rules import matches
from clearhead.hub.towers import JoinedTowers
from clearhead.hub.vision import PREFIXES
from clearhead.inside.checks.independent import reference_rows
from clearhead.learn.tasks.vectors import image_pixels
from clearhead.variants.towers import pair_loss
from tests.parity.harness import GRADIENTS, LOGITS, close, reference, reopened

TEXT = {
    **{"vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 13, "bos_token_id": 95, "eos_token_id": 96},
}
IMAGE = {
    **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": 16, "patch_size": 4},
}
OPTIONS = {
    "clip": ("CLIP", TEXT, IMAGE, {"projection_dim": 24}),
    "clip, unequal towers, patches that leave a rest": (
        "CLIP",
        dict(TEXT, hidden_size=35, num_attention_heads=5, hidden_act="gelu", layer_norm_eps=1e-3),
        dict(IMAGE, num_hidden_layers=1, image_size=23, patch_size=5, num_channels=1),
        {"projection_dim": 11},
    ),
    "clip, where the highest id ends a text": (
        "CLIP",
        dict(TEXT, eos_token_id=2, num_hidden_layers=3, intermediate_size=7),
        dict(IMAGE, hidden_size=30, num_attention_heads=3, hidden_act="gelu_new"),
        {"projection_dim": 3},
    ),
    "siglip": ("Siglip", TEXT, IMAGE, {}),
    "siglip, unequal towers, patches that leave a rest": (
        "Siglip",
        dict(TEXT, hidden_size=35, num_attention_heads=5, projection_size=24, hidden_act="relu"),
        dict(IMAGE, num_hidden_layers=3, image_size=23, patch_size=5, num_channels=1),
        {},
    ),
    "siglip of one patch": (
        "Siglip",
        dict(TEXT, num_hidden_layers=1, layer_norm_eps=1e-3, max_position_embeddings=11),
        dict(IMAGE, image_size=8, patch_size=8, num_attention_heads=3, intermediate_size=9),
        {},
    ),
}


def build(label: str, folder: pathlib.Path) -> transformers.PreTrainedModel:
    """A random model whose logits are not all alike."""
    kind, text, image, joint = OPTIONS[label]
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=image, **joint)
    model = reference(f"{kind}Model", config, folder)
    with torch.no_grad():
        model.logit_scale.fill_(1.3)  # thrice its first value would make of every rounding a large one
    model.save_pretrained(folder)
    return model


def inputs(model: transformers.PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Texts [3, 11] that end at 6, 9 and 11, the mask of their tokens, and images [3, C, H, W]."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 95, (3, 11), generator=generator)
    for row, end in enumerate((5, 8, 10)):
        ids[row, end:] = 96  # CLIP pads with its end
    seen = model.config.vision_config
    pixels = torch.randn(3, seen.num_channels, seen.image_size, seen.image_size, generator=generator)
    return ids, torch.arange(11) < torch.tensor([[6], [9], [11]]), pixels


def towers(folder: pathlib.Path) -> JoinedTowers:
    found = ch.load(folder).towers
    assert found is not None
    return found


@pytest.mark.ledger("L11", "E3")
@pytest.mark.parametrize("label", list(OPTIONS))
def test_towers(label: str, tmp_path: pathlib.Path) -> None:
    model = build(label, tmp_path / "reference")
    loaded = ch.load(tmp_path / "reference")
    ours, (ids, mask, pixels) = loaded.towers, inputs(model)
    assert ours is not None and loaded.model is ours.text
    for name, given in (("without a mask", None), ("padded right", mask)):
        theirs = model(
            input_ids=ids,
            pixel_values=pixels,
            attention_mask=None if given is None else given.long(),
            return_loss=True,
        )
        found = ours(ids, pixels, given)
        close(f"texts, {name}", found.texts, theirs.text_embeds, LOGITS)
        close("images", found.images, theirs.image_embeds, LOGITS)
        close(f"similarities, {name}", found.logits, theirs.logits_per_image, LOGITS)
        loss = pair_loss(found.logits, ours.config.loss)
        close(f"loss, {name}", loss, theirs.loss, GRADIENTS)
    assert len(found.logits.unique()) == 9
    for one in (theirs.loss, loss):
        one.backward()
    wanted = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    compared = set()
    for tower, prefix in PREFIXES.items():
        part = getattr(ours, tower)
        named, table = dict(part.named_parameters()), ours.description.table.tower(tower)
        for rule in matches(table.rules_for(part.config), named):
            assert rule.theirs.startswith(prefix)
            made = rule.operation.save([named[each].grad for each in rule.ours], part.config)[0]
            close(f"gradient of {rule.theirs}", made, wanted[rule.theirs], GRADIENTS)
            compared.add(rule.theirs)
    named = dict(ours.named_parameters())
    for rule in matches(ours.description.table.rules, named):
        made = rule.operation.save([named[each].grad for each in rule.ours], ours.config.image)[0]
        close(f"gradient of {rule.theirs}", made, wanted[rule.theirs], GRADIENTS)
        compared.add(rule.theirs)
    assert compared == set(wanted) == set(dict(model.named_parameters()))

    with torch.no_grad():
        fresh = JoinedTowers(ours.config)  # without their config.json, the table is found by the config
        fresh.load_state_dict(ours.state_dict())
        for name, saved in (("saved", loaded), ("fresh", ch.Model(fresh.text, towers=fresh))):
            saved.save(tmp_path / name)
            back = reopened(type(model), tmp_path / name)(input_ids=ids, pixel_values=pixels).logits_per_image
            close(f"transformers reads what was {name}", back, ours(ids, pixels).logits, LOGITS)
            reread = towers(tmp_path / name)
            assert reread.config == ours.config
            assert torch.equal(reread(ids, pixels).logits, ours(ids, pixels).logits)
        # Each tower opens alone, is the same, and is written as a model of its own.
        hidden = {
            "text": (ids,),
            "image": (pixels[..., : ours.image.config.image_size[0], : ours.image.config.image_size[0]],),
        }
        for tower, given in hidden.items():
            alone = ch.load(tmp_path / "reference" / tower)
            alone.save(tmp_path / tower)
            for one in (alone, ch.load(tmp_path / tower)):
                assert torch.equal(one.model(*given).hidden, getattr(ours, tower)(*given).hidden)


# Pictures ---------------------------------------------------------------------------------------------------

LABELS = ["a photo of a cat", "a dog", "airplane", "a frog, or so", "ship"]
TOKENS = ["a photo of a cat and a dog", "an airplane in the sky", "a frog, a ship, a truck or so"] * 5


def tokenizer_files(kind: str, folder: pathlib.Path, masked: bool = True) -> None:
    """Write a small tokenizer as released models have it."""
    if kind == "CLIP":
        trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
        trained.pre_tokenizer, letters = pre_tokenizers.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
        marks = [*(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
        shape = {"initial_alphabet": letters, "special_tokens": marks, "show_progress": False}
        trained.train_from_iterator(TOKENS, trainers.BpeTrainer(end_of_word_suffix="</w>", **shape))
        trained.model.save(str(folder))
        ids = trained.get_vocab()
        stated = {"eos_token_id": ids["<|endoftext|>"], "bos_token_id": ids["<|startoftext|>"]}
    else:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TOKENS),
            model_prefix=str(folder / "spiece"),
            **{"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2},
            **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        )
        stated = {"eos_token_id": 1, "pad_token_id": 1}
    settings = {"tokenizer_class": f"{kind}Tokenizer", "model_max_length": 13}
    settings |= {"pad_token": "</s>"} if kind == "Siglip" else {}
    settings |= {"model_input_names": ["input_ids"]} if not masked else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "ids.json").write_text(json.dumps(stated))


@pytest.fixture(scope="module", params=["CLIP", "Siglip", "Siglip that reads padding"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A whole directory, as released models are: weights, tokenizer, preprocessor."""
    kind, folder = request.param.split()[0], tmp_path_factory.mktemp("towers")
    tokenizer_files(kind, folder, masked=kind == request.param)
    ids = json.loads((folder / "ids.json").read_text())
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, "vocab_size": 700, **ids}, vision_config=dict(IMAGE, image_size=20)
    )
    model = reference(f"{kind}Model", config, folder)
    with torch.no_grad():
        model.logit_scale.fill_(1.3)
    model.save_pretrained(folder)
    square = {"height": 20, "width": 20}
    size = {"size": {"shortest_edge": 21}, "crop_size": square} if kind == "CLIP" else {"size": square}
    getattr(transformers, f"{kind}ImageProcessorPil")(**size).save_pretrained(folder)
    return folder


def pictures(shared: pathlib.Path, folder: pathlib.Path, count: int = 12) -> list[pathlib.Path]:
    """Real pictures of every class, and three made of them that are long, high, grey."""
    data = shared / "data" / "cifar10_sample" / "images.zip"
    if not data.exists():
        pytest.skip(f"no file {data}")
    with zipfile.ZipFile(data) as archive:
        names = sorted(name for name in archive.namelist() if name.startswith("test/"))[:: 500 // count]
        files = [pathlib.Path(archive.extract(name, folder)) for name in names]
    with Image.open(files[0]) as picture:
        for name, made in (
            ("long", picture.resize((61, 23))),
            ("high", picture.resize((22, 47))),
            ("grey", picture.convert("L")),
        ):
            made.save(folder / f"{name}.png")
            files.append(folder / f"{name}.png")
    return files


@pytest.mark.ledger("L11", "E3")
def test_real_pictures_have_the_labels_of_transformers(
    directory: pathlib.Path, shared: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = pictures(shared, tmp_path)
    theirs = transformers.AutoModel.from_pretrained(directory).eval()
    images = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    padding = "max_length" if "Siglip" in type(theirs).__name__ else True
    texts = tokenizer(LABELS, padding=padding, truncation=True, return_tensors="pt")
    read = images([Image.open(file).convert("RGB") for file in files], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        wanted = theirs(**texts, pixel_values=read)
    m = ch.load(directory)
    assert m.towers is not None
    assert torch.equal(image_pixels(m, files), read)
    scores = wanted.logits_per_image
    scores = scores.softmax(-1) if padding is True else scores.sigmoid()
    found = m.classify(files, labels=LABELS)
    close("probabilities", torch.tensor([list(one.scores.values()) for one in found]), scores, 1e-5)
    assert [one.label for one in found] == [LABELS[best] for best in scores.argmax(-1).tolist()]
    both = m.embed([files[0], LABELS[0], np.asarray(Image.open(files[1])), LABELS[1]])
    vectors = (wanted.image_embeds[0], wanted.text_embeds[0], wanted.image_embeds[1], wanted.text_embeds[1])
    close("vectors of both", both, torch.stack(vectors), 1e-5)
    # The command says the same, and a broken picture is one line.
    main(["classify", str(directory), str(files[3]), "--json", "--labels", *LABELS])
    said = json.loads(capsys.readouterr().out)
    assert said["label"] == found[3].label and said["scores"] == pytest.approx(found[3].scores)


@pytest.mark.ledger("L11", "E6")
def test_check_compares_both_towers(directory: pathlib.Path) -> None:
    m = ch.load(directory)
    assert m.towers is not None
    if m.towers.config.loss == "softmax":
        rows = {row.name: row for row in ch.check(m, reference=True)}
        assert all(row.passed for row in rows.values()), [row for row in rows.values() if not row.passed]
        assert {"text: fused = eager", "image: fused = eager", "loss = transformers"} < set(rows), set(rows)
    with torch.no_grad():
        for row in reference_rows(m):
            assert row.run() <= row.tolerance, row.name
    with pytest.raises(ch.InputError, match="one part of two"):
        ch.check(ch.load(directory / "text"), reference=True)


def test_what_is_wrong_is_one_line(directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    m, broken = ch.load(directory), tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    picture = np.zeros((9, 9, 3), np.uint8)
    alone = ch.load(directory / "image")
    for complaint, call in {
        "broken.png cannot be read as an image": lambda: m.classify(broken, labels=["a"]),
        "labels must be a list of texts": lambda: m.classify(picture),
        "a label is empty": lambda: m.classify(picture, labels=["a", " "]),
        'label "a" stands twice': lambda: m.classify(picture, labels=["a", "b", "a"]),
        "this model has one": lambda: alone.classify(picture, labels=["a"]),
        "embed was given 3": lambda: m.embed([3]),
        "it is for embed": lambda: m.tag("a cat"),
        "GGUF has no architecture": lambda: m.save(tmp_path / "model.gguf"),
        "quantize one of them": lambda: ch.quantize(m),
        "are not quantized": lambda: ch.load(directory, quantize="int8"),
    }.items():
        with pytest.raises(ch.ClearheadError, match=complaint) as raised:
            call()
        assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.png"]
    stated = json.loads((directory / "config.json").read_text())
    for changes, complaint in (
        ({"architectures": ["CLIPForImageClassification"]}, "names the class"),
        ({"text_config": 3}, "text_config that is no table"),
        ({"vision_config": dict(stated["vision_config"], num_hidden_layers=9)}, "do not belong together"),
        ({"text_config": dict(stated["text_config"], hidden_act="mish")}, "hidden_act"),
    ):
        wrong = tmp_path / complaint.split()[0]
        wrong.mkdir()
        (wrong / "config.json").write_text(json.dumps({**stated, **changes}))
        (wrong / "model.safetensors").symlink_to(wrong / "weights")
        (wrong / "weights").write_bytes((directory / "model.safetensors").read_bytes())
        with pytest.raises(ch.CheckpointError, match=complaint):
            ch.load(wrong)
    with pytest.raises(SystemExit) as stopped:
        main(["classify", str(directory), str(broken)])
    assert stopped.value.code == 2
