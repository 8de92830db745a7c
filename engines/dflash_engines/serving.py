"""What to serve after a build: a Deployment for every quantised drafter, ready for `dflash-serve serve`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from dflash_serve.deployment import Deployment

from .recipe import Recipe
from .sources import Source


def write_deployments(recipe: Recipe, sources: Mapping[str, Source], output: Path) -> list[Path]:
    """Writes OUTPUT/serve-<format>.yaml for each; the target stays the recipe's own, a bundled one by its folder."""
    written = []
    for format in recipe.build.drafter:
        fields = recipe.deployment.model_dump(mode="json", exclude_unset=True)
        fields["drafter"] = {"model": str(output / f"drafter-{format}"), "quantization": format}
        if "target" in sources and "/" not in recipe.deployment.target.model:
            fields["target"]["model"] = str(sources["target"].folder)
        path = output / f"serve-{format}.yaml"
        scratch = path.with_name(f".{path.name}.new")
        scratch.write_text(
            yaml.safe_dump(Deployment.model_validate(fields).model_dump(mode="json", exclude_unset=True))
        )
        scratch.replace(path)
        written.append(path)
    return written
