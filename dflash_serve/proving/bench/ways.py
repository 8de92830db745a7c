"""The ways of serving that are compared: one deployment at several widths, or servers that run already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError

OFF, FIXED, AUTO = "off", "fixed", "auto"


@dataclass(frozen=True)
class Way:
    """One line of the plot."""

    name: str
    url: str | None = None
    """Of a server that runs already; None = it is started from `deployment`."""
    deployment: Deployment | None = None

    @property
    def slug(self) -> str:
        """The name as a file's."""
        return "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in self.name)


def ways_of(deployment: Deployment, asked: Sequence[str]) -> list[Way]:
    """The deployment at each width that was asked for.

    Args:
        deployment: with a drafter, if any way is to speculate.
        asked: `off`, `fixed` (the whole block), `auto`, or numbers of slots, the anchor counted.

    Raises:
        UserError: an unknown word, or speculation without a drafter.
    """
    found: dict[str, Way] = {}
    for word in asked:
        if word != OFF and deployment.drafter is None:
            raise UserError("there is no drafter", where=f"--ways {word}", do="give one, or --ways off")
        width = _width(deployment, word)
        name = f"{FIXED} {width}" if isinstance(width, int) else width
        speculation = deployment.speculation.model_copy(update={"width": width})
        found[name] = Way(name, deployment=deployment.model_copy(update={"speculation": speculation}))
    return list(found.values())


def endpoint_ways(asked: Sequence[str]) -> list[Way]:
    """`name=http://host:port` of servers that run.

    Raises:
        UserError: not of that form, or a name given twice.
    """
    found: dict[str, Way] = {}
    for text in asked:
        name, _, url = text.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise UserError("not NAME=http://host:port", where=f"--endpoint {text}")
        if name in found:
            raise UserError("its name is given twice", where=f"--endpoint {text}")
        found[name] = Way(name, url=url.rstrip("/").removesuffix("/v1"))
    return list(found.values())


def _width(deployment: Deployment, word: str) -> int | str:
    if word in (OFF, AUTO):
        return word
    if word == FIXED:
        return _block_size(deployment)
    if word.isdecimal() and int(word) >= 1:
        return int(word)
    raise UserError(f"{word!r} is no way of serving", where="--ways", do="use off, fixed, auto or a number of slots")


def _block_size(deployment: Deployment) -> int:
    if deployment.speculation.block_size is not None:
        return deployment.speculation.block_size
    from dflash_serve.checkpoint.reader import read_config

    assert deployment.drafter is not None
    config, _ = read_config(deployment.drafter.model, deployment.drafter.revision)
    return config.block_size
