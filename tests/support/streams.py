"""A client of several streams at once: says when the server has them all, and at the end how each ended.

python -m tests.support.streams BODY.json NUMBER
"""

from __future__ import annotations

import json
import re
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx

SERVER = "http://127.0.0.1:8000"
PATIENCE = 300.0
Answer = dict[str, object]


def stream(body: dict[str, object]) -> Answer:
    """One answer: its status, its finish_reason, and whether it ended as streams must."""
    reason, last = None, ""
    request = {"json": {**body, "stream": True}, "timeout": PATIENCE}
    with httpx.stream("POST", f"{SERVER}/v1/completions", **request) as response:  # type: ignore[arg-type]
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                reason = "error" if "error" in event else event["choices"][0]["finish_reason"] or reason
            last = line or last
        return {"status": response.status_code, "reason": reason, "ended": last == "data: [DONE]"}


def admitted() -> int:
    """Requests that run or wait for a slot, as the server counts them."""
    text = httpx.get(f"{SERVER}/metrics", timeout=PATIENCE).text
    return sum(int(float(value)) for value in re.findall(r"^dflash:num_requests_\w+{.*} (\S+)$", text, re.MULTILINE))


def main() -> None:
    body, number = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    with ThreadPoolExecutor(number) as pool:
        answers: list[Future[Answer]] = [pool.submit(stream, body) for _ in range(number)]
        while admitted() + sum(answer.done() for answer in answers) < number:
            time.sleep(0.02)
        print("admitted", flush=True)
        print(json.dumps([answer.result() for answer in answers]), flush=True)


if __name__ == "__main__":
    main()
