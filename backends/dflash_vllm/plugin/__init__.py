"""The plug-in that vLLM loads into each of its processes (entry point `vllm.general_plugins`).

It makes vLLM load DFlash drafters strictly, and refuse a request's own width (`vllm_xargs.speculative`) where our
scheduler, which gives it, does not run. vLLM only logs an error of a plug-in, so our schedulers and metrics ask
whether it took effect (`proof`). vLLM loads it into every server of an environment: with a release that we do not
support it only logs one line, and servers with other drafting methods are left alone (`is_ours`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from dflash_serve.adapter.own_width import FIELD
from dflash_vllm.facts import RELEASES

from .widths import refusal

logger = logging.getLogger(__name__)
STRICT = {
    "DFlashDraftModel": "StrictDFlash",
    "DFlashMuseGlimmerAssistantModel": "StrictDFlash",
    "MuseGlimmerAssistantModel": "StrictDFlash",
    "DFlash2DraftModel": "StrictDFlash2",
}
"""Architectures of drafters -> our classes. Muse Glimmer's are plain ones to vLLM, too."""
METHODS = ("dflash", "dspark")  # vLLM's methods for drafters that we know


def register() -> None:
    """Registers our classes in place of vLLM's. The entry point; each process may call it more than once."""
    version = RELEASES.installed()
    if not RELEASES.supports(version):
        logger.warning("dflash-serve does nothing here: vLLM %s is not supported, tested %s", version, RELEASES)
        return
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm import ModelRegistry

    if not hasattr(InputProcessor._validate_params, "__wrapped__"):
        InputProcessor._validate_params = _checked(InputProcessor._validate_params, VLLMValidationError)
    for architecture, name in STRICT.items():
        # By name: importing the class here would choose a platform too early.
        ModelRegistry.register_model(architecture, f"{__name__}.model:{name}")


def _checked(validate: Callable[..., Any], refused: Callable[[str], Exception]) -> Callable[..., Any]:
    """vLLM's check of a request's parameters, which also refuses a width of its own that cannot be honoured.

    Args:
        refused: vLLM's error that becomes HTTP 400; any other becomes 500.
    """

    @wraps(validate)
    def check(processor: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        config = processor.vllm_config
        # First the request, which seldom asks: `is_ours` reads the installed release from disk.
        if FIELD in (getattr(params, "extra_args", None) or {}) and is_ours(config):
            follows_load = _has_our_scheduler(config)
            reason = refusal(params, config.speculative_config, follows_load=follows_load)
            if reason is not None:
                raise refused(reason)
        return validate(processor, params, *args, **kwargs)

    return check


def is_ours(vllm_config: Any) -> bool:
    """True for a server with a method of ours or with our scheduler; False with an unsupported release."""
    asked = vllm_config.speculative_config
    if not RELEASES.supports(RELEASES.installed()) or asked is None:
        return False
    return asked.method in METHODS or _has_our_scheduler(vllm_config)


def _has_our_scheduler(vllm_config: Any) -> bool:
    return f"{__name__}.scheduler" in str(vllm_config.scheduler_config.scheduler_cls)


def proof() -> None:
    """Checks that `register` took effect in this process.

    Raises:
        ValueError: it did not.
    """
    from vllm import ModelRegistry

    for architecture in STRICT:
        known = ModelRegistry.models.get(architecture)
        if getattr(known, "module_name", None) != f"{__name__}.model":
            raise ValueError(
                f"dflash-serve: {architecture} is not loaded by our class but by {known}: the plug-in dflash_serve was "
                f"not loaded (see VLLM_PLUGINS, and the log of this start; supported is vLLM {RELEASES})"
            )
