"""A file of requests over several machines: rows as a data set of Ray, an engine in each of its actors.

Answers are written by the process that was started, as they come, so that a run that was broken off goes on
as one without Ray does.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clearhead.errors import MissingExtraError
from clearhead.run.api import load
from clearhead.run.serve.batch import answers_to, write_answers
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits

ROWS = 64  # of a shard


class RayAnswers:
    """An engine that answers shards of rows."""

    def __init__(self, folder: str, limits: Limits, options: Mapping[str, Any], model: str) -> None:
        self.name, self.model = Path(folder).name, model
        self.engine = ServeEngine(load(folder, **options), limits)

    def __call__(self, shard: dict[str, Any]) -> dict[str, list[str]]:
        """Answer rows, given by name and JSON; return names and lines of answers."""
        rows = {str(name): json.loads(str(row)) for name, row in zip(shard["name"], shard["row"])}
        found = list(answers_to(self.engine, self.name, rows, self.model))
        return {"name": [name for name, _ in found], "line": [line for _, line in found]}


def run_on_ray(
    folder: Path,
    limits: Limits,
    options: Mapping[str, Any],
    given: Path,
    out: Path,
    workers: int,
    model: str = "",
) -> Iterator[str]:
    """Answer each line of a file that has no answer yet, by so many actors; yield names as they are written.

    Every machine of the cluster must have the model under the same path.
    """
    try:
        import ray.data
    except ImportError:
        raise MissingExtraError("batch --ray needs Ray Data: pip install 'clearhead[ray]'") from None

    def answers(rows: dict[str, Any]) -> Iterator[tuple[str, str]]:
        if not rows:
            return
        items = [{"name": name, "row": json.dumps(row)} for name, row in rows.items()]
        shards = ray.data.from_items(items, override_num_blocks=math.ceil(len(items) / ROWS)).map_batches(
            RayAnswers,
            fn_constructor_args=(str(folder.resolve()), limits, dict(options), model),
            batch_size=ROWS,
            concurrency=workers,
            num_gpus=1 if str(options.get("device", "cpu")).startswith("cuda") else 0,
        )
        for row in shards.iter_rows():
            yield str(row["name"]), str(row["line"])

    yield from write_answers(given, out, model, answers)
