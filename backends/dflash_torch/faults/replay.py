"""The decoding loop without the target: drafts are judged by answers that were recorded once.

Speculation changes no token, so the target's greedy answer is the same under every fault, and what is accepted at an
anchor follows from that answer alone. A replay therefore walks the very anchors that the real loop would walk under
the fault and counts the very same acceptances (a test holds the two together), at the cost of the drafter: on two
cores a tenth of a second a step for a dozen prompts, where drafting at every position would compute twice as much
and still have to be walked. The target is run twice in all: through the real loop for the answers, and once over the
finished texts for the features of every layer that a fault asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_serve.models.kv_cache import Span
from dflash_serve.outputs import RequestOutput
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

from ..engine import EmbeddedEngine
from ..evaluation import Evaluation
from ..model_runner import TargetRunner
from ..request import Request
from ..speculator import Speculator
from .fault import Fault

PREFILL_ROWS = 1024


@dataclass(frozen=True)
class Recording:
    """One prompt and its greedy answer, as the target saw them."""

    token_ids: tuple[int, ...]
    """Prompt and answer, and as much behind the end as a block could verify."""
    prompt_length: int
    limit: int
    """Length at which the loop ends at the latest."""
    features: dict[int, Tensor]
    """Outputs [tokens, H] by target layer."""


def record(
    evaluation: Evaluation, outputs: Sequence[RequestOutput], max_tokens: int, layer_ids: Sequence[int]
) -> list[Recording]:
    """Recordings of what `evaluation` has answered greedily, with `max_tokens` at most.

    Args:
        layer_ids: 0-based target layers whose outputs a replay may ask for.
    """
    whole = [output.prompt_token_ids + output.token_ids for output in outputs]
    limits = [len(output.prompt_token_ids) + max_tokens for output in outputs]
    for n, behind in _behind_the_end(evaluation, whole, limits).items():
        whole[n] = whole[n] + behind
    wanted = sorted(set(layer_ids))
    features = [_features(evaluation.engine, token_ids, wanted) for token_ids in whole]
    return [
        Recording(tuple(token_ids), len(output.prompt_token_ids), limit, dict(zip(wanted, rows, strict=True)))
        for token_ids, output, limit, rows in zip(whole, outputs, limits, features, strict=True)
    ]


def _behind_the_end(evaluation: Evaluation, whole: Sequence[list[int]], limits: Sequence[int]) -> dict[int, list[int]]:
    """What the target would say behind an answer that ended early: a last block may reach there."""
    early = [n for n, (ids, limit) in enumerate(zip(whole, limits, strict=True)) if len(ids) < limit]
    params = SamplingParams(temperature=0, max_tokens=evaluation.width, ignore_eos=True)
    found = evaluation.outputs([whole[n] for n in early], params)
    return {early[index]: output.token_ids for index, output in found}


@torch.inference_mode()
def _features(engine: EmbeddedEngine, token_ids: Sequence[int], layer_ids: Sequence[int]) -> Tensor:
    """[layers, tokens, H] of one text, in portions as the loop prefills."""
    target = engine.scheduler.target
    run, portions = TargetRunner(target, target.new_cache(1, len(token_ids)), 1), []
    for start in range(0, len(token_ids), PREFILL_ROWS):
        rows = list(token_ids[start : start + PREFILL_ROWS])
        features = run([rows], [Span(0, start, len(rows))], tuple(layer_ids)).features
        assert features is not None
        portions.append(features)
    return torch.cat(portions).view(len(token_ids), len(layer_ids), -1).transpose(0, 1)


class Replay:
    """Replays recordings with a sound or faulty speculator.

    Args:
        speculator: a sound one; its drafter, target and block size are used, its K/V cache is not.
        recordings: as many as are to run in one batch.
        width: slots verified a step.
    """

    def __init__(self, speculator: Speculator, recordings: Sequence[Recording], width: int) -> None:
        capacity = max(len(recording.token_ids) for recording in recordings)
        self.speculator = Speculator(
            speculator.drafter,
            speculator.target,
            block_size=speculator.block_size,
            max_batch_size=len(recordings),
            capacity=capacity,
        )
        self.recordings, self.width = recordings, width
        self.ends = set(speculator.target.config.eos_token_ids)

    @torch.inference_mode()
    def run(self, fault: Fault | None = None) -> list[AcceptanceStatistics]:
        """The statistics of each recording, as the real loop would count them."""
        speculator = self.speculator if fault is None else fault.change(self.speculator)
        layer_ids = speculator.target_layer_ids
        everything = [self._start(n, recording, layer_ids) for n, recording in enumerate(self.recordings)]
        running = list(everything)
        while running:
            widths = {s.id: min(self.width, s.remaining) for s in running}
            wide = [s for s in running if widths[s.id] > 1]
            drafts = speculator.draft(wide, [widths[s.id] for s in wide]) if wide else []
            drafted = {s.id: draft for s, draft in zip(wide, drafts, strict=True)}
            running = [s for s in running if self._advance(s, drafted.get(s.id, []), layer_ids)]
        return [request.statistics for request in everything]

    def _start(self, index: int, recording: Recording, layer_ids: Sequence[int]) -> Request:
        """As after the prefill: the first token is there, and features of the whole prompt."""
        request = Request(
            id=index,
            entry=index,
            token_ids=list(recording.token_ids[: recording.prompt_length + 1]),
            prompt_length=recording.prompt_length,
            limit=recording.limit,
            params=SamplingParams(temperature=0),
            seed=0,
            statistics=AcceptanceStatistics(),
        )
        self._verified(request, recording.prompt_length, layer_ids)
        return request

    def _advance(self, request: Request, draft: Sequence[int], layer_ids: Sequence[int]) -> bool:
        """One step; whether there will be another."""
        truth = self.recordings[request.id].token_ids[len(request.token_ids) :]
        accepted = next((n for n, token in enumerate(draft) if token != truth[n]), len(draft))
        request.statistics.record(1 + len(draft), accepted)
        gained = truth[: accepted + 1]
        request.token_ids += gained
        self._verified(request, accepted + 1, layer_ids)
        return request.remaining > 0 and not self.ends.intersection(gained)

    def _verified(self, request: Request, rows: int, layer_ids: Sequence[int]) -> None:
        features, start = self.recordings[request.id].features, request.verified
        request.features.append(torch.cat([features[layer][start : start + rows] for layer in layer_ids], dim=-1))
        request.verified += rows
