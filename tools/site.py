"""What MkDocs does to a page before it renders it: hooks, named in mkdocs.yml."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
NOTE = re.compile(r"^(```\w+)[ \t]+(?:no-run|sample)[ \t]*$", re.MULTILINE)
OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|src|tests|tools|notebooks|[A-Z]+\.md)[^)#]*)[^)]*\)"
)
FENCED = re.compile(r"^```.*?^```[ \t]*$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"(?<![\[`])`([\w./-]+\.(?:py|pyi|c|h|json|js|ipynb|patch|toml))`(?!\])")
KINDS = ("src", "tests", "tools", "benchmarks", "notebooks", "docs/drills", "pyproject.toml")


def source_of(name: str) -> str | None:
    """Return the path of a file of the repository that a page names, from its root; None: there is none."""
    for base in ("", "src/clearhead/"):
        path = f"{base}{name}"
        if path.startswith(KINDS) and (ROOT / path).is_file():
            return path
    return None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add CONTRIBUTING.md, which stands next to docs/, as a page, and the sources that pages name."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    pages = [text, *(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))]
    named = {
        name for page in pages for name in [*NAMED.findall(page), *(m[2] for m in OUTSIDE.finditer(page))]
    }
    for path in sorted({path for path in map(source_of, named) if path}):
        content = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, f"source/{path}.txt", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **given: Any) -> str:
    """Drop the words after a fence that only the tests read; link files of the repository to their text."""
    folder = os.path.dirname(page.file.src_uri)

    def linked(text: str, name: str) -> str:
        path = source_of(name)
        return (
            f"[{text}]({os.path.relpath(f'source/{path}.txt', folder or '.')})"
            if path
            else f"{text} (`{name}`)"
        )

    def outside_code(text: str) -> str:
        text = OUTSIDE.sub(lambda m: linked(m[1], m[2]), text)
        return NAMED.sub(lambda m: linked(m[0], m[1]) if source_of(m[1]) else m[0], text)

    pieces, end = [], 0
    for block in FENCED.finditer(markdown):
        pieces += [outside_code(markdown[end : block.start()]), block[0]]
        end = block.end()
    return NOTE.sub(r"\1", "".join([*pieces, outside_code(markdown[end:])]))
