"""What vLLM loads into each of its processes (entry point `vllm.general_plugins`): drafters that are loaded strictly.

vLLM only logs what fails while a plug-in is loaded; that this one took effect is asked where it can stop the server: by
our schedulers and by our metrics (`proof`). vLLM loads us into every server of an environment, so beside a release that
we do not know nothing is done but one line of log, and servers that draft by other methods are left alone (`is_ours`).
"""

from __future__ import annotations

import logging
from typing import Any

from dflash_vllm.facts import RELEASES

logger = logging.getLogger(__name__)
STRICT = {"DFlashDraftModel": "StrictDFlash", "DFlash2DraftModel": "StrictDFlash2"}
"""Architectures of drafters -> our classes of them."""
METHODS = ("dflash", "dspark")
"""vLLM's methods for drafters that we know."""


def register() -> None:
    """Puts our classes in the place of vLLM's; the entry point, called in every process, maybe more than once."""
    version = RELEASES.installed()
    if not RELEASES.supports(version):
        logger.warning("dflash-serve does nothing here: vLLM %s is not supported, tested %s", version, RELEASES)
        return
    from vllm import ModelRegistry

    for architecture, name in STRICT.items():
        # By name: importing the class here would choose a platform too early.
        ModelRegistry.register_model(architecture, f"{__name__}.model:{name}")


def is_ours(vllm_config: Any) -> bool:
    """Whether a server drafts by a drafter that we know, or has our scheduler; False beside an unknown release."""
    asked = vllm_config.speculative_config
    if not RELEASES.supports(RELEASES.installed()) or asked is None:
        return False
    return asked.method in METHODS or f"{__name__}.scheduler" in str(vllm_config.scheduler_config.scheduler_cls)


def proof() -> None:
    """Does nothing where `register` took effect in this process.

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
