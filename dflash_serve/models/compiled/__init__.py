"""A step's small operators compiled by the machine's own C++ compiler, where it has one.

Weights stream through a CPU's caches in every decoding step and push everything else out, so an operator of PyTorch
costs ten times there what it costs in a loop of its own. These are few, and their code is small.
"""
