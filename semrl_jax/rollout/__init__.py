"""Responses sampled by replicas, in this process or elsewhere.

The trainer has the `client`, a replica a `server` around one of the `engines`. They exchange the
messages of `wire`.
"""
