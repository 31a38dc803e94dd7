"""Held-out problems: what is asked, and how the answers are scored."""
