"""A mistake of the user's, a request to end, and what a full disk answers."""

import errno
import os

# A write that ends so is neither the user's mistake nor a defect: make room and go on.
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class UserError(ValueError):
    """A wrong setting, file, address or token; the message is one line that says the way out.

    The commands in `launch` print it without a traceback and exit with code 2. Anything else that
    escapes them is a defect of ours and keeps its traceback.
    """


class Preempted(BaseException):
    """The run was asked to end; the train state in memory is that of the last finished step.

    No Exception: it is raised wherever the main thread happens to be, and a library that goes on
    after any Exception would swallow it there.
    """


def disk_refusal(error: BaseException | None) -> OSError | None:
    """The disk's answer behind an error of a write; None if something else went wrong.

    Libraries in C++ and Rust have errors of their own, with the system's words in their text.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return OSError(error.errno, os.strerror(error.errno))
        for number in DISK_ERRNOS:
            if os.strerror(number) in str(error):
                return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None
