"""Write the table of generation options into docs/decoding.md, from their declaration.

python tools/options_table.py
"""

import pathlib
import re

from clearhead.run.generate.request import DEFAULTS, GROUPS, OPTIONS

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "decoding.md"
HEAD = (
    "| keyword | flag | HTTP | generation_config.json | default | |\n| --- | --- | --- | --- | --- | --- |\n"
)


def options_table() -> str:
    """Return the table, in Markdown."""
    rows = []
    for name in sorted(OPTIONS, key=lambda name: [*GROUPS, ""].index(OPTIONS[name].group)):
        stated, default = OPTIONS[name], DEFAULTS[name]
        flag = f"--{stated.flag or name.replace('_', '-')}" if stated.group else ""
        shown = "" if default in (None, ()) else str(default).lower() if default is False else str(default)
        names = [f"`{one}`" if one else "" for one in (name, flag, stated.http, stated.own, shown)]
        rows.append(f"| {' | '.join([*names, stated.help])} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    page = PAGE.read_text()
    table = re.compile(re.escape(HEAD) + r"(\|.*\n)+")
    PAGE.write_text(table.sub(lambda _: options_table(), page))
