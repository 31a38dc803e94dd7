"""The metrics of this package, one module each. The module's name is the metric's name."""
