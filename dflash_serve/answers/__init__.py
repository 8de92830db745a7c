"""Prompts and answers in this process: the protocol of engines, the Python API, prompt sets and chat templates."""
