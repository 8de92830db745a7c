r"""Exact acceptance rules for drafted tokens, for many requests with ragged widths at once.

A block is [anchor, d_1, ..., d_{W-1}]; row j of the target's pass gives p_j, its distribution of the token after
slot j, so row k-1 judges slot k. The first `a` drafted tokens are accepted and row a gives the bonus token: a+1 tokens
gained.

The rule (Leviathan et al. 2023; Chen et al. 2023), for a draft d that is the drafter's most probable token, a point
mass: accept with probability p(d), otherwise draw from p without d. The output is distributed as p:
    P(d) = p(d);      P(y) = (1 - p(d)) p(y) / (1 - p(d)) = p(y) for y != d;
and by induction over slots, the joint distribution is the target's.

The code draws y from p and accepts if y = d, which is the same: P(y = d) = p(d), and y given y != d is drawn from p
without d. The draw is the one that plain sampling makes at that position. So a request with a seed has not only the
distribution but the tokens that it has without speculation, for any drafter and any width.
"""

import torch
from torch import Tensor

from dflash_serve.speculation.noise import draw


def accept_matching(draft: Tensor, target_tokens: Tensor, widths: Tensor) -> Tensor:
    """The tokens gained, [N, W] int64: the target's own choices up to the first that differs from the draft, then -1.

    Args:
        draft: [N, W-1] int64, slots 1..W-1; slots beyond a request's width are ignored.
        target_tokens: [N, W] int64, the target's choice in every row.
        widths: [N] int64 in 1..W: slots verified; 1 verifies no drafted token.

    Raises:
        ValueError: the shapes disagree.
    """
    rows, slots = target_tokens.shape
    if tuple(draft.shape) != (rows, slots - 1) or tuple(widths.shape) != (rows,):
        raise ValueError(
            f"draft {tuple(draft.shape)}, target {(rows, slots)} rows and widths {tuple(widths.shape)} disagree;"
            " need [N, W-1], [N, W] and [N]"
        )
    slot = torch.arange(slots, device=draft.device)
    right = (draft == target_tokens[:, :-1]) & (slot[1:] < widths[:, None])
    accepted = right.long().cumprod(1).sum(1, keepdim=True)
    return target_tokens.masked_fill(slot > accepted, -1)


def accept_sampled(draft: Tensor, probabilities: Tensor, widths: Tensor, uniforms: Tensor) -> Tensor:
    """`accept_matching` with tokens drawn from the target's distributions; rule and proof: the module's docstring.

    With widths of 1 (and draft [N, 0]) this is plain sampling.

    Args:
        draft, widths: as for `accept_matching`; the drafter's most probable tokens.
        probabilities: [N, W, V] float, the target's distributions (`sampling.probabilities`).
        uniforms: [N, W] float64, the random numbers of this block (`noise.uniforms`).

    Raises:
        ValueError: the shapes disagree.
    """
    return accept_matching(draft, draw(probabilities, uniforms), widths)
