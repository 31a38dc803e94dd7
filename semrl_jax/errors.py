"""A mistake of the user's, a request to end, and what a full disk answers."""

import errno

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
