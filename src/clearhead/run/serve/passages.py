"""Passages of an index before the prompts of requests: `clearhead serve --retrieve INDEX`."""

import threading
from typing import Any

from clearhead.errors import refuse
from clearhead.labs.retrieval.index import Index
from clearhead.labs.retrieval.passages import before_prompt, cited
from clearhead.learn.tasks.chat import chat_ids
from clearhead.run.serve.answers import DEFAULT_TOKENS
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.protocol import ChatBody, CompletionBody


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
            found += [{"prompt": number, **one} for one in some]
        body.prompt = prompts
        return found

    def _chat(self, engine: ServeEngine, body: ChatBody) -> list[dict[str, Any]]:
        place = max((n for n, one in enumerate(body.messages) if one.get("role") == "user"), default=-1)
        refuse(place < 0, "this server looks for passages by the user's last message, and there is none")

        def messages(text: str) -> list[dict[str, Any]]:
            new = {**body.messages[place], "content": text}
            return [*body.messages[:place], new, *body.messages[place + 1 :]]

        def tokens(text: str) -> int:
            return len(chat_ids(engine.m, messages(text), body.chat_template_kwargs or {}))

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
