"""Quantised drafters: the number formats, and checkpoints in ModelOpt's layout."""
