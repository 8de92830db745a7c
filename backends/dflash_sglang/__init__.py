"""SGLang as a backend: checks, command line, and the plug-in and worker that SGLang loads."""

from .backend import SGLangBackend, backend

__all__ = ["SGLangBackend", "backend"]
