"""Controls for an acceptance figure: the same drafter, its features spoilt. A figure that survives them is no proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from .sequence import Sequence
from .speculator import Speculator


def shuffled(features: Tensor) -> Tensor:
    """The right rows at the wrong positions: acceptance must collapse."""
    return features[torch.randperm(len(features), device=features.device)]


DISTURBANCES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "features shuffled": shuffled,
    "features zeroed": torch.zeros_like,
}
SHIFTS = {"layer ids +1": 1, "layer ids -1": -1}
CONTROLS = (*DISTURBANCES, *SHIFTS)


class ControlSpeculator(Speculator):
    """A Speculator under one of `CONTROLS`; its context is made anew for every draft. Needs a Decoder without reuse."""

    control: str
    kept: dict[int, Tensor]

    @classmethod
    def under(cls, control: str, speculator: Speculator) -> ControlSpeculator:
        """The same drafter and store under a control."""
        made = cls.__new__(cls)
        made.__dict__.update(speculator.__dict__, control=control, kept={})
        return made

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        shift = SHIFTS.get(self.control, 0)
        last = self.target.config.num_layers - 1
        return tuple(min(max(layer + shift, 0), last) for layer in super().target_layer_ids)

    def inject(self, sequences: Many[Sequence]) -> None:
        disturb = DISTURBANCES.get(self.control)
        for sequence in sequences if disturb else ():
            before = [self.kept[sequence.id]] if sequence.id in self.kept else []
            self.kept[sequence.id] = torch.cat([*before, *sequence.features])
            assert disturb is not None
            sequence.features, sequence.injected = [disturb(self.kept[sequence.id])], 0
        super().inject(sequences)
