"""Scores of held-out problems, one module each; `evaluation.seam` says what a score defines."""
