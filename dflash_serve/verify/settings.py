"""Settings of a verification, and the servers and the plan that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from dflash_serve.answers.engine import Prompt
from dflash_serve.answers.prompts import prompts_digest, template_kwargs
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.http import read_api_key
from dflash_serve.common.settings import Frozen, PositiveInt, Several
from dflash_serve.errors import UserError
from dflash_serve.verify.questions import FEWEST, VerifyPlan
from dflash_serve.verify.subjects import SubjectPair, one_server, two_servers

EMBEDDED_SAMPLES, SERVER_SAMPLES = 256, 1024
"""Four times as many samples show deviations half as large. The embedded engine keeps seeds, which show more.

There are as many short answers under load."""


def _enough(samples: int | None) -> int | None:
    if samples and samples < FEWEST:
        do = f"give {FEWEST} or more, or 0 to verify greedy decoding alone"
        raise UserError(f"{samples} samples a side show nothing", where="--samples", do=do)
    return samples


class VerifySettings(Frozen):
    """A field for each option of `dflash-serve verify` that is not of a deployment, with the same name."""

    with_url: str | None
    without_url: str | None
    with_metrics_url: Several
    without_metrics_url: Several
    model: str | None
    api_key_file: Path | None
    concurrency: PositiveInt
    dtype: str | None
    chat_template_kwargs: Annotated[dict[str, JsonValue], BeforeValidator(template_kwargs)] = Field(default={})
    num_prompts: PositiveInt | None
    max_tokens: PositiveInt
    long_tokens: int
    samples: Annotated[int | None, AfterValidator(_enough)]
    """None = as many as `SERVER_SAMPLES`, or `EMBEDDED_SAMPLES` where the engine runs in this process."""
    false_alarm: float
    penalties: bool
    warm: bool
    pool_tokens: PositiveInt | None
    same_seeds: bool | None
    """None = true for the embedded engine in float32."""
    output: Path
    resume: bool

    def servers(self) -> SubjectPair:
        """The two running servers, or one that is asked with speculation and without.

        Raises:
            UserError: only the plain one is given, or the number format is not one that is verified.
        """
        if self.with_url is None:
            raise UserError("a server with speculation is verified", where="verify", do="give --url, too")
        _refuse_other_formats(self.dtype)
        key = read_api_key(self.api_key_file)

        def endpoint(url: str, metrics: tuple[str, ...]) -> Endpoint:
            return Endpoint(url, model=self.model, api_key=key, concurrency=self.concurrency, metrics_urls=metrics)

        speculating = endpoint(self.with_url, self.with_metrics_url)
        if self.without_url is None:
            return one_server(speculating)
        return two_servers(speculating, endpoint(self.without_url, self.without_metrics_url))

    def plan(self, prompts: Sequence[Prompt], pair: SubjectPair) -> VerifyPlan:
        """The verification of two subjects, with all that was left open chosen.

        Raises:
            UserError: the subjects' number format is not one that is verified.
        """
        dtype = pair.dtype or self.dtype
        _refuse_other_formats(dtype)
        exact, samples, same_seeds = dtype == "float32", self.samples, self.same_seeds
        if samples is None:
            samples = EMBEDDED_SAMPLES if pair.embedded else SERVER_SAMPLES
        return VerifyPlan(
            prompts=min(self.num_prompts or len(prompts), len(prompts)),
            prompts_sha256=prompts_digest(prompts),
            chat_template_kwargs=self.chat_template_kwargs,
            max_tokens=self.max_tokens,
            samples=samples,
            long_tokens=self.long_tokens,
            false_alarm=self.false_alarm,
            dtype="float32" if exact else "bfloat16",
            penalties=self.penalties,
            same_seeds=pair.embedded and exact if same_seeds is None else same_seeds,
        )


def _refuse_other_formats(dtype: str | None) -> None:
    if dtype not in (None, "auto", "float32", "bfloat16"):
        raise UserError(f"{dtype!r} is not float32 or bfloat16", where="--dtype")
