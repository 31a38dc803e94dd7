"""Work without a trainer: evaluate, generate, score, chat and view."""
