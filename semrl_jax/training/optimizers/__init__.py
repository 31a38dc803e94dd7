"""Optimisers by name, one module each; `training/optimizer.py` describes the interface."""
