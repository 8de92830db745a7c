"""A whole training run in miniature: the drafter learns, and a killed run ends where an uninterrupted one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_drafter, load_target
from dflash_serve.training.data import answer_engine, make_data
from dflash_serve.training.recipe import TrainingRecipe
from dflash_serve.training.run import Display, new_trainer, run
from dflash_serve.training.trainer import Scores, Tick, Trainer
from tests.support.recipes import STEPS, tiny_recipe, write_prompts
from tests.support.tiny_target import write_tiny_target

PLAIN: Mapping[str, object] = {}
DSPARK: Mapping[str, object] = {
    "markov": {"kind": "rnn", "rank": 6},
    "confidence": {"with_markov": True},
    "slots": "anchor-first",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_target(tmp_path_factory.mktemp("tiny") / "target"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")


def trainer(settings: TrainingRecipe, output: Path) -> Trainer:
    name = settings.target.model
    manifest = make_data(settings, lambda: answer_engine(settings, "cpu"), output / "data", lambda *_: None)
    return new_trainer(settings, load_target(name, dtype=torch.bfloat16), manifest, output)


def weights(run_of: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in run_of.drafter.state_dict().items()}


EVERYTHING: Mapping[str, object] = {
    "optimizer": "muon",
    "reduced_vocabulary": True,
    "seen_at_least": 2,
    "short_blocks": {"block_size": 3, "until": 0.4},
}


@pytest.mark.parametrize(
    ("heads", "options"),
    [(PLAIN, {}), (PLAIN, EVERYTHING), (DSPARK, {"soft_labels": 0.9}), (DSPARK, EVERYTHING)],
    ids=["adamw", "muon with everything", "DSpark, adamw", "DSpark, muon with everything"],
)
def test_a_resumed_run_ends_bit_equal_to_an_uninterrupted_one(
    target: str, prompts: Path, tmp_path: Path, heads: Mapping[str, object], options: Mapping[str, object]
) -> None:
    settings = tiny_recipe(target, prompts, heads, **options)
    whole = trainer(settings, tmp_path / "whole")
    whole.run(lambda _: None)
    first = trainer(settings, tmp_path / "halves")

    def stop(tick: Tick) -> None:
        first.stopping = tick.step == STEPS // 2

    first.run(stop)
    assert first.progress.step == STEPS // 2
    second = trainer(settings, tmp_path / "halves")
    assert second.resume()
    second.run(lambda _: None)
    assert second.progress.step == whole.progress.step == STEPS
    for name, expected in weights(whole).items():
        assert torch.equal(weights(second)[name], expected), name


def test_a_run_leaves_a_drafter_a_log_and_its_provenance(target: str, prompts: Path, tmp_path: Path) -> None:
    settings = tiny_recipe(target, prompts, steps=60, lr=3e-3)
    run(settings, tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 60
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["validation"]["replayed_tau"] >= 1.0
    folder = tmp_path / "out/drafter"
    drafter = load_drafter(folder)
    assert drafter.config.target_layer_ids == (0, 2)
    assert all(t.dtype == torch.bfloat16 for t in load_file(folder / "model.safetensors").values())
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["steps"] == 60
    assert 0 < provenance["best_step"] <= 60
    assert str(tmp_path) not in json.dumps(provenance)


@pytest.mark.parametrize("heads", [PLAIN, DSPARK], ids=["plain", "DSpark"])
def test_what_a_reduced_vocabulary_learnt_to_predict_is_all_that_is_drafted(
    target: str, prompts: Path, tmp_path: Path, heads: Mapping[str, object]
) -> None:
    settings = tiny_recipe(target, prompts, heads, reduced_vocabulary=True, seen_at_least=2)
    run(settings, tmp_path / "out")
    kept = trainer(settings, tmp_path / "out").loss.kept
    assert kept is not None
    assert load_drafter(tmp_path / "out/drafter").hot_tokens == kept.tolist()


def test_the_best_held_out_step_is_written_and_not_the_last(
    target: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the run was stopped and resumed in between: what was best before is not forgotten."""
    settings, seen = tiny_recipe(target, prompts, validate_every=4), dict[int, dict[str, torch.Tensor]]()
    taus = iter([1.5, 2.5, 2.0, 2.0])  # after steps 4, 8, 12, and before it is written

    def scripted(self: Trainer) -> Scores:
        seen[len(seen)] = {name: weight.to(torch.bfloat16) for name, weight in weights(self).items()}
        return Scores(loss=1.0, slot_accuracy=(0.5,), simulated_tau=1.0, replayed_tau=next(taus), survival=(0.5,))

    monkeypatch.setattr(Trainer, "validate", scripted)
    first = trainer(settings, tmp_path / "out")

    def stop(tick: Tick) -> None:
        first.stopping = tick.step == 10

    first.run(stop)
    run(settings, tmp_path / "out", resume=True)
    written = load_file(tmp_path / "out/drafter/model.safetensors")
    assert all(torch.equal(written[name], seen[1][name]) for name in written)
    assert not all(torch.equal(written[name], seen[2][name]) for name in written)
    provenance = json.loads((tmp_path / "out/drafter/provenance.json").read_text())
    assert (provenance["steps"], provenance["best_step"]) == (STEPS, 8)
    assert provenance["validation"]["replayed_tau"] == 2.5


def test_a_folder_that_holds_a_run_is_not_trained_over(target: str, prompts: Path, tmp_path: Path) -> None:
    settings, output = tiny_recipe(target, prompts), tmp_path / "out"
    first = trainer(settings, output)
    first.save()
    (file,) = output.glob("checkpoint-*/drafter.safetensors")
    whole = file.read_bytes()
    file.write_bytes(b"short")
    with pytest.raises(UserError, match=r"cannot be read .*; remove it and train again"):
        run(settings, output, resume=True)
    file.write_bytes(whole)
    with pytest.raises(UserError, match="it holds an unfinished run; add --resume, or give another --output"):
        run(settings, output)
    assert run(settings, output, resume=True)
    with pytest.raises(UserError, match="it holds a finished run; give another --output"):
        run(settings, output)
    with pytest.raises(UserError, match=r"other settings \(training.lr: 0.001 there, 0.002 here\); give another"):
        run(tiny_recipe(target, prompts, lr=2e-3), output, resume=True)


def test_a_drafter_that_cannot_be_is_refused_before_any_answer_is_written(
    target: str, prompts: Path, tmp_path: Path
) -> None:
    fields = tiny_recipe(target, prompts).model_dump()
    fields["drafter"] |= {"target_layer_ids": (0, 99)}
    wrong = TrainingRecipe.model_validate(fields)
    with pytest.raises(UserError, match="99") as caught:
        run(wrong, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert "validation error" not in str(caught.value), "not in pydantic's words"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_before_its_first_checkpoint_keeps_its_steps_and_says_so(
    target: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:  # fmt: skip
    def again(*, resume: bool = False) -> bool:
        return run(tiny_recipe(target, prompts), tmp_path / "out", resume=resume)

    show = Display.__call__

    def stop_at_three(self: Display, tick: Tick) -> None:
        show(self, tick)
        if tick.step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Display, "__call__", stop_at_three)
    before = signal.getsignal(number)
    assert not again()
    assert signal.getsignal(number) == before
    said = " ".join(capsys.readouterr().err.split())
    assert "stopping: this step is finished and saved first" in said
    assert "stopped at step 3; go on with --resume" in said
    monkeypatch.setattr(Display, "__call__", show)
    assert again(resume=True)
    assert "resumed at step 3" in capsys.readouterr().err


def test_more_minutes_for_answers_do_not_make_a_training_another_one(
    target: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def within(minutes: float) -> TrainingRecipe:
        fields = tiny_recipe(target, prompts).model_dump()
        fields["data"]["answers"]["max_minutes"] = minutes
        return TrainingRecipe.model_validate(fields)

    first = trainer(within(60), tmp_path / "out")
    first.progress = first.progress.model_copy(update={"step": STEPS - 1})
    first.save()
    assert run(within(90), tmp_path / "out", resume=True)
    assert f"resumed at step {STEPS - 1}" in capsys.readouterr().err


def test_other_settings_start_anew_say_why_and_leave_the_old_checkpoint(
    target: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, output = tiny_recipe(target, prompts), tmp_path / "out"
    first = trainer(settings, output)
    first.progress = first.progress.model_copy(update={"step": STEPS - 1})
    first.save()
    assert run(tiny_recipe(target, prompts, lr=2e-3), output, resume=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "made with other settings (training.lr: 0.001 there, 0.002 here); training starts anew" in said
    assert len((output / "log.jsonl").read_text().splitlines()) == STEPS // 2
    assert trainer(settings, output).resume()


def test_blocks_are_short_for_the_first_part_of_the_budget(target: str, prompts: Path, tmp_path: Path) -> None:
    run_of, slots = trainer(tiny_recipe(target, prompts, short_blocks={"block_size": 3, "until": 0.5}), tmp_path), []
    run_of.run(lambda tick: slots.append((tick.slots > 0).tolist()))
    assert slots == [[True, True, False]] * (STEPS // 2) + [[True, True, True]] * (STEPS // 2)


STOPPED = """
import os, signal
from dflash_serve.cli.main import app
from dflash_serve.training.run import Display

def stop(self, tick, show=Display.__call__):
    show(self, tick)
    if tick.step == 6 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)

Display.__call__ = stop
app()
"""
"""`dflash-serve`, whose second process is asked to stop at step 6."""


@pytest.mark.thorough
def test_two_processes_that_were_stopped_in_between_answer_and_train_as_one_does(
    target: str, prompts: Path, tmp_path: Path
) -> None:
    """Real torchrun, gloo: each answers half of the prompts and trains on half of every step's sequences."""
    heads = {**DSPARK, "markov": None, "confidence": {"with_markov": False}, "slots": "fill-in"}
    settings = tiny_recipe(target, prompts, heads, sequences=4, bf16=False, soft_labels=0.5, reduced_vocabulary=True)
    file, script = tmp_path / "recipe.yaml", tmp_path / "stopped.py"
    file.write_text(settings.model_dump_json())
    script.write_text(STOPPED)

    def torchrun(*program: str) -> tuple[int, str]:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
        argv += ["train", str(file), "--device", "cpu", "--output", str(tmp_path / "two"), "--resume"]
        done = subprocess.run(argv, timeout=240, capture_output=True, text=True)
        return done.returncode, " ".join(done.stderr.split())

    code, said = torchrun(str(script))
    assert code != 0
    assert "stopped at step 6; go on with --resume" in said
    code, said = torchrun("--no-python", str(Path(sys.executable).with_name("dflash-serve")))
    assert "resumed at step 6" in said
    # gloo aborted a process at its exit once in some fifty runs, after everything was written; not understood.
    assert code == 0 or "terminate called without an active exception" in said, said
    assert said.count("drafter: ") == 1, "one process speaks"
    run(settings, tmp_path / "one")
    one, two = ((tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("one", "two"))
    figures = ("step", "lr", "loss", "confidence_loss", "gradient_norm", "simulated_tau")
    for mine, theirs in zip(map(json.loads, one), map(json.loads, two), strict=True):
        assert [theirs[name] for name in figures] == pytest.approx([mine[name] for name in figures], abs=1e-3)
    found = [load_file(next((tmp_path / name).glob("checkpoint-*/drafter.safetensors"))) for name in ("one", "two")]
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, atol=1e-5, rtol=0)
