"""The verifiers of this package, one module each; `config.rewards.function` is the module's name.

A module has `verify(response, reference, settings) -> Verdict`, see `math`, and may have
`prepare()`, which a worker calls once before its first response. If `verify` has a parameter
`row`, it also gets the row of the prompt, see `benchmark`.
"""
