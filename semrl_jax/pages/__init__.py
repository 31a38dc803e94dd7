"""The pages that people look at: one kit for HTML, and the report of runs."""
