"""Measure the package: lines, files, rooms, floors, classes per concept, helpers called once, private words.

python tools/house.py                 this tree
python tools/house.py 6f8ff0d6 HEAD   two revisions of it, next to each other
python tools/house.py --features      lines and files of each part of 2026, of this tree
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from graphlib import TopologicalSorter
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What has several classes for one thing, by the names of these classes.
CONCEPTS = {
    "options of a generation": r"Sampling|\w*Request|\w*Options|SamplingFields|GenerationConfig",
    "task of training": r"\w*Shape|\w*Batching|\w*Objective|TaskSpec|\w*Judgement|\w*Task",
    "engine": r"\w*Engine|\w*Writer|\w*Runner|\w*Executor",
    "cache": r"\w*Cache",
    "attention module": r"\w*Attention",
    "linear module": r"\w*Linear",
    "stack or Transformer": r"\w*Stack|\w*Transformer",
}
# Words of our own, and what the literature says instead.
WORDS = {
    "few bits (quantized)": r"few bits",
    "product (matmul)": r"\bproducts?\b",
    "places (positions)": r"\bplaces\b",
    "piece (chunk, shard)": r"\bpieces?\b",
    "guess, ahead (draft tokens)": r"\bguess(es)?\b|\bahead\b",
    "turn (transpose, rotate, slot)": r"\bturn(s|ed|ing)?\b",
    "recorded step, replay (captured CUDA graph)": r"recorded steps?|\breplay\w*",
    "beside (versus, next to)": r"\bbeside\b",
    "said (reported)": r"\bsaid\b",
    "asked, fed (request, tokens)": r"\basked\b|\bfed\b",
    "door, behind, farewell, desk (front end, drain, loader)": r"\b(door|behind|farewell|desk)\b",
    "foretell, climb (predict, extrapolate)": r"\bforetell\w*|\bclimb\w*",
    "plainly, everywhere (reference, global)": r"\bplainly\b|\beverywhere\b",
    "for one in (the thing's name)": r"\bfor one in\b",
    "found, given, made (the thing's name)": r"\b(found|given|made) =|(\bin |\()(found|given|made)\b",
}

# The parts of 2026: the lines each was to have, its words in other files, and the files that are its own.
FEATURES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "latent attention": (400, r"latent|indexer", ("variants/latent.py", "hub/latent.py")),
    "multi-token prediction": (250, r"mtp", ("variants/mtp.py", "hub/mtp.py")),
    "state-space layers": (
        400,
        r"mamba|short_?conv|hybrid|state_space",
        ("variants/state_space.py", "hub/hybrids.py"),
    ),
    "diffusion": (
        350,
        r"diffusion|denois|llada|unmask|mask_schedule|block_?causal",
        (
            "run/generate/diffusion.py",
            "learn/tasks/entries/diffusion.py",
        ),
    ),
    "vision-language": (
        500,
        r"image_encoder|imageprompt|imageencoder|promptvectors|llava|idefics|smolvlm|qwen2_5_vl|rope_sections|rope_axial",
        (
            "variants/images.py",
            "hub/vision_language.py",
            "learn/tasks/images.py",
            "learn/tasks/entries/describe.py",
        ),
    ),
    "looped depth": (80, r"looped|\bconfig\.loop|\bloop:", ()),
    "GRPO": (
        400,
        r"grpo|rollout|reward",
        ("learn/rewards.py", "learn/tasks/rollouts.py", "learn/tasks/entries/grpo.py"),
    ),
    "QLoRA": (200, r"qlora|(plan|train|adapters)\.quantize", ("learn/parallel/adapters.py",)),
    "search encoders": (250, r"splade|colbert|matryoshka|\bwidths\b", ("hub/retrievers.py",)),
}


def parts(module: str, rooms: set[str]) -> str:
    """Return the folder of the package that a module lies in, two levels deep at most."""
    names = module.split(".")[1:]
    return next((part for part in (".".join(names[:2]), names[0]) if part in rooms), names[0])


def longest_chain(graph: dict[str, set[str]]) -> int:
    """Return the number of floors: the longest chain of imports between parts; a cycle is one floor."""
    while True:
        try:
            order = list(TopologicalSorter(graph).static_order())
            break
        except ValueError as cycle:  # two parts that import each other stand on one floor
            first, second = cycle.args[1][:2]
            merged = {name: {first if to == second else to for to in edges} for name, edges in graph.items()}
            merged[first] = (merged[first] | merged.pop(second, set())) - {first, second}
            graph = {name: edges - {name} for name, edges in merged.items()}
    height: dict[str, int] = {}
    for name in order:
        height[name] = 1 + max((height[to] for to in graph.get(name, ())), default=0)
    return max(height.values())


def imports(tree: ast.AST, modules: set[str]) -> Iterable[str]:
    """Yield the modules that a file imports, at its top and inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def lines_of(paths: Iterable[Path]) -> int:
    """Count the lines of files."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def measure(root: Path) -> dict[str, int]:
    """Return every figure of the tree at `root`."""
    source = root / "src" / "clearhead"
    files = sorted(source.rglob("*.py"))
    sizes = [lines_of([path]) for path in files]
    trees = {
        ".".join(path.relative_to(source.parent).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in files
    }
    modules = set(trees)
    folders = {".".join(path.parent.relative_to(source).parts[:2]) for path in files} - {""}
    graph: dict[str, set[str]] = {}
    classes: Counter[str] = Counter()
    helpers: set[str] = set()
    uses: Counter[str] = Counter()
    importers: dict[str, set[str]] = {}
    for module, tree in trees.items():
        if module == "clearhead":
            continue
        mine = parts(module, folders)
        for other in imports(tree, modules):
            if other in modules and other not in ("clearhead", module):
                importers.setdefault(other, set()).add(module)
                graph.setdefault(mine, set()).update({parts(other, folders)} - {mine})
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.update(
                    concept for concept, names in CONCEPTS.items() if re.fullmatch(f"_?({names})", node.name)
                )
            elif isinstance(node, ast.FunctionDef) and re.match(r"_[a-z]", node.name):
                helpers.add(node.name)
            elif isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
    single = [
        module
        for module, by in importers.items()
        if len(by) == 1 and module.rpartition(".")[0] == next(iter(by)).rpartition(".")[0]
    ]
    rooms = {path.relative_to(source).parts[0] for path in files}
    tests = sorted((root / "tests").rglob("*.py"))
    text = {
        "src": "".join(
            path.read_text(encoding="utf-8")
            for path in sorted(source.rglob("*"))
            if path.suffix in (".py", ".c", ".h", ".js", ".html")
        ),
        "docs": "".join(path.read_text(encoding="utf-8") for path in sorted((root / "docs").rglob("*.md"))),
    }
    figures = {
        "Python lines of the package": sum(sizes),
        "Python files of the package": len(files),
        "files over 600 lines": sum(size > 600 for size in sizes),
        "files under 60 lines": sum(size < 60 for size in sizes),
        "rooms at the top": len(rooms),
        "floors": longest_chain(graph),
        "modules that one sibling alone imports": len(single),
        "private helpers called once": sum(uses[name] == 1 for name in helpers),
        "lines of tests": lines_of(tests),
        "benchmark files": len(list((root / "benchmarks").glob("*.py"))),
    }
    figures |= {f"classes: {concept}": classes[concept] for concept in CONCEPTS}
    for place, content in text.items():
        figures |= {f"words, {place}: {word}": len(re.findall(way, content)) for word, way in WORDS.items()}
    return figures


def lines_about(text: str, words: str) -> int:
    """Count the lines with one of these words, and those of functions and classes named by one."""
    has = re.compile(words, re.IGNORECASE).search
    found = {number for number, line in enumerate(text.splitlines(), 1) if has(line)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and has(node.name):
            found |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(found)


def features(root: Path) -> str:
    """Return a table of the parts of 2026: lines in files of their own and in others, which they touch."""
    source, rows = (
        root / "src" / "clearhead",
        ["| part | aim | lines | of these in its own files | other files |"],
    )
    rows.append("| --- | ---: | ---: | ---: | ---: |")
    for name, (aim, words, own) in FEATURES.items():
        inside = lines_of(source / path for path in own)
        others = [path for path in source.rglob("*.py") if str(path.relative_to(source)) not in own]
        counts = [lines_about(path.read_text(encoding="utf-8"), words) for path in others]
        lines, touched = inside + sum(counts), sum(count > 0 for count in counts)
        rows.append(f"| {name} | {aim} | {lines:,} | {inside:,} in {len(own)} | {touched} |")
    return "\n".join(rows)


def at(revision: str | None, use: Callable[[Path], dict[str, int]]) -> dict[str, int]:
    """Measure a revision in a folder of its own, or this tree."""
    if revision is None:
        return use(ROOT)
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return use(Path(folder))


def main() -> None:
    """Print a table of the revisions that are named, or of this tree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "revisions", nargs="*", metavar="REVISION", help="of git, such as HEAD; none: this tree"
    )
    parser.add_argument("--features", action="store_true", help="lines and files of each part of 2026")
    asked = parser.parse_args()
    if asked.features:
        return print(features(ROOT))
    revisions: list[str | None] = asked.revisions or [None]
    for revision in filter(None, revisions):
        known = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
        if subprocess.run(known, capture_output=True).returncode:
            parser.error(f'git knows no revision "{revision}"')
    columns = [at(revision, measure) for revision in revisions]
    width = max(map(len, columns[0]))
    print(f"{'':{width}}", *(f"{revision or 'this tree':>10}" for revision in revisions))
    for name in columns[0]:
        print(f"{name:{width}}", *(f"{column[name]:10,}" for column in columns))


if __name__ == "__main__":
    main()
