"""The router drops `return_token_ids` from chats. Exit code 1: it does; 0: it hands it on.

Needs the sglang-router wheel, no GPU; a worker that only notes what it is asked listens on 127.0.0.1.
"""

import json
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LAUNCH = """import argparse
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser, use_router_prefix=False)
Router.from_args(RouterArgs.from_cli_args(parser.parse_args(), use_router_prefix=False)).start()
"""
asked: list[dict] = []


class Worker(BaseHTTPRequestHandler):
    """An SGLang server, as the router sees it."""

    def do_GET(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if "messages" in body or "prompt" in body:
            asked.append(body)
        models = {"object": "list", "data": [{"id": "toy", "object": "model", "owned_by": "sglang"}]}
        info = {"served_model_name": "toy", "model_path": "toy", "is_generation": True}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}, "text": "hi"}
        answer = {"id": "1", "object": "x", "created": 1, "model": "toy", "choices": [choice]}
        data = json.dumps(models if self.path == "/v1/models" else answer if body else info).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET  # noqa: N815 - the name that http.server calls

    def log_message(self, *_: object) -> None:
        pass


def port() -> int:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    server.server_close()
    return server.server_port


def post(url: str, body: dict) -> None:
    """Asks until the router is ready."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    for _ in range(240):
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30).read()
            return
        except OSError:
            time.sleep(0.25)
    raise TimeoutError(url)


worker = ThreadingHTTPServer(("127.0.0.1", 0), Worker)
threading.Thread(target=worker.serve_forever, daemon=True).start()
own, metrics = port(), port()
words = ["--host", "127.0.0.1", "--port", own, "--prometheus-host", "127.0.0.1", "--prometheus-port", metrics]
words += ["--policy", "round_robin", "--worker-urls", f"http://127.0.0.1:{worker.server_port}"]
router = subprocess.Popen(
    [sys.executable, "-c", LAUNCH, *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
)
try:
    question = {"model": "toy", "max_tokens": 4, "return_token_ids": True}
    post(f"http://127.0.0.1:{own}/v1/completions", {**question, "prompt": "hi"})
    post(f"http://127.0.0.1:{own}/v1/chat/completions", {**question, "messages": [{"role": "user", "content": "hi"}]})
finally:
    router.kill()
    router.wait()
completion, chat = (next(one for one in asked if name in one) for name in ("prompt", "messages"))
assert completion.get("return_token_ids") is True, completion
print("the worker is asked, completion:", sorted(completion), "- chat:", sorted(chat))
if chat.get("return_token_ids") is True:
    print("mended: the worker is told that the client wants token ids")
    sys.exit(0)
print("fault: the client asked for token ids, gets 200 and none")
sys.exit(1)
