"""How the code is laid out: imports go one way, the model knows no architecture, its files stay short."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import pathlib
import re

import pytest

import clearhead
from clearhead.core.config import Initialisation
from clearhead.core.config.registry import Registry
from tests import fresh

SOURCE = pathlib.Path(clearhead.__file__).parent
CORE = sorted((SOURCE / "core").glob("*.py"))
CONFIG = sorted((SOURCE / "core" / "config").glob("*.py"))
# A part imports from the rows above its own. Within a row modules may import each other, in one direction.
LAYERS = [
    {"errors"},
    {"core.config"},
    {"core", "minimal"},
    {"variants"},
    {"run.kernels", "run.quant", "hub.tokens"},
    {"learn.data"},
    {"hub", "learn.batches", "learn.parallel", "learn.recipe", "learn.rewards"},
    {"run.generate", "learn.losses"},
    {"run.bundle"},
    {"run.api", "learn.tasks", "learn.evaluation", "hub.onnx"},
    {"learn.training"},
    {"inside", "labs.retrieval"},
    {"labs.speed"},
    {
        "app.plot",
        "app.explorer",
        "app.report",
        "app.views",
        "app.watch",
        "run.serve",
        "labs.lab",
        "labs.sweep",
    },
    {"app.tour"},
    {"app.commands"},
    {"app.cli", "__main__"},
]
ARCHITECTURE = re.compile(
    r"(?<![a-z])(gpt|bert|albert|llama|mistral|mixtral|qwen|gemma|t5|bart|marian|nllb|m2m|longformer|bigbird|whisper|vit|palm|neox|bloom)(?![a-z])"
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def part_of(module: str) -> str:
    """The part of the package that a module belongs to: a row of LAYERS names a room, or a room within it."""
    names = module.split(".")[1:3]
    return ".".join(names) if ".".join(names) in RANK else names[0] if names else "__init__"


def module_of(path: pathlib.Path) -> str:
    """The dotted name of a file of the package."""
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def nodes_of(path: pathlib.Path) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree of a file."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(autouse=True, scope="module")
def _forget():
    """The trees are large, and no other file asks for them."""
    yield
    nodes_of.cache_clear()


@functools.cache
def imported_modules(path: pathlib.Path) -> frozenset[str]:
    """The modules of the package that a file imports: at its top, inside functions, and for type checkers."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return frozenset(found & FILES.keys() - {"clearhead", module_of(path)})


def imported(path: pathlib.Path) -> set[str]:
    """The parts of the package that a file imports."""
    return {part_of(module) for module in imported_modules(path)}


@pytest.mark.ledger("E5")
@pytest.mark.slow
def test_imports_go_one_way():
    wrong = []
    for module, path in FILES.items():
        mine = part_of(module)
        if mine == "__init__" or (path.name == "__init__.py" and mine not in RANK):
            assert not imported(path) - {"errors"}, module
            continue
        assert mine in RANK, f"{mine} has no place in LAYERS: say where it stands"
        for theirs in imported(path) - {mine}:
            if theirs not in RANK or RANK[theirs] > RANK[mine]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {theirs}")
    assert not wrong


def test_rooms_are_few():
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert len(rooms | {path.name for path in SOURCE.glob("*.py")}) <= 12


@pytest.mark.slow
def test_no_module_imports_one_that_imports_it():
    """Whoever imports, and however deep inside a function, no chain of imports leads back."""
    imports = {name: imported_modules(path) for name, path in FILES.items()}
    order = list(graphlib.TopologicalSorter(imports).static_order())  # CycleError names those of a circle
    assert {*order} == FILES.keys()


def test_files_are_short_and_narrow():
    lines = {module: path.read_text().splitlines() for module, path in FILES.items()}
    assert {module: len(own) for module, own in lines.items() if len(own) > 600} == {}
    assert [(module, line) for module, own in lines.items() for line in own if len(line) > 110] == []


def test_no_class_is_reassigned():
    """A faster part is a new module: no code changes the class or the private fields of another one."""
    private = {"__class__", "_modules", "_parameters", "_buffers", "_compiled_call_impl"}
    wrong = []
    for module, path in FILES.items():
        for node in nodes_of(path):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [target.attr for target in targets if isinstance(target, ast.Attribute)]
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
                names += [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if private & {*names}:
                wrong.append(f"{module}: {ast.unparse(node)}")
    assert wrong == []


def test_the_core_imports_only_the_core_and_errors():
    """Variants are named in registries, and imported when a config asks for one."""
    for path in [*CORE, *CONFIG]:
        assert set(imported(path)) <= {"core", "core.config", "errors"}, path.name
        assert not {"print", "distributed", "logging"} & set(code_names(path)), path.name


def test_every_registered_variant_is_there():
    registries = {
        name: value
        for module in FILES
        if module.startswith("clearhead.core")
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, Registry)
    }
    assert len(registries) >= 6
    for name, registry in registries.items():
        assert all(callable(registry[part]) for part in registry), name


def code_names(path: pathlib.Path) -> list[str]:
    """Identifiers and strings of the code, docstrings and comments left out."""
    prose = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.add(node.value)
    names = []
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            names.append(node.value)
        elif isinstance(node, ast.Name):
            names.append(node.id)
        elif isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
    return names


@pytest.mark.ledger("E5")
def test_no_family_and_no_architecture_in_the_core():
    # Initialisations and a kind of RoPE scaling have no other name.
    published = {*Initialisation.__args__, "llama3"}
    for path in CORE:
        names = code_names(path)
        assert not {"family", "encoder-decoder"} & {*names}, path.stem
        assert not [name for name in names if ARCHITECTURE.search(name.lower()) and name not in published]
        assert len(path.read_text().splitlines()) <= 320, path.stem


def test_the_core_can_be_read_in_one_sitting():
    model, config = (sum(len(path.read_text().splitlines()) for path in paths) for paths in (CORE, CONFIG))
    assert model <= 1900 and config <= 960


def test_the_reading_order_names_every_file():
    order = re.findall(r"\w+", (SOURCE / "core" / "__init__.py").read_text().split("Read in this order.")[1])
    assert [name for name in order if name.islower()] == list(dict.fromkeys(order))
    assert set(order) == {path.stem for path in CORE} - {"__init__"}


def test_importing_is_quick(tmp_path_factory):
    """`import clearhead` takes under two processor seconds beyond torch, and loads no heavy library."""
    found = fresh.found(tmp_path_factory)
    assert found["seconds"] < 2
    assert not {"transformers", "matplotlib", "tyro", "fastapi", "sklearn"} & {*found["imported"]}
