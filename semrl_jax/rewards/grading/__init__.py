"""The grader of answers, for training and evaluation; no text is ever executed.

`grade` judges a response and `equal` two answers; each module has one of the rules.
"""

from semrl_jax.rewards.grading.answers import equal
from semrl_jax.rewards.grading.choice import chosen_letters
from semrl_jax.rewards.grading.response_grader import Graded, grade, prepare

__all__ = ["Graded", "chosen_letters", "equal", "grade", "prepare"]
