"""Which heads of a model follow which syntactic relation, over a treebank: the table of docs/heads.md.

python benchmarks/syntax.py MODEL_DIR TREEBANK.conllu.gz [--name minilm_syntax] [--save]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from clearhead.inside.alignments import syntax
from clearhead.inside.heads import head_roles
from clearhead.learn.data.treebank import read_treebank
from clearhead.run.api import load
from common import save


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("treebank", type=Path)
    parser.add_argument("--name", default="minilm_syntax")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    m = load(options.folder)
    sentences = read_treebank(options.treebank, options.limit)
    found = syntax(m, sentences)
    for row in found.table(50):
        shares = (
            f"{100 * row.accuracy:6.1f} {100 * row.held_out:6.1f}   "
            f"{row.distance:+d} {100 * row.baseline:5.1f} {100 * row.gain:+6.1f}"
        )
        print(f"{row.name:<10} {row.arcs:>5}  {row.head:<5} {row.direction:<13} {shares}")
    roles = head_roles(m, [sentence.text for sentence in sentences[:200]])
    counts = {role: roles.roles.count(role) for role in sorted(set(roles.roles))}
    print(counts)
    if options.save:
        relations = [
            {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in row.to_dict().items()
            }
            for row in found.table(50)
        ]
        data = {
            "treebank": options.treebank.name,
            "sentences": found.sentences,
            "words": found.words,
            "lost": found.lost,
        }
        named = {str(head): role for head, role in zip(roles.heads, roles.roles) if role != "mixed"}
        # Save names alone, and no folder of this machine.
        sys.argv[1:3] = [options.folder.name, options.treebank.name]
        save(options.name, [data | {"relations": relations, "roles": counts, "named": named}])


if __name__ == "__main__":
    main()
