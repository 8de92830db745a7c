"""These need tools beside Python's, which `make test-deploy` gets; elsewhere they are not collected."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("DFLASH_SERVE_TEST_DEPLOY") else ["test_*.py"]
