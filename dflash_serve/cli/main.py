"""`dflash-serve`: the verbs. Nothing here imports torch, so `--help` answers at once.

Verbs of rooms that the core does not know (`build`) are found by their entry points.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from dflash_serve import __version__
from dflash_serve.cli import options
from dflash_serve.cli.answers import evaluate, generate
from dflash_serve.cli.bench import bench
from dflash_serve.cli.certify import certify
from dflash_serve.cli.deploy import deploy
from dflash_serve.cli.doctor import doctor
from dflash_serve.cli.drafters import convert, drafters, inspect, train
from dflash_serve.cli.plan import plan
from dflash_serve.cli.serve import serve
from dflash_serve.cli.top import top
from dflash_serve.cli.verify import verify
from dflash_serve.common.extras import absent
from dflash_serve.common.json_log import make_stderr_unfailing
from dflash_serve.errors import UserError

app = typer.Typer(
    help="One DFlash drafter, every engine: check it, prove it lossless, serve it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would take "[default: ...]" for a style, and cuts option names at 80 columns
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


ENGINE_VERBS = (serve, verify, bench, certify, deploy)  # Those that start an engine's own server, or say how
VERBS = (
    generate,
    serve,
    drafters,
    inspect,
    convert,
    train,
    evaluate,
    verify,
    doctor,
    top,
    bench,
    certify,
    plan,
    deploy,
)
for verb in VERBS:
    app.command(cls=options.TakesEngineArguments if verb in ENGINE_VERBS else options.Verb)(verb)
for point in entry_points(group="dflash_serve.verbs"):
    app.command()(point.load())


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
            print(f"dflash-serve: {UserError(said, do=do)}", file=sys.stderr)
        sys.exit(2)
    except (UserError, ModuleNotFoundError, OSError) as error:
        told = absent(error) if isinstance(error, ModuleNotFoundError) else error
        if isinstance(error, OSError):  # a name that is too long, a full disk
            told = UserError(error.strerror or str(error), where=str(error.filename or ""))
        if told is None:
            raise
        print(f"dflash-serve: {told}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as end:
        # When the reader of our output has closed the pipe, click exits with 1. `verify` means "not lossless" by 1.
        sys.exit(CLOSED_PIPE if isinstance(end.__context__, BrokenPipeError) else end.code)
    sys.exit(ended if isinstance(ended, int) else 0)
