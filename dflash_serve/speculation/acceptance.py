r"""Exact acceptance rules for drafted tokens, for many requests with ragged widths at once.

A block is [anchor, d_1, ..., d_{W-1}]; row j of the target's pass gives p_j, its distribution of the token after
slot j, so row k-1 judges slot k. The first `a` drafted tokens are accepted and row a gives the bonus token: a+1 tokens
gained.

The rule (Leviathan et al. 2023; Chen et al. 2023), for a token x drafted from q and judged by p:
accept if u < p(x)/q(x), u uniform; otherwise the token is drawn from the residual max(p - q, 0)/Z, with
Z = sum max(p - q, 0).

Why the output is distributed as the target:
    P(accepted and x)  = q(x) min(1, p(x)/q(x)) = min(p(x), q(x));      P(rejected) = 1 - sum min(p, q) = Z;
    P(rejected and x)  = Z max(p(x) - q(x), 0)/Z = max(p(x) - q(x), 0);
    their sum          = min(p, q) + max(p - q, 0) = p(x), given the tokens before; by induction over slots, the joint.

The point mass (a greedy drafter: q is 1 at d): accept with probability p(d), otherwise draw from p without d. This
equals drawing y from p and accepting if y = d: P(y = d) = p(d), and y given y != d is the residual. The code does the
latter, with the draw that plain sampling makes at that position. So a request with a seed has not only the distribution
but the tokens that it has without speculation, for any drafter and any width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_serve.speculation.noise import BlockNoise, draw


@dataclass(frozen=True)
class Acceptance:
    """The result for a batch of blocks. accepted: [N] int64, number of accepted tokens. bonus_token: [N] int64."""

    accepted: Tensor
    bonus_token: Tensor

    @property
    def acceptance_length(self) -> Tensor:
        """[N] int64: tokens gained, with the bonus token."""
        return self.accepted + 1

    def committed(self, draft: Tensor) -> Tensor:
        """[N, W] int64, the tokens gained in order: the accepted ones of draft [N, W-1], the bonus token, then -1."""
        tokens = torch.nn.functional.pad(draft, (0, 1))
        slot = torch.arange(tokens.shape[1], device=draft.device)
        accepted = self.accepted[:, None]
        tokens = torch.where(slot == accepted, self.bonus_token[:, None], tokens)
        return tokens.masked_fill(slot > accepted, -1)


def accept_matching(draft: Tensor, target_tokens: Tensor, widths: Tensor) -> Acceptance:
    """Accept drafted tokens up to the first that differs from the target's own choice.

    Args:
        draft: [N, W-1] int64, slots 1..W-1; slots beyond a request's width are ignored.
        target_tokens: [N, W] int64, the target's choice in every row.
        widths: [N] int64 in 1..W: slots verified; 1 verifies no drafted token.

    Raises:
        ValueError: the shapes disagree.
    """
    _check_shapes(draft, target_tokens.shape[:2], widths)
    accepted = _leading(draft == target_tokens[:, :-1], widths)
    return Acceptance(accepted, target_tokens.gather(1, accepted[:, None])[:, 0])


def accept_sampled(
    draft: Tensor,
    probabilities: Tensor,
    widths: Tensor,
    noise: BlockNoise,
    draft_probabilities: Tensor | None = None,
) -> Acceptance:
    """Acceptance that preserves the target's distribution (rule and proof: the module's docstring).

    With widths of 1 (and draft [N, 0]) this is plain sampling.

    Args:
        draft, widths: as for `accept_matching`.
        probabilities: [N, W, V] float, the target's distributions (`sampling.probabilities`).
        noise: the random numbers of this block (`BlockNoise.of`).
        draft_probabilities: [N, W-1, V] float, the q that each drafted token was sampled from, with noise of
            `NoiseStream.DRAFT`; None if the draft is a point mass (the drafter took its most probable token).

    Raises:
        ValueError: the shapes disagree.
    """
    if draft_probabilities is None:
        return accept_matching(draft, draw(probabilities, noise.draw), widths)
    _check_shapes(draft, probabilities.shape[:2], widths)
    if draft_probabilities.shape != probabilities[:, 1:].shape:
        raise ValueError(f"draft_probabilities: shape {tuple(draft_probabilities.shape)}, need [N, W-1, V]")
    p = probabilities[:, :-1].gather(2, draft.clamp(min=0)[..., None])[..., 0].double()
    q = draft_probabilities.gather(2, draft.clamp(min=0)[..., None])[..., 0].double()
    accepted = _leading(noise.accept * q < p, widths)  # u q < p: no division, and p = 0 is never accepted
    weights = _residual(probabilities, draft_probabilities, accepted, widths)
    return Acceptance(accepted, draw(weights, noise.draw.gather(1, accepted[:, None])[:, 0]))


def _residual(p: Tensor, q: Tensor, accepted: Tensor, widths: Tensor) -> Tensor:
    """[N, V]: max(p - q, 0) of the row after the last accepted slot; p if no token was rejected.

    If p = q up to rounding, no mass is left and the rejection was rounding too: then p.
    """
    request = torch.arange(p.shape[0], device=p.device)
    row = p[request, accepted]
    if q.shape[1] == 0:
        return row
    proposed = q[request, accepted.clamp(max=q.shape[1] - 1)]
    residual = (row - proposed).clamp(min=0)
    none_rejected = accepted >= widths - 1
    return torch.where((none_rejected | (residual.sum(-1) <= 0))[:, None], row, residual)


def _leading(good: Tensor, widths: Tensor) -> Tensor:
    """[N] int64: number of leading true slots of good [N, W-1] inside the width."""
    inside = torch.arange(good.shape[1], device=good.device) < (widths - 1)[:, None]
    return (good & inside).long().cumprod(1).sum(1)


def _check_shapes(draft: Tensor, rows: torch.Size, widths: Tensor) -> None:
    if tuple(draft.shape) != (rows[0], rows[1] - 1) or tuple(widths.shape) != (rows[0],):
        raise ValueError(
            f"draft {tuple(draft.shape)}, target {tuple(rows)} rows and widths {tuple(widths.shape)} disagree;"
            " need [N, W-1], [N, W] and [N]"
        )
