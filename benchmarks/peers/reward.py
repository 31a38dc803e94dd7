"""The reward of benchmarks/step.py, the same cheap function for all systems."""


def vowels(response, reference=""):
    """Share of the response's characters that are vowels."""
    return sum(character in "aeiou" for character in response) / max(len(response), 1)
