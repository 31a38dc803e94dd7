"""The published VERL runs: values of the launcher (arXiv 2509.23808 and its repository)."""
