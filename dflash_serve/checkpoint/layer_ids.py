"""Which target layers feed a drafter that does not say so itself."""

from __future__ import annotations


def uniform_target_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """`count` 0-based layer ids, uniform between layer 1 and layer N-3: z-lab's `build_target_layer_ids`.

    One id is the middle layer N // 2; otherwise round(1 + i (N - 4) / (count - 1)), rounding half to even (dflash 0.1.0
    `model.py`). A checkpoint's own list always wins: its number of features is independent of the drafter's layers.

    Raises:
        ValueError: count < 1, or a target too shallow for the formula (N < 4; N < 1 for one id).
    """
    if count < 1:
        raise ValueError(f"cannot choose {count} target layers")
    if num_target_layers < (1 if count == 1 else 4):
        raise ValueError(f"a target of {num_target_layers} layers is too shallow to choose {count} layers uniformly")
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))
