"""The built-in environments: one module each, with a class `Environment`."""
