"""Backends: their protocols and registry, and what `serve` makes of a deployment for any of them.

`registry` finds a backend by its entry point, `launch` turns a deployment into files and a command, `checks` and
`arguments` are refusals that several engines share, and `facts` and `counters` say how a running engine is read.
"""
