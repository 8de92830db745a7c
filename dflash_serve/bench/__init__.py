"""`dflash-serve bench`: aiperf against several variants of serving, interleaved, and a report of what it measured."""
