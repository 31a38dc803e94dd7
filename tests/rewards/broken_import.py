"""A user's module that fails on import."""

raise OSError("no such\ndata set")
