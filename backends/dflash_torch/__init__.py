"""The embedded backend: PyTorch in this process, and the reference the other engines are held to."""

from .backend import backend

__all__ = ["backend"]
