"""The HTTP routes: OpenAI's, and those around them. The engines' threads do the work, and this loop waits."""

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from clearhead.errors import BusyError, ClearheadError, InputError, RequestError, nearest, refuse
from clearhead.labs.retrieval.index import Index
from clearhead.labs.retrieval.passages import before_prompt, cited
from clearhead.learn.tasks import reading, vectors
from clearhead.learn.tasks.generation import chat_ids, chat_template
from clearhead.learn.tasks.images import ImagePrompt
from clearhead.run.generate.stream import token_texts
from clearhead.run.serve import embeddings, protocol
from clearhead.run.serve.adapters import open_adapter
from clearhead.run.serve.answers import DEFAULT_TOKENS, LOOK, ChatChoices, Choices, chat_turn, choices_of
from clearhead.run.serve.audio import add_audio
from clearhead.run.serve.blocks import Chat
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.messages import add_messages, model_card
from clearhead.run.serve.pooling import PoolingRequest
from clearhead.run.serve.protocol import ChatBody, CompletionBody, error_body
from clearhead.run.serve.responses import add_responses
from clearhead.run.serve.server import OWNER, RETRY_AFTER, Admission, Guard
from clearhead.run.serve.status import Metrics, add_page


class ServedPassages:
    """An index that requests are looked up in."""

    def __init__(self, index: Index, count: int) -> None:
        """Keep an index, and how many passages a prompt gets at most."""
        refuse(count < 1, f"--passages {count} must be 1 or more")
        self.index, self.count, self._lock = index, count, threading.Lock()

    def put(self, engine: ServeEngine, body: CompletionBody | ChatBody) -> list[dict[str, Any]]:
        """Put passages before each prompt, or before the user's last message; return what is cited."""
        if isinstance(body, ChatBody):
            return self._chat(engine, body)
        most = engine.longest - (DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens)
        prompts, found = [], []
        for number, prompt in enumerate(body.prompts()):
            whole, some = self._before(prompt, lambda text: len(engine.m.prompt_ids(text)), most)
            prompts.append(whole)
            found += [{"prompt": number, **passage} for passage in some]
        body.prompt = prompts
        return found

    def _chat(self, engine: ServeEngine, body: ChatBody) -> list[dict[str, Any]]:
        by_user = [n for n, message in enumerate(body.messages) if message.get("role") == "user"]
        place = by_user[-1] if by_user else -1
        refuse(place < 0, "this server looks for passages by the user's last message, and there is none")

        tools = body.choice_of_tools().shown

        def messages(text: str) -> list[dict[str, Any]]:
            new = {**body.messages[place], "content": text}
            return [*body.messages[:place], new, *body.messages[place + 1 :]]

        def tokens(text: str) -> int:
            more = {**tools, **(body.chat_template_kwargs or {})}
            return len(chat_ids(engine.m, messages(text), more, files=False))

        answer = body.max_completion_tokens or body.max_tokens or engine.longest // 4
        content, found = self._before(body.messages[place].get("content"), tokens, engine.longest - answer)
        body.messages = messages(content)
        return found

    def _before(self, prompt: Any, tokens: Any, most: int) -> tuple[str, list[dict[str, Any]]]:
        refuse(
            not isinstance(prompt, str),
            f"this server looks for passages by text, and was given {prompt!r:.40}: send text",
        )
        with self._lock:
            hits = self.index.search(prompt, self.count)
        whole, some = before_prompt(prompt, hits, tokens, most)
        return whole, [{"number": number, **cited(hit)} for number, hit in enumerate(some, start=1)]


KIND = re.compile(
    r"constrained-|(list|dict|literal)\[|(str|bool|int|float)$|[A-Z]\w*$"
)  # as pydantic names kinds
LOG = logging.getLogger("clearhead.run.serve")


def make_server(
    engines: Mapping[str, ServeEngine],
    host: str = "127.0.0.1",
    keys: Collection[str] = (),
    drain: float = 30.0,
    passages: ServedPassages | None = None,
    page: bool = False,
    log_prompts: bool = False,
    share_prefix_cache: bool = False,
    cors: Sequence[str] = (),
    adapter_loading: bool = False,
) -> FastAPI:
    """Return the routes for models by name; the first is the one a request without a name gets.

    `page`: show what is done at /, and what was asked and answered in the explorer. `log_prompts`: write what
    is asked to the log `clearhead.run.serve`, a line of JSON for each request; else nothing of it is written.
    `share_prefix_cache`: requests with different keys share cached prefixes too; else a request finds those
    of its own key alone, since how many of its tokens were cached tells what others have asked. `cors`:
    origins whose pages may read answers. `adapter_loading`: requests may load adapters of directories of this
    machine, and unload any.
    """
    metrics, loading = Metrics(), asyncio.Lock()

    def served() -> dict[str, ServeEngine]:
        """Return the models and adapters of now, by name."""
        return {**engines, **{name: engine for engine in engines.values() for name in engine.adapters}}

    @asynccontextmanager
    async def life(app: FastAPI) -> Any:
        for engine in engines.values():
            engine.start()
        yield
        for engine in engines.values():
            await run_in_threadpool(engine.close, drain)

    # FastAPI's own pages of the routes would fetch scripts from elsewhere.
    app = FastAPI(
        title="clearhead", version=version("clearhead"), lifespan=life, docs_url=None, redoc_url=None
    )

    def check_room() -> None:
        full = [engine for engine in engines.values() if engine.room < 1]
        if len(full) == len(engines):
            full[0].check_room()

    app.state.admission = Admission(host, keys, check_room, cors)
    app.add_middleware(Guard, admission=app.state.admission)
    if cors:  # outermost: a browser asks whether it may before it sends a key
        app.add_middleware(CORSMiddleware, allow_origins=cors, allow_methods=["*"], allow_headers=["*"])

    def told(request: Request, error: Exception, status: int, **headers: str) -> Response:
        return JSONResponse(error_body(error, status, request.url.path), status, headers)

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: RequestValidationError) -> Response:
        line, param = _in_words(error, request.headers.get("content-type", ""))
        return told(request, RequestError(line, None, 400, param), 400)

    @app.exception_handler(ClearheadError)
    async def refused(request: Request, error: ClearheadError) -> Response:
        if isinstance(error, BusyError):
            return told(request, error, 429, **{"Retry-After": RETRY_AFTER})
        return told(request, error, getattr(error, "status", 400))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return told(request, InputError(str(error.detail)), error.status_code)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return told(request, error, 500)

    def engine_of(name: str | None) -> tuple[str, ServeEngine]:
        known = served()
        wanted = next(iter(known)) if name is None else name
        if wanted not in known:
            line = f'model "{wanted}"{nearest(wanted, known)} is not here: {", ".join(known)} are'
            raise RequestError(line, "model_not_found", 404, "model")
        return wanted, known[wanted]

    def reader_of(name: str | None) -> tuple[str, ServeEngine]:
        """Return what answers with the model's own vectors, classes or scores."""
        found, engine = engine_of(name)
        refuse(found not in engines, f'adapter "{found}" is for text: name its model, {", ".join(engines)}')
        return found, engine

    def note(engine: ServeEngine, inputs: Sequence[Any]) -> None:
        if log_prompts:
            inputs = [x.prompt if isinstance(x, ImagePrompt) else x for x in inputs]
            ids = (isinstance(x, list) and all(isinstance(token, int) for token in x) for x in inputs)
            texts = [engine.m.decode(x) if coded else x for x, coded in zip(inputs, ids)]
            LOG.info("%s", json.dumps({"prompts": texts}))  # escaped: a prompt is never a line of its own

    def owner_of(request: Request) -> str:
        return "" if share_prefix_cache else str(request.scope.get(OWNER, ""))

    async def begin(body: CompletionBody | ChatBody, request: Request) -> Choices:
        """Admit a request before it is encoded, and submit it; passages come before its prompts."""
        name, engine = engine_of(body.model)
        with engine.admit():
            found = None if passages is None else await run_in_threadpool(passages.put, engine, body)
            choices = await run_in_threadpool(choices_of, engine, name, body, owner_of(request))
            choices.cited = {} if found is None else {"passages": found}
            note(engine, choices.prompts)
            await choices.begin(metrics, bool(body.stream))
        return choices

    async def generated(body: CompletionBody | ChatBody, request: Request) -> Response:
        choices = await begin(body, request)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(choices.stream(usage), media_type="text/event-stream")
        return JSONResponse(await choices.whole(request))

    @app.post("/v1/completions")
    async def completions(body: protocol.CompletionBody, request: Request) -> Response:
        return await generated(body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: protocol.ChatBody, request: Request) -> Response:
        return await generated(body, request)

    async def begin_chat(body: ChatBody, request: Request) -> ChatChoices:
        choices = await begin(body, request)
        assert isinstance(choices, ChatChoices)
        return choices

    async def counted(body: ChatBody) -> tuple[int, int]:
        engine = engine_of(body.model)[1]
        turn = await run_in_threadpool(chat_turn, engine.m, body)
        return len(turn.ids), engine.longest

    chats = Chat(begin_chat, counted, lambda name: chat_template(engine_of(name)[1].m))
    add_responses(app, chats)
    add_messages(app, chats)

    async def read(engine: ServeEngine, inputs: Sequence[Any], run: Any, request: Request) -> Sequence[Any]:
        """Let the engine read inputs, as long as the client waits."""
        note(engine, inputs)
        return await waited(engine.read(inputs, run), request)

    async def waited(one: PoolingRequest, request: Request) -> Sequence[Any]:
        """Wait for what the engine reads; cancel it when the client goes."""
        while not await run_in_threadpool(one.done.wait, LOOK):
            if await request.is_disconnected():
                one.cancelled = True
                raise ClearheadError("the client has gone")
        return one.wait(0)

    async def embedded(body: protocol.EmbeddingsBody, request: Request, pooling: bool) -> Response:
        name, engine = reader_of(body.model)
        as_base64 = body.encoding_format == "base64"
        embeddings.check_format(engine.m, pooling, as_base64)
        refuse(
            body.prompt_name is not None and engine.m.sentences is None,
            f"prompt_name {body.prompt_name!r}: this model has no prompts "
            "(config_sentence_transformers.json)",
        )
        embeddings.check_dimensions(engine.m, body.dimensions)
        if body.truncate in (None, False, "NONE"):
            await run_in_threadpool(embeddings.check_lengths, engine.m, body.texts(), body.prompt_name)
        rows = await read(engine, body.texts(), embeddings.embedding(body.prompt_name), request)
        rows = embeddings.cut(rows, body.dimensions)
        chunks = embeddings.written(name, rows, as_base64, pooling)
        return StreamingResponse(chunks, media_type="application/json")

    @app.post("/v1/embeddings")
    async def embed(body: protocol.EmbeddingsBody, request: Request) -> Response:
        return await embedded(body, request, pooling=False)

    @app.post("/pooling")
    async def pooling(body: protocol.EmbeddingsBody, request: Request) -> Response:
        return await embedded(body, request, pooling=True)

    @app.post("/v1/classify")
    async def classify(body: protocol.TextsBody, request: Request) -> Response:
        name, engine = reader_of(body.model)
        results = await read(engine, body.texts(), reading.classify, request)
        data = [
            {"index": n, "label": result.label, "probability": result.probability, "scores": result.scores}
            for n, result in enumerate(results)
        ]
        return JSONResponse({"object": "list", "data": data, "model": name})

    async def scored(body: protocol.PairsBody, request: Request) -> tuple[list[float], dict[str, Any]]:
        """Return how well each document answers the query, by a model of pairs or by vectors.
        With it what both answers have in common: the model, and how many tokens were read.
        """
        name, engine = reader_of(body.model)
        m, documents = engine.m, body.documents
        if vectors.reads_pairs(m):
            pairs = [(body.query, text) for text in documents]
            scores = [result.probability for result in await read(engine, pairs, reading.classify, request)]
            tokens = await run_in_threadpool(lambda: sum(len(m.framed(*pair).ids) for pair in pairs))
        else:
            asked, answering = map(embeddings.embedding, vectors.sides(m))
            if asked is answering:
                rows = await read(engine, [body.query, *documents], asked, request)
            else:
                rows = [
                    *await read(engine, [body.query], asked, request),
                    *await read(engine, documents, answering, request),
                ]
            query, *others = (vector for vector, _ in rows)
            scores = await run_in_threadpool(vectors.compare, m, query, others)
            tokens = sum(count for _, count in rows)
        return scores, {"model": name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}

    @app.post("/v1/rerank")
    async def rerank(body: protocol.PairsBody, request: Request) -> Response:
        scores, about = await scored(body, request)
        results = [
            {"index": passage.index, "document": {"text": passage.text}, "relevance_score": passage.score}
            for passage in vectors.ranked(scores, body.documents, body.top_n)
        ]
        return JSONResponse({**about, "results": results})

    @app.post("/v1/score")
    async def score(body: protocol.PairsBody, request: Request) -> Response:
        refuse(body.top_n is not None, "top_n is for rerank: score gives every document, in its order")
        scores, about = await scored(body, request)
        data = [{"index": n, "object": "score", "score": value} for n, value in enumerate(scores)]
        return JSONResponse({"object": "list", **about, "data": data})

    @app.post("/tokenize")
    def tokenize(body: protocol.TokenizeBody) -> Response:  # in a thread: a long text takes its time
        engine = engine_of(body.model)[1]
        m = engine.m
        encoding = m.text_tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        answer = {"tokens": encoding.ids, "token_strs": token_texts(m.text_tokenizer, encoding.ids)}
        # Made here: FastAPI would look at each token, in the loop that all others wait for.
        return JSONResponse({**answer, "count": len(encoding.ids), "max_model_len": engine.max_length})

    @app.post("/detokenize")
    def detokenize(body: protocol.DetokenizeBody) -> Any:
        return {"prompt": engine_of(body.model)[1].m.decode(body.tokens)}

    def check_loading() -> None:
        if not adapter_loading:
            line = "this server loads no adapters while it runs: start it with --allow-adapter-loading"
            raise RequestError(line, "adapter_loading_disabled", 403)

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: protocol.LoadAdapterBody) -> Response:
        check_loading()
        name, folder, engine = body.lora_name, Path(body.lora_path), reader_of(body.model)[1]
        if not folder.is_dir():
            line = f"lora_path {body.lora_path!r} is no directory on the server: give one with an adapter"
            raise RequestError(line, "adapter_not_found", 404, "lora_path")
        async with loading:  # one at a time, since each takes memory
            taken = served().keys() - ({*engine.adapters} if body.load_inplace else {})
            refuse(name in taken, f'lora_name "{name}" is taken: unload it first, or choose another name')
            updates = await run_in_threadpool(open_adapter, engine.m, name, folder)
            await run_in_threadpool(engine.load_adapter, name, updates, bool(body.load_inplace))
        return PlainTextResponse(f"adapter {name} is loaded")

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: protocol.UnloadAdapterBody) -> Response:
        check_loading()
        name = body.lora_name
        engine = next(
            (serving for serving in engines.values() if name in serving.adapters),
            next(iter(engines.values())),
        )
        engine.unload_adapter(name)
        return PlainTextResponse(f"adapter {name} is unloaded")

    def card(name: str, engine: ServeEngine, request: Request) -> dict[str, Any]:
        if "anthropic-version" in request.headers:
            return model_card(name, begun, engine.max_length)
        parent = next(base for base, mine in engines.items() if mine is engine)
        about = {"id": name, "object": "model", "created": begun, "owned_by": "clearhead"}
        return {**about, "max_model_len": engine.max_length, "parent": None if name == parent else parent}

    @app.get("/v1/models")
    async def models(request: Request) -> Any:
        known = served()
        names = [*known]
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        more = ends if "anthropic-version" in request.headers else {}
        return {"object": "list", "data": [card(*entry, request) for entry in known.items()], **more}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Any:
        return card(*engine_of(name), request)

    @app.get("/health")
    async def health() -> Response:
        ill = [name for name, engine in engines.items() if not engine.well]
        return _error(503, f"{', '.join(ill)}: work waits and nothing moves") if ill else Response()

    @app.get("/ready")
    async def ready() -> Response:
        closed = any(engine.closed for engine in engines.values())
        return _error(503, "the server is ending") if closed else Response()

    @app.get("/version")
    async def about() -> Any:
        exact = {name: engine.exact for name, engine in engines.items()}
        return {"version": version("clearhead"), "exact": exact}

    @app.get("/metrics")
    async def figures() -> Response:
        return PlainTextResponse(metrics.text(engines))

    add_audio(app, engine_of, note, waited)
    if page:
        add_page(app, engines, host)
    begun = int(time.time())
    return app


def _in_words(error: RequestValidationError, content_type: str) -> tuple[str, str | None]:
    """Return what is wrong with a body, field by field, and the first such field."""
    lines, fields = [], []
    for mistake in error.errors()[:5]:
        # A field of several kinds is tried as each of them, and the kind stands in the place too.
        names = [str(part) for part in mistake["loc"][1:] if not KIND.match(str(part))]
        field, what = ".".join(names), mistake["msg"]
        if mistake["type"] == "json_invalid":
            field, what = "", f"no JSON: {mistake['ctx']['error']} at character {mistake['loc'][1]}"
        elif not field and "json" not in content_type:
            what = f'of type "{content_type}": send it as Content-Type: application/json'
        if mistake["type"] == "extra_forbidden":
            taken = protocol.no_op_values(field)
            only = " or ".join(map(json.dumps, (None, *(taken or ()))))
            why = "is not a field of this request" if taken is None else f"is not served: {only} is taken"
            lines.append(f'"{field}" {why}')
        else:
            lines.append(f"{field or 'body'}: {what}")
        fields.append(field)
    return "; ".join(dict.fromkeys(lines)), next(iter(fields), None) or None


def _error(status: int, line: str) -> Response:
    return JSONResponse(error_body(InputError(line), status), status)
