"""vLLM, so far by its metrics alone: `verify`, `doctor` and `bench` read a vLLM server that somebody else started."""

from .backend import backend

__all__ = ["backend"]
