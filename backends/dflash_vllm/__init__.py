"""vLLM as a backend: checks and command line here, and in `plugin` what vLLM's own processes load."""

from .backend import VLLMBackend, backend

__all__ = ["VLLMBackend", "backend"]
