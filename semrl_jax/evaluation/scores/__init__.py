"""Scores of held-out problems, one per module; `evaluation.seam` describes the interface."""
