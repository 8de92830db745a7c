"""Readiness probe: the engine is ready, and its drafter has accepted a token since the engine started.

Engines do not report a drafter of which no token is accepted, and serve slowly. So the first time that the engine is
ready it gets a prompt that counts, which any drafter can continue, and the result is kept for the life of the
container's process. Standard library only: it runs in every engine's image.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

URL = "http://127.0.0.1:8000"
PROMPT = "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,"
TOKENS = 48
SEEN = Path("/tmp/dflash-serve-accepts")  # noqa: S108 - the pod's own
CHOOSE_A_WIDTH = ("torch", "sglang", "vllm")
"""Engines whose `width: auto` may choose width 1; TensorRT-LLM always drafts whole blocks."""
LATE_SECONDS = 15
"""TensorRT-LLM's counters change some time after an answer has ended."""
COUNTERS = {
    "vllm": ("/metrics", [("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")]),
    "tensorrt-llm": (
        "/prometheus/metrics",
        [
            ("trtllm_spec_decode_drafted_tokens_total", "trtllm_spec_decode_accepted_tokens_total"),
            ("trtllm_spec_decode_num_draft_tokens_total", "trtllm_spec_decode_num_accepted_tokens_total"),
        ],
    ),
}
"""Metrics page, and pairs of counters (drafted, accepted), of engines whose answers do not contain them."""


def main() -> None:
    """Exit code 0 if the server is ready; otherwise one line with the reason."""
    parser = argparse.ArgumentParser()
    for name in ("backend", "ready", "model", "width"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--url", default=URL)
    parser.add_argument("--seen", type=Path, default=SEEN)
    parser.add_argument("--late", type=float, default=LATE_SECONDS)
    given = parser.parse_args()
    try:
        call(given.url + given.ready)
        if seen(given.seen):
            return
        end = time.monotonic() + given.late
        drafted, accepted = ASK[given.backend](given.url, given.model, headers(given.keys))
        while not accepted and given.backend not in CHOOSE_A_WIDTH and time.monotonic() < end:
            time.sleep(0.5)
            drafted, accepted = counted(given.url, given.backend, headers(given.keys))
    except urllib.error.HTTPError as error:
        sys.exit(f"not ready: {error.url} says {error}")
    except (OSError, ValueError, KeyError) as error:  # timeouts are OSErrors
        sys.exit(f"not ready: {type(error).__name__}: {error}")
    if drafted and not accepted:
        sys.exit(f"the drafter accepted none of {drafted} drafted tokens: it does not fit this target")
    if not drafted and not (given.width == "auto" and given.backend in CHOOSE_A_WIDTH):
        sys.exit(f"nothing was drafted, but speculation.width is {given.width}: speculation is silently off")
    given.seen.write_text(process())  # width auto may have chosen, by measured cost, to draft nothing


def call(url: str, body: object = None, headers: dict[str, str] | None = None) -> Any:
    """Sends and returns JSON; a response that is no JSON is returned as bytes."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})  # noqa: S310
    with urllib.request.urlopen(request, timeout=25) as response:  # noqa: S310 - always http://
        text = response.read()
    try:
        return json.loads(text)
    except ValueError:
        return text


def headers(keys: Path | None) -> dict[str, str]:
    """Authorization header with the first key of the file."""
    lines = [line.strip() for line in keys.read_text(encoding="utf-8-sig").splitlines()] if keys else []
    return next(({"Authorization": f"Bearer {line}"} for line in lines if line and not line.startswith("#")), {})


def process() -> str:
    """Start time of the container's process 1, which identifies it: a restarted container is tested again."""
    return Path("/proc/1/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19]


def seen(marker: Path) -> bool:
    """True if this process has accepted a token before."""
    return marker.is_file() and marker.read_text(encoding="utf-8") == process()


def completion(model: str, **more: object) -> dict[str, object]:
    """Body of a request for a completion."""
    return {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, **more}


def ask_torch(url: str, model: str, headers: dict[str, str]) -> tuple[int, int]:
    """Drafted and accepted tokens of one answer, from the answer itself."""
    answer = call(f"{url}/v1/completions", completion(model, acceptance_metrics="summary"), headers)
    figures = answer["metrics"]["speculative_decoding"]
    return figures["num_draft_tokens"], figures["num_accepted_draft_tokens"]


def ask_sglang(url: str, model: str, headers: dict[str, str]) -> tuple[int, int]:
    """Drafted and accepted tokens of one answer, from SGLang's own route."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 0}
    figures = call(f"{url}/generate", {"text": PROMPT, "sampling_params": sampling}, headers)["meta_info"]
    return figures.get("spec_num_proposed_drafts", 0), figures.get("spec_num_correct_drafts", 0)


def ask_tensorrt_llm(url: str, model: str, headers: dict[str, str]) -> tuple[int, int]:
    """Drafted and accepted tokens since the server's start."""
    return asked_and_counted("tensorrt-llm", url, model, headers)


def ask_vllm(url: str, model: str, headers: dict[str, str]) -> tuple[int, int]:
    """Drafted and accepted tokens since the server's start."""
    return asked_and_counted("vllm", url, model, headers)


def asked_and_counted(backend: str, url: str, model: str, headers: dict[str, str]) -> tuple[int, int]:
    """The server's counters; a request of our own is sent only if nothing was accepted yet."""
    before = counted(url, backend, headers)
    if before[1]:
        return before
    call(f"{url}/v1/completions", completion(model), headers)
    return counted(url, backend, headers)


def counted(url: str, backend: str, headers: dict[str, str]) -> tuple[int, int]:
    """Drafted and accepted tokens by the first pair of counters that the engine's Prometheus page has; else 0."""
    path, names = COUNTERS[backend]
    page = call(url + path, headers=headers)
    totals: dict[str, float] = {}
    for line in page.decode().splitlines() if isinstance(page, bytes) else []:
        if line and not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            totals[name] = totals.get(name, 0.0) + float(line.rsplit(" ", 1)[-1])
    drafted, accepted = next((pair for pair in names if pair[0] in totals), names[0])
    return int(totals.get(drafted, 0)), int(totals.get(accepted, 0))


ASK = {"torch": ask_torch, "sglang": ask_sglang, "tensorrt-llm": ask_tensorrt_llm, "vllm": ask_vllm}

if __name__ == "__main__":
    main()
