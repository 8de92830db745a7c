"""Modules of a drafter beyond plain DFlash: grouped convolution and candidate selector (DFlash2), Markov and confidence
head (DSpark).

Equations: DeepSpec `deepspec/modeling/dspark` (arXiv 2607.05147) and z-lab `dflash/model.py` (0.1.0); parameter names
are theirs. Shapes and tensors: `checkpoint.config`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_serve.checkpoint.config import ConfidenceConfig, ConvolutionConfig, MarkovConfig, SelectorConfig


class GroupedConvolution(nn.Module):
    """A causal convolution over the rows of a block before a sublayer, and another one after it.

    Row i, channel c of group G: sum over taps t <= i of (base[t, c] + D[i, t, G]) y[i - t, c], where the coefficients D
    of both convolutions are a projection of the sublayer's input, computed before either. Values before the block's
    start are zero: rows never read another block or the context.
    """

    def __init__(self, config: ConvolutionConfig, hidden_size: int) -> None:
        super().__init__()
        self.taps, self.group_size = config.taps, config.group_size
        self.groups = hidden_size // config.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, config.taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * config.taps * self.groups, bias=False)

    @torch.no_grad()
    def make_idle(self) -> None:
        """Sets the identity, from which training starts."""
        self.base_kernel.zero_()[:, 0] = 1
        self.kernel_projection.weight.zero_()

    def before(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Normed rows x [blocks * rows, H] -> the sublayer's input, and the coefficients for `after`."""
        dynamic = self.kernel_projection(x).view(-1, rows, 2, self.taps, self.groups, 1)
        return self._convolve(x, dynamic[:, :, 0], self.base_kernel[0]), dynamic[:, :, 1]

    def after(self, y: Tensor, dynamic: Tensor) -> Tensor:
        """The sublayer's output y [blocks * rows, H], convolved."""
        return self._convolve(y, dynamic, self.base_kernel[1])

    def _convolve(self, y: Tensor, dynamic: Tensor, base: Tensor) -> Tensor:
        """y [blocks * rows, H], dynamic [blocks, rows, taps, groups, 1], base [taps, H]."""
        blocks, rows = dynamic.shape[:2]
        values = y.view(blocks, rows, self.groups, self.group_size)
        kernel = base.to(y.dtype).view(self.taps, self.groups, self.group_size)
        out = values * (kernel[0] + dynamic[:, :, 0])
        for tap in range(1, min(self.taps, rows)):
            earlier = F.pad(values[:, :-tap], (0, 0, 0, 0, tap, 0))
            out = out + earlier * (kernel[tap] + dynamic[:, :, tap])
        return out.view_as(y)


class MarkovHead(nn.Module):
    """The bias of a slot's logits, a function of the token before it."""

    def __init__(self, config: MarkovConfig, hidden_size: int, vocab_size: int, draft_vocabulary: int) -> None:
        super().__init__()
        self.kind, rank = config.kind, config.rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocabulary, bias=False)
        if config.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if config.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    @torch.no_grad()
    def make_idle(self) -> None:
        """Sets a bias of zero, from which training starts; `markov_w1` and the other matrices keep their values."""
        self.markov_w2.weight.zero_()
        if self.kind == "gated":
            self.gate_proj.bias.zero_()
        if self.kind == "rnn":
            self.joint_proj.bias.zero_()

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The bias [n, Vd] of one slot of n blocks, and the state that the next slot reads (rnn only).

        Args:
            previous: target ids int64 [n] of the slot before.
            hidden: [n, H] of this slot, after the final norm.
            state: [n, rank] from the slot before; None at the first.
        """
        latent, state = self.latent(previous, hidden, state)
        return self.markov_w2(latent), state

    def latent(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The input [n, rank] of `markov_w2`, and the state; arguments as for `forward`."""
        latent = self.markov_w1(previous)
        if self.kind == "gated":
            latent = torch.sigmoid(self.gate_proj(torch.cat([hidden, latent], dim=-1))) * latent
        elif self.kind == "rnn":
            state = torch.zeros_like(latent) if state is None else state
            gate, candidate, output = self.joint_proj(torch.cat([state, latent, hidden], dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state, latent = gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)
        return latent, state


class ConfidenceHead(nn.Module):
    """The probability that a slot is accepted if all slots before it are."""

    def __init__(self, config: ConfidenceConfig, hidden_size: int, markov_rank: int) -> None:
        super().__init__()
        self.with_markov = config.with_markov
        self.proj = nn.Linear(hidden_size + (markov_rank if config.with_markov else 0), 1)

    @torch.no_grad()
    def make_idle(self) -> None:
        """Sets a probability of one half for every slot, from which training starts."""
        self.proj.weight.zero_()
        self.proj.bias.zero_()

    def forward(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """Logits [...] in fp32 from hidden [..., H] and Markov embeddings [..., r] of the tokens before."""
        inputs = hidden if previous is None else torch.cat([hidden, previous.to(hidden.dtype)], dim=-1)
        return F.linear(inputs.float(), self.proj.weight.float(), self.proj.bias.float()).squeeze(-1)


class CandidateSelector(nn.Module):
    """Scores a slot's most probable tokens by how well each follows the token before it."""

    def __init__(self, config: SelectorConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, config.rank))

    def best(self, logits: Tensor, previous: Tensor, hidden: Tensor) -> Tensor:
        """The token ids [n] of one slot, from its logits [n, V] and hidden rows [n, H] after the tokens `previous`."""
        scores, candidates = torch.topk(logits, self.top_k, dim=-1)
        context = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        scores = scores + torch.einsum("nr,nkr->nk", context, self.successor_codebook[candidates])
        return candidates.gather(-1, scores.argmax(dim=-1, keepdim=True))[:, 0]
