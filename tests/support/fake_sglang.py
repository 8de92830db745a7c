"""An SGLang 0.5.23 server as its clients and its router meet it, over a toy engine.

Its tokens are words, its answers a function of their prompt, and every second token of an answer is an accepted draft.

Chats name token ids `response_token_ids` and stream none (entrypoints/openai/serving_chat.py), completions `token_ids`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from .site import FakeServer

Body = dict[str, Any]
WORDS = ("red", "fox", "sun", "hill", "tree", "rain", "moon", "lake", "bird", "snow", "wind", "leaf", "rock", "wolf")
BLOCK = 4


class FakeSglang(FakeServer):
    """One server.

    Args:
        drafts: it speculates, with our plug-in.
        wrong: a word of its answers is another one.
    """

    def __init__(self, *, drafts: bool, wrong: bool = False) -> None:
        self.drafts, self.wrong = drafts, wrong
        self.cuts = 0  # Streams that will be cut
        self.rejects = False  # Three of four of its drafts that others accept
        self.asked = list[tuple[str, Body]]()  # Requests for answers
        self.requests = self.generated = self.steps = 0

    def reply(self, path: str, body: Any, key: str | None) -> tuple[int, Any]:
        """The response to a request."""
        if body is not None:
            self.asked.append((path, body))
            return 200, self.answer(path, body)
        pages = {
            "/metrics": self.page(),
            "/v1/models": {"object": "list", "data": [{"id": "toy", "owned_by": "sglang", "max_model_len": 256}]},
            "/server_info": {"served_model_name": "toy", "model_path": "toy", "disable_overlap_schedule": True},
            "/model_info": {"model_path": "toy", "is_generation": True},
            "/health": "",
        }
        return (200, pages[path]) if path in pages else (404, "")

    def answer(self, path: str, body: Body) -> Any:
        """The answer to a request, as JSON, or as the text of a stream."""
        chat = "messages" in body
        prompt = " ".join(one["content"] for one in body["messages"]) if chat else body["prompt"]
        text = prompt if isinstance(prompt, str) else "".join(f" {WORDS[token]}" for token in prompt)
        tokens = self._tokens(text, body)
        self._count(len(tokens))
        words, ended = [f" {WORDS[token]}" for token in tokens], "length"
        for stop in body.get("stop") or ():
            if stop in "".join(words):
                words, ended = ["".join(words)[: "".join(words).index(stop)]], "stop"
        choice: Body = {"index": 0, "finish_reason": ended}
        choice |= {"message": {"role": "assistant", "content": "".join(words)}} if chat else {"text": "".join(words)}
        if body.get("return_token_ids") and not (chat and body.get("stream")):
            own = [WORDS.index(word) for word in text.split() if word in WORDS]
            choice |= {"response_token_ids" if chat else "token_ids": tokens, "prompt_token_ids": own or [0]}
        if body.get("logprobs") not in (None, False):
            choice["logprobs"] = logprobs(words, chat=chat)
        usage = {"prompt_tokens": 1, "completion_tokens": len(tokens), "total_tokens": 1 + len(tokens)}
        if not body.get("stream"):
            return {"id": "1", "object": path, "created": 1, "model": "toy", "choices": [choice], "usage": usage}
        return self._stream(choice, usage)

    def page(self, prefix: str = "") -> str:
        """/metrics of now.

        Args:
            prefix: of the names that it shows.
        """
        counts = {"generation_tokens_total": self.generated, "num_requests_total": self.requests}
        counts |= {"spec_verify_calls_total": self.steps} if self.drafts else {}
        families = {f"sglang:{name}": ("gauge", {"": 0}) for name in ("num_running_reqs", "num_queue_reqs")}
        if self.requests:  # SGLang has no counter before its first event
            families |= {f"sglang:{name}": ("counter", {"": count}) for name, count in counts.items()}
        if self.drafts:
            accepted = [self.generated - self.requests - self.steps, 0, 0]
            slots = {f',slot="{slot}"': count for slot, count in enumerate(accepted, start=1)}
            families["dflash_serve:steps_total"] = "counter", {f',width="{BLOCK}"': self.steps}
            families["dflash_serve:slots_offered_total"] = "counter", dict.fromkeys(slots, self.steps)
            families["dflash_serve:slots_accepted_total"] = "counter", slots
        return "".join(
            f"# HELP {name} About it.\n# TYPE {name} {kind}\n"
            + "".join(f'{name}{{model_name="toy"{labels}}} {value}.0\n' for labels, value in series.items())
            for name, (kind, series) in families.items()
            if name.startswith(prefix)
        )

    def _tokens(self, text: str, body: Body) -> list[int]:
        ends, least = set(body.get("stop_token_ids") or ()), body.get("min_tokens") or 0
        tokens = list[int]()
        while len(tokens) < (body.get("max_tokens") or body["max_completion_tokens"]):
            token = crc32(text.encode()) % len(WORDS)
            token = (token + 1) % len(WORDS) if self.wrong and len(tokens) == 5 else token
            text += f" {WORDS[token]}"
            if token in ends and len(tokens) >= least:
                break
            tokens.append(token)
        return tokens

    def _count(self, tokens: int) -> None:
        self.requests += 1
        self.generated += tokens
        # the first token is the prefill's, and a step gains up to two
        self.steps += 7 * tokens // 8 if self.rejects else tokens // 2

    def _stream(self, choice: Body, usage: Body) -> str:
        chat = "message" in choice
        said: Body = {"delta": choice.pop("message")} if chat else {"text": choice.pop("text")}
        last: Body = {"index": 0, "finish_reason": choice["finish_reason"], **({"delta": {}} if chat else {"text": ""})}
        parts = [{**choice, **said, "finish_reason": None}, last]
        common = {"id": "1", "object": "chat.completion.chunk" if chat else "text_completion", "model": "toy"}
        events: list[Body] = [{**common, "choices": [part]} for part in parts]
        events.append({**common, "choices": [], "usage": usage})
        if self.cuts > 0:
            self.cuts -= 1
            return f"data: {json.dumps(events[0])}\n\n"
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def logprobs(words: Sequence[str], *, chat: bool) -> Mapping[str, Any]:
    """Log-probabilities of words, as a chat or a completion has them."""
    tops = [{f" {other}": -0.5 if f" {other}" == word else -4.0 for other in WORDS} for word in words]
    if not chat:
        return {"tokens": list(words), "token_logprobs": [-0.5] * len(words), "top_logprobs": tops}
    named = [[{"token": other, "logprob": value} for other, value in top.items()] for top in tops]
    content = [{"token": word, "logprob": -0.5, "top_logprobs": top} for word, top in zip(words, named, strict=True)]
    return {"content": content}
