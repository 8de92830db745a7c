"""An endpoint picker of the Gateway API inference extension: `python fake_endpoint_picker.py PORT WORKER...`.

The real one is a Go program in a cluster. This one speaks its protocol (version 1.0.0 of proposal 004, Envoy's
external processing in full duplex) and treats requests as `pkg/epp/handlers` and `pkg/epp/util/request/body.go` do: it
reads a body whole, refuses one without `model` and without a text as `prompt` or `messages`, writes the JSON anew as Go
does (integers are floats meanwhile, keys are sorted), and sends a request without a body to any worker. It also holds
an answer that is no stream until its end, and marks every answer with a header. Unlike the real one it picks in turn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as service

DESTINATION = "x-gateway-destination-endpoint"
MARK = "x-went-into-resp-headers"
MOST_BYTES = 62000  # of a message of a body
USERS = 64


class BadRequestError(Exception):
    """A request that the picker refuses with HTTP 400."""


class Picker:
    """One call is one request: its messages and those of its response."""

    def __init__(self, workers: list[str]) -> None:
        self.workers = cycle(workers)

    def Process(self, messages: Iterator[Any], context: Any) -> Iterator[Any]:
        """The response to each message, or an HTTP error that ends the request."""
        try:
            yield from self._answers(messages)
        except BadRequestError as error:
            refused = pb.ProcessingResponse()
            refused.immediate_response.status.code = 400
            refused.immediate_response.body = f"inference gateway: BadRequest - {error}".encode()
            yield refused

    def _answers(self, messages: Iterator[Any]) -> Iterator[Any]:
        path, body, streams = "", b"", False
        for message in messages:
            match message.WhichOneof("request"):
                case "request_headers":
                    path = _headers(message.request_headers).get(":path", "")
                    if message.request_headers.end_of_stream:
                        yield self._picked(0)
                case "request_body":
                    body += message.request_body.body
                    if message.request_body.end_of_stream:
                        body = _checked(path, body)
                        yield self._picked(len(body))
                        yield from _sent("request_body", body, end=True)
                        body = b""
                case "response_headers":
                    streams = "text/event-stream" in _headers(message.response_headers).get("content-type", "")
                    marked = pb.ProcessingResponse()
                    _set(marked.response_headers.response.header_mutation, MARK, "true")
                    yield marked
                case "response_body":
                    body += message.response_body.body
                    end = message.response_body.end_of_stream
                    if streams or end:
                        yield from _sent("response_body", body, end=end)
                        body = b""

    def _picked(self, length: int) -> Any:
        # The answer to a request's headers: its worker, as a header and as metadata.
        worker, picked = next(self.workers), pb.ProcessingResponse()
        mutation = picked.request_headers.response.header_mutation
        picked.request_headers.response.clear_route_cache = True
        _set(mutation, DESTINATION, worker)
        if length:
            _set(mutation, "Content-Length", str(length))
        picked.dynamic_metadata.update({"envoy.lb": {DESTINATION: worker}})
        return picked


def _checked(path: str, body: bytes) -> bytes:
    try:
        asked = json.loads(body, parse_int=lambda digits: int(float(digits)))
    except ValueError:
        raise BadRequestError("Error unmarshaling request body") from None
    if not isinstance(asked, dict) or not isinstance(asked.get("model"), str):
        raise BadRequestError("model not found in request body")
    if "/v1/chat/completions" in path:
        if not isinstance(asked.get("messages"), list) or not asked["messages"]:
            raise BadRequestError("invalid chat completions request: must have valid messages field")
    elif not isinstance(asked.get("prompt"), str) or not asked["prompt"]:
        raise BadRequestError("invalid completions request: must have prompt field")
    return json.dumps(asked, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _headers(message: Any) -> dict[str, str]:
    return {one.key: one.raw_value.decode(errors="replace") or one.value for one in message.headers.headers}


def _set(mutation: Any, key: str, value: str) -> None:
    mutation.set_headers.add(header={"key": key, "raw_value": value.encode()})


def _sent(kind: str, body: bytes, *, end: bool) -> Iterator[Any]:
    for start in range(0, max(1, len(body)), MOST_BYTES):
        message = pb.ProcessingResponse()
        part = getattr(message, kind).response.body_mutation.streamed_response
        part.body = body[start : start + MOST_BYTES]
        part.end_of_stream = end and start + MOST_BYTES >= len(body)
        yield message


if __name__ == "__main__":
    server = grpc.server(ThreadPoolExecutor(USERS))
    service.add_ExternalProcessorServicer_to_server(Picker(sys.argv[2:]), server)
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    server.wait_for_termination()
