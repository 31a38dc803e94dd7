"""The verifiers of this package, one module each; `config.rewards.function` is the module's name.

A module has `verify(response, reference, settings) -> Verdict`, see `math`, and `prepare()`, which
a worker calls once before its first response.
"""
