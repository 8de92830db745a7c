"""A toy language model with all fields of an OpenAI-compatible server, which answers in a millisecond.

Its logits depend on the last two tokens and on the sum of all of them, so that any other context gives other answers.
A draw depends on seed and position alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Body = dict[str, Any]
Floats = NDArray[np.float64]
CONTEXT = 640  # Tokens of a prompt and its answer
END, USER, ASSISTANT, OPEN, YES, NO, CLOSE, FIRST_WORD, VOCABULARY = 0, 1, 2, 3, 4, 5, 6, 7, 64
TEXTS = ["", "", "", '{"answer": "', "yes", "no", '"}']
TEXTS += [f"{'kmnprst'[n % 7]}{'aeiou'[n % 5]}{'lxz'[n % 3]}{n} " for n in range(FIRST_WORD, VOCABULARY)]
GRAMMAR = ((OPEN,), (YES, NO), (CLOSE,), (END,))
RESIDUES = 97  # Sums of the context's tokens that the model tells apart
OFFSET = 12.0  # Mean logit of a word: language models have such, which is what a repetition penalty divides


class RefusedRequestError(Exception):
    """A request that the model does not take."""


def tokenize(prompt: str | Sequence[int] | Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a text, of messages, or of themselves."""
    if isinstance(prompt, str):
        words = re.findall(r"\S+", prompt)
        known = {text.strip(): token for token, text in enumerate(TEXTS) if text}
        return [known.get(word, FIRST_WORD + crc32(word.encode()) % (VOCABULARY - FIRST_WORD)) for word in words]
    found = list[int]()
    for part in prompt:
        if isinstance(part, int):
            found.append(part)
        else:
            found += [USER if part["role"] == "user" else ASSISTANT, *tokenize(part["content"])]
    return found if found and isinstance(prompt[0], int) else [*found, ASSISTANT]


class ToyModel:
    """The model; `complete` is its server's answer to a request."""

    def __init__(self) -> None:
        random = np.random.default_rng(3)
        self.last, self.before = (random.normal(0, scale, (VOCABULARY, VOCABULARY)) for scale in (2.0, 1.0))
        self.whole = random.normal(0, 1.0, (RESIDUES, VOCABULARY))
        self.offset = np.full(VOCABULARY, OFFSET)
        self.offset[[USER, ASSISTANT, OPEN, YES, NO, CLOSE]] = -40
        self.offset[END] = OFFSET - 1.5

    def complete(self, path: str, body: Body) -> Body:
        """The response, not streamed.

        Raises:
            RefusedRequestError: the context is too short.
        """
        prompt = tokenize(body["messages"] if "messages" in body else body["prompt"])
        if len(prompt) + body["max_tokens"] > CONTEXT:
            raise RefusedRequestError
        chat, choices = "messages" in body, []
        for number in range(body.get("n") or 1):
            seed = body.get("seed")
            tokens, scores, ended = self._answer(prompt, body, None if seed is None else seed + number)
            text, _ = _until_stop(tokens, body.get("stop") or ())
            choice: Body = {"index": number, "finish_reason": ended, "token_ids": tokens, "prompt_token_ids": prompt}
            choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            if body.get("logprobs"):
                count = body["top_logprobs"] if chat else body["logprobs"]
                choice["logprobs"] = _logprobs(tokens, scores, count, chat=chat)
            choices.append(choice)
        return {"choices": choices, "usage": {"completion_tokens": sum(len(one["token_ids"]) for one in choices)}}

    def _answer(self, prompt: list[int], body: Body, seed: int | None) -> tuple[list[int], list[Floats], str]:
        random = np.random.default_rng(seed)  # of the operating system without a seed
        draws: Floats = random.random((body["max_tokens"],))
        context = list(prompt)
        total, scores, least = sum(prompt), list[Floats](), body.get("min_tokens", 0)
        ends = {*body.get("stop_token_ids", ()), *(() if body.get("ignore_eos") else (END,))}
        for place, draw in enumerate(draws):
            logits = self.last[context[-1]] + self.whole[total % RESIDUES] + self.offset
            logits = logits + self.before[context[-2]] if len(context) > 1 else logits
            scores.append(logits - np.log(np.exp(logits).sum()))
            changed = _biased(logits, prompt, context[len(prompt) :], body)
            if place < least:
                changed[list({*ends, END})] = -1e9
            if "response_format" in body:
                allowed = list(GRAMMAR[min(place, len(GRAMMAR) - 1)])
                changed[[token for token in range(VOCABULARY) if token not in allowed]] = -1e9
            token = _chosen(changed, draw, body)
            context.append(token)
            total += token
            answer = context[len(prompt) :]
            if place + 1 > least and (token in ends or _until_stop(answer, body.get("stop") or ())[1]):
                return answer, scores, "stop"
        return context[len(prompt) :], scores, "length"


def _biased(logits: Floats, prompt: list[int], answer: list[int], body: Body) -> Floats:
    changed = logits.copy()
    for token, bias in (body.get("logit_bias") or {}).items():
        changed[int(token)] += bias
    if (factor := body.get("repetition_penalty", 1)) != 1:
        seen = list({*prompt, *answer})
        changed[seen] = np.where(changed[seen] > 0, changed[seen] / factor, changed[seen] * factor)
    if answer and (body.get("presence_penalty") or body.get("frequency_penalty")):
        counts = np.bincount(answer, minlength=VOCABULARY)
        changed -= body["presence_penalty"] * (counts > 0) + body["frequency_penalty"] * counts
    return changed


def _chosen(logits: Floats, draw: float, body: Body) -> int:
    if body["temperature"] == 0:
        return int(logits.argmax())
    order = np.argsort(-logits)
    p = np.exp((logits[order] - logits[order[0]]) / body["temperature"])
    if body.get("top_k"):
        p[body["top_k"] :] = 0
    if body.get("top_p", 1) < 1:
        shares = p / p.sum()
        p[np.cumsum(shares) - shares >= body["top_p"]] = 0
    p[p < body.get("min_p", 0)] = 0
    sums = np.cumsum(p)
    return int(order[np.searchsorted(sums, draw * sums[-1], side="right")])


def _until_stop(tokens: Sequence[int], stops: Sequence[str]) -> tuple[str, bool]:
    # the text before the first stop string, and True if there is one
    text = "".join(TEXTS[token] for token in tokens)
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def _logprobs(tokens: list[int], scores: list[Floats], count: int, *, chat: bool) -> Body:
    names = [TEXTS[token] or f"<{token}>" for token in range(VOCABULARY)]
    tops = [[(names[token], float(one[token])) for token in np.argsort(-one)[:count]] for one in scores]
    values = [float(one[token]) for one, token in zip(scores, tokens, strict=True)]
    if not chat:
        shown = [dict(top) for top in tops]
        return {"tokens": [names[token] for token in tokens], "token_logprobs": values, "top_logprobs": shown}
    each = zip(tokens, values, tops, strict=True)
    content = [
        {
            "token": names[token],
            "logprob": value,
            "top_logprobs": [{"token": name, "logprob": one} for name, one in top],
        }
        for token, value, top in each
    ]
    return {"content": content}
