"""The settings of the config files: one module per section, with the name of the section.

A field of a section's dataclass has its default, meaning, unit, rules and whether a resumed run may
change it. `check(section)`, if the module has one, raises UserError for what one field alone cannot
say, in one line: field, value, rule, way out. `runs.config_checks` has conditions between sections.
"""
