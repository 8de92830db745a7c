"""The run of a certification: one pair of servers at a time, each verified and measured, within a budget of time.

For whole blocks, then for `auto`: a verification of the size that fits, then rounds of all loads until each is decided
or the pair's share of the time is over. The plain server runs beside the speculating one, or in turn with it where a
server takes all of a device's memory.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from dflash_serve.adapter.launch import running_server
from dflash_serve.adapter.protocol import LookingBackend
from dflash_serve.adapter.registry import EMBEDDED, server_backend
from dflash_serve.answers.engine import Prompt
from dflash_serve.answers.prompts import BUNDLED, prompts_digest, read_prompt_set, with_variables
from dflash_serve.bench.results import LoadRatio, Run, as_json
from dflash_serve.bench.runner import Bench
from dflash_serve.bench.settings import AUTO, FIXED, OFF, BenchSettings, slug
from dflash_serve.certify.report import DECIDING, FASTER, SLOWER, UNKNOWN, Expected, Measurements, outcome
from dflash_serve.checkpoint.catalogue import catalogue
from dflash_serve.checkpoint.source import drafter_folder, recorded_survival
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.client.metrics import read_server
from dflash_serve.common.documents import read_json
from dflash_serve.common.provenance import query_gpus
from dflash_serve.common.store import Store
from dflash_serve.deployment.description import Deployment
from dflash_serve.doctor.examiner import examine_apart
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify.questions import FEWEST, WITH, WITHOUT, VerifyPlan
from dflash_serve.verify.subjects import ServerSubject, Subject, SubjectPair
from dflash_serve.verify.verification import Verification

ROUNDS = 5  # Most rounds of a load
RUN_SECONDS = 15.0  # Intended length of one run of aiperf, whose own start takes about 10 s
IN_FLIGHT = 16  # Requests in flight while answers are verified
VERIFY_SHARE = 0.4  # Largest share of a pair's time for its verification
FEWEST_PROMPTS = 8  # Fewest prompts of a verification, even if they take longer than its share
CAPTURED = re.compile(r"(?i)captur.*graph|graph.*captur")
LONGEST_LINE = 300
"""Characters of a log line about CUDA graphs; SGLang's line of all its arguments is longer and has the same words."""
SAMPLES = (1024, 512, 256, 128, FEWEST)
SAMPLED_COST = 120
"""Tokens of time for one sample of every case, prompts included: see `verify.questions.SAMPLED`."""
LONG_SHARE, LONGEST = 0.2, 2048  # Largest share of a verification's time for its long answers, and their most tokens
LONG_ANSWERS = 4  # Two prompts on two sides
DOCTOR_PROMPTS, DOCTOR_TOKENS = 8, 32  # Prompts of an examination, and the length of their longest answer


class OutOfTimeError(Exception):
    """The time is used up; everything finished is kept."""


class Certification:
    """One certification, in one folder.

    Args:
        settings: of the bench of every pair, but for `variants`, `rounds`, `requests_per_user` and `output`.
        store: finished verifications, chosen sizes, facts and the time that was spent.
        tell: gets one line about each step.

    Raises:
        UserError: a mistake in the settings, or a deployment with problems; nothing is started then.
    """

    def __init__(self, settings: BenchSettings, minutes: float, store: Store, tell: Callable[[str], None]) -> None:
        self.settings, self.store, self.tell = settings, store, tell
        self.seconds, self.work = 60 * minutes, settings.output / "work"
        self._before, self._start = float(store.get("spent", 0.0)), time.monotonic()
        self._longest = self._last = 0.0  # Seconds of the longest run of aiperf; time of the last one's end
        bundled = settings.dataset == str(settings.output / BUNDLED.name)
        self.left_out = ["prompts of yours (--dataset)"] if bundled else []
        self.benches: dict[str, Bench] = {}
        for word in (FIXED, AUTO):
            try:
                self.benches[word] = self._bench(word, ROUNDS)
            except UserError as error:
                if not self.benches:
                    raise
                self.left_out.append(f"{word}, which is refused ({error})")
        first, self.backend = self.benches[FIXED], server_backend(settings.backend)
        self.variants = {name: cast(Deployment, v) for b in self.benches.values() for name, v in b.variants.items()}
        self.together = not first.settings.one_at_a_time  # The plain server goes on beside another one
        self.running: dict[str, tuple[ExitStack, str]] = {}  # Servers and their URLs, by variant
        texts = first.dataset.prompts
        own: list[Prompt] = [[{"role": "user", "content": text}] for text in (texts or ())[:20]]
        self.prompts = [with_variables(prompt, settings.chat_template_kwargs) for prompt in own or read_prompt_set()]

    @property
    def spent(self) -> float:
        """Seconds of the budget, over all runs of an interrupted certification."""
        return self._before + time.monotonic() - self._start

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
        try:
            for number, word in enumerate(self.benches):
                share = (self.seconds - self.spent) / (len(self.benches) - number)
                with suppress(OutOfTimeError):
                    self._pair(word, self.spent + share)
                if word == FIXED and self.measurements().low and "doctor" not in self.store:
                    self.store.put("doctor", self._doctor())
        finally:
            self._stop()
            self.store.put("spent", self.spent)
        return self.measurements()

    def _bench(self, word: str, rounds: int) -> Bench:
        each = self.store.get("requests per user", 1)
        change = {"variants": (OFF, word), "rounds": rounds, "output": self.work / word, "requests_per_user": each}
        return Bench(self.settings.model_copy(update=change), lambda name, _: nullcontext(self._url(name)))

    def _pair(self, word: str, until: float) -> None:
        self.benches[word].open_stores()  # what an interrupted run has finished counts even if no time is left
        (name,) = self.benches[word].variants.keys() - {OFF}
        if f"rate {name}" not in self.store:
            rates = [self._rate(self._url(one)) for one in (name, OFF)]
            self.store.put(f"rate {name}", min(rates))
        rate = self.store[f"rate {name}"]
        if "requests per user" not in self.store:  # the same for both pairs, and after an interruption
            seconds = max(self.settings.concurrency) * self.settings.max_tokens / rate
            self.store.put("requests per user", max(1, min(8, round(RUN_SECONDS / seconds))))
        if f"verified {name}" not in self.store:
            seconds = VERIFY_SHARE * (until - self.spent)
            self.store.put(f"verified {name}", self._verified(name, rate * seconds))
        if self.store[f"verified {name}"]["findings"]["verdict"] == "not lossless":
            return  # which decides the verdict, whatever the speed
        for rounds in range(1, ROUNDS + 1):
            self.check(until - self._longest)
            self.benches[word], self._last = self._bench(word, rounds), self.spent
            self.benches[word].run(lambda run, *_: self._ran(run, until))
            ratios = self.benches[word].report().loads[name]
            if all(outcome(each) in (FASTER, SLOWER) for each in ratios):
                break

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
            if name != OFF or not self.together:
                self._stop(but=OFF if self.together else None)
            stack, folder, before = (
                ExitStack(),
                self.work / "servers" / slug(name),
                (query_gpus("memory.used"), host_mib()),
            )
            env, start = self._env, time.monotonic()
            url = stack.enter_context(running_server(self.backend, self.variants[name], folder, env=env))
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
            self._rate(url)
        return self.running[name][1]

    def _rate(self, url: str) -> float:
        """Tokens/s of short answers at the largest load."""
        users, params = max(self.settings.concurrency), SamplingParams(temperature=0, max_tokens=16)
        start, asked = time.monotonic(), [(f"Count to {number} in words.", params) for number in range(users)]
        list(Endpoint(url, concurrency=users).complete_all(asked))
        return users * 16 / (time.monotonic() - start)

    def _stop(self, but: str | None = None) -> None:
        """Ends all servers but one, and notes which metrics they had."""
        for name in self.running.keys() - {but}:
            stack, url = self.running.pop(name)
            with stack, suppress(UserError):
                told = vars(read_server(url)).items()
                self._seen(name, metrics=[key for key, value in told if value is not None])

    def _seen(self, name: str, **facts: Any) -> None:
        self.store.put(f"server {name}", self.store.get(f"server {name}", {}) | facts)

    def _verified(self, name: str, tokens: float) -> dict[str, Any]:
        kept = self.store.get(f"plan {name}")
        plan = self._plan(tokens) if kept is None else VerifyPlan.model_validate(kept)
        self.store.put(f"plan {name}", plan.model_dump(mode="json"))
        self.tell(f"verify {name}: {plan.prompts} prompts, {plan.samples} samples a side")
        described = {
            side: {"backend": self.backend.name, "deployment": self.variants[one].model_dump_json()}
            for side, one in ((WITH, name), (WITHOUT, OFF))
        }
        answers = Store(self.work / f"verify-{slug(name)}.jsonl", {"plan": self.store[f"plan {name}"], **described})

        def subject(variant: str) -> AbstractContextManager[Subject]:
            return nullcontext(ServerSubject(Endpoint(self._url(variant), concurrency=IN_FLIGHT)))

        speculating, plain = (partial(subject, one) for one in (name, OFF))
        pair = SubjectPair(speculating, plain, described, plan.dtype, lambda: self.store[f"server {name}"]["context"])
        run = Verification(plan, self.prompts, pair, answers, lambda *_: self.check(self.seconds))
        with closing(answers):
            found = run.run().model_dump(mode="json")
        self.tell(f"verify {name}: {found['verdict']}")
        return {"plan": plan.model_dump(mode="json"), "findings": found}

    def _plan(self, tokens: float) -> VerifyPlan:
        """The largest verification that takes so many tokens; the least one decides greedy decoding alone."""
        exact, longest = self.variants[OFF].hardware.dtype == "float32", min(128, self.settings.max_tokens)
        each, prompts = 2 * 2 * longest, len(self.prompts)  # 2 cases, 2 sides
        long = min(LONGEST, int(LONG_SHARE * tokens / LONG_ANSWERS))
        left = tokens - LONG_ANSWERS * long
        samples = next((count for count in SAMPLES if each * prompts + count * SAMPLED_COST <= left), 0)
        return VerifyPlan(
            prompts=prompts if samples else min(prompts, max(FEWEST_PROMPTS, int(left / each))),
            prompts_sha256=prompts_digest(self.prompts),
            chat_template_kwargs=self.settings.chat_template_kwargs,
            max_tokens=longest,
            samples=samples,
            long_tokens=long if long > longest else 0,
            dtype="float32" if exact else "bfloat16",
            same_seeds=exact and self.backend.name == EMBEDDED,
        )

    def _doctor(self) -> dict[str, Any]:
        """The doctor's verdict on the server of whole blocks; if that is healthy, on the checkpoint's settings, too."""
        (name,) = self.benches[FIXED].variants.keys() - {OFF}
        self.tell("acceptance is low: asking the doctor")
        suspect: dict[str, Any] = {"url": self._url(name)}
        if not self.together:  # its own engine needs the memory
            self._stop()
            suspect = {"observed": self.measurements().acceptance_length}
        sentences, verdicts = list[str](), list[str]()
        asked = self.prompts[:DOCTOR_PROMPTS]
        for number, about in enumerate((suspect, {})):
            output, left = self.work / f"doctor-{number}.json", max(60.0, self.seconds - self.spent)
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
        first, launch = data[FIXED], self.backend.launch(list(self.variants.values())[-1])
        told = [as_json(each) for each in data.values()]
        points = {(p["variant"], p["concurrency"]): p for each in reversed(told) for p in each["points"]}
        loads = {name: each.loads.get(name, []) for each in data.values() for name in each.variants if name != OFF}
        verified = {name: self.store[f"verified {name}"] for name in loads if f"verified {name}" in self.store}
        return Measurements(
            served=told[0]["served"],
            environment=told[0]["environment"],
            driver=next(iter(query_gpus("driver_version")), None),
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
