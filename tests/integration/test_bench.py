"""The real aiperf against real servers, and the report in a real browser that reaches no network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dflash_serve.cli.main import app
from tests.support.embedded import tiny_engine
from tests.support.serving import running
from tests.support.site import usage_only

Folders = tuple[Path, Path]
needs_aiperf = pytest.mark.skipif(find_spec("aiperf") is None, reason="pip install 'dflash-serve[bench]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps"),
)
pytestmark = pytest.mark.thorough
TOKENS = 200
"""Length of an answer. A busy machine let aiperf read a whole answer of 40 at once: no interactivity then."""
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND"


@pytest.fixture(scope="module")
def measured(tiny_folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One variant started by the bench, a server that ran already, and one without metrics; two users each."""
    folder = tmp_path_factory.mktemp("bench")
    prompts = folder / "prompts.jsonl"
    texts = ["the quick brown fox", "jumps over the lazy dog", "the name of the fox", "over and over"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    file = folder / "deployment.yaml"
    file.write_text(
        f"target: {{model: {tiny_folders[0]}}}\ndrafter: {{model: {tiny_folders[1]}}}\n"
        "limits: {max_batch_size: 2}\nhardware: {dtype: float32}\n"
    )
    with (
        running(tiny_engine(tiny_folders, width=1)) as plain,
        running(tiny_engine(tiny_folders, width=4)) as drafting,
        usage_only(drafting.url) as hidden,
    ):
        arguments = [
            *("bench", str(file), "--variants", "fixed", "--url", f"plain={plain.url}", "--baseline", "plain"),
            *("--url", f"hidden={hidden}"),
            *("--dataset", str(prompts), "--concurrency", "2", "--rounds", "1", "--min-requests", "4"),
            *("--requests-per-user", "1", "--max-tokens", str(TOKENS), "--ignore-eos", "--no-warm-up"),
            *("--output", str(folder / "out")),
        ]
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return folder / "out"


@needs_aiperf
def test_aiperf_measures_both_variants(measured: Path) -> None:
    found: dict[str, Any] = json.loads((measured / "bench.json").read_text())
    assert found["runs"] == {"done": 3, "planned": 3}
    fixed, plain, _ = found["points"]
    assert (fixed["variant"], plain["variant"]) == ("fixed 4", "plain")
    for point in (fixed, plain):
        assert (point["requests"], point["errors"], point["concurrency"]) == (4, 0, 2)
        assert point["throughput_per_device"] > 0
        assert point["interactivity"] > 0
        assert point["first_token_ms"] > 0
    assert plain["acceptance"]["verifications"] == 0
    assert plain["acceptance"]["acceptance_length"] is None


@needs_aiperf
def test_acceptance_is_of_this_run_alone_and_fits_the_tokens(measured: Path) -> None:
    acceptance = json.loads((measured / "bench.json").read_text())["points"][0]["acceptance"]
    assert acceptance["engine"] == "dflash-serve"
    # 4 answers: the first token of each is its prefill's, a last block may be cut.
    gained = round(acceptance["acceptance_length"] * acceptance["verifications"])
    unspeculated = acceptance["widths"].get("1", 0)
    assert 4 * (TOKENS - 1) <= gained + unspeculated <= 4 * (TOKENS + 2)
    assert len(acceptance["survival"]) == 3


@needs_aiperf
def test_aiperfs_section_and_the_usage_of_answers_tell_the_same_acceptance(measured: Path) -> None:
    """The section for speculation is of a server that is asked for it; behind a gateway there is only the usage."""
    fixed, _, hidden = json.loads((measured / "bench.json").read_text())["points"]
    runs = [json.loads(line) for line in (measured / "runs" / "fixed-4.jsonl").read_text().splitlines()]
    (told,) = (run["value"]["told"] for run in runs if "value" in run)
    counted = fixed["acceptance"]
    assert told["accepted_by_slot"] == [count for count in counted["accepted_by_slot"] if count]
    assert (told["verifications"], told["drafted"]) == (counted["verifications"], counted["drafted"])
    behind = hidden["acceptance"]
    assert (behind["accepted"], behind["drafted"]) == (counted["accepted"], counted["drafted"])
    assert behind["verifications"] == pytest.approx(counted["verifications"], abs=4), "one for each answer's end"


@needs_aiperf
def test_servers_that_were_started_are_gone(measured: Path) -> None:
    log = (measured / "work" / "fixed-4.server" / "server.log").read_text()
    assert "Finished server process" in log


@needs_aiperf
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH (Debian: apt-get install chromium)")
def test_the_report_reads_well_in_a_browser_without_a_network(measured: Path, tmp_path: Path) -> None:
    page = (measured / "report.html").resolve().as_uri()
    text = _browse(tmp_path, "--dump-dom", page).decode()
    assert json.loads((measured / "bench.json").read_text())["sentence"] in text
    text = (measured / "report.html").read_text()
    (tmp_path / "bare.html").write_text(re.sub(r"(<svg viewBox[^>]*>).*?</svg>", r"\1</svg>", text, flags=re.DOTALL))
    assert _ink(tmp_path, page) > _ink(tmp_path, (tmp_path / "bare.html").as_uri()) + 3000  # the plot is there


def _browse(tmp_path: Path, *more: str) -> bytes:
    assert CHROMIUM is not None
    command = [CHROMIUM, *QUIET, NO_NETWORK, f"--user-data-dir={tmp_path / 'profile'}", *more]
    return subprocess.run(command, capture_output=True, check=True, timeout=120).stdout


def _ink(tmp_path: Path, page: str) -> int:
    """Pixels that are not white."""
    from PIL import Image

    _browse(tmp_path, f"--screenshot={tmp_path / 'shot.png'}", "--window-size=1100,1400", page)
    return sum(Image.open(tmp_path / "shot.png").convert("L").histogram()[:250])
