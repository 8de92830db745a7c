"""The listening socket, taken before anything slow is done or imported."""

from __future__ import annotations

import socket

from dflash_serve.errors import UserError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow is done.

    Raises:
        UserError: the address is taken, not ours, or not to be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        do = "choose another with --port, or stop what has it"
        raise UserError(f"cannot listen ({error.strerror})", where=f"{host}:{port}", do=do) from None
    listener.setblocking(False)
    return listener
