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

from torch import Tensor


def count_accepted(draft: Tensor, target_tokens: Tensor, most: Tensor) -> Tensor:
    """Accepted drafted tokens [N] int64: the leading ones that equal the target's own. The bonus token follows them.

    Args:
        draft: [N, W-1] int64, slots 1..W-1.
        target_tokens: [N, W] int64, the target's choice in every row: `sampling.greedy_tokens`, or `noise.draw` from
            `sampling.probabilities`.
        most: [N] int64 in 0..W-1, the drafted tokens that are verified; further slots are ignored.
    """
    return (draft == target_tokens[:, :-1]).long().cumprod(1).sum(1).minimum(most)
