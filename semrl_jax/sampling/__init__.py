"""Responses for a trainer: prompts, replicas, verdicts and metrics behind one source."""
