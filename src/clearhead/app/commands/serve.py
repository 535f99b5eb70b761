"""Commands that serve a model: over HTTP, and over a file of requests."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clearhead.app.commands.common import Folder, check_inputs, is_own, load_model, print_notes
from clearhead.app.commands.retrieve import Passages, Retrieve
from clearhead.app.views import Repeated
from clearhead.errors import InputError, MissingExtraError, refuse
from clearhead.learn.parallel import first_here, started

if TYPE_CHECKING:
    from clearhead.run.api import Model
    from clearhead.run.serve.engine import ServeEngine
    from clearhead.run.serve.processes import Processes

KEY = "CLEARHEAD_API_KEY"


def _in_all_processes(command: Callable[..., None]) -> Callable[..., None]:
    """Let the processes of `torchrun`, if any, run a command together; one of them reports a mistake."""

    @functools.wraps(command)
    def run(*given: Any, **named: Any) -> None:
        if not started():
            return command(*given, **named)
        from clearhead.learn.parallel.world import joined

        with joined():
            command(*given, **named)

    return run


@_in_all_processes
def serve(
    folder: Folder,
    *,
    model: Repeated = (),
    adapter: Repeated = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key_file: Path | None = None,
    max_waiting: int | None = None,
    max_waiting_tokens: int = 262_144,
    step_tokens: int = 512,
    max_running: int = 64,
    cache_tokens: int | None = None,
    cache: Literal["int8"] | None = None,
    exact: bool = False,
    lookup: int | None = None,
    draft: Path | None = None,
    draft_tokens: int = 4,
    retrieve: Retrieve = None,
    passages: Passages = 3,
    drain: float = 30.0,
    page: bool = False,
    log_prompts: bool = False,
    share_prefix_cache: bool = False,
    cors: Repeated = (),
    max_model_len: int | None = None,
    allow_adapter_loading: bool = False,
    tokenizer: Path | None = None,
    device: str = "auto",
    dtype: str | None = None,
) -> None:
    """Serve a model over HTTP, with the routes of OpenAI's API: any client of it works.

    Args:
        model (NAME=DIR): one more model, under a name
        adapter (NAME=DIR): a low-rank update of the first model, under a name: PEFT's directory, or what
            train.lora leaves
        api_key_file: keys, one on a line, of which a request must have one; also: $CLEARHEAD_API_KEY
        max_waiting: requests that wait; more get 429; default: an eighth of max-running
        max_waiting_tokens: tokens of the prompts that wait
        cache: int8: keys and values in 8 bits, so that the same memory holds nearly four times the tokens of
            float32; slower on a CPU
        exact: logits with the same bits whoever shares the batch; slower for one text alone
        lookup: draft tokens looked up in the text itself, where it pays; 0: none; default: 8, on a GPU 0
        draft (DIR|mtp): a smaller model with the first one's vocabulary, which proposes draft tokens, or the
            first model's own MTP layers; the answers stay the same
        draft_tokens: tokens that the draft proposes at a time, where it pays
        drain: seconds that running requests get when the server is told to end
        page: show the page at / also where others reach the server: they see all requests
        log_prompts: write what is asked to stderr, a line each; else nothing of it is written anywhere
        share_prefix_cache: share cached prefixes between API keys too: cached_tokens then tells what others
            have asked
        cors (ORIGIN): let pages of another server ask, such as http://localhost:3000; *: any
        max_model_len: tokens of a prompt and its answer together; default: the model's own length
        allow_adapter_loading: let requests load adapters from directories of this machine, and unload them:
            /v1/load_lora_adapter, /v1/unload_lora_adapter
        tokenizer: the first model's, in place of the one in its directory

    For example:
      clearhead serve my-model/
      clearhead serve my-model/ --model small=other-model/ --port 9000
      clearhead serve my-model/ --adapter polite=lora-run/
      clearhead serve my-model/ --draft small-model/
      clearhead serve my-model/ --host 0.0.0.0 --api-key-file keys.txt
      clearhead serve my-model/ --retrieve notes.index
      torchrun --nproc-per-node 2 -m clearhead serve my-model/
    """
    named = [(folder.resolve().name, folder), *(_named(stated, "model") for stated in model)]
    updates = dict(tuned := [_named(stated, "adapter") for stated in adapter])
    folders, names = dict(named), [name for name, _ in (*named, *tuned)]
    smaller = [] if draft is None or is_own(draft) else [draft]
    for folder in (*folders.values(), *updates.values(), *smaller):
        check_inputs(folder)
    twice = next((name for name in names if names.count(name) > 1), None)
    refuse(twice is not None, f"two models are called {twice}: give one another name")
    keys = _keys(api_key_file)
    try:
        import uvicorn

        from clearhead.app.explorer.app import is_loopback
        from clearhead.run.serve.app import ServedPassages, make_server
        from clearhead.run.serve.server import Connection, connections_allowed
    except ImportError:
        raise MissingExtraError("serving needs FastAPI and uvicorn: pip install 'clearhead[serve]'") from None
    from clearhead.app.commands.models import bind
    from clearhead.labs.retrieval.index import Index
    from clearhead.run.serve.limits import Limits

    processes = _processes(
        {
            "--adapter": adapter,
            "--allow-adapter-loading": allow_adapter_loading,
            "--cache": cache,
            "--draft": draft,
            "--exact": exact,
            "--page": page,
        }
    )
    served = None if retrieve is None or not first_here() else ServedPassages(Index(retrieve), passages)
    waiting = max(1, max_running // 8) if max_waiting is None else max_waiting
    limits = Limits(
        step_tokens,
        max_running,
        waiting,
        max_waiting_tokens,
        64,
        cache_tokens,
        exact,
        lookup=lookup,
        draft_tokens=draft_tokens,
        max_length=max_model_len,
        cache=cache,
    )
    listening = bind(host, port) if processes is None else None
    first: dict[str, Any] = {"adapters": updates, "draft": draft, "tokenizer": tokenizer}
    engines = {
        name: _engine(where, limits, device, dtype, processes, **(first if where is folder else {}))
        for name, where in folders.items()
    }
    if processes is not None:
        from clearhead.run.serve.batch import model_fingerprint

        files = {f"{name}/": model_fingerprint(where)[:16] for name, where in folders.items()}
        processes.meet({"options": repr(limits), **files})
        if not processes.first:
            processes.follow()
            return
    listening = listening or bind(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    if not is_loopback(host) and not keys:
        print_notes(
            [f"warning: {host} can be reached by others, and no key is asked for: see --api-key-file"]
        )
    for name, engine in engines.items():
        own = engine.m.max_length
        if engine.max_length > own:
            print_notes([f"warning: {name} was made for {own} tokens, and takes up to {max_model_len}"])
        if exact and not engine.exact:
            print_notes([f"note: on this machine the last bits of {name}'s logits depend on the batch"])
    print_notes([f"clearhead serves {', '.join(engines)}: {address}/v1  (Ctrl-C ends it)"])
    if log_prompts:
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("clearhead.run.serve").setLevel(logging.INFO)
    shown = page or is_loopback(host)
    options = (served, shown, log_prompts, share_prefix_cache, cors, allow_adapter_loading)
    app = make_server(engines, host, keys, drain, *options)
    Connection.most, Connection.refusal = connections_allowed(), app.state.admission.early
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=int(drain) + 1,
        http=Connection,
    )
    sys.setswitchinterval(0.0005)  # seconds for which the engine's thread may keep the loop's from running
    server = uvicorn.Server(config)
    with (
        nullcontext()
        if processes is None
        else processes.leading(lambda: setattr(server, "should_exit", True))
    ):
        server.run([listening])


def batch(
    folder: Folder,
    requests: Path,
    answers: Path,
    *,
    step_tokens: int = 512,
    max_running: int = 64,
    cache_tokens: int | None = None,
    draft: Path | None = None,
    draft_tokens: int = 4,
    ray: int = 0,
    device: str = "auto",
    dtype: str | None = None,
) -> None:
    """Answer a file of requests: OpenAI's batch lines, or bodies of completions and chats.

    Broken off and started again, it goes on with the rows that have no answer yet. A file that holds anything
    but answers, or answers to other requests under the same names, is refused and left as it is.

    Args:
        requests (IN.jsonl): requests, one JSON object on a line
        answers (OUT.jsonl): where answers are added, a line each
        draft (DIR|mtp): a smaller model with the same vocabulary, which proposes draft tokens, or the model's
            own MTP layers; the answers stay the same
        draft_tokens: tokens that the draft proposes at a time, where it pays
        ray: engines to run as actors of Ray, on the cluster that RAY_ADDRESS names or here; 0: none

    For example:
      clearhead batch my-model/ requests.jsonl answers.jsonl
      clearhead batch my-model/ requests.jsonl answers.jsonl --ray 4
    """
    check_inputs(folder)
    refuse(not requests.is_file(), f"{requests} is not a file: name one with a request on each line")
    refuse(ray < 0, f"--ray {ray} is no number of engines: give 1 or more, or 0 for none")
    refuse(
        ray and draft is not None, "--draft with --ray: its engines draft from the text alone: leave one out"
    )
    if draft is not None and not is_own(draft):
        check_inputs(draft)
    try:
        from clearhead.run.serve.batch import check_files, model_fingerprint, run_batch, run_on_ray
    except ImportError:
        raise MissingExtraError("batch needs FastAPI: pip install 'clearhead[serve]'") from None
    from clearhead.run.serve.limits import Limits

    limits = Limits(
        *(step_tokens, max_running, sys.maxsize, sys.maxsize),
        cache_tokens=cache_tokens,
        draft_tokens=draft_tokens,
    )
    check_files(requests, answers)  # before a model is loaded
    model = model_fingerprint(folder, dtype)
    if ray:
        options = {"device": device, **({} if dtype is None else {"dtype": dtype})}
        written = run_on_ray(folder, limits, options, requests, answers, ray, model)
    else:
        engine = _engine(folder, limits, device, dtype, draft=draft)
        written = run_batch(engine, folder.resolve().name, requests, answers, model)
    count = sum(1 for _ in written)
    print_notes([f"{count} answers added to {answers}"])


def _processes(whole: Mapping[str, object]) -> Processes | None:
    """Return the processes of `torchrun`, if any; refuse options that want a `whole` model."""
    if not started():
        return None
    from clearhead.learn.parallel.world import join
    from clearhead.run.serve.processes import WHOLE, Processes

    named = ", ".join(name for name, value in whole.items() if value)
    refuse(named, f"{named}: not possible with {WHOLE}")
    return Processes(join())


def _engine(
    folder: Path,
    limits: object,
    device: str,
    dtype: str | None,
    processes: Processes | None = None,
    adapters: Mapping[str, Path] | None = None,
    draft: Path | None = None,
    tokenizer: Path | None = None,
) -> ServeEngine:
    from clearhead.run.serve.adapters import open_adapter
    from clearhead.run.serve.engine import ServeEngine
    from clearhead.run.serve.limits import Limits

    assert isinstance(limits, Limits)
    split = None if processes is None else {"tensor": processes.world.size}
    m = load_model(folder, tokenizer, device, dtype, parallel=split)
    updates = {name: open_adapter(m, name, where) for name, where in (adapters or {}).items()}
    smaller: Model | str | None = None
    if draft is not None:
        smaller = "mtp" if is_own(draft) else load_model(draft, device=device, dtype=dtype)
    return ServeEngine(m, limits, updates, smaller, processes)


def _named(value: str, option: str) -> tuple[str, Path]:
    name, equals, where = value.partition("=")
    refuse(not (name and equals and where), f'--{option} "{value}" must be NAME=DIR')
    return name, Path(where)


def _keys(file: Path | None) -> list[str]:
    """Return the keys of the file and of the environment."""
    keys = [os.environ[KEY]] if os.environ.get(KEY) else []
    if file is None:
        return keys
    try:
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--api-key-file {file} cannot be read: {error}") from None
    refuse(not any(lines), f"--api-key-file {file} has no key: write one on each line")
    return [*keys, *filter(None, lines)]
