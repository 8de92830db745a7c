"""Which requests a scheduler can take at all."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams


def check_request(token_ids: Sequence[int], params: SamplingParams, *, capacity: int, vocab_size: int) -> None:
    """Refuses what could not run.

    Args:
        capacity: tokens of prompt and answer that one sequence may have.

    Raises:
        UserError: an empty prompt, one that leaves no room for an answer, or token ids outside the vocabulary.
    """
    if not token_ids:
        raise UserError("it has no tokens", where="prompt", do="send at least one")
    if len(token_ids) >= capacity:
        do = "shorten it, or raise limits.max_model_len if the target allows"
        raise UserError(f"{len(token_ids)} tokens, but the model holds {capacity}", where="prompt", do=do)
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise UserError(f"a token id is outside the vocabulary of {vocab_size}", where="prompt")
    if max(params.logit_bias, default=0) >= vocab_size:
        raise UserError(f"a token id is outside the vocabulary of {vocab_size}", where="logit_bias")
