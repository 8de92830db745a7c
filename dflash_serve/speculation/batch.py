"""The sampling parameters of a batch, as tensors on the device, with the switches read once on the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_serve.speculation.params import SamplingParams


@dataclass(frozen=True)
class SamplingBatch:
    """Parameters of N requests. Build it with `of`, anew whenever the batch changes, not at every step.

    The `*_requests` hold the indices of the requests that use an option: an unused option costs nothing, an option of
    one request costs the others nothing, and no step waits for the device to look them up.

    Shapes: temperature, top_p, top_k, min_p and the penalties [N]; bias_* [M], one entry per (request, token).
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    bias_request: Tensor
    bias_token: Tensor
    bias_value: Tensor
    greedy_requests: Tensor
    top_p_requests: Tensor
    top_k_requests: Tensor
    min_p_requests: Tensor
    largest_top_k: int
    penalised: bool

    @property
    def size(self) -> int:
        return self.temperature.shape[0]

    @property
    def all_greedy(self) -> bool:
        return self.greedy_requests.shape[0] == self.size

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str | None = None
    ) -> "SamplingBatch":
        """Collate the parameters of N requests.

        Raises:
            ValueError: a `logit_bias` names a token that the target's vocabulary does not have.
        """
        bias = [(i, token, value) for i, p in enumerate(params) for token, value in p.logit_bias.items()]
        for _, token, _ in bias:
            if token >= vocab_size:
                raise ValueError(f"logit_bias: token id {token} is not in the vocabulary; use 0 to {vocab_size - 1}")

        def floats(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def where(wanted: Callable[[SamplingParams], bool]) -> Tensor:
            return ints([i for i, p in enumerate(params) if wanted(p)])

        return cls(
            temperature=floats([p.temperature for p in params]),
            top_p=floats([p.top_p for p in params]),
            top_k=ints([min(p.top_k, vocab_size) for p in params]),
            min_p=floats([p.min_p for p in params]),
            repetition_penalty=floats([p.repetition_penalty for p in params]),
            presence_penalty=floats([p.presence_penalty for p in params]),
            frequency_penalty=floats([p.frequency_penalty for p in params]),
            bias_request=ints([request for request, _, _ in bias]),
            bias_token=ints([token for _, token, _ in bias]),
            bias_value=floats([value for _, _, value in bias]),
            greedy_requests=where(lambda p: p.greedy),
            top_p_requests=where(lambda p: p.top_p < 1 and not p.greedy),
            top_k_requests=where(lambda p: p.top_k > 0 and not p.greedy),
            min_p_requests=where(lambda p: p.min_p > 0 and not p.greedy),
            largest_top_k=max((min(p.top_k, vocab_size) for p in params if not p.greedy), default=0),
            penalised=any(p.penalised for p in params),
        )
