"""Our drafter inside TensorRT-LLM: registered for DFlash, driven by TensorRT-LLM's own worker.

`--custom_module_dirs` imports a package in the serving process only. Worker processes learn of *model architectures*
that came from outside and import their modules when they look one up (PR #18284; `export_external_model_modules` in
modeling_utils.py @000a01d), but of drafters they learn nothing: a drafter registered alone is silently TensorRT-LLM's
own in every worker. So two architectures are registered from the package as well:

* the target's, as an empty subclass: looking it up imports the package, which registers the drafter;
* the drafter's own, which no built-in module claims. A worker that has the target's built-in module already never looks
  the first one up, and its built-in drafter would load ours with scales ignored; but that drafter looks up its own
  architecture, finds `Unwanted`, and stops with the reason.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from ..settings import Implementation

REGISTRY = "tensorrt_llm._torch.models.modeling_utils"
INTERFACE = "tensorrt_llm._torch.speculative.interface"
INPUTS = "tensorrt_llm.inputs.registry"
ZOO = "tensorrt_llm._torch.models"
REGISTERED = "_registered_architectures"  # attribute with which `register_auto_model` marks a registered class
DRAFTER = "DFlashDraftModel"  # the architecture in the config.json of every draft folder that we write
BUILT = "dflash-serve: drafter built on rank"  # begins the line that every rank logs


class Unwanted:
    """Takes the place of layers in which TensorRT-LLM's own drafter would look at our drafter."""

    def __init__(self, *_: object, **__: object) -> None:
        what = "TensorRT-LLM's own drafter was chosen on this rank; it would load this one wrongly and accept nothing"
        raise UserError(what, where="--custom_module_dirs", do="report this, with the release: it should be ours")


def register(architecture: str, package: str, implementation: Implementation) -> type:
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
    registry.register_draft_model(mode)(_builder(implementation))
    registry.register_auto_model(DRAFTER)(type("DrafterModel", (Unwanted,), {"__module__": package}))
    names = {"__module__": package, "__qualname__": "TargetModel", "__doc__": f"{architecture}, unchanged."}
    shadow: type = type(target)("TargetModel", (target,), names)
    registry.register_auto_model(architecture)(shadow)
    _hand_on(registry, architecture, target, shadow)
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


def _hand_on(registry: Any, architecture: str, target: type, shadow: type) -> None:
    """Gives the subclass what is kept by class: pictures would reach a target whose class no processor is kept for."""
    processors = import_module(INPUTS).INPUT_PROCESSOR_REGISTRY._input_processors_cls_by_model_type
    if target in processors:
        processors[shadow] = processors[target]
    encoders = getattr(registry, "MODEL_CLASS_VISION_ENCODER_MAPPING", {})
    if architecture in encoders:
        registry.register_vision_encoder(*encoders[architecture])(shadow)


def _builder(implementation: Implementation) -> Any:
    """Called by TensorRT-LLM for SpeculativeDecodingMode.DFLASH (signature fixed by `get_draft_model`)."""

    def build_drafter(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> Any:
        from . import drafter

        build = drafter.build_dequantised if implementation == "dequantised context" else drafter.build
        built = build(model_config, draft_config)
        line = f"{BUILT} {getattr(model_config.mapping, 'rank', 0)} ({implementation})"
        import_module("tensorrt_llm.logger").logger.info(line)
        return built

    return build_drafter
