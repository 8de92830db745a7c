"""SGLang as a backend: checks and command line here, and in `plugin` what SGLang's own process loads."""

from .backend import SGLangBackend, backend

__all__ = ["SGLangBackend", "backend"]
