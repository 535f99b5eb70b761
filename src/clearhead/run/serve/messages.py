"""`/v1/messages`, Anthropic's Messages API: a chat whose answer is told as content blocks and events."""

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from clearhead.run.serve.answers import ChatChoices
from clearhead.run.serve.blocks import Block, Blocks, Chat, Step, event, new_id, whole_of
from clearhead.run.serve.messages_body import CountBody, MessagesBody
from clearhead.run.serve.protocol import MESSAGES, error_body

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {  # by the kind of a block: the type of what is new of it, and its field
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class Answer:
    """A message as it grows: its content blocks, and the events that tell of them."""

    def __init__(self, body: MessagesBody, choices: ChatChoices) -> None:
        self.body, self.choices = body, choices
        self.id, self.blocks = new_id("msg"), Blocks(choices)
        self.omits = body.thinking is not None and body.thinking.display == "omitted"

    async def whole(self, request: Request) -> dict[str, Any]:
        """Wait for the answer, as long as the client does; return the message."""
        await self.choices.finish(request)
        for _ in self.blocks.add(whole_of(self.choices)):
            pass
        content = [self._block(block, block.text) for block in self.blocks.blocks]
        return self._message(content) | self._ended() | {"usage": self._usage()}

    async def stream(self) -> AsyncIterator[str]:
        """Yield server-sent events, as they come."""
        try:
            yield event("message_start", message=self._message([]) | {"usage": self._usage()})
            yield event("ping")
            async for update in self.choices.follow():
                for step in self.blocks.add(update):
                    for told in self._told(step):
                        yield told
            yield event("message_delta", delta=self._ended(), usage=self._usage())
            yield event("message_stop")
        except Exception as error:
            yield event("error", error=error_body(error, path=MESSAGES)["error"])
        finally:
            self.choices.cancel()

    def _told(self, step: Step) -> Iterator[str]:
        """Yield the event of what happens to a block."""
        number = step.block.number
        if step.what == "start":
            yield event("content_block_start", index=number, content_block=self._block(step.block, ""))
        elif step.what == "stop":
            yield event("content_block_stop", index=number)
        elif not (self.omits and step.block.kind == "reasoning"):
            kind, name = DELTAS[step.block.kind]
            yield event("content_block_delta", index=number, delta={"type": kind, name: step.text})

    def _block(self, block: Block, text: str) -> dict[str, Any]:
        """Return a content block with so much of its text."""
        if block.kind == "call":
            arguments = block.arguments() if text else {}
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": "" if self.omits else text, "signature": ""}
        return {"type": "text", "text": text}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.choices.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            **self.choices.cited,
        }

    def _ended(self) -> dict[str, Any]:
        """Return why the answer has ended."""
        stream, sequence = self.choices.seqs[0].stream, None
        reason = REASONS[self.choices.finish_reason(0)]
        if reason == "max_tokens" and self.choices.options["max_new_tokens"] < self.body.max_tokens:
            reason = "model_context_window_exceeded"
        stopped = None if stream is None else stream.stopped_by
        if reason == "end_turn" and stopped in (self.body.stop_sequences or ()):
            reason, sequence = "stop_sequence", stopped
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        """Return the tokens: those of the prompt that were cached are counted apart."""
        usage = self.choices.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens")
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            **({"output_tokens_details": {"thinking_tokens": thought}} if thought else {}),
        }


def model_card(name: str, created: int, length: int) -> dict[str, Any]:
    """Return a model as Anthropic's clients read it."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }


def add_messages(app: FastAPI, chat: Chat) -> None:
    """Add the routes below /v1/messages."""

    @app.post("/v1/messages")
    async def create(body: MessagesBody, request: Request) -> Response:
        stop = body.stop_sequences or None
        choices = await chat.begin(body.chat(chat.template(body.model), stop=stop), request)
        answer = Answer(body, choices)
        if body.stream:
            return StreamingResponse(answer.stream(), media_type="text/event-stream")
        return JSONResponse(await answer.whole(request))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> Any:
        tokens, _ = await chat.count(body.chat(chat.template(body.model)))
        return {"input_tokens": tokens}
