"""`dflash-serve bench`: a concurrency sweep by aiperf over several ways of serving, interleaved, and its report."""
