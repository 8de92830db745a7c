"""Log probabilities with their tokens named, in the shapes of chat and of plain completions."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from dflash_serve.outputs import TokenLogprob

from ..grammar import Grammars
from . import responses as r

LOWEST = -9999.0
"""What JSON gets for minus infinity, as from vLLM."""


class TokenNames:
    """Tokens as text and bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, grammars: Grammars) -> None:
        self._tokenizer, self._grammars = tokenizer, grammars

    def chat(self, entries: Sequence[TokenLogprob] | None) -> r.ChatLogprobs | None:
        """In chat's shape."""
        if entries is None:
            return None
        content = []
        for entry in entries:
            top = [self._named(token, value) for token, value in entry.top]
            own = self._named(entry.token_id, entry.logprob)
            content.append(r.TokenLogprobs(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
        return r.ChatLogprobs(content=content)

    def completion(self, entries: Sequence[TokenLogprob] | None, offset: int) -> r.CompletionLogprobs | None:
        """In the older shape; `offset` is where the text of the first one begins."""
        if entries is None:
            return None
        named = [self._named(entry.token_id, entry.logprob) for entry in entries]
        offsets = []
        for own in named:
            offsets.append(offset)
            offset += len(own.token)
        return r.CompletionLogprobs(
            tokens=[own.token for own in named],
            token_logprobs=[own.logprob for own in named],
            top_logprobs=[self._best(entry) for entry in entries],
            text_offset=offsets,
        )

    def _best(self, entry: TokenLogprob) -> dict[str, float]:
        """The most probable tokens, and the generated one where it is not among them."""
        named = [self._named(*pair) for pair in (*entry.top, (entry.token_id, entry.logprob))]
        return {own.token: own.logprob for own in reversed(named)}

    def _named(self, token: int, logprob: float) -> r.TopLogprob:
        text = str(self._tokenizer.decode([token]))
        value = max(logprob, LOWEST)
        return r.TopLogprob(token=text, logprob=value, bytes=list(self._grammars.token_bytes(token)))
