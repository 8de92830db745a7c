"""TensorRT-LLM as a backend: checks, configuration, command line, and the drafter it loads as a plug-in."""

from .backend import TensorRTLLMBackend, backend

__all__ = ["TensorRTLLMBackend", "backend"]
