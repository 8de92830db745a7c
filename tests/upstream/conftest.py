"""These need the engines' environments, which `make test-upstream` names; elsewhere they are not collected."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("SGLANG_PYTHON") else ["*.py"]
