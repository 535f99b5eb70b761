"""Nonsense asked of `graph`, `circuit`, `features`, `lens`: each is refused in one line, with exit code 2."""

from __future__ import annotations

import shlex

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.app.cli import main
from clearhead.core.attention import Attention
from clearhead.inside.circuit import Circuit, circuit, path_patch
from clearhead.inside.features.training import FeaturePlan, train_features
from clearhead.run.kernels.lora import LoraLinear
from tests.harness import build, byte_tokenizer
from tests.inside.test_patch import CLEAN, CORRUPT

REFUSED = """
graph m ""                                              | the text is empty
graph m abcd --token zzz                                | name one token
graph m abcd --token ""                                 | the token is empty
graph m abcd --token a --against a                      | against itself
graph m abcd --against ""                               | the token is empty
graph m abcd --position 99                              | no position 99
graph m abcd --target ab                                | leave it out
graph m abcd --features nowhere                         | holds no dictionary
graph wide abcd --features f                            | trained on another model
graph m abcd --features f --features f                  | two dictionaries
graph m abcd --nodes 0                                  | keeps nothing
graph m abcd --merge a                                  | NAME=
graph m abcd --merge a=                                 | has no node ""
graph m abcd --merge =embedding@3                       | needs a name
graph m abcd --merge a=9.9@9                            | no node "9.9@9"
graph m abcd --merge a=embedding@3,embedding@3          | named twice
graph m abcd --merge a=embedding@3 --merge b=embedding@3 | named twice
graph m abcd --merge a=embedding@3 --merge a=embedding@2 | one group twice
graph m abcd --merge logit=embedding@3                  | "logit" is a node
graph m abcd --merge a=logit                            | leave it by itself
graph m abcd --plot nowhere/g.svg                       | its folder is missing
circuit m                                               | no prompts
circuit m "" ""                                         | the text is empty
circuit m abcd                                          | give CORRUPT
circuit m abcd abcd                                     | with all edges and with none
circuit m abcd abcde                                    | align
circuit m abcd abed --answer a --wrong a                | both the answer and the wrong one
circuit m abcd abed --edges 0                           | edges 0 must be 1 or more
circuit m abcd abed --edges 999                         | 110 at most
circuit m abcd abed --edges 10 --faithful 0.5           | choose one
circuit m abcd abed --method acdc --edges 10            | leave edges out
circuit m abcd abed --method acdc --faithful 0.5        | leave faithful out
circuit m abcd abed --faithful 0                        | faithful 0.0 must be above 0
circuit m abcd abed --faithful nan                      | faithful nan must be
circuit m abcd abed --faithful inf                      | 1 at most
circuit m abcd abed --threshold 0.1                     | threshold belongs to method acdc, not eap-ig
circuit m abcd abed --method acdc --threshold -1        | threshold -1.0 must be 0 or more
circuit m abcd abed --method acdc --threshold nan       | threshold nan
circuit m abcd abed --steps 0                           | steps 0 must be 1 or more
circuit m abcd abed --steps 100000                      | 1,000 at most
circuit m abcd abed --steps 5 --method eap              | steps belong to method eap-ig, not eap
circuit m abcd abed --seed -1                           | seed -1 must be
circuit m abcd abed --position 99                       | no position 99
circuit m abcd abed --metric kl --method atp            | no slope
circuit m abcd abed --metric kl --method eap            | no slope
circuit m abcd abed --metric kl --answer a              | reads no answer
circuit m abcd abed --metric probability --wrong a      | reads no wrong
circuit m abcd abed --prompts nowhere.tsv               | no file nowhere.tsv
circuit m --prompts one.tsv --answer a                  | answer is of clean and corrupt
circuit m --prompts wrong.tsv                           | name the columns
circuit m abcd abed --save nowhere/c.json               | its folder is missing
circuit m abcd abed --path "0.1 -> logits" --save c     | no circuit to --save
circuit m abcd abed --path "0.1 -> logits" --edges 3    | leave --edges out
circuit m abcd abed --path "0.1 -> logits" --method eap | leave --method out
circuit m abcd abed --path "0.1 -> logits" --plot c.svg | nothing to draw
circuit m abcd abed --path "0.1"                        | is no path
features train m t.txt --at nowhere                     | no activation is called
features train m t.txt --at logits                      | one vector for every token
features train m t.txt --at blocks.1.feedforward --k 500 | k 500 is more than the 128 features
features train m t.txt --at blocks.1.feedforward --features -1 | is negative
features train m t.txt --at blocks.1.feedforward --batch 0 | must be 1 or more
features train m t.txt --at blocks.1.feedforward --lr inf | lr inf must be above 0
features train m t.txt --at blocks.1.feedforward --lr nan | lr nan must be above 0
features train m t.txt --at blocks.1.feedforward --length 100 | length 100 must be 2 or more, and 32 at most
features train m t.txt --at blocks.1.feedforward --seed 99999999999999999999 | seed
features train m t.txt --at blocks.1.feedforward --to embedding | an autoencoder writes what it reads
features train m t.txt --at blocks.1.feedforward --validation empty.txt | is empty
features train m empty.txt --at blocks.1.feedforward    | is empty
features train m t.txt --at blocks.1.feedforward --output f | holds a dictionary already
features show m m                                       | holds no dictionary
features show wide f t.txt                              | trained on another model
features show m f t.txt --text ab                       | choose one
features show m f --text ""                             | the corpus is empty
features show m f t.txt --feature 99                    | no feature 99
features show m f t.txt --feature x                     | no number of a feature
features show m f t.txt --top 0                         | --top must be 1 or more
lens m abcd --top 0                                     | keeps nothing
lens m abcd --contributions --top 9                     | leave one of the two out
lens m abcd --token a                                   | add --contributions
lens m abcd --save x                                    | add --tuned or --jacobian
lens m abcd --tuned t.txt --jacobian t.txt              | choose one
lens m abcd --tuned t.txt --save nowhere/x              | its folder is missing
lens m abcd --tuned empty.txt                           | is empty
lens m abcd --through f/sae_weights.safetensors         | is no lens
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models of other widths, a dictionary of the first, and some files."""
    folder, tokenizer = tmp_path_factory.mktemp("options"), byte_tokenizer()
    size = tokenizer.get_vocab_size()
    m = ch.Model(build(vocab_size=size), tokenizer)
    m.save(folder / "m")
    ch.Model(build(vocab_size=size, d_model=32), tokenizer).save(folder / "wide")
    texts = {"t.txt": "abcd efgh " * 60, "empty.txt": "", "wrong.tsv": "x\ty\n1\t2\n"}
    for name, text in {**texts, "one.tsv": "clean\tcorrupt\nabcd\tabed\n"}.items():
        (folder / name).write_text(text)
    plan = {"n_features": 16, "k": 4, "tokens": 500, "batch": 100}
    train_features(m, folder / "t.txt", "blocks.1.feedforward", folder=folder / "f", **plan)
    return folder


@pytest.mark.parametrize(
    "row", REFUSED.strip().splitlines(), ids=lambda row: " ".join(row.split("|")[0].split())
)
def test_nonsense_is_refused_in_one_line(folder, row, capsys, monkeypatch):
    command, words = (part.strip() for part in row.rsplit("|", 1))
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    with pytest.raises(SystemExit) as stopped:
        main(shlex.split(command))
    lines = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and len(lines) == 1 and words in lines[0]
    assert sorted(folder.iterdir()) == before


def test_nonsense_in_python_is_refused():
    m = ch.Model(build())
    found = circuit(m, CLEAN, CORRUPT, method="eap", draws=0, edges=20)
    for run, words in (
        (lambda: circuit(m, CLEAN, CORRUPT, draws=-1), "draws -1"),
        (lambda: circuit(m, CLEAN, CORRUPT, method="best"), "best"),
        (lambda: circuit(m, CLEAN, CORRUPT, ablation="noise"), "noise"),
        (lambda: circuit(m, prompts=[(CLEAN, CORRUPT)], wrong=3), "wrong is of clean and corrupt"),
        (lambda: circuit(m, prompts=[(CLEAN, CORRUPT, 3, 5)], metric="kl"), "reads no answer"),
        (
            lambda: path_patch(m, CLEAN, CORRUPT, "0.1 -> logits", wrong=3, metric="probability"),
            "reads no wrong",
        ),
        (lambda: found.apply(m, prompt=1), "prompt 1"),
        (lambda: found.apply(build(n_heads=2)), "another model"),
        (lambda: Circuit.load(__file__), "is no circuit"),
        (lambda: ch.graph(m, CLEAN, node_share=float("nan")), "node_share nan"),
        (lambda: ch.graph(m, CLEAN, edge_share=0), "edge_share 0"),
        (lambda: FeaturePlan(warmup=float("inf")), "warmup inf"),
        (lambda: FeaturePlan(inactive=-1), "inactive -1"),
    ):
        with pytest.raises(ch.InputError, match=words):
            run()


class Mine(Attention):
    """An attention of somebody else's, which adds what nobody knows of."""


def other_class(block):
    mine = Mine.__new__(Mine)
    mine.__dict__.update(block.attention.__dict__)
    block.attention = mine


def other_forward(block):
    block.feedforward.forward = type(block.feedforward).forward.__get__(block.feedforward)


FOREIGN = {
    "a subclass": other_class,
    "a wrapper": lambda block: setattr(block, "attention", nn.Sequential(block.attention)),
    "a hook": lambda block: block.register_forward_hook(lambda *given: None),
    "a forward": other_forward,
    "a layer": lambda block: setattr(block.attention_residual, "before", nn.LayerNorm(16)),
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_parts_of_others_are_refused_by_name(change):
    model = build()
    change(model.decoder.blocks[0])
    for run in (lambda: ch.graph(model, CLEAN), lambda: circuit(model, CLEAN, CORRUPT)):
        with pytest.raises(ch.InputError, match=r"part decoder\.blocks\.0"):
            run()


def test_an_adapter_is_part_of_its_layer():
    model = build()
    for block in model.decoder.blocks:
        for name in ("q", "out"):
            layer = LoraLinear(getattr(block.attention, name), 2, 4.0)
            nn.init.normal_(layer.b)
            setattr(block.attention, name, layer)
    assert ch.graph(model, CLEAN, verify=True).difference < 1e-10
    found = circuit(model.double(), CLEAN, CORRUPT, 3, 5, method="eap", draws=0)
    with torch.no_grad():
        logits = model(torch.tensor([CLEAN])).logits[0, -1]
    assert found.full == pytest.approx(float(logits[3] - logits[5]), abs=1e-9)
