"""Evaluation on held-out problems: benchmarks and scores."""
