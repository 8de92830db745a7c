"""`python -m dflash_torch.server deployment.json`: what `dflash-serve serve` becomes. Settings come by environment."""

from __future__ import annotations

import sys
from pathlib import Path

from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError

from .settings import ServerSettings


def main() -> None:
    """A user's mistake is one line on stderr and exit code 2."""
    try:
        deployment, settings = Deployment.model_validate_json(Path(sys.argv[1]).read_text()), ServerSettings()
        from .run import serve

        code = serve(deployment, settings)
    except UserError as error:
        print(f"dflash-serve: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
