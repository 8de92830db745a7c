"""What turns pictures into tokens, kept by the model's class: a subclass has none."""

from __future__ import annotations


class InputProcessorRegistry:
    def __init__(self) -> None:
        self._input_processors_cls_by_model_type: dict[type, type] = {}


INPUT_PROCESSOR_REGISTRY = InputProcessorRegistry()
