"""What the reference pages read off the code: commands with their options, models with what each can do."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from clearhead.hub.registry import ARCHITECTURES, IMAGES, TOWERS

# Names that readers know, where the class in transformers is called otherwise or stands for several.
KNOWN_AS = {
    "gpt2": "GPT-2, DistilGPT-2",
    "gpt_neox": "GPT-NeoX, Pythia",
    "gpt_neo": "GPT-Neo",
    "gptj": "GPT-J",
    "gpt_bigcode": "StarCoder (GPT-BigCode)",
    "bloom": "BLOOM",
    "llama": "Llama 1–3, SmolLM 1–2",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "phi3": "Phi-3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder2",
    "cohere": "Cohere (Command R)",
    "cohere2": "Cohere 2",
    "glm": "GLM",
    "glm4": "GLM-4",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "mamba2": "Mamba-2",
    "bamba": "Bamba",
    "falcon_h1": "Falcon-H1",
    "nemotron_h": "Nemotron-H, Nemotron 3 Nano",
    "lfm2": "LFM2",
    "llada": "LLaDA (masked diffusion)",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3, R1",
    "deepseek_v32": "DeepSeek-V3.2",
    "glm4_moe_lite": "GLM-4-MoE-Lite (GLM-4.7-Flash)",
    "glm4_moe": "GLM-4-MoE (GLM-4.5 to 4.7)",
    "gpt_oss": "gpt-oss",
    "granitemoe": "Granite-MoE",
    "bert": "BERT",
    "roberta": "RoBERTa",
    "distilbert": "DistilBERT",
    "albert": "ALBERT",
    "xlm-roberta": "XLM-RoBERTa",
    "camembert": "CamemBERT",
    "electra": "ELECTRA",
    "modernbert": "ModernBERT",
    "deberta-v2": "DeBERTa v2, v3",
    "t5": "T5, T5 v1.1",
    "mt5": "mT5",
    "bart": "BART",
    "mbart": "mBART",
    "m2m_100": "M2M-100, NLLB",
}
# Published weights that the tests or benchmarks open, or that they compare with other programs.
TESTED = {
    "llama": "stories260K, SmolLM2-135M-Instruct",
    "bert": "all-MiniLM-L6-v2",
    "whisper": "Whisper tiny.en",
}
TASKS = {"classifier": "classify", "tagger": "tag", "span": "answer"}
KINDS = ("decoder", "encoder", "encoder-decoder")


# Models -----------------------------------------------------------------------------------------------------


def family_of(name: str) -> str:
    """Return the family that a config.json of this architecture leads to, with nothing else stated."""
    first = next(iter(ARCHITECTURES[name].classes))
    if first.endswith(("ForCausalLM", "LMHeadModel")):
        return "decoder"
    return "encoder-decoder" if first.endswith(("ForConditionalGeneration", "MTModel")) else "encoder"


def tasks_of(name: str) -> str:
    """Return the commands that models of an architecture serve, by the heads of its classes."""
    family, heads = family_of(name), [cls.get("head") for cls in ARCHITECTURES[name].classes.values()]
    if name == "whisper":
        return "transcribe"
    if name == "vit":
        return "classify (images), embed"
    if name == "llada":
        return "generate"
    first = {"decoder": "generate, chat", "encoder": "fill", "encoder-decoder": "generate, translate"}
    others = [] if family == "encoder-decoder" else [TASKS[head] for head in TASKS if head in heads]
    return ", ".join([first[family], *others, *(["embed"] if family == "encoder" else [])])


def model_table(kind: str) -> Iterator[str]:
    """Yield the rows of the architectures of one family."""
    from clearhead.hub.gguf_architectures import DIALECTS, WITH_EXPERTS

    gguf = {"mistral", *(dialect.model_type for dialect in (*DIALECTS.values(), *WITH_EXPERTS.values()))}
    yield "| model | `model_type` | class in transformers | commands | GGUF | real weights in the tests |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, table in ARCHITECTURES.items():
        if family_of(name) != kind:
            continue
        first = next(iter(table.classes))
        known = KNOWN_AS.get(name) or re.sub(r"(For|MT)[A-Z]\w*$", "", first)
        has = "yes" if name in gguf else "—"
        yield (f"| {known} | `{name}` | `{first}` | {tasks_of(name)} | {has} | {TESTED.get(name, '—')} |")


SHOWN = {
    **{"llava": "LLaVA 1.5", "idefics3": "Idefics3, SmolVLM", "smolvlm": "SmolVLM2"},
    **{"qwen2_5_vl": "Qwen2.5-VL"},
}


def towers_table() -> Iterator[str]:
    """Yield the rows of the architectures of images and texts."""
    yield "| model | `model_type` | commands |"
    yield "| --- | --- | --- |"
    for name in TOWERS:
        shown = {"clip": "CLIP", "siglip": "SigLIP"}[name]
        yield f"| {shown} | `{name}` | classify (zero-shot), embed, align |"
    for name in IMAGES:
        shown = SHOWN[name]
        yield f"| {shown} | `{name}` | chat, generate and serve, with images |"


def presets_table() -> Iterator[str]:
    """Yield the named sizes, with their parameters."""
    from clearhead.variants.costs import cost
    from clearhead.variants.presets import PRESETS

    yield "| preset | family | layers | width | heads | parameters |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for name, config in PRESETS.items():
        total = cost(config).parameters.total
        yield (
            f"| `{name}` | {config.family} | {config.n_layers} | {config.d_model:,} "
            f"| {config.n_heads} | {total:,} |"
        )


def models(which: str) -> Iterator[str]:
    """Yield the table of one family, of "towers" or of "presets"."""
    if which == "towers":
        return towers_table()
    return presets_table() if which == "presets" else model_table(which)


# Commands ---------------------------------------------------------------------------------------------------


class Flag(NamedTuple):
    """An argument or option of a command, as its help shows it."""

    names: tuple[str, ...]  # "--top-p", and further spellings; of an argument its metavar
    positional: bool
    values: str
    default: str
    help: str
    group: str = ""  # what its help calls the group of options


def flags(described: Any, defaults: dict[str, Any] | None = None, group: str = "") -> Iterator[Flag]:
    """Yield the arguments of a command, and those of the dataclasses among its parameters."""
    from tyro.conf import Positional

    marker = get_args(Positional[str])[1]
    stated = defaults if defaults is not None else _defaults(described)
    for name, hint in get_type_hints(described, include_extras=True).items():
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if name == "return":
            continue
        if dataclasses.is_dataclass(kind):
            value = stated.get(name)
            title = f"{name.capitalize()} options: {kind.__doc__}" if kind.__module__ == "types" else ""
            yield from flags(kind, None if value is None else vars(value), title)
            continue
        told = next((note for note in notes if hasattr(note, "help")), None)
        positional = marker in notes
        spelled = "--" + ((told and told.name) or name).replace("_", "-")
        metavar = told.metavar if told and told.metavar else None
        names = (metavar or name.upper(),) if positional else (spelled, *((told and told.aliases) or ()))
        value = stated.get(name)
        shown = "" if value is None or value is False or value in ("", ()) else str(value)
        shown = "" if value is inspect.Parameter.empty else shown
        yield Flag(names, positional, metavar or _values(kind), shown, (told and told.help) or "", group)


def _defaults(described: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(described):
        return {
            f.name: f.default_factory() if f.default is dataclasses.MISSING else f.default  # type: ignore[misc]
            for f in dataclasses.fields(described)
            if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        }
    return {name: param.default for name, param in inspect.signature(described).parameters.items()}


def _values(kind: Any) -> str:
    """Return what an option takes: its choices, or the kind of its value."""
    names = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: ""}
    if kind in names:
        return names[kind]
    if get_origin(kind) is Literal:
        return " \\| ".join(str(choice) for choice in get_args(kind))
    inner = [arg for arg in get_args(kind) if arg not in (type(None), Ellipsis)]
    shown = dict.fromkeys(word for word in map(_values, inner) if word)
    several = " …" if get_origin(kind) is tuple else ""
    return ", ".join(shown) + several


def commands(group: str) -> Iterator[str]:
    """Yield the commands of one group: summary, examples, and a table of arguments and options."""
    from clearhead.app.commands.common import command_of
    from clearhead.app.views import GROUPS

    for name, row in GROUPS[group].items():
        command = command_of(name)
        text, _, examples = (inspect.getdoc(command) or "").partition("For example:\n")
        yield f"### clearhead {name}\n"
        yield f"{' '.join(text.split())}\n" if text.strip() else f"{row.summary.capitalize()}.\n"
        if examples.strip():
            yield "```bash\n" + "\n".join(line.strip() for line in examples.rstrip().splitlines()) + "\n```\n"
        found = list(flags(command))
        for title in dict.fromkeys(flag.group for flag in found):
            if title:
                yield f"{title}\n"
            yield "| argument or option | values | default | what it does |"
            yield "| --- | --- | --- | --- |"
            yield from (_row(flag) for flag in found if flag.group == title)
            yield ""


def _row(flag: Flag) -> str:
    """Return the row of one argument or option."""
    names = "<br>".join(f"`{name}`" for name in flag.names)
    cells = (names, "" if flag.positional else _code(flag.values), _code(flag.default), flag.help)
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell).strip() for cell in cells) + " |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


# Benchmarks -------------------------------------------------------------------------------------------------


def benchmarks(_: str) -> Iterator[str]:
    """Yield the cases of `benchmarks/run.py`, each with the first line of its docstring and its records."""
    import ast

    from benchmarks.run import CASES
    from tools.claims import records_by_case

    folder = Path(__file__).parents[1] / "benchmarks"
    yield "| case | what it measures | record |"
    yield "| --- | --- | --- |"
    for name, target in CASES.items():
        module, function = target.split(":")
        tree = ast.parse((folder / f"{module}.py").read_text(encoding="utf-8"))
        node = next(one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == function)
        told = (ast.get_docstring(node) or ast.get_docstring(tree) or "").partition("\n\n")[0]
        first = " ".join(told.split()).partition(". ")[0].rstrip(".")
        records = [f"`benchmarks/results/{record}`" for record in records_by_case().get(name, [])]
        words = first.replace("|", "\\|")
        yield f"| `python benchmarks/run.py {name}` | {words} | {'<br>'.join(records)} |"
