"""A step's operators compiled by the machine's own C++ compiler, where it has one.

Weights stream through a CPU's caches in every decoding step and push everything else out, so a small operator of
PyTorch costs ten times there what it costs in a loop of its own. And oneDNN's matrix products, made for many rows, take
half as long again as memory needs for the few that decoding has. These are few operators, and their code is small.
"""
