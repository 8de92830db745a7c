"""Our drafter inside TensorRT-LLM: registered for DFlash, driven by TensorRT-LLM's own worker.

`--custom_module_dirs` imports a package in the serving process only. Worker processes learn of *model architectures*
that came from outside and import their modules when they look one up (PR #18284; `export_external_model_modules` in
modeling_utils.py), but of drafters they learn nothing: a drafter registered alone is silently TensorRT-LLM's own in
every worker. So the target's architecture is registered again too, as an empty subclass that lives in the package:
looking it up imports the package, which registers the drafter.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dflash_serve.errors import UserError

REGISTRY = "tensorrt_llm._torch.models.modeling_utils"
INTERFACE = "tensorrt_llm._torch.speculative.interface"
ZOO = "tensorrt_llm._torch.models"
REGISTERED = "_registered_architectures"
"""Where `register_auto_model` notes on a class what it registered it for."""


def register(architecture: str, package: str) -> type:
    """Registers drafter and target; returns the target's class, which must become `TargetModel` of `package`.

    Raises:
        UserError: this TensorRT-LLM takes no drafter from outside, or does not know the target.
    """
    registry = import_module(REGISTRY)
    if not hasattr(registry, "register_draft_model"):
        do = "install TensorRT-LLM 1.4, or use a plain bf16 drafter"
        raise UserError("this release takes no drafter from outside", where="TensorRT-LLM", do=do)
    mode = import_module(INTERFACE).SpeculativeDecodingMode.DFLASH
    target = _target_class(registry, architecture)
    registry.register_draft_model(mode)(build_drafter)
    names = {"__module__": package, "__qualname__": "TargetModel", "__doc__": f"{architecture}, unchanged."}
    shadow: type = type(target)("TargetModel", (target,), names)
    registry.register_auto_model(architecture)(shadow)
    return shadow


def _target_class(registry: Any, architecture: str) -> type:
    """TensorRT-LLM's own class, taken from its module.

    In a worker the registry itself would answer with our package, which is just being imported.
    """
    index: dict[str, str] = import_module(f"{ZOO}._arch_index").MODEL_ARCH_TO_MODULE
    if architecture in index:
        module = import_module(f"{ZOO}.{index[architecture]}")
        for found in vars(module).values():
            if isinstance(found, type) and architecture in found.__dict__.get(REGISTERED, ()):
                return found
    raise UserError(f"it does not know the target's architecture {architecture}", where="TensorRT-LLM")


def build_drafter(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> Any:
    """The builder TensorRT-LLM calls for SpeculativeDecodingMode.DFLASH (signature fixed by `get_draft_model`)."""
    from .drafter import PlugInDrafter

    return PlugInDrafter.from_configs(model_config, draft_config)
