"""What MkDocs does to a page before it renders it: hooks, named in mkdocs.yml."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

CONTRIBUTING = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
NOTE = re.compile(r"^(```\w+)[ \t]+(?:no-run|sample)[ \t]*$", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|src|tests|tools|notebooks|[A-Z]+\.md)[^)]*)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add CONTRIBUTING.md, which stands beside docs/, as a page."""
    text = CONTRIBUTING.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    return files


def on_page_markdown(markdown: str, **given: Any) -> str:
    """Drop the words after a fence that only the tests read; name files outside docs/ instead of linking."""
    return OUTSIDE.sub(r"\1 (`\2`)", NOTE.sub(r"\1", markdown))
