"""Streams an answer of the bundled pair and says what speculation was worth: `python examples/generate.py "Why?"`."""

from __future__ import annotations

import sys

from dflash_serve import LLM, SamplingParams


def main() -> None:
    """One streamed answer, then its acceptance."""
    question = sys.argv[1] if len(sys.argv) > 1 else "Ten apples cost 4 dollars. What do 25 apples cost?"
    llm = LLM("smollm2", "smollm2", max_batch_size=1)
    stream = llm.stream([[{"role": "user", "content": question}]], SamplingParams(temperature=0, max_tokens=96))
    for chunk in stream:
        print(chunk.text, end="", flush=True)
    statistics = stream.outputs()[0].statistics
    print(f"\n\nacceptance length {statistics.acceptance_length}, steps by width {statistics.widths}")


if __name__ == "__main__":
    main()
