"""Errors that several rooms use: a user's mistake, a request to end, an error of the disk."""

import contextlib
import errno
import os
from collections.abc import Iterator

# A write that fails with one of these is neither a user mistake nor a defect of the program.
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class UserError(ValueError):
    """A wrong setting, file, address or token; the message is one line with a way out.

    The commands in `launch` print it without a traceback and exit with code 2. Any other exception
    is a defect of the program and keeps its traceback.
    """

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows."""
        return [f"{type(self).__name__}: {self}"]


@contextlib.contextmanager
def prefixed(place: str) -> Iterator[None]:
    """Lets the message of a UserError in the block begin with a place, such as a setting."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


class Preempted(BaseException):
    """The run was asked to end; memory holds the train state after the last finished step.

    It can be raised at any point of the main thread. It is not a subclass of Exception, because
    some libraries catch every Exception.
    """


def disk_refusal(error: BaseException | None) -> OSError | None:
    """The disk error behind the error of a write, maybe of C++ or Rust; None: another cause."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return OSError(error.errno, error.strerror or os.strerror(error.errno))
        for number in DISK_ERRNOS:
            if os.strerror(number) in str(error):
                return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None
