"""A random chat model, and rows to train it on."""

import pytest

from tests.fixtures import save_chat_model

SIZES = {
    "training": {"num_steps": 3, "micro_batch_size": 8, "learning_rate": 1e-2},
    "data": {"prompts_per_step": 4},
    "rollout": {"group_size": 4, "max_prompt_tokens": 96, "max_response_tokens": 12},
    "evaluation": {"every_steps": 0},
    "checkpoints": {"every_steps": 1},
    "logging": {"plot_every_steps": 0},
    "metrics": {"stride": 2, "names": ("effective_rank",)},  # few programs
    "rewards": {"num_workers": 1},  # the start of one costs more than all grading
}
ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(5)]


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "chat"
    return save_chat_model(directory, "0123456789 + = " * 20, 300)
