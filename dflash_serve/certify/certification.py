"""The run of a certification: one pair of servers at a time, each verified and measured, within a budget of time.

For whole blocks, then for `auto`: a verification of the size that fits, then rounds of all loads until each is decided
or the pair's share of the time is over. The plain server runs beside the speculating one, or in turn with it where a
server takes all of a device's memory. A server gets the time that is left to start. No run of aiperf begins that would,
as far as was measured, end later. Running servers are asked at the width they have.
"""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, cast

from dflash_serve.adapter.launch import running_server
from dflash_serve.adapter.protocol import LookingBackend
from dflash_serve.adapter.registry import EMBEDDED, server_backend
from dflash_serve.answers.engine import Prompt
from dflash_serve.answers.prompts import BUNDLED, prompts_digest, read_prompt_set, with_variables
from dflash_serve.bench.results import LoadRatio, Run, as_json
from dflash_serve.bench.runner import Bench
from dflash_serve.bench.settings import AUTO, FIXED, OFF, BenchSettings, read_deployment, slug
from dflash_serve.certify.budget import FEWEST_PROMPTS, IN_FLIGHT, Speed, largest_plan, run_seconds
from dflash_serve.certify.report import DECIDING, FASTER, SLOWER, UNKNOWN, Expected, Measurements, outcome
from dflash_serve.checkpoint.catalogue import catalogue
from dflash_serve.checkpoint.source import drafter_folder, recorded_survival
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import read_server
from dflash_serve.common.documents import read_json
from dflash_serve.common.progress import Work
from dflash_serve.common.provenance import query_gpus
from dflash_serve.common.store import Store
from dflash_serve.deployment.description import Deployment
from dflash_serve.doctor.examiner import examine_apart
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify.amount import CHARACTERS, amount_of
from dflash_serve.verify.questions import WITH, WITHOUT, VerifyPlan
from dflash_serve.verify.subjects import ServerSubject, Subject, SubjectPair, two_servers
from dflash_serve.verify.verification import CONTEXT, Verification

ROUNDS = 5  # Most rounds of a load
RUN_SECONDS = 15.0  # Intended length of one run of aiperf, without `AIPERF_SECONDS`
VERIFY_SHARE = 0.4  # Largest share of a pair's time for its verification
CAPTURED = re.compile(r"(?i)captur.*graph|graph.*captur")
LONGEST_LINE = 300
"""Characters of a log line about CUDA graphs; SGLang's line of all its arguments is longer and has the same words."""
RATED_TOKENS, RATED_CHARACTERS = 16, 2048  # Of the answers, and of the prompt, by which a server's speed is measured
DOCTOR_PROMPTS, DOCTOR_TOKENS = 8, 32  # Prompts of an examination, and the length of their longest answer
STARTS_IN_TURN = 7  # Of a pair, one server at a time: two to measure speeds, one to verify, four in three rounds
UNLIMITED = Speed(math.inf, math.inf, math.inf)
DOCTOR_SECONDS = 60.0  # The doctor is not asked in less time


class OutOfTimeError(Exception):
    """The time is used up, or too little for the next step is left; everything finished is kept."""


class RunningServers(NamedTuple):
    """Servers that run already: that of a deployment, and the same without a drafter."""

    speculating: Endpoint
    plain: Endpoint


class Certification:
    """One certification, in one folder.

    Args:
        settings: of the bench of every pair, but for `variants`, `rounds`, `requests_per_user` and `output`.
        store: finished verifications, chosen sizes, facts and the time that was spent.
        given: the servers to ask; None = the deployment's are started.

    Attributes:
        tell: gets one line about each step.

    Raises:
        UserError: a mistake in the settings, or a deployment with problems; nothing is started then.
    """

    def __init__(
        self, settings: BenchSettings, minutes: float, store: Store, given: RunningServers | None = None
    ) -> None:
        self.settings, self.store, self.given = settings, store, given
        self.tell: Callable[[str], None] = lambda line: None
        self.seconds, self.work = 60 * minutes, settings.output / "work"
        self._before, self._start = float(store.get("spent", 0.0)), time.monotonic()
        self._longest = self._last = 0.0  # Seconds of the longest run of aiperf; time of the last one's end
        self._rated = count()  # Begins each long prompt, so that no server has it in its prefix cache
        self.step = Work("certifying")  # Its part is the step that runs
        bundled = settings.dataset == str(settings.output / BUNDLED.name)
        self.left_out = ["prompts of yours (--dataset)"] if bundled else []
        self.benches: dict[str, Bench] = {}
        for word in (FIXED, AUTO) if given is None else (self._given_width(),):
            try:
                self.benches[word] = self._bench(word, ROUNDS)
            except UserError as error:
                if not self.benches:
                    raise
                self.left_out.append(f"{word}, which is refused ({error})")
        first, self.backend = next(iter(self.benches.values())), server_backend(settings.backend)
        self.variants = {name: cast(Deployment, v) for b in self.benches.values() for name, v in b.variants.items()}
        # The plain server goes on beside another one:
        self.together = given is not None or not first.settings.one_at_a_time
        self.running: dict[str, tuple[ExitStack, str]] = {}  # Servers and their URLs, by variant
        texts = first.dataset.prompts
        own: list[Prompt] = [[{"role": "user", "content": text}] for text in (texts or ())[:20]]
        self.prompts = [with_variables(prompt, settings.chat_template_kwargs) for prompt in own or read_prompt_set()]

    @property
    def spent(self) -> float:
        """Seconds of the budget, over all runs of an interrupted certification."""
        return self._before + time.monotonic() - self._start

    @property
    def needed(self) -> float:
        """Seconds that a verdict needs at least: starts, the fewest questions, and `DECIDING` rounds of all loads.

        What is not known yet counts as nothing.
        """
        pairs = len(self.benches)
        starts = pairs + 1 if self.together else STARTS_IN_TURN * pairs  # Of running ones, none takes a second
        known = [Speed(*self.store[f"speed {name}"]) for name in self.variants if f"speed {name}" in self.store]
        speed = min(known, default=UNLIMITED)
        asked = speed.seconds(amount_of(self._least(), self.prompts, self._context(OFF))) if known else 0.0
        return starts * self._start_seconds + pairs * (asked + 2 * DECIDING * sum(self._runs(speed)))

    def _runs(self, speed: Speed) -> list[float]:
        each = {"requests_per_user": self.store.get("requests per user", 1)}
        settings = self.settings.model_copy(update=each)
        return [run_seconds(settings, users, speed) for users in settings.concurrency]

    def check(self, until: float) -> None:
        """Keeps the time that was spent.

        Raises:
            OutOfTimeError: `until` seconds are over.
        """
        self.store.put("spent", self.spent)
        if self.spent >= until:
            raise OutOfTimeError

    def run(self) -> Measurements:
        """Measures what is missing.

        Raises:
            UserError: a server or aiperf failed; finished results are kept.
        """
        if self.needed > self.seconds:
            self.tell(self._told_needed("the fewest runs of aiperf take"))
        try:
            for number, word in enumerate(self.benches):
                share = (self.seconds - self.spent) / (len(self.benches) - number)
                with suppress(OutOfTimeError):
                    self._pair(word, self.spent + share)
                if number == 0 and self.measurements().low and "doctor" not in self.store:
                    self.store.put("doctor", self._doctor())
        finally:
            self._stop()
            self.store.put("spent", self.spent)
        return self.measurements()

    def _bench(self, word: str, rounds: int) -> Bench:
        each = self.store.get("requests per user", 1)
        change = {"variants": (OFF, word), "rounds": rounds, "output": self.work / word, "requests_per_user": each}
        bench = Bench(self.settings.model_copy(update=change), lambda name, _: nullcontext(self._endpoint(name)))
        bench.local = self.given is None
        return bench

    def _given_width(self) -> str:
        # The word of the bench for the deployment's own width
        deployment = read_deployment(self.settings)[0]
        assert deployment is not None
        width = deployment.speculation.width
        if width in (OFF, 1):
            raise UserError("it does not speculate", where="speculation.width", do="give another, or auto")
        if width == AUTO and server_backend(self.settings.backend).launch(deployment).never_narrow is not None:
            return FIXED
        return str(width)

    def _endpoint(self, name: str) -> Endpoint:
        """A variant's server, which is started and warmed up if none is given or runs."""
        if self.given is None:
            return Endpoint(self._url(name))
        found = self.given.plain if name == OFF else self.given.speculating
        if f"server {name}" not in self.store:
            self._seen(name, url=found.base, context=found.context)
        return found

    def _pair(self, word: str, until: float) -> None:
        self.benches[word].open_stores()  # what an interrupted run has finished counts even if no time is left
        (name,) = self.benches[word].variants.keys() - {OFF}
        if f"speed {name}" not in self.store:
            one, plain = (self._speed(self._endpoint(each), each) for each in (name, OFF))
            self.store.put(f"speed {name}", [min(pair) for pair in zip(one, plain, strict=True)])
        speed = Speed(*self.store[f"speed {name}"])
        if "requests per user" not in self.store:  # the same for both pairs, and after an interruption
            seconds = max(self.settings.concurrency) * self.settings.max_tokens / speed.together
            self.store.put("requests per user", max(1, min(8, round(RUN_SECONDS / seconds))))
            self.tell(self._told_needed(f"at {speed.together:.0f} tokens/s a verdict takes about"))
        if f"verified {name}" not in self.store:
            self.store.put(f"verified {name}", self._verified(name, speed, VERIFY_SHARE * (until - self.spent)))
        if self.store[f"verified {name}"]["findings"]["verdict"] == "not lossless":
            return  # which decides the verdict, whatever the speed
        self._longest = self._longest or max(self._runs(speed))
        for rounds in range(1, ROUNDS + 1):
            self.check(until - self._longest)
            self.benches[word], self._last = self._bench(word, rounds), self.spent
            self.step.part = f"measuring {name}: round {rounds} of at most {ROUNDS}"
            self.benches[word].run(lambda run, done, of: self._ran(run, until))
            ratios = self.benches[word].report().loads[name]
            if all(outcome(each) in (FASTER, SLOWER) for each in ratios):
                break

    def _told_needed(self, what: str) -> str:
        told, given = f"{what} {self.needed / 60:.1f} minutes", f"{self.seconds / 60:g}"
        return f"{told} of {given}" if self.needed <= self.seconds else f"{told}; what exceeds {given} is left out"

    def _ran(self, run: Run, until: float) -> None:
        self.tell(f"{run}: {run.throughput:.1f} tokens/s")
        self._longest, self._last = max(self._longest, self.spent - self._last), self.spent
        self.check(until - self._longest)  # the next run may take as long

    @cached_property
    def _env(self) -> Mapping[str, str]:
        return self.backend.look() if isinstance(self.backend, LookingBackend) else {}

    def _url(self, name: str) -> str:
        """The URL of a variant's server, which is started and warmed up if it does not run."""
        if name not in self.running:
            self.check(self.seconds)
            if name != OFF or not self.together:
                self._stop(but=OFF if self.together else None)
            stack, folder, before = (
                ExitStack(),
                self.work / "servers" / slug(name),
                (query_gpus("memory.used"), host_mib()),
            )
            self.step.part = f"starting the server of {name}"
            left, env, start = self.seconds - self.spent, self._env, time.monotonic()
            one = running_server(self.backend, self.variants[name], folder, env=env, patience=left)
            try:
                url = stack.enter_context(one)
            except UserError as error:
                if self.spent < self.seconds:
                    raise
                if self._start_seconds:
                    raise OutOfTimeError from None
                raise UserError(error.what, where=error.where, do="give it more --minutes") from None
            self.running[name], log = (stack, url), folder / "server.log"
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            self._seen(
                name,
                start_seconds=round(time.monotonic() - start, 1),
                gpu_mib=(before[0], query_gpus("memory.used")),
                host_mib=host_mib() - before[1],
                graphs=[line[-160:] for line in lines if CAPTURED.search(line) and len(line) <= LONGEST_LINE][-1:],
                context=Endpoint(url).context,
            )
            self._speed(Endpoint(url), name)  # a warm-up
        return self.running[name][1]

    @property
    def _start_seconds(self) -> float:
        seen = (self.store.get(f"server {name}", {}) for name in self.variants)
        return max((float(each.get("start_seconds", 0.0)) for each in seen), default=0.0)

    def _context(self, name: str) -> int:
        known: int | None = self.store.get(f"server {name}", {}).get("context")
        return known or CONTEXT

    def _speed(self, server: Endpoint, name: str) -> Speed:
        self.step.part = f"asking {name} for its speed"
        users, length = max(self.settings.concurrency), min(RATED_CHARACTERS, self._context(name) // 2)
        texts = [f"Count to {number} in words." for number in range(users)]
        (alone, _), (together, _) = (self._timed(server, each, RATED_TOKENS) for each in (texts[:1], texts))
        long = f"{next(self._rated)}. {texts[0] * length}"[:length]  # No token is shorter than a character
        prompt, read = self._timed(server, [long], 1)
        return Speed(RATED_TOKENS / alone, users * RATED_TOKENS / together, read / prompt)

    def _timed(self, server: Endpoint, texts: list[str], tokens: int) -> tuple[float, int]:
        """Seconds until all are answered at once, and the tokens of the prompts."""
        start, params, read = time.monotonic(), SamplingParams(temperature=0, max_tokens=tokens), 0
        for reply in replace(server, concurrency=len(texts)).complete_all([(text, params) for text in texts]):
            read += len(reply.prompt_ids or texts[0][::CHARACTERS])
            self.check(self.seconds)
        return time.monotonic() - start, read

    def _stop(self, but: str | None = None) -> None:
        """Ends all servers but one, and notes which metrics they had."""
        for name in self.running.keys() - {but}:
            stack, url = self.running.pop(name)
            with stack, suppress(UserError):
                told = vars(read_server(url)).items()
                self._seen(name, metrics=[key for key, value in told if value is not None])

    def _seen(self, name: str, **facts: Any) -> None:
        self.store.put(f"server {name}", self.store.get(f"server {name}", {}) | facts)

    def _verified(self, name: str, speed: Speed, seconds: float) -> dict[str, Any]:
        kept, context = self.store.get(f"plan {name}"), self._context(OFF)
        found = largest_plan(self._least(), self.prompts, context, speed, seconds) if kept is None else kept
        plan = VerifyPlan.model_validate(found)
        self.store.put(f"plan {name}", plan.model_dump(mode="json"))
        amount = amount_of(plan, self.prompts, context)
        self.tell(
            f"verify {name}: {plan.prompts} prompts, {plan.samples} samples a side; about {amount.answers} answers and "
            f"{speed.seconds(amount) / 60:.1f} minutes"
        )
        pair = self._subjects(name, plan)
        described = {side: dict(one) for side, one in pair.descriptions.items()}
        answers = Store(self.work / f"verify-{slug(name)}.jsonl", {"plan": self.store[f"plan {name}"], **described})
        done = 0

        def answered(_: str, number: int) -> None:
            nonlocal done
            done += number
            self.step.part = f"verifying {name}: {done} of about {amount.answers} answers"
            self.check(self.seconds)

        run = Verification(plan, self.prompts, pair, answers, answered)
        with closing(answers):
            found = run.run().model_dump(mode="json")
        self.tell(f"verify {name}: {found['verdict']}")
        return {"plan": plan.model_dump(mode="json"), "findings": found}

    def _subjects(self, name: str, plan: VerifyPlan) -> SubjectPair:
        if self.given is not None:
            return two_servers(*(replace(one, concurrency=IN_FLIGHT) for one in self.given))
        described = {
            side: {"backend": self.backend.name, "deployment": self.variants[one].model_dump_json()}
            for side, one in ((WITH, name), (WITHOUT, OFF))
        }

        def subject(variant: str) -> AbstractContextManager[Subject]:
            return nullcontext(ServerSubject(replace(self._endpoint(variant), concurrency=IN_FLIGHT)))

        speculating, plain = (partial(subject, one) for one in (name, OFF))
        return SubjectPair(speculating, plain, described, plan.dtype, lambda: self.store[f"server {name}"]["context"])

    def _least(self) -> VerifyPlan:
        """The smallest verification, which decides greedy decoding alone."""
        exact = self.variants[OFF].hardware.dtype == "float32"
        return VerifyPlan(
            prompts=min(len(self.prompts), FEWEST_PROMPTS),
            prompts_sha256=prompts_digest(self.prompts),
            chat_template_kwargs=self.settings.chat_template_kwargs,
            max_tokens=min(128, self.settings.max_tokens),
            samples=0,
            long_tokens=0,
            dtype="float32" if exact else "bfloat16",
            same_seeds=exact and self.backend.name == EMBEDDED,
        )

    def _doctor(self) -> dict[str, Any]:
        """The doctor's verdict on the server of whole blocks; if that is healthy, on the checkpoint's settings, too."""
        (name,) = next(iter(self.benches.values())).variants.keys() - {OFF}
        self.step.part = "asking the doctor"
        if self.seconds - self.spent < DOCTOR_SECONDS:
            return {"verdict": UNKNOWN, "sentences": ["there was no time to ask (--minutes)"]}
        self.tell("acceptance is low: asking the doctor")
        suspect: dict[str, Any] = {"url": self._endpoint(name).base}
        if not self.together:  # its own engine needs the memory
            self._stop()
            suspect = {"observed": self.measurements().acceptance_length}
        sentences, verdicts = list[str](), list[str]()
        asked = self.prompts[:DOCTOR_PROMPTS]
        for number, about in enumerate((suspect, {})):
            output, left = self.work / f"doctor-{number}.json", max(1.0, self.seconds - self.spent)
            again = output.with_name(f"{output.name}.partial.jsonl").exists()
            try:
                examine_apart(
                    self.variants[name], asked, output, **about, max_tokens=DOCTOR_TOKENS, resume=again, seconds=left
                )
            except subprocess.TimeoutExpired:
                return {"verdict": UNKNOWN, "sentences": [*sentences, "there was no time for more (--minutes)"]}
            except UserError as error:
                return {"verdict": UNKNOWN, "sentences": [*sentences, str(error)]}
            report = read_json(output)
            sentences += report["sentences"][:2]
            verdicts.append(report["verdict"])
            if report["verdict"] != "healthy":
                break
        return {"verdict": verdicts[-1], "server": verdicts[0], "sentences": sentences}

    def measurements(self) -> Measurements:
        """Everything that is finished."""
        data = {word: bench.report() for word, bench in self.benches.items()}
        first, launch = next(iter(data.values())), self.backend.launch(list(self.variants.values())[-1])
        told = [as_json(each) for each in data.values()]
        points = {(p["variant"], p["concurrency"]): p for each in reversed(told) for p in each["points"]}
        loads = {name: each.loads.get(name, []) for each in data.values() for name in each.variants if name != OFF}
        verified = {name: self.store[f"verified {name}"] for name in loads if f"verified {name}" in self.store}
        return Measurements(
            served=told[0]["served"],
            environment=told[0]["environment"],
            driver=None if self.given else next(iter(query_gpus("driver_version")), None),
            backend=self.backend.name,
            deployment=launch.deployment.model_dump(mode="json", exclude_defaults=True),  # which refuses secrets
            command=[Path(w).name if w[:1] == "/" else w for w in launch.command(Path("FOLDER")).argv],
            choices=[f"{one.key} = {one.value}: {one.why}" for one in launch.choices],
            request=first.request.model_dump(mode="json"),
            settings={"concurrency": self.settings.concurrency, "minutes": self.seconds / 60, "aiperf_seed": 0},
            verifications=verified,
            loads=loads,
            points=list(points.values()),
            servers={name: self.store[f"server {name}"] for name in self.variants if f"server {name}" in self.store},
            expected=self._expected(),
            doctor=self.store.get("doctor"),
            not_tested=[*self.left_out, *self._missing(loads)],
            minutes=round(self.spent / 60, 1),
            needed_minutes=round(self.needed / 60, 1),
        )

    def _missing(self, loads: Mapping[str, list[LoadRatio]]) -> Iterator[str]:
        for name, ratios in loads.items():
            rounds = {each.users: each.rounds for each in ratios}
            none = [str(users) for users in self.settings.concurrency if users not in rounds]
            few = [str(users) for users, count in rounds.items() if count < DECIDING]
            yield from [f"{name}, users at once: {', '.join(none)}"] if none else []
            told = f"in {DECIDING} rounds, the fewest that decide: {name}, users at once: {', '.join(few)}"
            yield from [told] if few else []

    def _expected(self) -> Expected | None:
        if self.variants.keys() == {OFF, AUTO}:
            return None  # Publishers state the acceptance of whole blocks
        drafter = next(v.drafter for v in self.variants.values() if v.drafter)
        survival = recorded_survival(drafter_folder(drafter.model, drafter.revision))
        rows = [one.acceptance_length for one in catalogue().drafters if one.repository == drafter.model]
        told = [(each.value, f"{each.benchmark}, {each.source}") for row in rows for each in row]
        told += [] if survival is None else [(1 + sum(survival), "the drafter's provenance.json")]
        if not told:
            return None
        length, source = min(told)
        return Expected(acceptance_length=length, survival=survival, source=source)


def host_mib(pid: int | str = "self") -> int:
    """Peak memory of all processes that this one started, and of theirs; 0 where the system is not Linux."""
    own, found = 0, list[str]()
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        own = 0 if pid == "self" else sum(int(kib) for kib in re.findall(r"VmHWM:\s*(\d+)", status)) // 1024
        found = [child for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return own + sum(map(host_mib, found))
