"""LLaVA, Idefics3, SmolVLM beside transformers: logits, gradients, tokens, both ways; images in prompts."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image

import clearhead as ch
from clearhead.app.cli import main
from clearhead.errors import CheckpointError, InputError
from clearhead.hub.checkpoint import rules_of
from clearhead.hub.files import read_json
from clearhead.hub.preprocessor import to_pixels
from clearhead.hub.rules import matches
from clearhead.hub.towers import JoinedImages
from clearhead.hub.vision_language import IDEFICS3
from clearhead.inside.attribution import occlusion
from clearhead.inside.inputs import prepare
from clearhead.inside.lens import contributions
from clearhead.inside.memories import memories
from clearhead.learn.tasks.images import ids_of, pixels_of_prompt, token_names
from clearhead.run.generate import decode
from clearhead.variants.images import placed
from tests.llava import IDEFICS, OPTIONS, TOKEN, build, directory, image, tensors, tiled_directory
from tests.parity.harness import GRADIENTS, LOGITS, close, reopened


def logits(
    m: ch.Model, ids: torch.Tensor, pixels: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    assert m.image_encoder is not None
    vectors = placed(m.model.main.embedding.front, ids, TOKEN, m.image_encoder(pixels))
    return m.model(ids, mask, vectors=vectors).logits


def prompts(count: int) -> list[list[int]]:
    """Two prompts of unequal length, of one image and of two."""
    ids = torch.randint(3, 290, (2, 9), generator=torch.Generator().manual_seed(2)).tolist()
    pictured = [TOKEN] * count
    return [[*ids[0][:4], *pictured, *ids[0][4:]], [*pictured, *ids[1][:2], *pictured, *ids[1][2:]]]


def fed(label: str, *rows: torch.Tensor) -> torch.Tensor:
    """Return the images of each row as the reference takes them: Idefics3 as a batch, with zeros for none."""
    if label in OPTIONS:
        return torch.cat(rows)
    most = max(map(len, rows))
    return torch.stack([torch.cat([row, row.new_zeros(most - len(row), *row.shape[1:])]) for row in rows])


@pytest.mark.parametrize("label", [*OPTIONS, *IDEFICS])
def test_readers_of_images(label: str, tmp_path: pathlib.Path) -> None:
    model = build(label, tmp_path / "reference")
    ours, pixels = ch.load(tmp_path / "reference"), tensors(label, 3)
    encoder = ours.image_encoder
    assert encoder is not None and ours.description is not None
    rows = prompts(encoder.config.count)
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]).bool()
    places = (mask.long().cumsum(1) - 1).clamp(min=0)
    batch = fed(label, pixels[:1], pixels[1:])
    theirs = model(input_ids=ids, pixel_values=batch, attention_mask=mask.long(), position_ids=places).logits
    mine = logits(ours, ids, pixels, mask)
    close("logits", mine[mask], theirs[mask], LOGITS)
    assert float((logits(ours, ids, pixels.flip(0), mask) - mine)[mask].detach().abs().max()) > 0.01

    losses = [F.cross_entropy(each[mask], ids[mask]) for each in (theirs, mine)]
    for loss in losses:
        loss.backward()
    wanted = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    compared = set()
    own = ("language_model.", "vision_tower.") if label in OPTIONS else ("text_model.", "vision_model.")
    for prefix, part, rules in (
        (own[0], ours.model, rules_of(ours.description.architecture, ours.model)),
        (own[1], encoder.tower, rules_of(encoder.tower_description.architecture, encoder.tower)),
        ("", encoder, encoder.table.rules),
    ):
        named = dict(part.named_parameters())
        for rule in matches(rules, named):
            bare = rule.theirs.removeprefix("model.").removeprefix("vision_model.")
            name = bare if bare.startswith("lm_head") else f"model.{prefix}{bare}"
            if name in wanted:  # the layers of the tower behind the one that is read have none
                grads = [named[each].grad for each in rule.ours]
                close(
                    f"gradient of {name}",
                    rule.operation.save(grads, part.config if prefix else encoder.tower.config)[0],
                    wanted[name],
                    GRADIENTS,
                )
                compared.add(name)
    assert compared == set(wanted)

    # Greedy tokens: alone as transformers; in a batch, with draft tokens, beams and short chunks as alone.
    given = [ch.ImagePrompt(rows[0], list(pixels[:1])), ch.ImagePrompt(rows[1], list(pixels[1:])), [5, 6, 7]]
    alone = [ours.generate(prompt, 12).ids for prompt in given]
    for prompt, row, few in zip(alone, rows, (pixels[:1], pixels[1:])):
        reply = model.generate(
            input_ids=torch.tensor([row]), pixel_values=fed(label, few), max_new_tokens=12, do_sample=False
        )
        assert prompt == reply[0, len(row) :].tolist()
    assert [one.ids for one in ours.generate(given, 12)] == alone
    assert ours.generate(given[1], 12, lookup=3).ids == alone[1]
    whole = ours.generate(given[1], 6, num_beams=3).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "PREFILL_CHUNK", 5)
        assert ours.generate(given[1], 12).ids == alone[1]
        assert ours.generate(given[1], 6, num_beams=3).ids == whole

    with torch.no_grad():
        fresh = JoinedImages(
            encoder.config, table=encoder.table
        )  # without their config.json, theirs is written from ours
        fresh.load_state_dict(encoder.state_dict())
        for name, saved in (("saved", ours), ("fresh", ch.Model(ours.model, image_encoder=fresh))):
            saved.save(tmp_path / name)
            back = reopened(
                type(model), tmp_path / name, () if name == "saved" else ("*.vision_tower.head.*",)
            )
            again = back(input_ids=ids, pixel_values=batch, attention_mask=mask.long(), position_ids=places)
            close(f"transformers reads what was {name}", again.logits[mask], theirs[mask], 1e-6)
            reread = ch.load(tmp_path / name)
            assert reread.image_encoder is not None and reread.image_encoder.config == encoder.config
            assert torch.equal(logits(reread, ids, pixels, mask), mine)
        text = ch.load(tmp_path / "saved" / "text")  # each part opens alone, and is a model of its own
        text.save(tmp_path / "text")
        plain = torch.tensor([[5, 6, 7]])
        assert torch.equal(ch.load(tmp_path / "text").model(plain).logits, ours.model(plain).logits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return directory(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiled_directory(tmp_path_factory.mktemp("idefics"))


@pytest.mark.parametrize("kind", ["folder", "tiled"])
def test_a_conversation_with_images_is_that_of_the_reference(
    kind: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    """Processor and generation of transformers, from the same directory and from what is saved here."""
    folder = request.getfixturevalue(kind)
    m, picture = ch.load(folder), image(1)
    Image.fromarray(picture).save(tmp_path / "one.png")
    m.save(tmp_path / "saved")
    for place in (folder, tmp_path / "saved"):
        processor = transformers.AutoProcessor.from_pretrained(place)
        model = transformers.AutoModelForImageTextToText.from_pretrained(place)
        asked = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
        talk = [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": asked},
        ]
        text = processor.apply_chat_template(talk, add_generation_prompt=True)
        inputs = processor(images=[Image.fromarray(picture)], text=text, return_tensors="pt")
        reply = model.generate(**inputs, max_new_tokens=15, do_sample=False)
        wanted = reply[0, inputs["input_ids"].shape[1] :].tolist()
        assert ch.load(place).generate(ch.ImagePrompt(text, [picture]), 15).ids == wanted
    for given in (picture, tmp_path / "one.png", str(tmp_path / "one.png"), Image.fromarray(picture)):
        content = [{"type": "image", "image": given}, {"type": "text", "text": "What is this?"}]
        talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
        assert m.chat(talk, 15).ids == wanted


def test_tiles_and_their_tokens_are_those_of_the_reference(tiled: pathlib.Path) -> None:
    """Pixels bit for bit, ids of the prompt, and a name for each vector; also through tokens written out."""
    m, processor = ch.load(tiled), transformers.AutoProcessor.from_pretrained(tiled)
    pictures = [image(n, *size) for n, size in enumerate([(20, 31), (40, 8), (48, 48), (9, 90), (1, 70)])]
    for changes in (
        {},
        {"do_image_splitting": False},
        {"do_resize": False, "resample": 3},
        {"size": {"height": 33, "width": 20}, "image_mean": [0.1, 0.2, 0.3], "rescale_factor": 0.01},
        {"size": {"longest_edge": 4099}, "do_normalize": False},
    ):
        usual = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}}
        processor.image_processor = transformers.Idefics3ImageProcessorPil(**(usual | changes))
        mine = dataclasses.replace(m, images=json.loads(processor.image_processor.to_json_string()))
        for some in (
            [pictures[-1:]] if "do_normalize" in changes else [*([one] for one in pictures), pictures]
        ):
            text = "\n".join(f"{n}: <image>\nWhat?" for n in range(len(some)))
            theirs = processor(images=[Image.fromarray(one) for one in some], text=text, return_tensors="pt")
            assert torch.equal(pixels_of_prompt(mine, some), theirs["pixel_values"][0])
            ids = ids_of(mine, ch.ImagePrompt(text, some))
            assert ids == theirs["input_ids"][0].tolist() == ids_of(mine, ch.ImagePrompt(ids, some))
            names = token_names(mine, ids, some)
            assert len({name for name, token in zip(names, ids) if token == TOKEN}) == ids.count(TOKEN)
    mine = dataclasses.replace(m, images={**m.images, "max_image_size": {"longest_edge": 32}})
    with pytest.raises(CheckpointError, match=r"max_image_size.*tiles of 16"):
        mine.generate(ch.ImagePrompt("<image>", pictures[:1]), 2)
    with pytest.raises(CheckpointError, match="cuts images into tiles"):
        to_pixels(pictures[0], m.image_encoder.config.tower, m.images)


def test_a_kept_cache_is_of_the_same_image_alone(folder: pathlib.Path) -> None:
    """With `reuse` the next prompt takes up what the last one read: only where pixels are equal too."""
    m, text = ch.load(folder), "USER: <image>\nWhat? ASSISTANT:"
    want = [m.generate(ch.ImagePrompt(text, [image(seed)]), 8).ids for seed in (1, 2)]
    assert want[0] != want[1]
    for seed in (1, 2, 2, 1):
        assert m.generate(ch.ImagePrompt(text, [image(seed)]), 8, reuse=True).ids == want[seed - 1]


def test_a_side_with_mixed_positions_is_refused(tiled: pathlib.Path) -> None:
    theirs = read_json(tiled / "config.json")
    theirs["vision_config"] |= {"image_size": 19 * 4}
    with pytest.raises(CheckpointError, match="mixes up positions"):
        IDEFICS3.read({**theirs, "scale_factor": 1})
    with pytest.raises(CheckpointError, match="whole squares"):
        IDEFICS3.read({**theirs, "scale_factor": 3, "vision_config": {"image_size": 16, "patch_size": 4}})


def test_what_does_not_fit_is_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    m = ch.load(folder)
    picture = image(1)
    for prompt, words in (
        ("USER: <image> what?", "1 times, for 0 images"),
        (ch.ImagePrompt("what?", [picture]), "0 times, for 1 images"),
        (ch.ImagePrompt("<image><image>", [picture]), "2 times, for 1 images"),
        (ch.ImagePrompt("<image>", ["no.png"]), "no.png"),
        (ch.ImagePrompt("<image>", [7]), "give a path"),
    ):
        with pytest.raises(InputError, match=words):
            m.generate(prompt, 2)
    with pytest.raises(InputError, match="overflow stream with images"):
        m.generate(ch.ImagePrompt("<image>", [picture]), 2, overflow="stream")
    with pytest.raises(InputError, match="reads text alone"):
        ch.load(folder / "text").generate(ch.ImagePrompt("<image>", [picture]), 2)
    with pytest.raises(InputError, match="not fetched"):
        m.chat(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}]}]
        )
    other = ch.Model(ch.Transformer(m.config.replace(positions="alibi")), image_encoder=m.image_encoder)
    with pytest.raises(CheckpointError, match="no decoder like this one"):
        other.save(tmp_path / "other")
    assert np.array_equal(image(1), picture)


def test_looking_inside_reads_the_image(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    m, text = ch.load(folder), "USER: <image>\nWhat? ASSISTANT:"
    prompt, other = (ch.ImagePrompt(text, [image(seed)]) for seed in (1, 2))
    prepared = prepare(m, prompt)
    assert prepared.tokens.labels[6:11] == ("0,0", "0,1", "0,2", "0,3", "1,0")
    written = m.generate(prompt, 1, logprobs=True)
    with torch.no_grad():
        scores = prepared.run().required_logits[0, -1].log_softmax(-1)
        apart = prepare(m, other).run().required_logits[0, -1].log_softmax(-1) - scores
    assert float(apart.abs().max()) > 0.01
    assert int(scores.argmax()) == written.ids[0]
    assert float(scores.max()) == pytest.approx(written.logprobs[0], abs=1e-5)
    walked = ch.trace(m, prompt)
    assert walked.difference < 1e-5 and any(step.name == "embedding.vectors" for step in walked.steps)
    parts = contributions(m, prompt)
    assert sum(term.value for term in parts.terms) == pytest.approx(parts.logit, abs=1e-4)
    found = ch.graph(m, prompt, nodes=8)
    assert found.logit == pytest.approx(sum(term.value for term in parts.terms), abs=1e-4)
    assert abs(found.logit - ch.graph(m, other, written.ids[0], nodes=8).logit) > 0.01
    with pytest.raises(InputError, match="text 1 of the corpus has images"):
        memories(m, [text.replace("<image>", "an image"), prepared])
    # Without a patch the logit is that of a pass in which its token is no image's.
    drops = occlusion(m, prompt)
    place = drops.units.index("1,0")
    ids = prepared.main.clone()
    ids[0, drops.places[place][0]] = m.special["pad"]
    assert prepared.vectors is not None
    vectors = torch.where(
        (ids == prepared.main)[..., None], prepared.vectors, m.model.main.embedding.front(ids)
    )
    logits = m.model(ids, vectors=vectors).logits[0, -1].detach()
    here = logits - logits.mean()
    assert drops.logit - float(drops.dropped[place]) == pytest.approx(float(here[written.ids[0]]), abs=1e-4)
    Image.fromarray(image(1)).save(tmp_path / "one.png")
    main(["lens", str(folder), text, "--image", str(tmp_path / "one.png"), "--json"])
    assert m.decode(written.ids) in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "tiled"])
def test_check_compares_images_too(kind: str, request: pytest.FixtureRequest) -> None:
    m = ch.load(request.getfixturevalue(kind))
    rows = {row.name: row for row in ch.check(m, reference=True)}
    assert all(row.passed for row in rows.values())
    assert {"image = transformers", "image tokens = transformers", "image: saved = loaded"} <= {*rows}
