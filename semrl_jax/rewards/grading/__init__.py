"""Whether two answers of a benchmark are equal; plain Python, and no text is ever executed.

`answers.equal` puts the rules together; each module has one of them.
"""

from semrl_jax.rewards.grading.answers import equal
from semrl_jax.rewards.grading.choice import chosen_letters

__all__ = ["chosen_letters", "equal"]
