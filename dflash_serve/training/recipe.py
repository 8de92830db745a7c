"""The recipe: everything that a training run depends on, with all defaults, read from YAML."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

from dflash_serve.checkpoint.config import ConfidenceConfig, ConvolutionConfig, MarkovConfig, Slots
from dflash_serve.common.documents import read_recipe_file
from dflash_serve.common.settings import Frozen, PositiveInt, describe
from dflash_serve.errors import UserError

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


GONE = {
    "data.texts": "is gone: train on the target's own answers; give more prompts instead",
    "data.answers.slots": "is called `max_batch_size` now",
    "data.answers.keep_features": "is gone: features are computed while training; leave it out",
    "training.soft_loss": "is gone: `soft_labels` is the share of `tv`; leave it out",
    "training.ema": "is gone: the best held-out step is written; leave it out",
    "training.feature_cache_gib": "is gone: features are computed while training; leave it out",
}
"""Keys of earlier versions, and what replaces them."""


class TargetSection(Frozen):
    """The model to draft for. It writes the data, lends its embedding and head, and stays frozen."""

    model: str
    revision: str | None = None
    chat_template_kwargs: dict[str, JsonValue] = Field(default={}, exclude_if=operator.not_)
    """Variables of its chat template, such as `enable_thinking`, for all prompts."""


class FilePrompts(Frozen):
    """User turns from a JSONL file, one {"prompt": text} a line; ${NAME} in the path is taken from the environment."""

    kind: Literal["file"]
    name: str
    path: Path
    count: PositiveInt | None = None
    templates: Annotated[tuple[str, ...], Field(min_length=1)] = ("{prompt}",)
    """Each prompt is put into one of these at {prompt}, in turn."""


class DatasetPrompts(Frozen):
    """User turns from a Hugging Face dataset (needs the `datasets` package); of a conversation, the first."""

    kind: Literal["dataset"]
    name: str
    dataset: str
    subset: str | None = None
    split: str = "train"
    column: str | None = None
    """None = the first column with a usual name for prompts."""
    count: PositiveInt | None = None
    templates: Annotated[tuple[str, ...], Field(min_length=1)] = ("{prompt}",)


class SynthesisedPrompts(Frozen):
    """User turns the target makes up itself: sampled after the chat template's user prefix and an opener, in turn."""

    kind: Literal["synthesised"]
    name: str
    count: PositiveInt
    openers: Annotated[tuple[str, ...], Field(min_length=1)] = ("",)
    temperature: Positive = 0.8
    max_new_tokens: PositiveInt = 80


class ConversationPrompts(Frozen):
    """Conversations from a JSONL file, each up to a user's turn: {"messages": [...]} a line.

    A line may have variables of its own in `chat_template_kwargs`.
    """

    kind: Literal["conversations"]
    name: str
    path: Path
    count: PositiveInt | None = None


Prompts = Annotated[
    FilePrompts | ConversationPrompts | DatasetPrompts | SynthesisedPrompts, Field(discriminator="kind")
]


class AnswersSection(Frozen):
    """Lengths, sampling and storage of the target's answers."""

    max_prompt_tokens: PositiveInt = 224
    max_new_tokens: PositiveInt = 256
    max_batch_size: PositiveInt = 64
    """Prompts answered at once."""
    server: str | None = Field(default=None, exclude_if=operator.not_)
    """URL of a running server of the target that returns token ids (vLLM, SGLang, ours); None = the embedded engine."""
    sampled_share: Share = 0.15
    """This share of the prompts is answered by sampling at `temperature`, the rest greedily."""
    temperature: Positive = 0.7
    max_minutes: Positive | None = None
    """Time for prompts that the target makes up and for answers, without that of loading it; None = no limit."""
    shard_size: PositiveInt = 256


class DataSection(Frozen):
    """Prompts, and the target's answers to them."""

    prompts: Annotated[tuple[Prompts, ...], Field(min_length=1)]
    exclude: tuple[str, ...] = ()
    """Prompts that must never be trained on, e.g. those of an evaluation: JSONL files, or `humaneval`. A user turn that
    shares 13 words in a row with one of them is left out and counted."""
    answers: AnswersSection = AnswersSection()
    validation_share: Share = 0.015


class DrafterSection(Frozen):
    """The drafter's shape and first weights; sizes, RoPE and norms follow the target."""

    num_layers: PositiveInt = 3
    intermediate_size: PositiveInt | None = Field(default=None, exclude_if=operator.not_)
    """Hidden units of each MLP; None = the target's `intermediate_size`. Give it for a mixture of experts, whose
    config.json has the size of one expert there."""
    block_size: Annotated[int, Field(ge=2)] = 8
    mask_token_id: Annotated[int, Field(ge=0)]
    target_layer_ids: tuple[int, ...] | None = None
    """0-based; None = `num_features` layers by z-lab's formula."""
    num_features: PositiveInt = 5
    convolution: ConvolutionConfig | None = None
    """Convolutions over the rows of a block in every layer, as in DFlash2; they begin as the identity. Two taps gave a
    small drafter most of DFlash2's gain (verl-SpeCo #62). None = plain DFlash."""
    slots: Slots = "fill-in"
    """The row of a block that predicts a slot; most DSpark drafters are anchor-first. A given drafter keeps its own."""
    markov: MarkovConfig | None = None
    """A Markov head, as in DSpark; it begins without a bias."""
    confidence: ConfidenceConfig | None = None
    """A confidence head, as in DSpark; it begins as one half. `training.soft_labels` decides what it learns."""
    init: str = "target"
    """First weights: `target` (its last layers), `random`, or a drafter to go on from, by folder or hub id. A drafter
    without convolutions or heads, such as a plain backbone, is given those of the recipe, fresh."""


class ShortBlocks(Frozen):
    """Blocks of fewer slots for the first part of the budget, which cost fewer rows.

    The last slots learn little while the first are still wrong.
    """

    block_size: Annotated[int, Field(ge=2)]
    until: Share
    """Share of the budget."""


class TrainingSection(Frozen):
    """The optimisation. One of `steps` and `minutes` is the budget; the learning rate follows it."""

    steps: PositiveInt | None = None
    minutes: Positive | None = None
    sequences: PositiveInt = 8
    """Sequences in a step."""
    anchors: PositiveInt = 64
    """Anchors a sequence, drawn anew every epoch."""
    short_blocks: ShortBlocks | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 1e-3
    final_lr: Share = 0.01
    """The learning rate's end, as a share of its peak."""
    warmup: Share = 0.04
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: Positive = 1.0
    weighting: Literal["dpace", "exponential"] = "dpace"
    dpace_alpha: Share = 0.5
    decay_gamma: Positive = 4.0
    soft_labels: Share = 0.0
    """Share of the loss that is the distance of the drafter's distribution q from the target's p, sum |q - p|; the rest
    is the cross-entropy of the answer's tokens (DSpark: 0.9). Costs the target's last layers and another product with
    its head. A confidence head then learns the probability that a sampled draft is accepted, 1 - sum |q - p| / 2, as
    DSpark's does; without soft labels it learns if the likeliest token is the answer's."""
    heads_only: bool = Field(default=False, exclude_if=operator.not_)
    """Train Markov and confidence head alone: the other weights stay those of the drafter that the training begins
    with."""
    confidence_weight: Positive = 1.0
    """Weight of the confidence head's loss relative to that of the slots."""
    reduced_vocabulary: bool = False
    """Softmax over the tokens seen in the data only, which is far cheaper. The drafter's vocabulary stays whole; the
    list of tokens that it learnt to predict is written beside it (`models.drafter`)."""
    seen_at_least: PositiveInt = 1
    """A reduced vocabulary leaves out tokens that occur fewer times in the data: they are neither predicted nor learnt
    to be avoided."""
    bf16: bool = True
    """Compute in bf16 over fp32 weights; never fp16, features reach 25,000."""
    checkpoint_minutes: Positive = 5.0
    validate_every: PositiveInt = 200
    log_every: PositiveInt = 20

    @model_validator(mode="after")
    def _is_consistent(self) -> TrainingSection:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("give exactly one budget, steps or minutes")
        if self.seen_at_least > 1 and not self.reduced_vocabulary:
            raise ValueError(f"seen_at_least: {self.seen_at_least} needs reduced_vocabulary: true")
        return self


class TrainingRecipe(Frozen):
    """A training run: target, data, drafter, training, seed."""

    target: TargetSection
    data: DataSection
    drafter: DrafterSection
    training: TrainingSection
    seed: int = 0

    @model_validator(mode="after")
    def _short_blocks_are_short(self) -> TrainingRecipe:
        short, whole = self.training.short_blocks, self.drafter.block_size
        if short is not None and short.block_size >= whole:
            raise ValueError(
                f"training.short_blocks: {short.block_size} slots are not fewer than the drafter's {whole}"
            )
        return self


def load_recipe(path: Path) -> TrainingRecipe:
    """Reads a YAML recipe; ${NAME} is taken from the environment.

    Raises:
        UserError: unreadable, not YAML, an unset variable, an unknown key or an impossible value.
    """
    raw = read_recipe_file(path)
    if not isinstance(raw, dict):
        raise UserError("not a mapping of target, data, drafter and training", where=str(path))
    for gone, why in GONE.items():
        *sections, key = gone.split(".")
        section: Any = raw
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and key in section:
            raise UserError(f"{'.'.join(sections)}: `{key}` {why}", where=str(path), do="correct the recipe")
    try:
        return TrainingRecipe.model_validate(raw)
    except ValidationError as error:
        raise UserError(describe(error, TrainingRecipe), where=str(path), do="correct the recipe") from None
