"""Penalties inside a block count the block's own tokens, and afterwards what was gained: as a plain loop would."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_sglang.plugin.penalties import Penalties, _penalised
from dflash_sglang.plugin.refusals import penalties_of

VOCAB, WIDTH, STOP = 11, 4, 10
NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
    "stop_token_ids": None,
}


class Request:
    """As much of SGLang's Req. It is equal to itself only, like that."""

    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=STOP)
    eos_token_ids = frozenset({STOP})
    has_ended = False

    def __init__(self, rid: str, output_ids: list[int], params: dict[str, float]) -> None:
        self.rid, self.output_ids = rid, output_ids
        self.sampling_params = SimpleNamespace(**{**NEUTRAL, **params})

    def finished(self) -> bool:
        return self.has_ended


def request(rid: str, output: list[int], **params: float) -> Any:
    return Request(rid, output, params)


class Information:
    """As much of SGLang's SamplingBatchInfo."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self.acc_additive_penalties = self.acc_scaling_penalties = None

    def __len__(self) -> int:
        return self.requests


def prefilled(penalties: Penalties, requests: list[Any], decoding: int = 0, input_ids: Any = None) -> Information:
    information = Information(len(requests))
    running = requests[len(requests) - decoding :] if decoding else None
    batch = SimpleNamespace(reqs=requests, decoding_reqs=running, sampling_info=information, input_ids=input_ids)
    penalties.at_prefill(batch)
    return information


def plain(logits: torch.Tensor, output: list[int], params: Any) -> torch.Tensor:
    """What a loop that makes one token at a time has for the token after `output`."""
    logits = logits.clone()
    for token in range(VOCAB):
        count = output.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        if token == STOP and len(output) < params.min_new_tokens:
            logits[token] = -torch.inf
        if count:
            scale = params.repetition_penalty
            logits[token] = logits[token] * scale if logits[token] < 0 else logits[token] / scale
    return logits


PENALISED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"min_new_tokens": 6},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "min_new_tokens": 3},
]


def test_a_request_that_decodes_in_a_mixed_batch_counts_its_anchor() -> None:
    penalties, ours = Penalties(VOCAB, "cpu"), request("a", [], presence_penalty=1.0)
    prefilled(penalties, [ours])
    mixed: Any = prefilled(penalties, [request("b", []), ours], decoding=1, input_ids=torch.tensor([1, 2, 7]))
    assert mixed.acc_additive_penalties[1].nonzero().flatten().tolist() == [7]


def test_requests_that_are_gone_are_forgotten_and_others_cost_nothing() -> None:
    penalties, ours = Penalties(VOCAB, "cpu"), request("a", [5, 5], presence_penalty=1.0)
    prefilled(penalties, [request("b", [])])
    assert not penalties.concern([request("b", [])])
    prefilled(penalties, [ours])
    penalties.settle([request("b", [])], torch.zeros(1, 2, dtype=torch.int64), torch.tensor([1]))
    assert not penalties.concern([ours])
    information: Any = prefilled(penalties, [request("c", [3], frequency_penalty=1.0, min_new_tokens=2)])
    expected = torch.zeros(VOCAB).index_fill(0, torch.tensor([3]), -1.0).index_fill(0, torch.tensor([STOP]), -torch.inf)
    assert torch.equal(information.acc_additive_penalties[0], expected), "nothing is left of who had the row before"


def test_the_id_of_a_request_that_was_penalised_may_come_again_without_penalties() -> None:
    penalties, again = Penalties(VOCAB, "cpu"), request("a", [])
    prefilled(penalties, [request("a", [5], presence_penalty=1.0)])
    prefilled(penalties, [again])
    assert not penalties.concern([again])


def test_requests_that_end_with_their_prefill_leave_no_rows_behind() -> None:
    """No step comes after them, where one token is asked for."""
    penalties, decoding = Penalties(VOCAB, "cpu"), request("decoding", [], presence_penalty=1.0)
    prefilled(penalties, [decoding])
    for i in range(40):
        asked = request(str(i), [], presence_penalty=1.0)
        prefilled(penalties, [asked])
        asked.has_ended = True
    assert len(penalties._counts) == 8
    assert penalties.concern([decoding])


def test_a_prefills_token_is_penalised_by_all_that_its_own_request_has_put_out() -> None:
    """After retractions, of more requests than the tables have rows for at first."""
    knobs = {"frequency_penalty": 1.0, "repetition_penalty": 2.0}
    requests = [request(str(i), [i % VOCAB] * (i + 1), **knobs) for i in range(20)]
    information: Any = prefilled(Penalties(VOCAB, "cpu"), [*requests, request("plain", [3])])
    own = torch.cat([torch.eye(VOCAB)[[i % VOCAB for i in range(20)]], torch.zeros(1, VOCAB)])
    assert torch.equal(information.acc_additive_penalties, -torch.arange(1.0, 22)[:, None] * own)
    assert torch.equal(information.acc_scaling_penalties, 1 + own)


@pytest.mark.parametrize("seed", range(8))
def test_every_token_counts_once_in_whatever_order_requests_come_stop_and_come_again(seed: int) -> None:
    """SGLang's order of events with overlap: a result is read after the next launch; a retracted request's is lost.

    Rows of the tables go from one request to the next, and a prefill may come in parts, with steps between.
    """
    luck, penalties = random.Random(seed), Penalties(VOCAB, "cpu")
    torch.manual_seed(seed)
    waiting = [request(str(i), [], **(PENALISED[i % 4] if i % 5 else {})) for i in range(12)]
    running: list[Any] = []
    gaining: dict[str, list[int]] = {}  # tokens of a step whose result is not read yet, the next anchor last
    while waiting or running:
        gone = [one for one in running if luck.random() < 0.15]  # finished, or retracted
        running = [one for one in running if one not in gone]
        joining = [waiting.pop() for _ in range(min(luck.randint(0, 3), len(waiting)))]
        for _ in range(luck.randint(1, 2) if joining else 0):
            information: Any = prefilled(penalties, joining)
            if penalties.concern(running):  # a step between two parts, which gains nothing
                penalties.settle(running, torch.zeros(len(running), 1, dtype=torch.int64), torch.zeros(len(running)))
        if joining:
            information = prefilled(penalties, joining)
        for at, one in enumerate(joining):
            logits = torch.randn(VOCAB)
            expected, found = plain(logits, one.output_ids, one.sampling_params), logits
            if penalties_of(one.sampling_params):
                terms = information.acc_additive_penalties[at], information.acc_scaling_penalties[at]
                found = _penalised(logits, *terms)
            torch.testing.assert_close(found, expected)
            gaining[one.rid] = [luck.randrange(VOCAB - 1)]
        outputs = {one.rid: one.output_ids + gaining[one.rid] for one in running + joining}
        running = luck.sample(running + joining, len(running) + len(joining))
        width = luck.choice([1, WIDTH])
        tokens, gained = torch.randint(0, VOCAB - 1, (len(running), width)), torch.ones(len(running), dtype=torch.int64)
        for at, one in enumerate(running):
            tokens[at, 0], gained[at] = outputs[one.rid][-1], luck.randint(1, width)
        if penalties.concern(running):
            logits = torch.randn(len(running) * width, VOCAB)
            found = logits.clone()
            penalties.constrain(running, found, tokens)
            for row, (at, slot) in enumerate(itertools.product(range(len(running)), range(width))):
                known = outputs[running[at].rid][:-1] + tokens[at, : slot + 1].tolist()
                torch.testing.assert_close(found[row], plain(logits[row], known, running[at].sampling_params))
            penalties.settle(running, tokens, gained)
        for at, one in enumerate(running):  # now the last step's result is read
            one.output_ids[:] = outputs[one.rid]
            gaining[one.rid] = [*tokens[at, 1 : gained[at]].tolist(), luck.randrange(VOCAB - 1)]
        waiting += [one for one in gone if luck.random() < 0.6]


class Kernels(TorchDispatchMode):
    """Counts operators that launch a kernel, and tensors that come from the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sent += "lift_fresh" in str(func) or "_local_scalar_dense" in str(func)
        self.launched += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("requests", [1, 8])
def test_a_step_takes_the_same_few_kernels_at_every_width_and_nothing_from_the_host(requests: int) -> None:
    """On a GPU every operator is a launch, and every tensor from the host waits for the verification."""
    running, penalties = [request(str(i), [], repetition_penalty=1.1) for i in range(requests)], Penalties(VOCAB, "cpu")
    prefilled(penalties, running)
    seen = []
    for width in (4, 4, 16):
        tokens, logits = torch.zeros(requests, width, dtype=torch.int64), torch.randn(requests * width, VOCAB)
        gained = torch.ones(requests, dtype=torch.int64)
        with Kernels() as kernels:
            penalties.constrain(running, logits, tokens)
            penalties.settle(running, tokens, gained)
        seen.append((kernels.launched, kernels.sent))
    assert seen[1] == seen[2]
    assert seen[1][0] <= 50
    assert seen[1][1] == 0
