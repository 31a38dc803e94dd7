"""What the commands share: flags, and user mistakes as one line with exit code 2."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from absl import flags

from semrl_jax.errors import UserError

EXIT_USER_ERROR = 2


def run(main: Callable[[], int], usage: str) -> None:
    """Parses the flags, runs `main` and exits with its code.

    Args:
      main: the command; returns an exit code.
      usage: printed above the flags by --help.
    """
    program = f"python -m {usage.split()[2]}"
    try:
        rest = _parse(usage)
        if rest:
            raise UserError(f"{rest[0]!r} is not a flag; see {program} --help.")
        code = main()
    except UserError as error:
        # One line, whatever the message quotes.
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        code = EXIT_USER_ERROR
    except KeyboardInterrupt:
        code = 130
    logging.shutdown()
    sys.exit(code)


def _parse(usage: str) -> list[str]:
    flags.DEFINE_bool("help", False, "print this help", allow_hide_cpp=True, short_name="h")
    try:
        rest = flags.FLAGS(sys.argv)[1:]
    except flags.UnrecognizedFlagError as error:
        raise UserError(f"unknown flag --{error.flagname}; see --help for the fields.") from None
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        # ml_collections raises these for a field or a value that does not fit.
        raise UserError(f"{error}") from None
    if flags.FLAGS.help:
        print(usage)
        print(flags.FLAGS.module_help(sys.modules["__main__"]))
        sys.exit(0)
    return rest
