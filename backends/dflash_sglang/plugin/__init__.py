"""The plug-in that SGLang loads into its processes (entry point `sglang.srt.plugins`): hooks around algorithm DFLASH.

Until a server asks for DFLASH, only its check of API keys is changed. Then its draft is checked before anything is
loaded, loaded strictly, and measured; and where a width is asked for (`DFLASH_SERVE_SPECULATION__WIDTH`), our worker
runs in the place of SGLang's. An SGLang that is not the one we were tested with runs as if we were not installed, but
for a warning.

SGLang promises none of the names here; tests/contract/test_sglang_names.py holds them, and every name that we import,
against the installed release.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dflash_serve.common.key_guard import KeyGuard
from dflash_serve.deployment.variables import given_cost, given_survival
from dflash_serve.errors import Problem, UserError, refuse
from dflash_sglang.facts import FACTS, RELEASES
from dflash_sglang.settings import AUTO, DFLASH, DSPARK, WIDTH_VARIABLE, asked_width

from . import dynamo
from .pair import beside_its_drafter, one_choice
from .refusals import StrictLoad, draft_problems, guarded, with_min_p

logger = logging.getLogger(__name__)
ASIDE = "dflash-serve steps aside, and SGLang runs as it does without it: %s"
RESOLUTION = "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding"
ADD_KEYS = "sglang.srt.utils.auth.add_api_key_middleware"
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
BUILD_WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.__init__"
RESULT = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
    "process_batch_result_decode"
)
LOAD_WEIGHTS = "sglang.srt.models.dflash.DFlashDraftModel.load_weights"
QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
PREFILL_HALVES = "sglang.srt.disaggregation.decode.DecodePreallocQueue._ensure_prefill_info"
CHOICES = "sglang.srt.managers.io_struct.GenerateReqInput._handle_parallel_sampling"
MAMBA = "sglang.kernels.ops.mamba.triton_ops.ssu_dispatch.selective_state_update"
TARGET_PROBS = "sglang.srt.speculative.dflash_utils.build_speculative_verify_target_probs"
ROW_HEADROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"

OPEN_PATHS = {"/health", "/health_generate", "/ready", FACTS.metrics.path, f"{FACTS.metrics.path}/"}
"""Routes of probes and metrics, which SGLang leaves open too."""


def install() -> None:
    """Registers our hooks; the entry point."""
    _around({RESOLUTION: before_resolution, CREATE_WORKER: before_worker, ADD_KEYS: closed})


def _around(hooks: dict[str, Callable[..., Any]]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, hook in hooks.items():
        HookRegistry.register(name, hook, HookType.AROUND)


def _apply(hooks: dict[str, Callable[..., Any]]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    _around(hooks)
    HookRegistry.apply_hooks()


def usable() -> bool:
    """True if this SGLang is the tested release; else a warning is logged."""
    problem = next(RELEASES.problems(RELEASES.installed() or "unknown"), None)
    if problem is not None:
        logger.warning(ASIDE, problem)
    return problem is None


def closed(add: Callable[..., None], app: Any, *, api_key: str | None, admin_api_key: str | None) -> None:
    """Lets an API key close web sockets, too: SGLang's own check leaves /v1/realtime open (utils/auth.py)."""
    add(app, api_key=api_key, admin_api_key=admin_api_key)
    if api_key and usable():
        keys = [key for key in (api_key, admin_api_key) if key]  # which route wants which is SGLang's to say
        app.add_middleware(KeyGuard, keys=keys, open_paths=OPEN_PATHS, preflights=True)


def before_resolution(resolve: Callable[[Any], None], server_args: Any) -> None:
    """Runs in the main process, before SGLang looks at what speculation is asked for.

    Raises:
        ValueError: this draft or these settings will not do; the message says why.
    """
    algorithm = str(getattr(server_args, "speculative_algorithm", None)).upper()  # of whatever release
    if algorithm == DFLASH and usable():
        from sglang.srt.arg_groups.overrides import resolving_view

        asked = resolving_view(server_args)
        refuse(draft_problems(asked))
        refuse(width_problems(asked))
    if algorithm in (DFLASH, DSPARK) and usable():
        _apply({CHOICES: one_choice, **dynamo.hooks()})
    resolve(server_args)


def width_problems(server_args: Any) -> list[Problem]:
    """Problems of the width that the environment asks for, with these arguments."""
    try:
        width = asked_width()
        if width == AUTO:
            given_cost()
            given_survival()
    except UserError as error:
        return [error.problem()]
    lora = server_args.enable_lora or (server_args.enable_lora is None and server_args.lora_paths)
    block = server_args.speculative_num_draft_tokens or server_args.speculative_dflash_block_size
    if not lora or width in (None, block):
        return []
    what = "LoRA's CUDA graphs are made for one width, the whole block, and another one is asked for"
    do = f"set {WIDTH_VARIABLE} to the value of --speculative-num-draft-tokens, or leave LoRA out"
    return [Problem(what, "--enable-lora", do)]


def before_worker(create: Callable[..., type], algorithm: Any, server_args: Any) -> type:
    """Runs in a scheduler, before SGLang's DFlash worker is built: where a width is asked for, ours takes its place.

    With DSPARK SGLang's own worker runs, and requests that it would answer wrongly are refused.
    """
    theirs = create(algorithm, server_args)
    try:
        if not algorithm.is_dflash_family() or not usable():
            return theirs
        if algorithm.is_dflash():
            return ours(theirs, server_args)
        _apply({QUEUE: guarded, PREFILL_HALVES: beside_its_drafter})
        return theirs
    except Exception:
        logger.exception("dflash-serve steps aside: its worker could not be prepared, SGLang's own runs")
        return theirs


def ours(theirs: type, server_args: Any) -> type:
    """The worker to build where SGLang would build `theirs`; what it loads, counts and refuses is hooked."""
    from sglang.srt.arg_groups.overrides import resolving_view

    from .results import RESULTS, watch
    from .worker import WidthWorker

    strict = StrictLoad()

    def built(build: Callable[..., None], worker: Any, *args: Any, **kwargs: Any) -> None:
        build(worker, *args, **kwargs)
        strict.is_built = True
        watch(worker)

    _apply(
        {
            ROW_HEADROOM: room_for_a_step,
            MAMBA: in_rows_of_the_buffer,
            LOAD_WEIGHTS: strict,
            RESULT: RESULTS.on_result,
            QUEUE: guarded,
            PREFILL_HALVES: beside_its_drafter,
            TARGET_PROBS: with_min_p,
            BUILD_WORKER: built,
        }
    )
    if asked_width() in (None, resolving_view(server_args).speculative_num_draft_tokens):
        return theirs
    if theirs is not WidthWorker.__base__:
        logger.warning("dflash-serve: this platform has a worker of its own (%s), which runs alone", theirs.__name__)
        return theirs
    return WidthWorker


def room_for_a_step(headroom: Callable[[], int]) -> int:
    """Entries of a request's row beyond its context: at least what a decoding step reserves at any page size.

    SGLang 0.5.23 makes this room only for pages of several tokens. With pages of one token a request that comes to
    the end of its context then writes into the next request's row (sglang#33579).
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode

    return max(headroom(), int(get_alloc_reserve_per_decode() + get_alloc_page_size()) - 1)


def in_rows_of_the_buffer(update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Writes the states of Mamba2's verified slots where SGLang reads them, at any width.

    SGLang 0.5.23 tells this kernel the width of the step as the length of a request's row in the buffer of states, and
    reads the accepted state by the row's real length: a whole block. At another width all requests but the first
    would take over states of others. Its kernels for gated delta nets read the length from the buffer, as this does.
    """
    states = kwargs.get("intermediate_states_buffer")
    return update(*args, **(kwargs if states is None else {**kwargs, "cache_steps": states.shape[1]}))
