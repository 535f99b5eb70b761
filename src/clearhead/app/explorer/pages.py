"""The page's files, and the same page as one file with a recorded run in it: no network, no second file.

The modules are plain: static imports from files beside them, names at the top level that no two files share.
So one script is their concatenation in the order of their imports, without the import and export words.
"""

import base64
import hashlib
import json
import re
from functools import cache
from importlib import resources
from typing import Any

TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
ENTRY = "main.js"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let)\b)", re.MULTILINE)


@cache
def page_files(package: str = "clearhead.app.explorer") -> dict[str, tuple[str, str]]:
    """Return every file of a package's page by its name: text and type.

    A request can name one of these, and nothing else.
    """
    folder = resources.files(package) / "static"
    endings = {entry: "." + entry.name.rpartition(".")[2] for entry in folder.iterdir() if entry.is_file()}
    return {
        entry.name: (entry.read_text(encoding="utf-8"), TYPES[ending])
        for entry, ending in endings.items()
        if ending in TYPES
    }


@cache
def modules(name: str = ENTRY) -> tuple[str, ...]:
    """Return the names of a module and of all that it needs, each after those it imports."""
    needed = [each for imported in _IMPORT.findall(page_files()[name][0]) for each in modules(imported)]
    return tuple(dict.fromkeys([*needed, name]))


def script() -> str:
    """Return all modules as one."""
    bodies = {name: _EXPORT.sub("", _IMPORT.sub("", page_files()[name][0])) for name in modules()}
    return "\n".join(f"// {name}\n{body}" for name, body in bodies.items())


def single_file(record: dict[str, Any], notebook: bool = False) -> str:
    """Return the page with everything inside.

    No text of the record can end its element: `<` is written as an escape.
    """
    page, style, icon = (page_files()[name][0] for name in ("index.html", "style.css", "icon.svg"))
    code = f"\n{script()}"
    body = json.dumps(record, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    digest = base64.b64encode(hashlib.sha256(code.encode("utf-8")).digest()).decode()
    policy = (
        "default-src 'none'; img-src data: blob:; connect-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    )
    head = [
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f'<link rel="icon" href="data:image/svg+xml;base64,{base64.b64encode(icon.encode()).decode()}">',
        f"<style>{style}</style>",
    ]
    tail = [
        f'<script type="application/json" id="record">{body}</script>',
        f'<script type="module">{code}</script>',
    ]
    page = re.sub(r"<link[^>]*>\n", "", page).replace('<script type="module" src="main.js"></script>\n', "")
    page = page.replace("</head>", "\n".join([*head, "</head>"]))
    page = page.replace("<body>", '<body data-notebook="">' if notebook else "<body>")
    return page.replace("</body>", "\n".join([*tail, "</body>"]))
