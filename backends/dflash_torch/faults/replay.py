"""The doctor's reference: acceptance of a pair in our own loop, sound and under every fault.

Speculation changes no token, so the target's greedy answer is the same under every fault of the drafter, and acceptance
at an anchor follows from that answer alone. A `Replay` walks the anchors that the real loop would walk under the fault
and counts the same acceptances (a test compares the two), at the cost of the drafter only: 0.1 s a step for a dozen
prompts on two cores. The target runs twice in all: through the real loop for the answers, and once over the finished
texts for the features of every layer that a fault asks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from random import Random

import torch
from torch import Tensor

from dflash_serve.answers.engine import Prompt, RequestOutput
from dflash_serve.answers.evaluation import answer_all
from dflash_serve.checkpoint.config import uniform_target_layer_ids
from dflash_serve.doctor.evidence import Prediction, Steps, distance
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import Span
from dflash_serve.models.target import TargetModel
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

from ..engine import EmbeddedEngine
from ..model_runner import TargetRunner
from ..request import Request
from ..speculator import Speculator
from .kinds import DrafterFault, PromptFault, drafter_faults, mask_tokens, prompt_faults, settings

MOST_MASK_TOKENS = 32  # special tokens that are tried as the mask token of a checkpoint
PREFILL_ROWS = 1024  # rows of one target pass over a finished text


class EmbeddedReference:
    """Our own loop over the doctor's prompts; a `dflash_serve.doctor.evidence.Reference`.

    Args:
        engine: the sound engine.
        drafter: the core's own, unfused, so that predictions do not come from the code that serves.
        prompts: text, token ids or messages for the target's own template.
        params: greedy, with `max_tokens`.
        width: slots verified a step, at most.
        steps: the steps of each prompt by width, if widths change; None = every step is `width` wide.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        drafter: Drafter,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        width: int,
        steps: Sequence[Steps] | None = None,
    ) -> None:
        assert engine.block_size is not None
        target = engine.scheduler.target
        self.engine, self.params, self.asked, self.width, self.steps = engine, params, prompts, width, steps
        self.speculator = Speculator(drafter, target, block_size=engine.block_size, max_batch_size=1, capacity=1)
        self.prompts = [engine.tokenize(prompt) for prompt in prompts]

    def faults(self) -> list[DrafterFault | PromptFault]:
        """Every fault of a server that is known, those of the prompt included."""
        return [*drafter_faults(self.speculator), *prompt_faults(self.engine.tokenizer, self.asked, self.prompts)]

    def settings(self) -> list[DrafterFault]:
        """Every fault that another line in the checkpoint's configuration would mend."""
        special = sorted(self.engine.tokenizer.get_added_vocab().values())[:MOST_MASK_TOKENS]
        found = [*settings(self.speculator), *mask_tokens(self.speculator.drafter.config, special)]
        return list({fault.name: fault for fault in found}.values())

    def predict(self, fault: str | None) -> Prediction:
        """The loop's counts and answers under the fault of that name; None = the sound loop."""
        found = None if fault is None else self._by_name[fault]
        if isinstance(found, PromptFault):
            outputs = self._run(found.prompts)
            predicted = _prediction(outputs)
            if self.steps is None:
                return predicted
            replay = self._replay_of(outputs, set(self.speculator.target_layer_ids))
            return replace(predicted, counts=tuple(replay.run()))
        return replace(self.loop(), counts=tuple(self._replay.run(found)))

    def order_errors(self) -> tuple[float, ...] | None:
        """By prompt, the root mean square distance between the sound counts in one order of the widths and others."""
        if self.steps is None:
            return None
        evenly, *others = ([*self._replay.run(order=order)] for order in ORDERS)
        squares = [[distance(*pair) for pair in zip(evenly, other, strict=True)] for other in others]
        return tuple(math.sqrt(sum(each) / len(each)) for each in zip(*squares, strict=True))

    def loop(self) -> Prediction:
        """The real loop without a fault; replays are tested against it."""
        return _prediction(self._outputs)

    @cached_property
    def _by_name(self) -> dict[str, DrafterFault | PromptFault]:
        return {fault.name: fault for fault in (*self.faults(), *self.settings())}

    @cached_property
    def _outputs(self) -> list[RequestOutput]:
        return self._run(self.prompts)

    @cached_property
    def _replay(self) -> Replay:
        depth, ids = self.speculator.target.config.num_layers, self.speculator.target_layer_ids
        layers = {layer + by for layer in ids for by in (-1, 0, 1) if 0 <= layer + by < depth}
        formula = uniform_target_layer_ids(depth, len(ids)) if depth >= 4 else ()
        return self._replay_of(self._outputs, {*layers, *formula})

    def _replay_of(self, outputs: Sequence[RequestOutput], layer_ids: set[int]) -> Replay:
        # of answers of the real loop, with the outputs of some 0-based target layers
        assert self.params.max_tokens is not None
        prompts = [output.prompt_token_ids for output in outputs]
        limits = [len(prompt) + self.params.max_tokens for prompt in prompts]
        texts = self._continued([output.prompt_token_ids + output.token_ids for output in outputs], limits)
        target, layers = self.engine.scheduler.target, sorted(layer_ids)
        recordings = [
            Recording(tuple(text), len(prompt), limit, dict(zip(layers, features(target, text, layers), strict=True)))
            for text, prompt, limit in zip(texts, prompts, limits, strict=True)
        ]
        return Replay(self.speculator, recordings, self.width, self.steps)

    def _continued(self, texts: list[list[int]], limits: Sequence[int]) -> list[list[int]]:
        # Answers that ended early get the target's next tokens, because a last block may reach there.
        early = [n for n, (text, limit) in enumerate(zip(texts, limits, strict=True)) if len(text) < limit]
        params = SamplingParams(temperature=0, max_tokens=self.width, ignore_eos=True)
        for n, output in zip(early, self._run([texts[n] for n in early], params), strict=True):
            texts[n] = texts[n] + output.token_ids
        return texts

    def _run(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[RequestOutput]:
        return answer_all(self.engine.fixed(self.width), prompts, params or self.params)


def _prediction(outputs: Sequence[RequestOutput]) -> Prediction:
    return Prediction(tuple(output.statistics for output in outputs), tuple(output.text for output in outputs))


@dataclass(frozen=True)
class Recording:
    """One prompt and its greedy answer, as the target saw them."""

    token_ids: tuple[int, ...]  # prompt and answer, and as much behind the end as a block could verify
    prompt_length: int
    limit: int  # length at which the loop ends at the latest
    features: dict[int, Tensor]  # outputs [tokens, H] by target layer


@torch.inference_mode()
def features(target: TargetModel, token_ids: Sequence[int], layer_ids: Sequence[int]) -> Tensor:
    """Outputs [layers, tokens, H] of some target layers over one text, in portions as the loop prefills."""
    run, portions = TargetRunner(target, target.new_cache(1, len(token_ids)), 1), []
    for start in range(0, len(token_ids), PREFILL_ROWS):
        rows = list(token_ids[start : start + PREFILL_ROWS])
        portion = run([rows], [Span(0, start, len(rows))], tuple(layer_ids)).features
        assert portion is not None
        portions.append(portion)
    return torch.cat(portions).view(len(token_ids), len(layer_ids), -1).transpose(0, 1)


ORDERS = ("evenly", "wide first", "narrow first", "shuffled")


def in_order(steps: Steps, order: str, *, otherwise: int) -> Iterator[int]:
    """The widths of one prompt's steps in some order, repeated; `otherwise` without steps."""
    places = [((n + 0.5) / count, width) for width, count in steps.items() for n in range(round(count))]
    if order == "shuffled":
        Random(0).shuffle(places)  # noqa: S311 - no secret
    else:
        sign = {"evenly": 0, "wide first": -1, "narrow first": 1}[order]
        places.sort(key=lambda place: (sign * place[1], place))
    return cycle([width for _, width in places] or [otherwise])


class Replay:
    """The decoding loop without the target: drafts of a sound or faulty speculator, verified by recorded answers.

    Args:
        speculator: a sound one; its drafter, target and block size are used, its K/V cache is not.
        recordings: as many as are to run in one batch.
        width: slots verified a step, at most.
        steps: the steps of each recording by width, if widths change.
    """

    def __init__(
        self, speculator: Speculator, recordings: Sequence[Recording], width: int, steps: Sequence[Steps] | None = None
    ) -> None:
        capacity = max(len(recording.token_ids) for recording in recordings)
        self.speculator = Speculator(
            speculator.drafter,
            speculator.target,
            block_size=speculator.block_size,
            max_batch_size=len(recordings),
            capacity=capacity,
        )
        self.recordings, self.width = recordings, width
        self.steps = steps or [{}] * len(recordings)
        self.ends = set(speculator.target.config.eos_token_ids)

    @torch.inference_mode()
    def run(self, fault: DrafterFault | None = None, *, order: str = "evenly") -> list[AcceptanceStatistics]:
        """The statistics of each recording, as the real loop counts them; `order` is the order of changing widths."""
        speculator = self.speculator if fault is None else fault.change(self.speculator)
        layer_ids = speculator.target_layer_ids
        everything = [self._start(n, recording, layer_ids) for n, recording in enumerate(self.recordings)]
        running = [one for one in everything if one.remaining > 0 and one.token_ids[-1] not in self.ends]
        chosen = [in_order(steps, order, otherwise=self.width) for steps in self.steps]
        while running:
            widths = {one.id: min(self.width, next(chosen[one.id]), one.remaining) for one in running}
            wide = [request for request in running if widths[request.id] > 1]
            drafts = speculator.draft(wide, [widths[request.id] for request in wide]) if wide else []
            drafted = {request.id: draft for request, draft in zip(wide, drafts, strict=True)}
            running = [one for one in running if self._advance(one, drafted.get(one.id, []), layer_ids)]
        return [request.statistics for request in everything]

    def _start(self, index: int, recording: Recording, layer_ids: Sequence[int]) -> Request:
        # as after the prefill: with the first token, and features of the whole prompt
        request = Request(
            id=index,
            entry=index,
            token_ids=list(recording.token_ids[: recording.prompt_length + 1]),
            prompt_length=recording.prompt_length,
            limit=recording.limit,
            params=SamplingParams(temperature=0),
        )
        self._verified(request, recording.prompt_length, layer_ids)
        return request

    def _advance(self, request: Request, draft: Sequence[int], layer_ids: Sequence[int]) -> bool:
        # one step; True if another follows
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
