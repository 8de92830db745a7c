"""What a stranger reads is true: generated pages are those of the code, links lead somewhere, one version number."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import dflash_serve
from dflash_serve.cli.main import app
from tests.house import ROOT


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["cli.md", "deployment.md", "grammar.md"])
def test_the_generated_pages_are_those_of_the_code(page: str) -> None:
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert written == generator().PAGES[page](), "run: python docs/generate.py"


def test_every_option_and_key_says_what_it_means() -> None:
    for page in ("cli.md", "deployment.md"):
        rows = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| `")]
        assert [row for row in rows if row.replace(" ", "").endswith("||")] == []
    said = (ROOT / "docs" / "cli.md").read_text()
    assert "Likewise" not in said


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "architecture" / "index.html").is_file()


def test_every_page_is_in_the_sites_navigation_and_on_its_first_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert {file for entry in navigation for file in entry.values()} == pages
    linked = set(re.findall(r"^\| \[[^]]+\]\((\w+\.md)\)", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE))
    assert linked | {"index.md"} == pages


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "docs/index.md", "docs/architecture.md", "examples/README.md"]
)
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    assert [link for link in targets if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_readme_is_short_and_names_only_verbs_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 140
    verbs = set(generator().typer.main.get_command(app).commands)
    assert set(re.findall(r"[$;] dflash-serve ([a-z]+) ", text)) <= verbs


def test_commands_on_pages_have_only_options_that_exist() -> None:
    commands = generator().typer.main.get_command(app).commands
    examples = (path for path in (ROOT / "examples").rglob("*") if path.suffix in (".md", ".py", ".yaml"))
    for page in (ROOT / "README.md", ROOT / "deploy" / "README.md", *(ROOT / "docs").glob("*.md"), *examples):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for verb, words in re.findall(r"dflash-serve ([a-z]+)\b([^`#\n]*)", text):
            if verb in commands:
                known = {one for option in commands[verb].params for one in (*option.opts, *option.secondary_opts)}
                used = set(re.findall(r"\s(--[a-z-]+)", words.split(" -- ")[0]))
                assert used <= known, f"{page.relative_to(ROOT)}: dflash-serve {verb}: {used - known}"


def test_messages_name_only_verbs_that_exist() -> None:
    verbs = set(generator().typer.main.get_command(app).commands)
    for folder in ("dflash_serve", "backends", "engines", "deploy"):
        for path in (ROOT / folder).rglob("*.py"):
            for verb in re.findall(r"`dflash-serve ([a-z]+)", path.read_text(encoding="utf-8")):
                assert verb in verbs, f"{path.relative_to(ROOT)}: dflash-serve {verb}"


def test_every_module_of_ours_that_a_file_says_to_run_exists() -> None:
    """Neither what has changed since (the changelog) nor what was measured then says how to run it now."""
    argv = ["git", "grep", "-IohE", r"python3? -m (benchmarks|tests|dflash_[a-z_]+)[a-z_.]*"]
    left_out = [":!CHANGELOG.md", ":!benchmarks/results"]
    done = subprocess.run([*argv, "--", ".", *left_out], cwd=ROOT, capture_output=True, text=True, check=True)
    named = {line.split()[-1].rstrip(".") for line in done.stdout.splitlines()}
    assert len(named) > 10
    homes = (ROOT, ROOT / "backends", ROOT / "engines")

    def exists(name: str) -> bool:
        places = [home / name.replace(".", "/") for home in homes]
        return any(place.with_suffix(".py").is_file() or (place / "__main__.py").is_file() for place in places)

    assert [name for name in sorted(named) if not exists(name)] == []


def test_there_is_one_version_number() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/dflash-serve/Chart.yaml").read_text())
    assert chart["appVersion"] == dflash_serve.__version__
    argo = yaml.safe_load((ROOT / "examples/helm/argo-cd.yaml").read_text())
    assert chart["version"] == argo["spec"]["source"]["targetRevision"]
    flux = next(yaml.safe_load_all((ROOT / "examples/helm/flux.yaml").read_text()))
    assert chart["version"].startswith(flux["spec"]["ref"]["semver"].removesuffix("x"))
    assert f"## {dflash_serve.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert "dynamic" in (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[0]
