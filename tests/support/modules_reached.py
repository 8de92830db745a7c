"""Which modules of ours a fresh server process has loaded, and which of them run code, for one streamed request.

python -m tests.support.modules_reached
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dflash_serve.common.processes import free_port

from .caches import own_cache

WIDTH = 4
"""Fixed, so that each step drafts: whether `auto` does is this machine's own measurement."""

SERVER = """
import json, os, signal, sys, threading, time, urllib.error, urllib.request

OURS = ("dflash_serve", "dflash_torch")
called, serving = set(), threading.Event()

def record(frame, event, _):
    if serving.is_set() and event == "call":
        called.add(frame.f_globals.get("__name__", ""))

def ask_once(url):
    while True:
        try:
            urllib.request.urlopen(url + "/ready")
            break
        except OSError:
            time.sleep(0.05)
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 8, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    serving.set()
    answer = urllib.request.urlopen(request).read()
    serving.clear()
    assert answer.endswith(b"data: [DONE]\\n\\n"), answer
    files = {name: module.__file__ for name, module in sys.modules.items() if name.startswith(OURS)}
    print(json.dumps({"files": files, "called": [name for name in called if name in files]}), flush=True)
    signal.raise_signal(signal.SIGTERM)

import torch, transformers  # before calls are recorded, which takes half of the time of an import

url = "http://127.0.0.1:" + os.environ["DFLASH_SERVE_HTTP_PORT"]
threading.Thread(target=ask_once, args=(url,), daemon=True).start()
from dflash_torch.server.__main__ import main
threading.setprofile(record)
sys.setprofile(record)
try:
    main()
finally:
    sys.setprofile(None)
"""


@dataclass(frozen=True)
class ModulesReached:
    """Module names, sorted; an `__init__` that is a docstring alone is not counted."""

    loaded: list[str]
    """In `sys.modules` when the answer is out."""
    called: list[str]
    """Those of them with a function that ran between the request and the end of its answer."""


def modules_reached(target: Path, drafter: Path, scratch: Path) -> ModulesReached:
    """Serves one request in a process of its own.

    Args:
        scratch: a folder for the deployment and the cost table.
    """
    deployment = scratch / "deployment.json"
    models = {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}, "speculation": {"width": WIDTH}}
    deployment.write_text(json.dumps({**models, "limits": {"max_batch_size": 1, "max_model_len": 64}}))
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(own_cache(scratch)),
        "DFLASH_SERVE_HTTP_PORT": str(free_port()),
        "DFLASH_SERVE_HTTP_SERVED_MODEL_NAME": "tiny",
    }
    command = [sys.executable, "-c", SERVER, str(deployment)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    loaded = sorted(name for name, file in seen["files"].items() if file and _has_code(Path(file)))
    return ModulesReached(loaded, sorted(set(seen["called"]) & set(loaded)))


def _has_code(file: Path) -> bool:
    statements = ast.parse(file.read_text(encoding="utf-8")).body
    return any(not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)) for each in statements)


def main() -> None:
    """Prints the names, those with code that ran marked by a star, and both numbers."""
    from tests.support.tiny_target import write_tiny_pair

    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        reached = modules_reached(*write_tiny_pair(folder / "pair"), folder)
    for name in reached.loaded:
        print("*" if name in reached.called else " ", name)
    print(f"loaded: {len(reached.loaded)}, run by the request: {len(reached.called)}")


if __name__ == "__main__":
    main()
