"""The rules of speculation: sampling, acceptance, statistics, width. Pure functions: no I/O, no engine.

Nothing is imported here, so that `params`, `statistics` and `width` stay importable without torch.
"""
