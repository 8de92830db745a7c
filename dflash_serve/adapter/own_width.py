"""A request's own width, which engines hand on to our plug-ins inside a field of their own.

SGLang hands on `custom_params`, vLLM `vllm_xargs`. The embedded server takes the field itself.
"""

from __future__ import annotations

from dflash_serve.errors import UserError

FIELD = "speculative"
OFF = {FIELD: "off"}
WAYS = (OFF, {"custom_params": OFF}, {"vllm_xargs": OFF})
"""Fields of a request that is not drafted for: the embedded server's, SGLang's, vLLM's."""


def most_slots(asked: object, block_size: int) -> int | None:
    """Most slots, the anchor counted, that a request asks for; None = the server chooses.

    Raises:
        UserError: `asked` is no such number.
    """
    if asked is None or asked == "auto":
        return None
    if asked == "off":
        return 1
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= block_size:
        what = f"{asked!r} is neither auto, off nor a number of slots from 1 to {block_size}"
        raise UserError(what, where=FIELD, do="leave it out, or send off")
    return asked
