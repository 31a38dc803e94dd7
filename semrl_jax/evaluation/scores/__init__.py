"""Scores of held-out problems, one per module; `evaluation.interface` describes the interface."""
