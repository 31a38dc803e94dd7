"""What the commands share: flags, and user mistakes as one line with exit code 2."""

from __future__ import annotations

import errno
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from semrl_jax.errors import UserError

EXIT_USER_ERROR = 2
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def run(main: Callable[[], int], usage: str) -> None:
    """Parses the flags, runs `main` and exits with its code.

    Args:
      main: the command; returns an exit code.
      usage: printed above the flags by --help.
    """
    program = f"python -m {sys.modules['__main__'].__spec__.name}"
    try:
        rest = _parse(usage)
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
