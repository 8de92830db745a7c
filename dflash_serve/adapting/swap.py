"""Another drafter for a running server, with a proof, and back again where the proof fails.

1. A few prompts are answered by the served drafter: tokens gained per step, which needs no metrics of other clients.
2. The server loads the new drafter and puts it in place (`/update_drafter_from_disk`).
3. The same prompts are answered again, and `verify` asks the server with and without speculation.
4. Where verification does not pass, or the tokens per step fell by more than is allowed, the server takes the drafter
   before it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dflash_serve.adapter.registry import backend, installed
from dflash_serve.answers.engine import Prompt
from dflash_serve.answers.prompts import prompts_digest
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.http import Connection, RefusedError
from dflash_serve.common.settings import Frozen
from dflash_serve.common.store import Store
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify.questions import VerifyPlan
from dflash_serve.verify.report import Findings, Verdict
from dflash_serve.verify.subjects import one_server
from dflash_serve.verify.verification import Verification

UPDATE, INFO = "/update_drafter_from_disk", "/server_info"
LONGEST_PROMPT = 1024  # Tokens of a prompt and its answer in this verification; `verify` asks for longer ones
PATIENCE = 1800.0  # Seconds for a server to load a drafter
Told = Callable[[str], None]


class SwapSettings(Frozen):
    """Options of `swap`."""

    max_tokens: int = 64  # of an answer
    allowed_loss: float = 0.1  # of tokens per step, a share


class SwapReport(Frozen):
    """Result of an exchange."""

    verdict: Verdict
    kept: bool  # False = the drafter before it serves again
    reason: str
    drafter: str
    revision: int
    before: float  # Tokens per step of the prompts with the served drafter
    after: float | None  # With the new one; None = not measured
    prompts: int
    allowed_loss: float
    load_seconds: float
    pause_seconds: float  # Time in which no step ran
    undrafted: int  # Answers in flight, which went on without drafts


class SwappableServer:
    """A running embedded server whose drafter can be replaced.

    Raises:
        UserError: nothing answers there, or another engine, whose drafter is replaced by a restart.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        engine = endpoint.metrics.require("--url").engine or ""
        for facts in (backend(name).facts for name in installed()):
            if facts.no_swap is not None and engine.startswith(facts.title):
                raise UserError(facts.no_swap, where=endpoint.base, do=RESTART)
        self._connection = Connection(endpoint.base, endpoint.api_key, PATIENCE)

    def update(self, drafter: str | None) -> dict[str, Any]:
        """Puts a drafter in place; None = the one before the served one. The server's answer.

        Raises:
            UserError: the server does not allow it, or refuses this drafter.
        """
        body = {"back": True} if drafter is None else {"model_path": drafter}
        found: dict[str, Any] = self._asked(lambda: self._connection.json("POST", UPDATE, body))
        return found

    def dtype(self) -> str:
        """Number format of the server's engine.

        Raises:
            UserError: the server does not allow another drafter.
        """
        if (found := self._asked(lambda: self._connection.json("GET", INFO)).get("dtype")) is None:
            raise self._fixed()
        return str(found)

    def gained(self, prompts: Sequence[Prompt], max_tokens: int) -> float:
        """Tokens per step of greedy answers.

        Raises:
            UserError: it drafts for none of them.
        """
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        replies = list(self.endpoint.complete_all([(prompt, params) for prompt in prompts]))
        accepted, drafted = (sum(getattr(one, name) or 0 for one in replies) for name in ("accepted", "drafted"))
        if not drafted:
            raise UserError("it drafts for no request now", where=self.endpoint.base, do=NOTHING)
        # The first token of an answer is its prefill's.
        tokens = sum((one.completion_tokens or 1) - 1 for one in replies)
        return float(tokens / max(1, tokens - accepted))

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RefusedError as error:
            if error.status == 404:
                raise self._fixed() from None
            raise

    def _fixed(self) -> UserError:
        return UserError("its drafter may not be replaced", where=self.endpoint.base, do=ALLOW)


RESTART = "restart it with the drafter: with the chart, set deployment.drafter.model, and `helm upgrade` rolls the pods"
ALLOW = "start it with engine_args.torch.swap-from: FOLDER, below which the drafter is"
NOTHING = "swap when it drafts, or restart it with the drafter"


def swap(
    server: SwappableServer, drafter: str, prompts: Sequence[Prompt], settings: SwapSettings, told: Told = print
) -> SwapReport:
    """Replaces the server's drafter, and takes the new one back where it does not prove itself.

    Raises:
        UserError: the server refuses the drafter, or cannot be asked. After its exchange the drafter is taken back.
    """
    told("asking the served drafter")
    dtype, before = server.dtype(), server.gained(prompts, settings.max_tokens)
    told("the server loads the new drafter")
    done = server.update(drafter)
    try:
        told("asking the new drafter")
        verdict, reason, after = _judged(server, dtype, before, prompts, settings, told)
    except BaseException:
        server.update(None)
        raise
    kept = verdict == "lossless" and reason is None
    if not kept:
        done["revision"] = server.update(None)["revision"]
    return SwapReport(
        verdict=verdict,
        kept=kept,
        reason=reason or verdict,
        before=before,
        after=after,
        prompts=len(prompts),
        allowed_loss=settings.allowed_loss,
        **{name: done[name] for name in ("drafter", "revision", "load_seconds", "pause_seconds", "undrafted")},
    )


def _judged(
    server: SwappableServer, dtype: str, before: float, prompts: Sequence[Prompt], settings: SwapSettings, told: Told
) -> tuple[Verdict, str | None, float | None]:
    # Verdict, the reason against the drafter if there is one, and its tokens per step.
    try:
        after = server.gained(prompts, settings.max_tokens)
    except UserError as error:
        if isinstance(error, RefusedError):
            raise
        return "could not tell", error.what, None
    if after < before * (1 - settings.allowed_loss):
        lost = f"tokens per step fell from {before:.2f} to {after:.2f}, by more than {settings.allowed_loss:.0%}"
        return "could not tell", lost, after
    told("verifying")
    findings = verified(server.endpoint, dtype, prompts, settings.max_tokens)
    against = None if findings.verdict == "lossless" else "; ".join([findings.headline, *findings.reasons])
    return findings.verdict, against, after


def verified(endpoint: Endpoint, dtype: str, prompts: Sequence[Prompt], max_tokens: int) -> Findings:
    """A short verification of one server, which is asked with speculation and without: greedy decoding alone."""
    pair = one_server(endpoint)
    context = min(endpoint.context or LONGEST_PROMPT, LONGEST_PROMPT)
    plan = VerifyPlan(
        prompts=len(prompts),
        prompts_sha256=prompts_digest(prompts),
        max_tokens=max_tokens,
        samples=0,
        long_tokens=0,
        dtype="float32" if dtype == "float32" else "bfloat16",
        penalties=False,
    )
    limited = replace(pair, context=lambda: context)
    return Verification(plan, prompts, limited, Store(None, {})).run()
