"""Asks a running `dflash-serve serve`, or any OpenAI-compatible server: `python examples/openai_client.py [URL]`."""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def main() -> None:
    """One streamed chat completion."""
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(
        base_url=base.rstrip("/").removesuffix("/v1") + "/v1", api_key=os.environ.get("DFLASH_SERVE_API_KEY", "none")
    )
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Count from one to ten."}],
        max_tokens=48,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
