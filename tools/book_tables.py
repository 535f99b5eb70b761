"""Generated tables of the documentation: config fields, recipe keys, experiments, commands, models."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from typing import Any

from tools.api_fields import fields_table
from tools.book_reference import benchmarks, commands, models
from tools.config_pictures import PICTURES

from clearhead.core.config import ModelConfig
from clearhead.core.config.fields import Fields, StackFields
from clearhead.labs.lab import EXPERIMENTS
from clearhead.labs.lab.experiment import find
from clearhead.learn.recipe import SECTIONS
from clearhead.variants.presets import PRESETS

GROUP = re.compile(r"^    # [A-Z][\w -]*?(, .*)?$")  # a heading among the fields
FIELD = re.compile(r"^    (\w+): .*?(?:  # (.*))?$")
SUPPORTING = ("nano", "micro-decoder", "micro-encoder", "micro-encoder-decoder", "micro-vit")
MOST = 4  # systems named in a row
REPORTS = Path(__file__).parents[1] / "docs" / "lab"


@cache
def described(cls: type) -> dict[str, str]:
    """Return what the source of a dataclass says about each of its fields, beside or above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        if GROUP.match(line):
            above = []
        elif line.startswith("    # "):
            above.append(line.removeprefix("    # "))
        elif match := FIELD.match(line):
            found[match[1]] = " ".join([*above, match[2] or ""]).strip()
            above = []
        elif line.startswith("    def "):
            break
    return found


def config_fields() -> dict[str, str]:
    """Return the meaning of every field of a config."""
    return {**described(StackFields), **described(Fields)}


@cache
def users() -> dict[str, list[str]]:
    """Return the published systems whose config sets each field to something other than its default."""
    from tests.parity.harness import config_of
    from tests.parity.mutations import SUBJECTS

    from clearhead.hub.registry import ARCHITECTURES

    configs: dict[str, ModelConfig] = {}
    for name, subject in SUBJECTS.items():
        theirs = config_of(subject.kind, subject.options).to_dict()
        classes = {**theirs, "architectures": [subject.model]}
        if theirs["model_type"] in ARCHITECTURES:  # a decoder that reads images has that of its decoder
            configs[name] = ARCHITECTURES[theirs["model_type"]].read(classes)
    for name, config in PRESETS.items():
        if name not in SUPPORTING:
            configs[name] = config
    found: dict[str, list[str]] = {field.name: [] for field in fields(ModelConfig)}
    for system, config in configs.items():
        for name in config.to_dict():
            found[name].append(system.split(" ")[0])
    return {name: list(dict.fromkeys(systems)) for name, systems in found.items()}


def config_table(picture: str) -> Iterator[str]:
    """Yield the rows of the fields of a config that one picture shows."""
    yield "| field | default | what it does | set by |"
    yield "| --- | --- | --- | --- |"
    known = {field.name: field for field in fields(ModelConfig)}
    for name in PICTURES[picture].shown:
        systems = users()[name]
        more = f" and {len(systems) - MOST} more" if len(systems) > MOST else ""
        named = ", ".join(systems[:MOST]) + more if systems else "—"
        yield f"| `{name}` | {default(known[name])} | {cell(config_fields()[name])} | {named} |"


def recipe_table(section: str) -> Iterator[str]:
    """Yield the rows of one section of a recipe."""
    yield "| key | default | what it does |"
    yield "| --- | --- | --- |"
    cls = SECTIONS[section]
    known = described(cls)
    for field in fields(cls):
        yield f"| `{field.name}` | {default(field)} | {cell(known[field.name])} |"


def lab_sections(_: str) -> Iterator[str]:
    """Yield a section for each experiment: its question, what its report under docs/lab found, a picture."""
    for name in EXPERIMENTS:
        experiment, path = find(name), REPORTS / name / "results.json"
        yield f"### {experiment.title}\n\n{experiment.question} `clearhead lab {name}`\n"
        if path.exists():
            claims = json.loads(path.read_text(encoding="utf-8"))["verdicts"]
            yield from (f"- {claim['verdict'].capitalize()}: {claim['claim']}" for claim in claims)
            picture = experiment.pictures[0]
            yield f"\n![{picture.title}](lab/{name}/{picture.name}.png)\n"
            yield f"The [report](lab/{name}/report.md) has the numbers.\n"


def default(field: Field[Any]) -> str:
    """Return the default of a field as one writes it."""
    if field.default is not MISSING:
        value = field.default
    else:
        value = field.default_factory() if field.default_factory is not MISSING else "required"
    return f"`{value!r}`" if not isinstance(value, str) else f"`{value}`"


def cell(text: str) -> str:
    """Return a comment as the text of a cell."""
    return text.replace("|", "\\|")


def table(name: str) -> str:
    """Return what stands under a name: "config PICTURE", "recipe SECTION", "commands GROUP", ..."""
    kind, _, which = name.partition(" ")
    makers = {
        **{"config": config_table, "recipe": recipe_table, "lab": lab_sections},
        **{"commands": commands, "models": models, "benchmarks": benchmarks, "fields": fields_table},
    }
    return "\n".join(makers[kind](which)).rstrip()
