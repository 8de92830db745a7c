"""These need an environment of their own, which `make test-clients` makes; elsewhere they are not collected."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("CLIENTS_PYTHON") else ["*.py"]
