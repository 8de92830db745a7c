"""Acceptance gate of a new drafter: measures the acceptance length on fixed questions against a minimum."""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from pathlib import Path

from ask import request, whole

from dflash_serve.client.metrics import read_acceptance
from dflash_serve.errors import UserError

LATE_SECONDS = 15
"""TensorRT-LLM's counters change some time after an answer has ended."""
QUESTIONS = (
    "Write a Python function that merges two sorted lists, and explain it.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Show your steps.",
    "Translate into German: The meeting was moved to Thursday because half of the team is travelling.",
    "Summarise how a bill becomes law in the United States in five sentences.",
    "Write a SQL query for the ten customers with the highest revenue of last year.",
    "Explain to a student why the sky is blue.",
    "List the planets of the solar system with their diameters as a Markdown table.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
)


def main() -> None:
    """Prints the acceptance length; exit code 1 if it is below the minimum or unknown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--at-least", type=float, required=True)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    try:
        length = acceptance_length(given.url, given.model, given.keys, given.tokens)
    except (UserError, OSError, ValueError, LookupError) as error:
        sys.exit(f"no acceptance: {type(error).__name__}: {error}")
    if length is None:
        sys.exit("no acceptance: the server verified nothing, or has no counters of it")
    print(f"{length:.2f} tokens per verification; the minimum is {given.at_least:.2f}")
    sys.exit(length < given.at_least)


def acceptance_length(url: str, model: str, keys: Path | None, tokens: int) -> float | None:
    """Tokens per verification, the bonus token counted, over all requests that the server answered meanwhile."""
    key = (
        next(
            (line.strip() for line in keys.read_text(encoding="utf-8-sig").splitlines() if line and line[0] != "#"),
            None,
        )
        if keys
        else None
    )
    before = read_acceptance(url, api_key=key)
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}
        with urllib.request.urlopen(request(url, body, keys), timeout=300) as response:  # noqa: S310 - always http://
            whole(json.load(response))
    end = time.monotonic() + LATE_SECONDS
    while (gained := read_acceptance(url, api_key=key).since(before)).verifications in (0, None):
        if time.monotonic() > end:
            break
        time.sleep(1)
    return gained.acceptance_length


if __name__ == "__main__":
    main()
