"""An SGLang 0.5.23 server with HiCache and our plug-in, as `verify --warm` meets it, over a toy engine.

K/V of whole prompts lie in a pool of few tokens, the least recently used ones leave it, and a host tier keeps them
(mem_cache/unified_radix_cache.py). `/metrics` has the pool's size and the source of cached tokens
(observability/metrics_collector.py). A request may switch speculation off by `custom_params`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import takewhile
from threading import Lock
from typing import Any
from zlib import crc32

from .fake_sglang import BLOCK, WORDS, logprobs
from .site import FakeServer

Body = dict[str, Any]
Tokens = tuple[int, ...]
POOL, CONTEXT, WRONG = 4096, 256, 3  # Tokens of the pool and of a request; place of a wrong token


class HiCacheFault(StrEnum):
    """Faults of a host tier."""

    tokens = "other tokens after a reload"
    drafter = "the drafter's K/V do not come back (sglang#21125)"
    veto = "nothing comes back where the drafter's K/V are missing (vllm#47890)"
    large = "the pool is larger than its metrics tell"
    small = "the host tier has room for few prompts, and the drafter's K/V do not come back"


class FakeHiCache(FakeServer):
    """One server.

    Args:
        drafts: it speculates.
        tells_pool: its metrics tell the size of the pool.
    """

    def __init__(self, fault: HiCacheFault | None = None, *, drafts: bool = True, tells_pool: bool = True) -> None:
        self.fault, self.drafts, self.tells_pool = fault, drafts, tells_pool
        self.turn = Lock()
        self.pool = 64 * POOL if fault is HiCacheFault.large else POOL
        self.device, self.host = list[Tokens](), set[Tokens]()  # the least recently used prompt first
        self.asked = list[Body]()
        self.steps = self.accepted = self.generated = self.reloaded = 0

    def reply(self, path: str, body: Any, key: str | None) -> tuple[int, Any]:
        """The response to a request."""
        if body is not None:
            with self.turn:
                self.asked.append(body)
                return 200, self.answer(body)
        pages = {
            "/metrics": self.page(),
            "/v1/models": {"data": [{"id": "toy", "owned_by": "sglang", "max_model_len": CONTEXT}]},
            "/server_info": {"disable_overlap_schedule": True},
        }
        return (200, pages[path]) if path in pages else (404, "")

    def answer(self, body: Body) -> Body:
        """The answer to a request."""
        asked = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        prompt = tokens_of(asked) if isinstance(asked, str) else tuple(asked)
        cached, reloaded = self._load(prompt)
        self.reloaded += reloaded
        tokens = self._tokens(prompt, body, wrong=self.fault is HiCacheFault.tokens and reloaded > 0)
        if self.drafts and body.get("custom_params") != {"speculative": "off"}:
            lost = self.fault in (HiCacheFault.drafter, HiCacheFault.small) and reloaded > 0
            self._count(len(tokens), lost=lost)
        words = [f" {WORDS[token]}" for token in tokens]
        choice: Body = {"index": 0, "finish_reason": "length", "token_ids": tokens, "prompt_token_ids": [*prompt]}
        chat = "messages" in body
        choice |= {"message": {"role": "assistant", "content": "".join(words)}} if chat else {"text": "".join(words)}
        if body.get("logprobs") not in (None, False):
            choice["logprobs"] = logprobs(words, chat=chat)
        usage: Body = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}  # with --enable-cache-report
        return {"choices": [choice], "usage": usage}

    def page(self) -> str:
        """/metrics of now."""
        counts = {"sglang:generation_tokens_total": self.generated}
        counts |= {f'dflash_serve:steps_total{{width="{BLOCK}"}}': self.steps}
        counts |= {'dflash_serve:slots_offered_total{slot="1"}': self.steps}
        counts |= {'dflash_serve:slots_accepted_total{slot="1"}': self.accepted}
        counts |= {'sglang:cached_tokens_total{cache_source="host"}': self.reloaded} if self.reloaded else {}
        counts |= {"sglang:max_total_num_tokens": POOL} if self.tells_pool else {}
        return "".join(f"{name} {value}\n" for name, value in counts.items())

    def _load(self, prompt: Tokens) -> tuple[int, int]:
        # cached tokens of a prompt, and those of them that came from the host tier; then the pool has the prompt
        on_device = max((_common(prompt, one) for one in self.device), default=0)
        on_host = max((_common(prompt, one) for one in self.host), default=0)
        reloaded = max(0, on_host - on_device) if self.fault is not HiCacheFault.veto else 0
        self.device = [one for one in self.device if one != prompt] + [prompt]
        while sum(map(len, self.device)) > self.pool:
            gone = self.device.pop(0)
            if self.fault is not HiCacheFault.small or sum(gone) % 8 == 0:
                self.host.add(gone)
        return on_device + reloaded, reloaded

    def _tokens(self, prompt: Tokens, body: Body, *, wrong: bool) -> list[int]:
        answer = list[int]()
        for place in range(body["max_tokens"]):
            token = crc32(bytes((*prompt, *answer))) % len(WORDS)
            answer.append((token + 1) % len(WORDS) if wrong and place == WRONG else token)
        return answer

    def _count(self, tokens: int, *, lost: bool) -> None:
        # The first token is the prefill's. A step gains two of the others, or one where the drafter knows no context.
        accepted = (tokens - 1) // (8 if lost else 2)
        self.generated += tokens
        self.accepted += accepted
        self.steps += tokens - 1 - accepted


def tokens_of(text: str) -> Tokens:
    """Token ids of a text: one a word."""
    return tuple(WORDS.index(word) if word in WORDS else crc32(word.encode()) % len(WORDS) for word in text.split())


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
