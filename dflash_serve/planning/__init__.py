"""`dflash-serve plan`: which GPUs, which split, which width and how many requests at once, before anything runs.

Step times of target and drafter (operator tables, or a roofline) plus an engine's own milliseconds give tokens/s at
every batch and width; the question's limits choose among them. Nothing is run: every figure says where
it comes from, and the mean error of such figures where measurements were published.
"""
