"""Every kind of drafter in miniature: what `tiny_drafter_config` takes for each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig

CONVOLUTION = {"taps": 2, "group_size": 8}
SELECTOR = {"rank": 6, "top_k": 5}
VANILLA, GATED, RNN = ({"kind": kind, "rank": 6} for kind in ("vanilla", "gated", "rnn"))
SHIFTED = {"slots": "anchor-first"}
HEADS: Mapping[str, Mapping[str, object]] = {
    "plain": {},
    "anchor-first": SHIFTED,
    "reduced vocabulary": {"draft_vocabulary": 40},
    "reduced, anchor-first": {"draft_vocabulary": 40, **SHIFTED},
    "vanilla Markov": {"markov": VANILLA, **SHIFTED},
    "vanilla Markov, fill-in": {"markov": VANILLA},
    "gated Markov": {"markov": GATED, **SHIFTED},
    "rnn Markov": {"markov": RNN, **SHIFTED},
    "Markov and confidence": {"markov": VANILLA, "confidence": {"with_markov": True}, **SHIFTED},
    "Markov, reduced": {"markov": RNN, "draft_vocabulary": 40, **SHIFTED},
    "convolution": {"convolution": CONVOLUTION},
    "three taps": {"convolution": {"taps": 3, "group_size": 4}},
    "DFlash2": {"convolution": CONVOLUTION, "selector": SELECTOR},
}


def make_idle(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with heads that change nothing: biases of zero, identity convolutions, codebooks of zero."""
    idle = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("markov_w2.weight", "kernel_projection.weight", "_codebook")):
            idle[name] = torch.zeros_like(tensor)
        if name.endswith("base_kernel"):
            idle[name] = torch.zeros_like(tensor)
            idle[name][:, 0] = 1
    return idle
