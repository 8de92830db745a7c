"""Answers that must match a grammar (a JSON schema, a regular expression, calls of tools), with speculation.

Each slot of the draft is masked by the grammar's state after the tokens before it. Row j of the verification is masked
by the state after slots 1..j. So the accepted tokens are those that masked decoding without speculation would
choose. llguidance keeps the state; its rollback undoes the steps along a draft.
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

# The field of a request that usually asks for a grammar.
FIELD = "response_format"
# Most characters of a schema or an expression.
MAX_SOURCE = 65536
# Deepest nesting of a schema.
MAX_DEPTH = 32
# White space between JSON tokens. It is limited: small models can write it without end.
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"


class Grammar:
    """The grammar of one answer and its state.

    `failure` says why the matcher could not go on (one of its limits); its masks have no meaning after that.

    Args:
        where: the field of the request that asks for it.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, where: str) -> None:
        self._matcher, self._vocab_size, self.where = matcher, vocab_size, where
        self.failure: str | None = None

    def copy(self) -> Grammar:
        """A copy with its own state."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size, self.where)

    @property
    def finished(self) -> bool:
        """Only the end of the answer can follow."""
        return bool(self._matcher.is_stopped())

    def advance(self, token: int) -> None:
        """Advances by a token of the answer, which `masks` allowed."""
        if not self._matcher.consume_token(token):
            self._fail()

    def fill(self, slots: int, choose: Callable[[Sequence[int], Tensor], int]) -> list[int]:
        """Drafts at most `slots` slots, one by one; the draft ends early where the answer must end.

        Args:
            choose: (the draft so far, allowed next tokens as bool [V] on the CPU) -> the next token.
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

    def _step(self, token: int) -> bool:  # advances by a token of a draft, unless it ends the answer
        if self._matcher.validate_tokens([token]) != 1 or not self._matcher.consume_token(token):
            return False
        if self._matcher.stop_reason() == "EndOfSentence":
            self._matcher.rollback(1)
            return False
        return True

    def _allowed(self, device: torch.device) -> Tensor:  # bool [V]; all True once the grammar has failed
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
    """Compiles grammars for one target's tokenizer. Needs the extra `[serve]`.

    Each method raises a UserError, at the request's field `where`, for a source that is too large or too deep, or that
    cannot be enforced.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        from llguidance.hf import from_tokenizer

        self._vocab_size = vocab_size
        self._tokenizer = from_tokenizer(tokenizer, vocab_size, list(eos_token_ids) or None)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; a character may need several tokens."""
        return self._tokenizer.decode_bytes([token])

    def json_schema(self, schema: Mapping[str, Any], *, where: str = FIELD) -> Grammar:
        """Answers that are JSON of this schema."""
        from llguidance import LLMatcher

        source = checked_schema(schema, where)
        try:
            text = LLMatcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": WHITESPACE})
        except ValueError as error:
            raise UserError(f"not a JSON schema ({error})", where=where) from None
        return self._compile(text, where)

    def regex(self, pattern: str, *, where: str = FIELD) -> Grammar:
        """Answers that match a regular expression (Rust's syntax) from beginning to end."""
        from llguidance import LLMatcher

        _check_size(pattern, where)
        return self._compile(LLMatcher.grammar_from_regex(pattern), where)

    def lark(self, text: str, *, where: str = FIELD) -> Grammar:
        """Answers that match a grammar in llguidance's form of Lark, which may hold JSON schemas."""
        _check_size(text, where)
        return self._compile(text, where)

    def _compile(self, text: str, where: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        # With ten times this fuel, its default, `(a{1000}){100}` costs the whole batch 0.1 s a step; string lengths and
        # enumerations of thousands need less than it.
        fuel = 100_000
        limits = LLParserLimits(
            max_grammar_size=100_000, max_lexer_states=50_000, initial_lexer_fuel=fuel, verbose_errors=False
        )
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            message = " ".join(matcher.get_error().split())[:300]
            raise UserError(f"it cannot be enforced ({message})", where=where)
        grammar = Grammar(matcher, self._vocab_size, where)
        grammar.masks([], torch.device("cpu"))
        if grammar.failure is not None:
            limit = matcher.get_error().splitlines()  # none for a schema that only refers to itself
            what = f"it cannot be enforced ({limit[0]})" if limit else "no answer can match it"
            raise UserError(what, where=where)
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


def _depth(value: object) -> int:  # without recursion, since the input is not trusted
    deepest, stack = 0, [(value, 0)]
    while stack:
        inner, depth = stack.pop()
        children = inner.values() if isinstance(inner, Mapping) else inner if isinstance(inner, list) else None
        if children is not None:
            deepest = max(deepest, depth + 1)
            stack += [(child, depth + 1) for child in children]
    return deepest
