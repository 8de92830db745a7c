"""`dflash-serve`: the verbs. Each is imported when it is asked for, so `--help` answers at once.

Verbs of rooms that the core does not know (`build`) are found by their entry points.
"""

from __future__ import annotations

import re
import sys
from collections import UserDict
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dflash_serve import __version__
from dflash_serve.common.extras import absent
from dflash_serve.common.json_log import make_stderr_unfailing
from dflash_serve.common.terminal import say
from dflash_serve.errors import UserError

CLI = "dflash_serve.cli"
MODULES = {
    "generate": f"{CLI}.answers",
    "serve": f"{CLI}.serve",
    "drafters": f"{CLI}.drafters",
    "inspect": f"{CLI}.drafters",
    "convert": f"{CLI}.drafters",
    "train": f"{CLI}.drafters",
    "evaluate": f"{CLI}.answers",
    "adapt": f"{CLI}.adapt",
    "swap": f"{CLI}.swap",
    "verify": f"{CLI}.verify",
    "doctor": f"{CLI}.doctor",
    "top": f"{CLI}.top",
    "bench": f"{CLI}.bench",
    "certify": f"{CLI}.certify",
    "plan": f"{CLI}.plan",
    "deploy": f"{CLI}.deploy",
}
"""Verbs in the order of the help, and the module that has a function of that name."""
ENGINE_VERBS = ("serve", "verify", "bench", "certify", "deploy")  # Those that start an engine's own server, or say how
SETTINGS: dict[str, Any] = {
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # rich would take "[default: ...]" for a style, and cuts option names at 80 columns
}


class Commands(UserDict[str, Any]):
    """The commands of all verbs, each made when it is asked for."""

    @cached_property
    def functions(self) -> dict[str, tuple[str, str]]:
        """Module and function of each verb, those of other packages included."""
        from importlib.metadata import entry_points

        others = {point.name: (point.module, point.attr) for point in entry_points(group="dflash_serve.verbs")}
        return {**others, **{verb: (module, verb) for verb, module in MODULES.items()}}

    def __missing__(self, verb: str) -> Any:
        module, function = (MODULES[verb], verb) if verb in MODULES else self.functions[verb]
        self.data[verb] = made = _command(verb, module, function)
        return made

    def __contains__(self, verb: object) -> bool:
        return verb in MODULES or verb in self.functions

    def __iter__(self) -> Iterator[str]:
        return iter([*MODULES, *(verb for verb in self.functions if verb not in MODULES)])

    def __len__(self) -> int:
        return len(self.functions)


class Verbs(TyperGroup):
    """The root of the command line. Its help reads the verbs' first lines without importing them."""

    commands: Commands

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = Commands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a line for each verb: the first line of its function's docstring."""
        functions = self.commands.functions
        with formatter.section("Commands"):
            formatter.write_dl([(verb, _first_sentence(*functions[verb])) for verb in self.commands])


def _command(verb: str, module: str, function: str) -> Any:
    from dflash_serve.cli import grammar, options

    own = typer.Typer(add_completion=False, **SETTINGS)
    kind = options.TakesEngineArguments if verb in ENGINE_VERBS else options.Verb
    own.command(verb, cls=kind, epilog=grammar.exit_codes(verb))(getattr(import_module(module), function))
    return typer.main.get_command(own)


def _first_sentence(module: str, function: str) -> str:
    # Of the function's docstring, read from the source: to parse all of it takes five times as long as to search it.
    found = find_spec(module)
    if found is None or found.origin is None:
        return ""
    text = Path(found.origin).read_text(encoding="utf-8")
    line = re.search(rf'^def {function}\(.*?"""(.*?)(?:\n|""")', text, re.MULTILINE | re.DOTALL)
    return line[1].split(". ")[0].rstrip(".") + "." if line else ""


app = typer.Typer(
    cls=Verbs,
    help="One DFlash drafter, every engine: check it, prove it lossless, serve it.",
    no_args_is_help=True,
    **SETTINGS,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dflash-serve {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """One DFlash drafter, every engine: check it, prove it lossless, serve it."""


CLOSED_PIPE = 128 + 13  # Exit code of a command that a shell's pipe ends (SIGPIPE)
USAGE_ERROR: Any = typer.BadParameter.__base__  # of the click that this typer brings or imports


def run() -> None:
    """Entry point: a mistake, a missing extra, or a refusal of the system is one line on stderr and exit code 2."""
    make_stderr_unfailing()
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal of another encoding than UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        ended = app(prog_name="dflash-serve", standalone_mode=False)
    except USAGE_ERROR as error:
        if len(sys.argv) == 1:  # its text is the help
            error.show()
        else:
            said = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
            do = f"see `{error.ctx.command_path if error.ctx else 'dflash-serve'} --help`"
            say(f"dflash-serve: {UserError(said, do=do)}", to=sys.stderr)
        sys.exit(2)
    except (UserError, ModuleNotFoundError, OSError) as error:
        told = absent(error) if isinstance(error, ModuleNotFoundError) else error
        if isinstance(error, OSError):  # a name that is too long, a full disk
            told = UserError(error.strerror or str(error), where=str(error.filename or ""))
        if told is None:
            raise
        say(f"dflash-serve: {told}", to=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as end:
        # When the reader of our output has closed the pipe, click exits with 1. `verify` means "not lossless" by 1.
        sys.exit(CLOSED_PIPE if isinstance(end.__context__, BrokenPipeError) else end.code)
    sys.exit(ended if isinstance(ended, int) else 0)
