"""The one exception that stands for a mistake of the user's, and what a full disk answers."""

import errno

# A write that ends so is neither the user's mistake nor a defect: make room and go on.
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class UserError(ValueError):
    """A wrong setting, file, address or token; the message is one line that says the way out.

    The commands in `launch` print it without a traceback and exit with code 2. Anything else that
    escapes them is a defect of ours and keeps its traceback.
    """
