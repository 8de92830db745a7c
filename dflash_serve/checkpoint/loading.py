"""The drafter that an engine was given: its files are found, and its tensors loaded strictly, in the engine's process.

SGLang's and vLLM's loaders skip tensors that they do not know, and do not look for missing ones: such a server would
start and accept nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dflash_serve.checkpoint.reader import Checkpoint, is_plain, open_checkpoint
from dflash_serve.checkpoint.source import local_folder
from dflash_serve.checkpoint.tensors import parts_of
from dflash_serve.errors import Problem, UserError, refuse

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


def given_checkpoint(folder_or_id: str, revision: str | None, *, block_size: int | None = None) -> Checkpoint | None:
    """The drafter's files; None where they cannot be found, or have a head that we do not know.

    Engines also know ModelScope and object stores; `StrictLoader` checks what they load from them.

    Args:
        block_size: as for `open_checkpoint`.
    """
    try:
        folder = local_folder(folder_or_id, revision)
    except UserError as error:
        logger.warning("dflash-serve: only the names of the drafter's tensors are checked: %s", error)
        return None
    return open_checkpoint(folder, block_size=block_size) if is_plain(folder) else None


@dataclass(frozen=True)
class StrictLoader:
    """Accounts for every tensor and every parameter of a drafter when an engine loads it."""

    spare: tuple[str, ...]
    """Parts of the names of tensors that a drafter may have and the engine does not use."""
    unfilled: tuple[str, ...]
    """Endings of our names of parameters that no tensor need fill."""
    unread: Set[str] = frozenset()
    """Other names of tensors (`tensors.ALIASES`) that the engine does not know, with or without `model.`."""

    @property
    def of_weights_alone(self) -> StrictLoader:
        """A loader for ModelOpt's W4A16_NVFP4, whose products drop their parameter `input_scale` unfilled."""
        return replace(self, unfilled=(*self.unfilled, "input_scale"))

    def load(
        self, load: Callable[[Iterator[tuple[str, Tensor]]], Any], model: Any, weights: Iterable[tuple[str, Tensor]]
    ) -> tuple[Any, frozenset[str]]:
        """Gives what `load` gives for the weights, and their names.

        Raises:
            ValueError: tensors are unknown or missing; the message names all of them.
        """
        names: list[str] = []

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                names.append(name)
                yield name, tensor

        loaded = load(noted())
        refuse(self.problems(names, {name for name, _ in model.named_parameters()}))
        return loaded, frozenset(names)

    def problems(self, names: Iterable[str], parameters: Iterable[str]) -> Iterator[Problem]:
        """One problem for all tensors that no parameter takes, and all parameters that no tensor fills."""
        wanted = [part for parameter in sorted(parameters) for part in parts_of(parameter)]
        known, filled, unknown = set(wanted), set[str](), list[str]()
        for name in names:
            parts = [name] if self.unread & {name, name.removeprefix("model.")} else parts_of(name)
            if known.issuperset(parts):
                filled.update(parts)
            elif not any(spare in name for spare in self.spare):
                unknown.append(name)
        missing = [part for part in wanted if part not in filled and not part.endswith(self.unfilled)]
        found = [f"unknown tensors: {', '.join(sorted(unknown))}"] if unknown else []
        found += [f"missing: {', '.join(missing)}"] if missing else []
        if found:
            do = "`dflash-serve inspect` on the drafter's folder says more"
            yield Problem(f"the drafter does not fit its config.json: {'; '.join(found)}", do=do)
