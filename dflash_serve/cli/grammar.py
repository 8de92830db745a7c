"""The grammar that all verbs share: exit codes, and words of earlier releases with what they are called now.

docs/grammar.md has a table of it, and the help of a verb says its exit codes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

INTERRUPTED = 130  # 128 + SIGINT
EXIT_CODES: Mapping[int, str] = {
    0: "done, and nothing is wrong",
    1: "the answer is no",
    2: "an error in the input: one line on stderr says what, where, and what to do",
    3: "no verdict: there was not enough data",
    INTERRUPTED: "interrupted: what is finished is kept",
    141: "the reader of the output closed the pipe: no answer",
}
"""Meanings in every verb. Only verbs of `VERDICTS` end with 1 or 3."""
VERDICTS: Mapping[str, Mapping[int, str]] = {
    "generate": {1: "with --compare: the two answers differ"},
    "serve": {1: "the embedded engine's server broke, or was cut short; other engines have codes of their own"},
    "inspect": {1: "the drafter has problems"},
    "adapt": {1: "do not swap", 3: "could not tell"},
    "swap": {1: "taken back"},
    "verify": {1: "speculation changes answers; with --warm: or acceptance falls", 3: "undecided"},
    "doctor": {1: "a fault was found", 3: "undecided"},
    "certify": {1: "refused; with --compare: worse", 3: "could not tell"},
    "build": {1: "with --verify: a file differs from the manifest"},
}
"""Verb -> what 1 and 3 mean there."""
RENAMED: Mapping[str, Mapping[str, str]] = {
    "verify": {
        "--with": "--url",
        "--without": "--without-url",
        "--with-metrics-url": "--metrics-url",
    },
    "bench": {"--endpoint": "--url"},
}
"""Verb -> option of release 0.2 -> its name now. The old names are understood until 0.4."""
ADDRESS = ("http://", "https://")
TAKE_ADDRESS = ("--url", "--metrics-url")


def exit_codes(verb: str) -> str:
    """The sentence of a verb's help about its exit codes."""
    codes = {**EXIT_CODES, **VERDICTS.get(verb, {})}
    told = (f"{code} {codes[code].partition(':')[0] if code == 2 else codes[code]}" for code in _own(verb))
    return f"Exit codes: {'; '.join(told)}."


def _own(verb: str) -> list[int]:
    return sorted({0, 2, *VERDICTS.get(verb, {})})


def in_todays_words(verb: str, words: Sequence[str], *, quiet: bool = False) -> list[str]:
    """The words of a command line with today's names; stderr says which were old.

    Args:
        quiet: stderr says nothing, as where a shell asks for completions.
    """
    names, found = RENAMED.get(verb, {}), list[str]()
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            _say(f"{name} is {names[name]} now", quiet=quiet)
            word = names[name] + equals + value
        elif verb == "top" and word.startswith(ADDRESS) and (place == 0 or words[place - 1] not in TAKE_ADDRESS):
            _say(f"give the address as --url {word}", quiet=quiet)
            found.append("--url")
        found.append(word)
    return found


def _say(what: str, *, quiet: bool) -> None:
    if not quiet:
        print(f"dflash-serve: {what}; the old form will be gone in 0.4", file=sys.stderr)
