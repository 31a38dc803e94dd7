"""The checks of a configuration: one module per section, with the name of the section.

Each module has `check(section)`. It raises UserError for the first field that is wrong, in one
line: field, value, rule, way out. It reads only its own section; `runs.config` checks conditions
between sections. Nothing here loads JAX, so that a wrong setting is refused at once.
"""
