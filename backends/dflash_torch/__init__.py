"""The embedded backend: PyTorch in this process, and the reference for the other engines."""

from .backend import backend

__all__ = ["backend"]
