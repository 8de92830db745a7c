"""Routes that answer without the API key. Exit code 1: there are some; 0: there are none.

Needs the vllm wheel, no GPU, no network.
"""

import ast
import asyncio
import hashlib
import secrets
import sys
from glob import glob
from importlib.util import find_spec
from pathlib import Path

import torch
from starlette.datastructures import Headers
from starlette.responses import JSONResponse


def take(file: str, *wanted: str, **given: object) -> dict:
    """Functions, classes and methods (`Class.method`) of a file of the wheel, with what they use of that file.

    The file's imports are left out, since they take a minute and a GPU's libraries; `given` has what is needed of them.
    """
    (root,) = find_spec("vllm").submodule_search_locations
    known = {}
    for node in ast.parse((Path(root) / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            known |= {f"{node.name}.{one.name}": one for one in node.body if hasattr(one, "decorator_list")}
        for target in getattr(node, "targets", [getattr(node, "target", node)]):
            known[getattr(target, "id", getattr(target, "name", None))] = node
    chosen, left = {}, list(wanted)
    while left:
        name = left.pop()
        node = known[name]
        if "." in name:
            node.decorator_list = []
        if name not in chosen:
            chosen[name] = node
            parts = [(one, getattr(one, "annotation", None), getattr(one, "returns", None)) for one in ast.walk(node)]
            hints = {id(name) for _, *hints in parts for hint in hints if hint for name in ast.walk(hint)}
            used = {one.id for one, *_ in parts if isinstance(one, ast.Name) and id(one) not in hints}
            left += sorted(used & known.keys() - given.keys() - chosen.keys())
    future = ast.parse("from __future__ import annotations").body
    body = future + sorted(chosen.values(), key=lambda node: node.lineno)
    names = {"torch": torch, **given}
    exec(compile(ast.Module(body, []), file, "exec"), names)
    return names


guard = take(
    "entrypoints/serve/middleware/authenticate.py",
    "AuthenticationMiddleware",
    hashlib=hashlib,
    secrets=secrets,
    Headers=Headers,
    JSONResponse=JSONResponse,
)["AuthenticationMiddleware"]


def status(path: str, key: str | None) -> int:
    """The status of a POST: 200 where the request gets through to the application."""
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": headers}
    asyncio.run(guard(JSONResponse({}), ["secret"])(scope, None, send))
    return sent[0]["status"]


(root,) = find_spec("vllm").submodule_search_locations
routes = {
    node.args[0].value
    for file in glob(f"{root}/entrypoints/**/*.py", recursive=True)
    for node in ast.walk(ast.parse(Path(file).read_text()))
    if isinstance(node, ast.Call)
    and getattr(node.func, "attr", "") in ("post", "put", "delete")
    and node.args
    and isinstance(node.args[0], ast.Constant)
    and str(node.args[0].value).startswith("/")
}
assert {"/invocations", "/tokenize", "/v1/chat/completions"} <= routes, sorted(routes)
assert {status(route, "secret") for route in routes} == {200}
assert status("/v1/chat/completions", None) == 401
assert status("/health", None) == 200
found = sorted(route for route in routes - {"/ping"} if status(route, None) == 200)
print("POST, PUT and DELETE that get through without a key:", *(found or ["none"]))
if not found:
    print("mended: only /health and the like are open")
    sys.exit(0)
print("fault: a server with --api-key answers these to everyone")
sys.exit(1)
