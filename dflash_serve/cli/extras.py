"""What a verb needs beside the core, asked for before any work is done."""

from dflash_serve.common.extras import need

__all__ = ["need"]
