"""The reference of `doctor`: what this pair accepts in our own loop, sound and under every fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dflash_serve.backend import Prompt
from dflash_serve.checkpoint.config import uniform_target_layer_ids
from dflash_serve.models.drafter import Drafter
from dflash_serve.outputs import RequestOutput
from dflash_serve.proving.doctor.counts import Counts
from dflash_serve.proving.doctor.reference import Prediction
from dflash_serve.speculation.params import SamplingParams

from ..engine import EmbeddedEngine
from ..evaluation import Evaluation
from ..speculator import Speculator
from .catalogue import catalogue, mask_tokens, settings
from .fault import Fault
from .replay import Replay, record

MOST_MASK_TOKENS = 32
"""Special tokens that are tried as the mask token of a checkpoint."""


def unchanged(speculator: Speculator) -> Speculator:
    """For faults that lie in the prompt."""
    return speculator


@dataclass(frozen=True)
class PromptFault(Fault):
    """A fault in what the target is given: its answers differ, so it needs a run of its own."""

    prompts: tuple[tuple[int, ...], ...] = ()


class EmbeddedReference:
    """Our own loop over the doctor's prompts, greedily.

    Args:
        engine: the sound engine.
        drafter: the core's own, unfused: what is predicted does not come from the code that serves.
        prompts: text, token ids or messages for the target's own template.
        width: slots verified a step.
    """

    def __init__(
        self, engine: EmbeddedEngine, drafter: Drafter, prompts: Sequence[Prompt], params: SamplingParams, width: int
    ) -> None:
        assert engine.scheduler.speculator is not None
        self.engine, self.params, self.asked, self.width = engine, params, prompts, width
        self.evaluation = Evaluation(engine, width)
        block_size = engine.scheduler.speculator.block_size
        self.speculator = Speculator(
            drafter, engine.scheduler.target, block_size=block_size, max_batch_size=1, capacity=1
        )
        self.prompts = [engine.tokenize(prompt) for prompt in prompts]

    def loop(self) -> Prediction:
        """The real loop, as it is: the authority."""
        return self._prediction(self.outputs)

    def faults(self) -> list[Fault]:
        """All that is wrong with a server that we can think of, faults of the prompt included."""
        return [*catalogue(self.speculator), *self._prompt_faults()]

    def settings(self) -> list[Fault]:
        """All that another line in the checkpoint's configuration could change."""
        special = sorted(self.engine.tokenizer.get_added_vocab().values())[:MOST_MASK_TOKENS]
        found = [*settings(self.speculator), *mask_tokens(self.speculator.drafter.config, special)]
        return list({fault.name: fault for fault in found}.values())

    def predict(self, fault: Fault | None) -> Prediction:
        """What the loop would count under the fault."""
        if isinstance(fault, PromptFault):
            return self._prediction(self._run(fault.prompts))
        statistics = self._replay.run(fault)
        return replace(self.loop(), counts=tuple(Counts.of(each, self.width) for each in statistics))

    @cached_property
    def outputs(self) -> list[RequestOutput]:
        """The real loop's answers, in order."""
        return self._run(self.prompts)

    def _run(self, prompts: Sequence[Prompt]) -> list[RequestOutput]:
        found = dict(self.evaluation.outputs(prompts, self.params))
        return [found[index] for index in range(len(prompts))]

    def _prediction(self, outputs: Sequence[RequestOutput]) -> Prediction:
        counts = tuple(Counts.of(output.statistics, self.width) for output in outputs)
        return Prediction(counts, tuple(output.text for output in outputs))

    @cached_property
    def _replay(self) -> Replay:
        depth, ids = self.speculator.target.config.num_layers, self.speculator.target_layer_ids
        layers = {layer + by for layer in ids for by in (-1, 0, 1) if 0 <= layer + by < depth}
        formula = uniform_target_layer_ids(depth, len(ids)) if depth >= 4 else ()
        assert self.params.max_tokens is not None
        recordings = record(self.evaluation, self.outputs, self.params.max_tokens, [*layers, *formula])
        return Replay(self.speculator, recordings, self.width)

    def _prompt_faults(self) -> Iterator[Fault]:
        tokenizer = self.engine.tokenizer
        texts = [_bare(prompt) for prompt in self.asked]
        if tokenizer.chat_template and all(text is not None for text in texts):
            bare = tuple(tuple(tokenizer(text)["input_ids"]) for text in texts)
            says = "prompts reach the target without the chat template that the drafter was trained behind"
            yield PromptFault("chat template", "chat template missing", says, unchanged, prompts=bare)
        bos = tokenizer.bos_token_id
        if bos is None:
            return
        has = all(prompt[0] == bos for prompt in self.prompts)
        twice = tuple((bos, *prompt) for prompt in self.prompts)
        name = "BOS doubled" if has else "BOS added"
        yield PromptFault("BOS", name, "template and tokenizer both add it", unchanged, prompts=twice)
        if has:
            without = tuple(tuple(prompt[1:]) for prompt in self.prompts)
            yield PromptFault(
                "BOS", "BOS missing", "neither template nor tokenizer adds it", unchanged, prompts=without
            )


def _bare(prompt: Prompt) -> str | None:
    """Messages without their template; None for what has none."""
    turns = [turn for turn in prompt if isinstance(turn, Mapping)]
    return "\n".join(turn["content"] for turn in turns) if turns else None
