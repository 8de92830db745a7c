"""API keys from a file, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from dflash_serve.errors import UserError


class ApiKeys:
    """The keys that open the server; none = it is open."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, path: Path | None) -> ApiKeys:
        """One key a line; empty lines and lines that begin with # are skipped.

        Raises:
            UserError: the file cannot be read or has no key.
        """
        if path is None:
            return cls([])
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot be read ({error})", where=str(path), do="give a file with one key a line"
            ) from None
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise UserError("has no key", where=str(path), do="write one key a line, or leave --api-key-file out")
        return cls(keys)

    def owner(self, authorization: str) -> str | None:
        """Whose key it is, None = nobody's. All keys are compared, each in constant time."""
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return f"key {found.index(True)}" if scheme.lower() == "bearer" and any(found) else None
