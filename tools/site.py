"""What MkDocs does to a page before it renders it: a hook, named in mkdocs.yml."""

import re
from typing import Any

NOTE = re.compile(r"^(```\w+)[ \t]+(?:no-run|sample)[ \t]*$", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|src|tests|tools|notebooks|[A-Z]+\.md)[^)]*)\)")


def on_page_markdown(markdown: str, **given: Any) -> str:
    """Drop the words after a fence that only the tests read; name files outside docs/ instead of linking."""
    return OUTSIDE.sub(r"\1 (`\2`)", NOTE.sub(r"\1", markdown))
