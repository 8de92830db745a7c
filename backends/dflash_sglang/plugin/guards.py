"""What we refuse where SGLang would go on in silence: drafts that it would read wrongly, and requests.

* A draft is checked before anything is loaded (`draft_problems`), and loaded strictly (`load_strictly`): SGLang's
  `load_weights` skips names it does not know and never looks for missing ones, so that the server would start, and
  accept nothing.
* Penalties: SGLang counts a request's output for its penalties only in plain decoding steps
  (`schedule_batch.prepare_for_decode`) and adds one penalty to all rows of a block
  (`dflash_utils.apply_dflash_verify_logits_adjustments`), so even a step that accepts nothing is penalised wrongly.
* Sampling: where its kernel is absent SGLang logs one warning and answers every request as if at temperature 0.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_serve.checkpoint.quantization import plain_only
from dflash_serve.checkpoint.reader import Checkpoint, open_checkpoint
from dflash_serve.checkpoint.source import local_folder
from dflash_serve.checkpoint.target import PENALTIES
from dflash_serve.errors import Problem, UserError

from .upstream import TOKENIZED

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
MOST = 8
"""Problems in one message."""
PLAIN = ("DFlashDraftModel", "DFlashSpeculator", "Qwen3DFlashModel")
"""Architectures that we understand to the last tensor; of SGLang's others only the names of tensors are checked."""
READ_BY_SGLANG = "mask_embedding.pt"
"""A pickle that we refuse to read, but SGLang reads safely (weights_only)."""
STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Tensors of a checkpoint that become rows of one parameter."""
ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""Other names that SGLang knows for a tensor."""
RECOMPUTED = "rotary_emb."
"""Part of the names of tensors that need not be loaded."""
LEARNT = (".weight", ".bias")
"""Endings of parameters that nothing but a checkpoint can fill."""
NEUTRAL = {**PENALTIES, "min_new_tokens": 0}
"""Sampling parameters that depend on what has been generated, and the values at which they do nothing."""
PENALISED = (
    "dflash-serve: SGLang does not count the tokens of DFlash steps for {names}, so the answer would not be the one "
    "without speculation; leave it out (where the model's generation_config.json sets it, start the server with "
    "--sampling-defaults openai), or serve without speculation"
)
SAMPLED = (
    "dflash-serve: this SGLang build cannot verify sampled tokens of DFlash drafts (its kernel is absent), and would "
    "answer greedily without saying so; send temperature 0, or serve without speculation"
)


def refuse(problems: Iterable[Problem]) -> None:
    """Ends a server that starts, with the first of the problems; where there are none, nothing happens.

    Raises:
        ValueError: the problems.
    """
    found = list(problems)
    if found:
        more = [f"(and {len(found) - MOST} more)"] if len(found) > MOST else []
        raise ValueError("dflash-serve: " + "\n".join([*map(str, found[:MOST]), *more]))


def draft_problems(server_args: Any) -> list[Problem]:
    """Everything wrong with the draft named in `server_args`.

    Nothing where none is named, and where we cannot find it: SGLang has other ways (ModelScope, object stores), says
    itself when they fail, and loads strictly what it finds.
    """
    if server_args.speculative_draft_model_path is None:
        return []
    try:
        folder = local_folder(server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision)
    except UserError as error:
        logger.warning("dflash-serve: the draft was not checked: %s", error)
        return []
    if not _is_plain(folder):
        return []
    checkpoint = open_checkpoint(folder)
    found = [problem for problem in checkpoint.problems if not problem.where.endswith(READ_BY_SGLANG)]
    found += plain_only(checkpoint.quantization, "SGLang", str(folder))
    return [*_dialect(checkpoint), *found, *_block_size(checkpoint, server_args)]


def _is_plain(folder: Path) -> bool:
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architectures = raw.get("architectures") or [PLAIN[0]]
        return architectures[0] in PLAIN
    except (OSError, ValueError, AttributeError, TypeError, LookupError):
        return True  # open_checkpoint says what is wrong with it


def _dialect(checkpoint: Checkpoint) -> Iterator[Problem]:
    """SGLang reads z-lab's dialect; it skips in silence what another one says elsewhere."""
    if checkpoint.config is None or checkpoint.dialect is None:
        return
    do = f"dflash-serve convert {checkpoint.folder} --to zlab"
    if checkpoint.dialect.name == "speculators":
        yield Problem("the draft is written in speculators' dialect, SGLang reads z-lab's", str(checkpoint.folder), do)
    if checkpoint.dialect.name == "modelopt" and any(kind.causal or kind.window for kind in checkpoint.config.layers):
        what = "the draft's windows and causality are written as ModelOpt does, which SGLang does not read"
        yield Problem(what, str(checkpoint.folder), do)
    if checkpoint.config.has_mask_embedding:
        what = "the draft brings its mask embedding as a tensor, which SGLang does not read"
        yield Problem(what, str(checkpoint.folder), "use a draft that masks with a token")


def _block_size(checkpoint: Checkpoint, server_args: Any) -> Iterator[Problem]:
    asked = server_args.speculative_num_draft_tokens or server_args.speculative_dflash_block_size
    if checkpoint.config is not None and asked is not None and asked > checkpoint.config.block_size:
        what = f"block size {asked} is larger than the draft's {checkpoint.config.block_size}"
        do = f"use {checkpoint.config.block_size} or less: it was not trained to fill more slots"
        yield Problem(what, "--speculative-num-draft-tokens", do)


def load_strictly(load: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
    """Loads as SGLang does, then accounts for every tensor and every parameter.

    Raises:
        ValueError: one is unknown or missing; all of them are named.
    """
    names: list[str] = []

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            names.append(name)
            yield name, tensor

    result = load(model, noted())
    unknown, missing = account(names, {name for name, _ in model.named_parameters()})
    if unknown or missing:
        parts = [f"unknown tensors: {', '.join(unknown)}"] if unknown else []
        parts += [f"missing: {', '.join(missing)}"] if missing else []
        do = "`dflash-serve inspect` on the draft's folder says more"
        raise ValueError(f"dflash-serve: the draft does not fit its config.json: {'; '.join(parts)}; {do}")
    return result


def account(names: Iterable[str], parameters: Collection[str]) -> tuple[list[str], list[str]]:
    """(tensors that went nowhere, tensors that parameters still wait for), by the checkpoint's kind of names."""
    unknown, filled = [], set()
    for name in names:
        place = _place(name, parameters)
        if place is not None:
            filled.add(place)
        elif RECOMPUTED not in name:
            unknown.append(name)
    wanted = [place for name in sorted(parameters) if name.endswith(LEARNT) for place in _pieces(name)]
    missing = [f"{whole.replace(STACKED[part], part) if part else whole}" for whole, part in wanted
               if (whole, part) not in filled and (whole, "") not in filled]  # fmt: skip
    return sorted(unknown), missing


def _place(name: str, parameters: Collection[str]) -> tuple[str, str] | None:
    """The parameter a tensor goes to, and which part of it; "" = all."""
    for part, whole in STACKED.items():
        if f".{part}." in name:
            found = _parameter(name.replace(part, whole), parameters)
            if found is not None:
                return found, part
    found = _parameter(name, parameters)
    return None if found is None else (found, "")


def _parameter(name: str, parameters: Collection[str]) -> str | None:
    candidates = (name, name.removeprefix("model."), f"model.{name}", ALIASES.get(name, name))
    return next((candidate for candidate in candidates if candidate in parameters), None)


def _pieces(name: str) -> Iterator[tuple[str, str]]:
    parts = [part for part, whole in STACKED.items() if f".{whole}." in name]
    yield from ((name, part) for part in parts or [""])


def guard_requests() -> None:
    """Refuses such requests from now on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.dflash_utils import is_dflash_sampling_verify_available

    can_sample = is_dflash_sampling_verify_available()

    def checked(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        request = create(*args, **kwargs)
        reason = refusal(getattr(request, "sampling_params", None), can_sample=can_sample)
        if reason:
            raise ValueError(reason)  # SGLang answers it with HTTP 400
        return request

    HookRegistry.register(TOKENIZED, checked, HookType.AROUND)
    HookRegistry.apply_hooks()


def refusal(params: Any, *, can_sample: bool) -> str | None:
    """Why a request with these sampling parameters (SGLang's, normalised; None: not a generation) is refused."""
    if params is None:
        return None
    names = [name for name, neutral in NEUTRAL.items() if getattr(params, name) != neutral]
    if names:
        return PENALISED.format(names=", ".join(names))
    greedy = params.top_k == 1  # SGLang has made that of temperature 0 by then
    return None if greedy or can_sample else SAMPLED
