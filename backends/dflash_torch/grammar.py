"""Answers that must match a grammar (a JSON schema, a regular expression, calls of tools), inside speculation.

The drafter's slots are masked as they are filled, each by the state that the tokens before it lead to, and so is every
row of the verification: row j by the state after slots 1..j. What is accepted is then what masked decoding without
speculation would have chosen, token by token. llguidance keeps the grammar; walking ahead is undone by its rollback.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase

FIELD = "response_format"
"""The field of a request that usually asks for a grammar."""
MAX_SOURCE = 65536
"""Characters of a schema or an expression."""
MAX_DEPTH = 32
"""Nesting of a schema."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"
"""Between JSON tokens: enough to indent, too little to get lost in, which small models do."""


class Grammar:
    """One answer's grammar: where it stands and what may come next.

    `failure` says why it could not go on (a limit of the matcher); nothing it allows afterwards means anything.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self.failure: str | None = None

    def copy(self) -> Grammar:
        """The same, to be walked on its own."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size)

    @property
    def finished(self) -> bool:
        """Nothing can follow but the end of the answer."""
        return bool(self._matcher.is_stopped())

    def advance(self, token: int) -> None:
        """The answer goes on with this token; one that `masks` allowed."""
        if not self._matcher.consume_token(token):
            self._fail()

    def fill(self, slots: int, choose: Callable[[Sequence[int], Tensor], int]) -> list[int]:
        """Drafts at most so many slots, one by one; ends early where the answer could only end.

        Args:
            choose: (the draft so far, bool [V] on this machine's CPU: what may follow it) -> the token that does.
        """
        draft: list[int] = []
        for _ in range(slots):
            token = choose(draft, self._allowed(torch.device("cpu")))
            if not self._step(token):
                break
            draft.append(token)
        self._matcher.rollback(len(draft))
        return draft

    def masks(self, draft: Sequence[int], device: torch.device) -> Tensor:
        """Bool [1 + slots, V], True = allowed: row j after drafted slots 1..j, which `fill` has chosen."""
        rows = [self._allowed(device)]
        for token in draft:
            self._matcher.consume_token(token)
            rows.append(self._allowed(device))
        self._matcher.rollback(len(draft))
        return torch.stack(rows)

    def _step(self, token: int) -> bool:
        """Walks ahead, unless the token ends the answer."""
        if self._matcher.validate_tokens([token]) != 1 or not self._matcher.consume_token(token):
            return False
        if self._matcher.stop_reason() == "EndOfSentence":
            self._matcher.rollback(1)
            return False
        return True

    def _allowed(self, device: torch.device) -> Tensor:
        """Bool [V]; everything once the grammar has failed, so that no row is left without a token."""
        if self.failure is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool))
            if not self._matcher.is_error() and bool(allowed.any()):
                return allowed.to(device)
            self._fail()
        return torch.ones(self._vocab_size, dtype=torch.bool, device=device)

    def _fail(self) -> None:
        first = (self._matcher.get_error() or "no token can follow").strip().splitlines()[0]
        self.failure = f"the grammar cannot go on ({first})"


class Grammars:
    """Compiles grammars for one target's tokenizer, and knows the bytes of its tokens. Needs the extra `[serve]`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        from llguidance.hf import from_tokenizer

        self._vocab_size = vocab_size
        self._tokenizer = from_tokenizer(tokenizer, vocab_size, list(eos_token_ids) or None)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; a character may need several tokens."""
        return self._tokenizer.decode_bytes([token])

    def json_schema(self, schema: Mapping[str, Any], *, where: str = FIELD) -> Grammar:
        """Answers that are JSON of this schema.

        Args:
            where: the request's field that asks for it.

        Raises:
            UserError: it is too large or too deep, or not a schema that can be enforced.
        """
        from llguidance import LLMatcher

        try:
            text = LLMatcher.grammar_from_json_schema(
                checked_schema(schema, where), overrides={"whitespace_pattern": WHITESPACE}
            )
        except ValueError as error:
            raise UserError(f"not a JSON schema ({error})", where=where) from None
        return self._compile(text, where)

    def regex(self, pattern: str, *, where: str = FIELD) -> Grammar:
        """Answers that match a regular expression (Rust's syntax) from beginning to end.

        Raises:
            UserError: it is too large or not one that can be compiled.
        """
        from llguidance import LLMatcher

        _check_size(pattern, where)
        return self._compile(LLMatcher.grammar_from_regex(pattern), where)

    def lark(self, text: str, *, where: str = FIELD) -> Grammar:
        """Answers that match a grammar in llguidance's form of Lark, which may hold JSON schemas.

        Raises:
            UserError: it is too large or not one that can be compiled.
        """
        _check_size(text, where)
        return self._compile(text, where)

    def _compile(self, text: str, where: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            message = " ".join(matcher.get_error().split())[:300]
            raise UserError(f"it cannot be enforced ({message})", where=where)
        grammar = Grammar(matcher, self._vocab_size)
        grammar.masks([], torch.device("cpu"))
        if grammar.failure is not None:  # such as a schema that is nothing but a reference to itself
            raise UserError("no answer can match it", where=where)
        return grammar


def checked_schema(schema: Mapping[str, Any], where: str) -> str:
    """A client's JSON schema as text.

    Raises:
        UserError: it is too large or too deep.
    """
    if _depth(schema) > MAX_DEPTH:
        raise UserError(f"the schema is nested more than {MAX_DEPTH} deep", where=where)
    source = json.dumps(schema)
    _check_size(source, where)
    return source


def _check_size(source: str, where: str) -> None:
    if len(source) > MAX_SOURCE:
        raise UserError(f"it has {len(source)} characters, at most {MAX_SOURCE} are taken", where=where)


def _depth(value: object) -> int:
    """Nesting of lists and objects, found without recursion: the input is not trusted."""
    deepest, stack = 0, [(value, 0)]
    while stack:
        inner, depth = stack.pop()
        children = inner.values() if isinstance(inner, Mapping) else inner if isinstance(inner, list) else None
        if children is not None:
            deepest = max(deepest, depth + 1)
            stack += [(child, depth + 1) for child in children]
    return deepest
