"""`helm test`: one question over the Service, answered whole or as a stream. Standard library only."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXTS = ("content", "reasoning_content", "reasoning")
"""Keys of an answer's text, and of its reasoning: vLLM calls that `reasoning`."""


def main() -> None:
    """Prints the answer; exit code 1 if there is none."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--stream", action="store_true")
    given = parser.parse_args()
    question = [{"role": "user", "content": "Count from 1 to 10."}]
    body = {"model": given.model, "messages": question, "max_tokens": 32, "stream": given.stream}
    try:
        with urllib.request.urlopen(request(given.url, body, given.keys), timeout=120) as response:  # noqa: S310
            text = "".join(pieces(response)) if given.stream else whole(json.load(response))
    except (OSError, ValueError, KeyError, LookupError) as error:
        sys.exit(f"no answer: {type(error).__name__}: {error}")
    if not text.strip():
        sys.exit("the answer is empty")
    print(text)


def request(url: str, body: object, keys: Path | None) -> urllib.request.Request:
    """A POST with the first key of the file."""
    headers = {"Content-Type": "application/json"}
    for line in keys.read_text(encoding="utf-8-sig").splitlines() if keys else ():
        if line.strip() and not line.startswith("#"):
            headers.setdefault("Authorization", f"Bearer {line.strip()}")
    return urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)  # noqa: S310


def whole(answer: Any) -> str:
    """The answer's text. Reasoning counts: 32 tokens may end within it."""
    message = answer["choices"][0]["message"]
    return str(next(filter(None, map(message.get, TEXTS)), ""))


def pieces(lines: Iterator[bytes]) -> Iterator[str]:
    """The text of each event of a stream.

    Raises:
        LookupError: the stream broke off.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        for choice in json.loads(data)["choices"]:
            yield next(filter(None, map(choice["delta"].get, TEXTS)), "")
    raise LookupError("the stream ended without [DONE]")


if __name__ == "__main__":
    main()
