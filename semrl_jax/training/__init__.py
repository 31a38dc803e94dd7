"""The training loop, the learner and the compiled update."""
