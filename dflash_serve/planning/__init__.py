"""`dflash-serve plan`: which GPUs, which split, which width and how many requests at once, before anything runs.

Step times of target and drafter (operator tables, or a roofline) plus an engine's own milliseconds give tokens/s at
every batch and width; the question's limits choose among them. Nothing here is measured by us: every figure says
where it comes from and how far such figures were off where somebody published a measurement.
"""
