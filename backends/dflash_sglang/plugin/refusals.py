"""Drafts and requests that SGLang would silently read or answer wrongly: refused in its own processes.

* Drafts are checked from their files before anything is loaded, then loaded strictly.
* Penalties: SGLang counts a request's output for its penalties only in plain decoding steps
  (`schedule_batch.prepare_for_decode`), so its own DFlash worker ignores them. Our worker counts them (`penalties`).
* Sampling: without the sampling kernel SGLang logs one warning and answers every request as if at temperature 0.
* A request's own width (`custom_params.speculative`) is noted where steps of several widths run, else refused.
* `min_p`: SGLang samples speculative steps without it. `with_min_p` applies it to greedy drafts of DFLASH.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dflash_serve.adapter.checks import layer_problems
from dflash_serve.adapter.own_width import FIELD, most_slots
from dflash_serve.checkpoint.loading import StrictLoader, given_checkpoint
from dflash_serve.checkpoint.reader import Checkpoint
from dflash_serve.checkpoint.target import PENALTIES
from dflash_serve.checkpoint.tensors import ALIASES
from dflash_serve.errors import Problem, UserError
from dflash_sglang.layouts import storage_problems
from dflash_sglang.settings import head_problems

if TYPE_CHECKING:
    from torch import Tensor

READ_BY_SGLANG = "mask_embedding.pt"  # a pickle that we refuse to read, but SGLang reads safely (weights_only)


def draft_problems(server_args: Any) -> list[Problem]:
    """Problems of the draft named in `server_args`; empty if none is named or it cannot be found."""
    name, revision = server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision
    asked = server_args.speculative_num_draft_tokens or server_args.speculative_dflash_block_size
    checkpoint = None if name is None else given_checkpoint(name, revision, block_size=asked)
    if checkpoint is None:
        return []
    found = [problem for problem in checkpoint.problems if not problem.where.endswith(READ_BY_SGLANG)]
    found += storage_problems(checkpoint, 1, str(checkpoint.folder))
    config = checkpoint.config
    heads = [] if config is None else [*head_problems(config), *layer_problems(config, "SGLang")]
    return [*_dialect(checkpoint), *found, *heads, *_block_size(checkpoint, server_args)]


def _dialect(checkpoint: Checkpoint) -> Iterator[Problem]:
    """SGLang reads z-lab's dialect and silently skips the keys of others."""
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


READ = {"encoder.fc.weight", "encoder.output_norm_enc.weight"}  # other names that it knows, without `model.` only
LOADER = StrictLoader(
    spare=("rotary_emb.", "embed_tokens.", "lm_head.", ".k_scale", ".v_scale"),  # it takes the target's embedding, head
    unfilled=("k_scale", "v_scale"),
    unread=ALIASES.keys() - READ | {f"model.{name}" for name in READ},
)


def _needs_no_input_scale(module: Any) -> bool:
    # SGLang's product of W4A16_NVFP4 weights has a parameter for it, and drops it (modelopt_quant.py).
    return type(getattr(module, "quant_method", None)).__name__ == "ModelOptNvFp4A16LinearMethod"


class StrictLoad:
    """Accounts for every tensor and parameter of a draft when it is loaded.

    Later loads are updates of weights (`update_weights_from_disk`, ..._from_tensor). SGLang hands the target's tensors
    to its draft, too, whose layers have the same names but for a prefix. Only tensors of the draft's own checkpoint are
    taken.
    """

    def __init__(self) -> None:
        self.is_built = False  # the worker is: loads from now on are updates
        self._own: frozenset[str] | None = None
        """Names of the tensors of the draft's checkpoint; None: it was not loaded (`--load-format dummy`)."""

    def __call__(self, load: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Loads, then accounts for every tensor.

        Raises:
            ValueError: tensors are unknown or missing; the message names all of them.
        """
        if self.is_built:
            own = self._own
            return load(model, (one for one in weights if own is None or one[0] in own))
        loader = LOADER.of_weights_alone if any(map(_needs_no_input_scale, model.modules())) else LOADER
        loaded, self._own = loader.load(lambda given: load(model, given), model, weights)
        return loaded


NEUTRAL = {**PENALTIES, "min_new_tokens": 0}
"""Sampling parameters that depend on the generated tokens, and their neutral values."""
PENALISED = (
    "dflash-serve: SGLang does not count the tokens of DFlash steps for {names}, so the answer would not be the one "
    "without speculation; leave it out (where the model's generation_config.json sets it, start the server with "
    "--sampling-defaults openai), or serve with an automatic width, or without speculation"
)
SAMPLED = (
    "dflash-serve: this SGLang build cannot verify sampled tokens of DFlash drafts (its kernel is absent), and would "
    "answer greedily without saying so; send temperature 0, or serve without speculation"
)

MIN_P = (
    "dflash-serve: SGLang's DSPARK, and DFlash2, whose head draws its drafts, sample without min_p; leave it out, or "
    "serve without speculation"
)
ONE_WIDTH = (
    "dflash-serve: custom_params.speculative asks for a width of this request alone, and this server verifies blocks "
    "of one width ({why}); leave it out, or serve with speculation.width: auto"
)
_MOST = "_dflash_serve_most_slots"  # attribute of SGLang's requests


def penalties_of(params: Any) -> list[str]:
    """Names of the parameters that depend on the generated tokens and are not neutral."""
    return [name for name, neutral in NEUTRAL.items() if getattr(params, name) != neutral]


def refusal(params: Any, *, can_sample: bool, counts_penalties: bool, takes_min_p: bool = True) -> str | None:
    """The reason to refuse a request with these sampling parameters (SGLang's, normalised); None: it is answered."""
    names = penalties_of(params)
    if names and not counts_penalties:
        return PENALISED.format(names=", ".join(names))
    greedy = params.top_k == 1  # SGLang has made that of temperature 0 by then
    if greedy:
        return None
    return SAMPLED if not can_sample else MIN_P if params.min_p > 0 and not takes_min_p else None


def own_width(req: Any) -> int | None:
    """Most slots of the request's blocks, 1 = no drafts; None: it leaves its width to the server."""
    most: int | None = getattr(req, _MOST, None)
    return most


def _take_own_width(req: Any, worker: Any, *, dspark: bool) -> str | None:
    """Notes the width that a request asks for, or gives the reason to refuse it."""
    asked = (req.sampling_params.custom_params or {}).get(FIELD)
    widths = getattr(worker, "widths", None)  # of our worker, where its steps can have another width than the block
    try:
        most = most_slots(asked, int(worker.block_size) if widths else 1)
    except UserError as error:
        if widths:
            return f"dflash-serve: {error}"
        most = 1
    if most is None:
        return None
    if widths is None or widths.offered[0] != 1:
        why = "DSPARK" if dspark else "whole blocks" if widths is None else f"width {widths.offered[0]}"
        return ONE_WIDTH.format(why=why)
    setattr(req, _MOST, most)
    return None


def guarded(add: Callable[..., Any], scheduler: Any, req: Any, is_retracted: bool = False) -> Any:
    """Around `Scheduler._add_request_to_queue`: a refused request is answered with HTTP 400."""
    worker = scheduler.draft_worker
    if worker is not None and not is_retracted and req.to_finish is None:
        from sglang.srt.speculative.dflash_utils import is_dflash_sampling_verify_available

        dspark = scheduler.spec_algorithm.is_dspark()
        reason = refusal(
            req.sampling_params,
            can_sample=dspark or is_dflash_sampling_verify_available(),
            counts_penalties=bool(getattr(worker, "counts_penalties", False)),
            takes_min_p=not dspark and getattr(worker, "selector", None) is None,
        )
        reason = reason or _take_own_width(req, worker, dspark=dspark)
        if reason is not None:
            req.set_finish_with_abort(reason)
    return add(scheduler, req, is_retracted)


def with_min_p(build: Callable[..., Any], *, sampling_info: Any, **given: Any) -> Any:
    """The target's probabilities of a step [n, w, V], after top-k and top-p as SGLang does, and after `min_p`."""
    probs = build(sampling_info=sampling_info, **given)
    if not sampling_info.need_min_p_sampling:
        return probs
    least = probs.amax(dim=-1, keepdim=True) * sampling_info.min_ps.view(-1, 1, 1)
    kept = probs.masked_fill(probs < least, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)
