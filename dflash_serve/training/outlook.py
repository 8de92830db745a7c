"""Sizes, disk space and memory that a run will need. The memory of a step is counted on tensors without data.

Nothing of the target is fetched but its configuration. The step is the trainer's own, on PyTorch's `meta` device: its
tensors have shapes and no values, so a target of any size is tried on any machine.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.source import local_folder, target_source
from dflash_serve.checkpoint.target_config import read_target_config
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.target import TargetModel
from dflash_serve.training.blocks import Flex
from dflash_serve.training.data import written_prompts
from dflash_serve.training.other_target import OtherTarget, empty_other_target, other_family, read_sizes
from dflash_serve.training.parallel import Processes
from dflash_serve.training.recipe import FilePrompts, TrainingRecipe
from dflash_serve.training.run import check_recipe
from dflash_serve.training.shards import Example
from dflash_serve.training.trainer import Trainer

GB = 1e9
SUSTAINED = 0.4 * 2.25e15  # operations/s: 40 % of a B200's dense bf16 peak, which is assumed and not measured
CONFIGURATION = ["config.json", "generation_config.json"]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make inside it: `now`, and `most` at any moment."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                weakref.finalize(storage, self._gone, storage.nbytes())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return out

    def _gone(self, size: int) -> None:
        self.now -= size


def outlook(recipe: TrainingRecipe, processes: int = 1) -> dict[str, Any]:
    """Sizes of a run, as `train --dry-run --json` prints them; memory in bytes, for one of `processes` GPUs.

    Raises:
        UserError: the target's configuration cannot be read, or the recipe does not fit it.
    """
    model, answers, training = recipe.target, recipe.data.answers, recipe.training
    folder = local_folder(target_source(model.model), model.revision, files=CONFIGURATION)
    target, config = read_sizes(folder), check_recipe(recipe, folder)
    per_token = 2 * 2 * target.num_layers * target.num_key_value_heads * target.head_dim
    longest = answers.max_prompt_tokens + answers.max_new_tokens
    prompts = _prompts(recipe)
    memory, counts, operations = step_memory(recipe, folder, config, processes)
    parameters = counts["drafter"]
    return {
        "target": {"model": model.model, "parameters": counts["target"]},
        "drafter": {
            "parameters": parameters,
            "layers": config.num_layers,
            "block_size": config.block_size,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "answers": {
            "prompts": prompts,
            "most_tokens": longest * prompts,
            "kv_cache_bytes": per_token * longest * answers.max_batch_size,
        },
        "step": {
            "processes": processes,
            "sequences": training.sequences,
            "rows": training.sequences * training.anchors * config.rows(),
            "steps": training.steps,
            "minutes": training.minutes,
            "operations": operations,
        },
        "memory_bytes": memory,
        "disk_bytes": {
            "answers": 4 * longest * prompts,
            # Weights, Adam's two averages and the best weights; the old one stays until the new one is whole.
            "checkpoint": 2 * 4 * 4 * parameters,
            "drafter": 2 * parameters,
        },
    }


def outlook_text(figures: Mapping[str, Any]) -> str:
    """The text that `train --dry-run` prints of an `outlook`."""
    target, drafter, answers = figures["target"], figures["drafter"], figures["answers"]
    step, memory, disk = figures["step"], figures["memory_bytes"], figures["disk_bytes"]
    budget = f"{step['steps']} steps" if step["steps"] else f"{step['minutes']:g} minutes"
    layers = ", ".join(map(str, drafter["target_layer_ids"]))
    hours = step["steps"] and step["steps"] * step["operations"] / SUSTAINED / 3600
    lasts = f"; {hours:.3g} hours at {SUSTAINED / 1e12:.0f} TFLOP/s a process" if hours else ""
    each = "" if step["processes"] == 1 else f", shared by {step['processes']} processes"
    return "\n".join(
        [
            f"target: {target['model']}, {target['parameters'] / GB:.2f} billion parameters, frozen, in bf16",
            f"drafter: {drafter['layers']} layers, block size {drafter['block_size']}, "
            f"{drafter['parameters'] / GB:.3f} billion parameters, reads the outputs of target layers {layers}",
            f"answers: at most {answers['prompts']} prompts and {answers['most_tokens'] / 1e6:.1f} million tokens; "
            f"K/V cache {answers['kv_cache_bytes'] / GB:.1f} GB beside the target",
            f"training: {budget}; a step is {step['sequences']} sequences and {step['rows']} rows of blocks{each}"
            f"{lasts}",
            f"memory of a process: target {memory['target'] / GB:.1f} GB, drafter and optimiser "
            f"{memory['drafter'] / GB:.1f} GB, a step at most {memory['step'] / GB:.1f} GB, together "
            f"{sum(memory.values()) / GB:.1f} GB",
            f"disk: answers at most {disk['answers'] / GB:.2f} GB, checkpoints {disk['checkpoint'] / GB:.2f} GB, "
            f"drafter {disk['drafter'] / GB:.2f} GB",
        ]
    )


def step_memory(
    recipe: TrainingRecipe, folder: Path, config: DrafterConfig, processes: int
) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes in one of the processes, of the target, of the drafter with its optimiser, and of a step beside them.

    Every sequence is as long as the recipe allows, and the head's vocabulary is whole. Attention keeps what
    FlexAttention keeps: queries, keys, values, its output, and no scores. What the allocator loses is not counted.

    Returns:
        the bytes, the numbers of parameters of target and drafter, and the operations of a step's products (those of
        attention in the drafter are not counted).
    """
    answers, device = recipe.data.answers, torch.device("meta")
    tokens = torch.zeros(answers.max_prompt_tokens + answers.max_new_tokens, dtype=torch.int32)
    examples = [Example(index, tokens, answers.max_prompt_tokens) for index in range(recipe.training.sequences)]
    whole = recipe.training.model_copy(update={"reduced_vocabulary": False})
    with LiveBytes() as live, tempfile.TemporaryDirectory() as scratch:
        with device:
            frozen = empty_target(folder).requires_grad_(False)
            of_target = live.now
            drafter = Drafter(config).float()
        drafter.rotary.to(device)
        shared = _Share(count=processes)
        recipe = recipe.model_copy(update={"training": whole})
        trainer = Trainer(recipe, frozen, drafter, examples, [], Path(scratch), shared)
        for group in (group for part in trainer.optimizer.parts for group in part.param_groups):
            group |= {"fused": False, "foreach": False}  # the fused operator, which takes no memory, has no meta form
        trainer.forward.backbone.flex = ATTENTION
        trainer.update()
        models = {"target": frozen, "drafter": drafter}
        counts = {name: sum(parameter.numel() for parameter in each.parameters()) for name, each in models.items()}
        of_drafter = live.now - of_target + 4 * counts["drafter"]
        live.most = live.now
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _expert_operations}) as counter:
            trainer.update()
        memory = {"target": of_target, "drafter": of_drafter, "step": live.most - of_target - of_drafter}
        return memory, counts, counter.get_total_flops()


def empty_target(folder: Path) -> TargetModel | OtherTarget:
    """The target on the current device, in bfloat16, without weights."""
    if other_family(folder) is not None:
        return empty_other_target(folder)
    target = TargetModel(read_target_config(folder)).to(torch.bfloat16)
    target.rotary.to(torch.get_default_device())
    return target


def _expert_operations(rows: torch.Size, _weights: object, *_: object, out_shape: torch.Size, **__: object) -> int:
    # of a product of sorted rows with their experts' weights, which torch's counter does not know
    return 2 * out_shape.numel() * rows[-1]


def _attention(queries: Tensor, keys: Tensor, values: Tensor, **_: object) -> Tensor:
    return _Attention.apply(queries, keys, values)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    # keeps what FlexAttention keeps, and computes nothing
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = torch.empty_like(queries)
        ctx.save_for_backward(queries, keys, values, out, torch.empty_like(queries[..., 0], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


ATTENTION: Flex | None = Flex(_attention, create_block_mask)


class _Share(Processes):
    # the first of several processes that are not there: it takes its share and adds nothing up
    def total(self, value: Tensor) -> Tensor:
        return value

    def total_gradients(self, parameters: Any) -> None:
        pass


def _prompts(recipe: TrainingRecipe) -> int:
    count = 0
    for source in recipe.data.prompts:
        if isinstance(source, FilePrompts):
            count += len(written_prompts(source))
        else:  # a dataset is not fetched
            count += source.count or 0
    return count
