"""`/v1/responses`, OpenAI's Responses API: a chat whose answer is told as items and events.

Responses are kept in memory, for each API key apart, so that one can be continued (`previous_response_id`).
"""

import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from clearhead.errors import InputError, RequestError, refuse
from clearhead.hub.tokens.chat import LEADING
from clearhead.run.serve.answers import ChatChoices, Update
from clearhead.run.serve.blocks import Block, Blocks, Chat, Step, TextLogprobs, event, new_id, whole_of
from clearhead.run.serve.protocol import ChatBody, error_body
from clearhead.run.serve.responses_body import PREFIXES, InputBody, ResponsesBody, plain_items
from clearhead.run.serve.server import OWNER

MOST_KEPT = 1000  # responses of one key; the one that was asked for longest ago goes first
MOST_BYTES = 64_000_000  # of the conversations that are kept for one key, as they were sent
NAMES = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
KINDS = {"content": "message", "reasoning": "reasoning", "call": "function_call"}
ECHOED = {"text", "reasoning", "tool_choice"}  # of a request, in the response
SHOWN = {"type", "name", "description", "parameters", "strict"}  # of a tool, in the response

Items = list[dict[str, Any]]


# What is kept -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A response, and the conversation that it answers."""

    response: dict[str, Any]
    items: Items
    size: int  # in bytes, about

    @property
    def conversation(self) -> Items:
        """Everything that was said, the answer too."""
        return [*self.items, *self.response["output"]]


class Memory:
    """The responses that are kept, by their owner: the API key that they were made with."""

    def __init__(self) -> None:
        self._of: defaultdict[str, OrderedDict[str, Kept]] = defaultdict(OrderedDict)

    def find(self, owner: str, id: str, param: str = "response_id") -> Kept:
        """Return a response; one of another owner is not there."""
        if id not in self._of[owner]:
            line = f'response "{id:.100}" is not here: it was not kept, or not for long'
            code = "not_found" if param == "response_id" else "previous_response_not_found"
            raise RequestError(line, code, 404, param)
        self._of[owner].move_to_end(id)
        return self._of[owner][id]

    def resolved(self, owner: str, items: Items) -> Items:
        """Return items with those of kept responses in the place of references to them."""
        wanted = {item["id"] for item in items if item["type"] == "item_reference"}
        own = (item for kept in self._of[owner].values() for item in kept.conversation) if wanted else ()
        known = {item["id"]: item for item in own if item["id"] in wanted}
        for id in wanted - known.keys():
            line = f'item "{id:.100}" is of no response that is kept: send it whole'
            raise RequestError(line, "not_found", 404, "input")
        return [known[item["id"]] if item["type"] == "item_reference" else item for item in items]

    def keep(self, owner: str, kept: Kept) -> None:
        """Keep a response, and as many of those before it as there is room for."""
        if kept.size > MOST_BYTES:
            return
        own = self._of[owner]
        own[kept.response["id"]] = kept
        size = sum(response.size for response in own.values())
        while len(own) > MOST_KEPT or size > MOST_BYTES:
            size -= own.popitem(last=False)[1].size

    def drop(self, owner: str, id: str) -> None:
        """Drop a response."""
        self.find(owner, id)
        del self._of[owner][id]


# Answers ----------------------------------------------------------------------------------------------------


class Answer:
    """A response as it grows: its items, and the events that tell of them."""

    def __init__(self, body: ResponsesBody, choices: ChatChoices) -> None:
        self.body, self.choices = body, choices
        self.id, self.blocks, self.events = new_id("resp"), Blocks(choices), 0
        self.report = None if body.best is None else TextLogprobs(choices)
        self.logprobs: dict[int, Items] = {}  # of the tokens of each block

    async def whole(self, request: Request) -> dict[str, Any]:
        """Wait for the answer, as long as the client does; return the response."""
        await self.choices.finish(request)
        for _ in self._steps(whole_of(self.choices)):
            pass
        return self._ended()

    async def stream(self, keep: Callable[[dict[str, Any]], None]) -> AsyncIterator[str]:
        """Yield server-sent events, as they come; `keep` is given the response before its last event."""
        try:
            for kind in ("created", "in_progress"):
                yield self._event(f"response.{kind}", response=self._response("in_progress"))
            async for update in self.choices.follow():
                for step, logprobs in self._steps(update):
                    for told in self._told(step, logprobs):
                        yield told
            response = self._ended()
            keep(response)
            yield self._event(f"response.{response['status']}", response=response)
        except Exception as error:
            failed = {"code": "server_error", "message": error_body(error)["error"]["message"]}
            response = self._response("failed", error=failed, output=self._output())
            yield self._event("response.failed", response=response)
        finally:
            self.choices.cancel()

    def _steps(self, update: Update) -> Iterator[tuple[Step, Items]]:
        """Yield what happens to blocks, with the log-probabilities of new tokens."""
        if self.report is not None:
            self.report.read(update)
        for step in self.blocks.add(update):
            text = step.block.name if step.what == "start" else step.text
            told = [] if self.report is None else self.report.of(text)
            if step.block.kind != "content":
                told = []
            self.logprobs.setdefault(step.block.number, []).extend(told)
            if step.what == "stop" and told:  # they were known only now
                yield Step("delta", step.block), told
            yield step, told

    def _told(self, step: Step, new: Items) -> Iterator[str]:
        """Yield the events of what happens to a block; `new`: the log-probabilities of new tokens."""
        block, name, is_call = step.block, NAMES[step.block.kind], step.block.kind == "call"
        item = self._item(block, "in_progress" if step.what != "stop" else None)
        place = {"item_id": item["id"], "output_index": block.number} | (
            {} if is_call else {"content_index": 0}
        )
        logprobs = {"logprobs": new} if block.kind == "content" else {}
        if step.what == "start":
            yield self._event("response.output_item.added", output_index=block.number, item=item)
            if not is_call:
                yield self._event("response.content_part.added", **place, part=self._part(block))
        elif step.what == "delta":
            yield self._event(f"response.{name}.delta", **place, delta=step.text, **logprobs)
        else:
            text = {"arguments" if is_call else "text": block.text}
            logprobs = {"logprobs": self.logprobs[block.number]} if logprobs else {}
            yield self._event(f"response.{name}.done", **place, **text, **logprobs)
            if not is_call:
                yield self._event("response.content_part.done", **place, part=self._part(block))
            yield self._event("response.output_item.done", output_index=block.number, item=item)

    def _event(self, kind: str, **fields: Any) -> str:
        self.events += 1
        return event(kind, sequence_number=self.events - 1, **fields)

    def _output(self) -> Items:
        return [self._item(block) for block in self.blocks.blocks]

    def _ended(self) -> dict[str, Any]:
        cut = self.choices.finish_reason(0) == "length"
        return self._response(
            "incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            output=self._output(),
            usage=self._usage(),
        )

    def _response(self, status: str, **known: Any) -> dict[str, Any]:
        """Return the response as it is now: what was asked, and what is known."""
        body = self.body
        stated = body.model_dump(by_alias=True, exclude_none=True, include=ECHOED)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.choices.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.choices.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | stated.get("reasoning", {}),
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium"} | stated.get("text", {}),
            "tool_choice": stated.get("tool_choice", "auto"),
            "tools": [tool.model_dump(include=SHOWN) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            **self.choices.cited,
            **known,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.choices.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage["total_tokens"],
        }

    def _part(self, block: Block) -> dict[str, Any]:
        """Return the content of an item."""
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self.logprobs.get(block.number, [])
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        """Return a block as an item of the output; one in progress has no content yet."""
        kind = KINDS[block.kind]
        ended = "completed" if block.whole else "incomplete"
        item = {
            "id": f"{PREFIXES[kind]}_{block.id.removeprefix('call_')}",
            "type": kind,
            "status": status or ended,
        }
        if block.kind == "call":
            return {**item, "call_id": block.id, "name": block.name, "arguments": block.text}
        own: dict[str, Any] = {"summary": []} if block.kind == "reasoning" else {"role": "assistant"}
        return {**item, **own, "content": [] if status == "in_progress" else [self._part(block)]}


# Routes -----------------------------------------------------------------------------------------------------


def add_responses(app: FastAPI, chat: Chat) -> None:
    """Add the routes below /v1/responses."""
    memory = Memory()

    def conversation(body: InputBody, owner: str) -> tuple[Items, int]:
        """Return the items that are answered, earlier responses included, and their size."""
        items = memory.resolved(owner, plain_items(body.input or []))
        size, previous = _size(items), body.previous_response_id
        if previous is None:
            return items, size
        before = memory.find(owner, previous, "previous_response_id")
        return before.conversation + items, before.size + size

    async def fitted(body: InputBody, items: Items) -> ChatBody:
        """Return the chat that is answered; without its oldest turns where `truncation` lets them go."""
        template = chat.template(body.model)
        if body.truncation != "auto":
            return body.chat(items, template)
        turns = [n for n, item in enumerate(items) if item.get("role") == "user"] or [0]
        first = [item for item in items[: turns[0]] if item.get("role") in LEADING]
        answer = getattr(body, "max_output_tokens", None)

        def chat_from(turn: int) -> ChatBody:
            return body.chat(first + items[turns[turn] :] if turn else items, template)

        least, last = 0, len(turns) - 1
        while least < last:  # the first that leaves room for the answer, or the shortest
            middle = (least + last) // 2
            tokens, longest = await chat.count(chat_from(middle))
            if tokens + (answer or longest // 4) <= longest:
                last = middle
            else:
                least = middle + 1
        return chat_from(least)

    @app.post("/v1/responses")
    async def create(body: ResponsesBody, request: Request) -> Response:
        owner = _owner(request)
        items, size = conversation(body, owner)
        answer = Answer(body, await chat.begin(await fitted(body, items), request))

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                memory.keep(owner, Kept(response, items, size + _size([response])))

        if body.stream:
            return StreamingResponse(answer.stream(keep), media_type="text/event-stream")
        response = await answer.whole(request)
        keep(response)
        return JSONResponse(response)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(body: InputBody, request: Request) -> Any:
        items, _ = conversation(body, _owner(request))
        tokens, _ = await chat.count(await fitted(body, items))
        return {"object": "response.input_tokens", "input_tokens": tokens}

    @app.get("/v1/responses/{id}")
    async def retrieve(id: str, request: Request, stream: bool = False) -> Any:
        refuse(stream, "stream: a response is kept whole: leave it out")
        return memory.find(_owner(request), id).response

    @app.delete("/v1/responses/{id}")
    async def delete(id: str, request: Request) -> Any:
        memory.drop(_owner(request), id)
        return {"id": id, "object": "response", "deleted": True}

    @app.post("/v1/responses/{id}/cancel")
    async def cancel(id: str, request: Request) -> Any:
        memory.find(_owner(request), id)
        raise InputError(
            "this response has ended: close the connection of one that is being made to cancel it"
        )

    @app.get("/v1/responses/{id}/input_items")
    async def input_items(
        id: str,
        request: Request,
        order: Literal["asc", "desc"] = "desc",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
    ) -> Any:
        items = memory.find(_owner(request), id).items
        items = items if order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        refuse(after is not None and after not in ids, f'after "{after!s:.100}" is no item of this response')
        start = 0 if after is None else ids.index(after) + 1
        data = items[start : start + limit]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        more = start + limit < len(items)
        return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


def _size(items: Items) -> int:
    """Return about how many bytes items take."""
    return sum(len(repr(item)) for item in items)


def _owner(request: Request) -> str:
    """Return whose responses a request may see: those of its key."""
    return str(request.scope.get(OWNER, ""))
