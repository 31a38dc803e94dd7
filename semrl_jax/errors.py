"""The one exception that stands for a mistake of the user's."""


class UserError(ValueError):
    """A wrong setting, file, address or token; the message is one line that says the way out.

    The commands in `launch` print it without a traceback and exit with code 2. Anything else that
    escapes them is a defect of ours and keeps its traceback.
    """
