"""`python -m dflash_torch.server deployment.json`: what `dflash-serve serve` becomes. Settings come by environment."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.deployment import Deployment, describe
from dflash_serve.errors import UserError

from .keys import ApiKeys
from .listen import bind
from .settings import ENV_PREFIX, ServerSettings


def main() -> None:
    """A user's mistake is one line on stderr and exit code 2."""
    try:
        deployment = Deployment.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
        settings = _settings()
        keys, listener = ApiKeys.read(settings.api_key_file), bind(settings.host, settings.port)
        from .run import serve  # after what can be wrong with the settings: this imports torch

        code = serve(deployment, settings, keys, listener)
    except UserError as error:
        print(f"dflash-serve: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def _settings() -> ServerSettings:
    try:
        return ServerSettings()
    except ValidationError as error:
        raise UserError(describe(error), where=f"{ENV_PREFIX}*") from None


if __name__ == "__main__":
    main()
