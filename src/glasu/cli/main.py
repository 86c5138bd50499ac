"""The command `glasu`: parse arguments, run a command, and turn errors into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, NoReturn, Protocol

from glasu import __version__, registry
from glasu.cli import align, audit, demo, doctor, join, predict, provision, reproduce, search, serve, split, train
from glasu.cli.arguments import format_event
from glasu.cli.interrupts import find_exit_code, handle_interrupts
from glasu.errors import GlasuError


class Command(Protocol):
    """A module that implements a command. Its docstring, after "glasu NAME: ", is the help text."""

    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int | None: ...


COMMANDS: Mapping[str, Command] = {
    "demo": demo,
    "train": train,
    "split": split,
    "align": align,
    "provision": provision,
    "doctor": doctor,
    "serve": serve,
    "join": join,
    "predict": predict,
    "reproduce": reproduce,
    "search": search,
    "audit": audit,
}
BETWEEN_ORGANISATIONS = ("align", "doctor", "serve", "join")  # commands whose logs must not contain a party's data


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown arguments here, so that the error names the help of the command and not of `glasu` itself."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser(commands: Mapping[str, Command] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of all commands. Torch is not loaded."""
    parser = _Parser(
        prog="glasu",
        description="Train one graph neural network across organisations that share nodes, not features or edges.",
        epilog="example: glasu demo --out runs/demo",
    )
    parser.add_argument("--version", action="version", version=f"glasu {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in commands.items():
        about = (module.__doc__ or "").split(": ", 1)[1].strip()
        command = subparsers.add_parser(
            name,
            help=about.splitlines()[0],
            description=about,
            epilog=f"example: {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        kept = getattr(module, "INTERRUPTED", "no incomplete file is left")
        command.set_defaults(run=module.run, interrupted=kept)
    return parser


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Command] = COMMANDS) -> int:
    """Run one command; return 0 (success), 1 (the run failed), 2 (invalid input), 130 or 143 (interrupted)."""
    with handle_interrupts():
        try:
            args = build_parser(commands).parse_args(argv)
            with _leave_no_empty_folder(args):
                return _run(args)
        except KeyboardInterrupt as interruption:  # outside `_run`, which handles its own interrupts; print nothing
            return find_exit_code(interruption)


@contextmanager
def _leave_no_empty_folder(args: argparse.Namespace) -> Iterator[None]:
    """Remove the folders of --out that the command created, if they are empty when it ends."""
    out = getattr(args, "out", None)
    created = [] if out is None else [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        yield
    finally:
        for folder in created:
            with suppress(OSError):  # the folder is not empty, or was never created
                folder.rmdir()


def _run(args: argparse.Namespace) -> int:
    try:
        for name in getattr(args, "extensions", ()):  # must be loaded before a config that uses them is read
            registry.load_extension(name)
        code: int | None = args.run(args)
        sys.stdout.flush()
    except GlasuError as error:
        return _fail(args, f"{error}{_warn_about_fresh(args) if error.exit_code == 1 else ''}", error.exit_code)
    except KeyboardInterrupt as interruption:
        return _fail(
            args,
            f"interrupted; {args.interrupted}.{_warn_about_fresh(args)}",
            find_exit_code(interruption),
            "interrupted",
        )
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, MemoryError) as error:  # for example a full disk, or a graph that does not fit into memory
        return _fail(args, f"{type(error).__name__}: {error}", 1)
    except Exception as error:  # a bug of GLASU or of an extension; only developers need the traceback
        if os.environ.get("GLASU_TRACEBACK"):
            raise
        why = "" if args.command in BETWEEN_ORGANISATIONS else f": {error}"
        return _fail(args, f"failed: {type(error).__name__}{why}; {_advise(error)}.", 1)
    return code or 0


def _advise(error: Exception) -> str:
    """Return the remedy for an unexpected error. It can be a bug of GLASU or of a loaded extension."""
    advice = "set GLASU_TRACEBACK=1 to print the traceback (it may contain data), and"
    if (extension := registry.find_failed_extension(error)) is not None:
        return f"the extension {extension.name!r} raised or caused this error: {advice} correct the extension"
    if loaded := ", ".join(repr(extension.name) for extension in registry.extensions()):
        return (
            f"{advice} check the results of the loaded extensions ({loaded}); if they are correct, please report this"
        )
    return f"{advice} please report this"


def _warn_about_fresh(args: argparse.Namespace) -> str:
    """Return a warning if the command had --fresh, because the same command would not resume the run."""
    again = " To resume this run, remove --fresh; with --fresh, the command starts over."
    return again if getattr(args, "fresh", False) else ""


def _fail(args: argparse.Namespace, message: str, code: int, event: str = "error") -> int:
    """Write the reason for the exit as one line, in the format of the log."""
    line = " ".join(message.split())
    if getattr(args, "log_format", "text") == "json":
        print(format_event(args.command, event, datetime.now(UTC), message=line, exit_code=code), file=sys.stderr)
    else:
        print(f"glasu {args.command}: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
