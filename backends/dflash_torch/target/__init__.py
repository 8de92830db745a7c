"""The target model of the embedded backend."""

from .source import load_target, load_tokenizer, target_folder, target_source

__all__ = ["load_target", "load_tokenizer", "target_folder", "target_source"]
