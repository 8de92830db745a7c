"""Randomness as an argument: every random number is a function of (seed, output position).

Output position t is the 0-based index of an output token; row j of a block decides position `first + j`, where `first`
output tokens are committed already. A request thus gets the same numbers for any batch, width and device. A position's
numbers may be read in several steps (when a block is cut short before it), but only the step that commits the position
uses them, so every committed token has fresh ones.
"""

import secrets
from typing import Final

import torch
from torch import Tensor

_CHUNK: Final = 128  # divides the usual vocabulary sizes, so that `draw` seldom pads


def fresh_seed() -> int:
    """A seed for a request without one; it must not change during the request."""
    return secrets.randbits(63)


def uniforms(seeds: Tensor, first: Tensor, rows: int) -> Tensor:
    """Uniform numbers in [0, 1) for one verification, [N, rows] float64, multiples of 2**-53.

    Args:
        seeds: [N] int64 of any value, one per request.
        first: [N] int64, output tokens committed so far.
        rows: W; slot k is decided by row k-1.
    """
    positions = first[:, None] + torch.arange(rows, device=first.device)
    key = _mix(seeds + _signed(_GOLDEN))[:, None]
    return _shift(_mix(key + (positions + 1) * _signed(_GOLDEN)), 11).double() * 2.0**-53


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverting the cumulative distribution: the first token whose cumulative weight exceeds u x total.

    Sums run in float64 over chunks of the vocabulary and then inside the one chunk that was hit, so neither accuracy
    nor memory suffers from a large vocabulary. A token of weight 0 is never drawn.

    Args:
        weights: [..., V] floating, non-negative, of any positive sum; a row without one gives an arbitrary token.
        uniforms: [...] float64 in [0, 1).

    Returns:
        [...] int64 token ids.
    """
    padding = -weights.shape[-1] % _CHUNK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    chunks = weights.reshape(*weights.shape[:-1], -1, _CHUNK)  # [..., C, 128]
    edges = chunks.sum(-1, dtype=torch.float64).cumsum(-1)  # [..., C]
    target = uniforms * edges[..., -1]
    chunk = _first_above(edges, target)
    before = edges.gather(-1, (chunk - 1).clamp(min=0)[..., None])[..., 0].masked_fill(chunk == 0, 0.0)
    hit = chunks.gather(-2, chunk[..., None, None].expand(*chunk.shape, 1, _CHUNK))[..., 0, :]
    inside = _first_above(hit.double().cumsum(-1), target - before)
    return (chunk * _CHUNK + inside).clamp(max=weights.shape[-1] - padding - 1)


def _first_above(edges: Tensor, target: Tensor) -> Tensor:
    """Index of the first edge above the target; if rounding leaves none, the first that reaches the last edge."""
    return torch.minimum((edges <= target[..., None]).sum(-1), (edges < edges[..., -1:]).sum(-1))


# A counter-based generator: the 64-bit finaliser of SplitMix64 (Steele, Lea and Flood, 2014), over the key and again
# over key + counter x golden ratio. int64 arithmetic wraps, which is the modulo 2**64 that it asks for.
_GOLDEN: Final = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift: >> of int64 would repeat the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift(bits, 31)
