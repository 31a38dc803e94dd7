"""What the commands share: flags, and user mistakes as one line with exit code 2."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from semrl_jax.errors import DISK_ERRNOS, UserError

EXIT_USER_ERROR = 2


def run(main: Callable[[], int] | Mapping[str, Callable[[], int]], usage: str) -> None:
    """Parses the flags, runs `main` and exits with its code.

    Args:
      main: the command; returns an exit code. Or several, by the word that chooses one of them.
      usage: printed above the flags by --help.
    """
    program = f"python -m {sys.modules['__main__'].__spec__.name}"
    try:
        # Flags may come after the word, but nothing after a word that has no place.
        flags.FLAGS.set_gnu_getopt(isinstance(main, Mapping))
        rest = _parse(usage)
        if isinstance(main, Mapping):
            if not rest or rest[0] not in main:
                given = repr(rest[0]) if rest else "nothing"
                raise UserError(
                    f"say what to do, one of {', '.join(main)}, not {given}; see --help."
                )
            main = main[rest.pop(0)]
        if rest:
            raise UserError(f"{rest[0]!r} is not a flag; see {program} --help.")
        code = main()
    except UserError as error:
        # One line, whatever the message quotes.
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        code = EXIT_USER_ERROR
    except OSError as error:
        if error.errno not in DISK_ERRNOS:
            raise
        reason = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        print(f"{program}: {reason}; free some space, the same command goes on", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    logging.shutdown()
    sys.exit(code)


@contextlib.contextmanager
def new_directory(flag: str, path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Checks that a directory can be made at `path`, before any work, and keeps its place clean.

    The block writes it by way of neighbours named `<path>.writing` and `<path>.replaced`; what it
    leaves of them when it fails is removed.

    Raises:
      UserError: if something is there already, also under those two names, or nothing can be made.
    """
    path = pathlib.Path(os.path.abspath(path))
    neighbours = [path.with_name(path.name + end) for end in (".writing", ".replaced")]
    try:
        empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
        if os.path.lexists(path) and not empty:
            raise UserError(f"--{flag}={path} is there already; name a new directory.")
        for neighbour in neighbours:
            if os.path.lexists(neighbour):
                raise UserError(
                    f"--{flag}={path}: {neighbour} is there already, perhaps left by a command "
                    "that was killed; remove it or name another directory."
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        neighbours[0].mkdir()  # can anything be made here?
        neighbours[0].rmdir()
    except OSError as error:
        raise UserError(f"--{flag}={path} cannot be made: {error.strerror}.") from None
    try:
        yield path
    except BaseException:
        for neighbour in neighbours:
            shutil.rmtree(neighbour, ignore_errors=True)
        raise


def required(flag: flags.FlagHolder[Any]) -> Any:
    """The flag's value; UserError where it was not given."""
    if flag.value is None:
        raise UserError(f"--{flag.name} is needed; see --help.")
    return flag.value


def locked_config(flag: flags.FlagHolder[ConfigDict]) -> ConfigDict:
    """The config with its overrides; no field can be added from here on."""
    try:
        return required(flag).lock()
    except OSError as error:  # ml_collections tells of a failed load at the first use
        raise UserError(f"--{flag.name}: {_first_reason(error)}") from None


def _parse(usage: str) -> list[str]:
    flags.DEFINE_bool("help", False, "print this help", allow_hide_cpp=True, short_name="h")
    try:
        rest = flags.FLAGS(sys.argv)[1:]
    except flags.UnrecognizedFlagError as error:
        raise UserError(f"--{error.flagname} is unknown; see --help.") from None
    except (AttributeError, KeyError) as error:
        # ml_collections looks an override's path up in the config.
        name = re.sub(r"\W*(\w+).*", r"\1", str(error.args[0]), flags=re.DOTALL)
        raise UserError(
            f"the config has no field {name!r} where a flag sets it; see configs/default.py."
        ) from None
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(str(error)) from None
    if flags.FLAGS.help:
        print(usage)
        print(flags.FLAGS.module_help(sys.modules["__main__"]))
        sys.exit(0)
    return rest


def _first_reason(error: Exception) -> str:
    """The reason ml_collections buries in a list of attempts."""
    reasons = re.findall(r"^\s+(\[Errno.*|.*Error.*)$", str(error), re.MULTILINE)
    return reasons[0] if reasons else str(error)
