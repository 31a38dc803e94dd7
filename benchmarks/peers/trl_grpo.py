"""GRPO steps of TRL's GRPOTrainer, with generation by transformers. See benchmarks/step.py.

Its defaults bf16 and gradient checkpointing are off, so that it does the same work in float32.
"""

import tempfile
import time

import torch
import transformers
import trl
from datasets import Dataset
from protocol import Driver
from reward import vowels

driver = Driver()
work = driver.work
num_responses = len(work["prompts"]) * work["group_size"]
micro_batches = num_responses // work["peer_micro_batch_size"]
tokenizer = transformers.AutoTokenizer.from_pretrained(work["model"])
model = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
# Without end tokens, every response has its full length.
ends = {"eos_token_id": work["end_token_ids"]}
if not work["end_token_ids"]:
    ends = {"min_new_tokens": work["response_tokens"]}
row = {}


def reward(prompts, completions, completion_ids, **_):
    row["num_tokens"] = sum(map(len, completion_ids))
    return [vowels(completion) for completion in completions]


class Trainer(trl.GRPOTrainer):
    """Times generation, and what precedes the update."""

    def _generate(self, *arguments, **options):
        began = time.perf_counter()
        found = super()._generate(*arguments, **options)
        row["rollout_s"] = time.perf_counter() - began
        return found

    def _generate_and_score_completions(self, *arguments, **options):
        found = super()._generate_and_score_completions(*arguments, **options)
        row["scored"] = time.perf_counter()
        return found


class Steps(transformers.TrainerCallback):
    """Waits before a step, and reports it before the next."""

    def on_step_begin(self, *_, **__):
        if row:
            driver.report(**row)
        driver.wait()

    def on_step_end(self, *_, **__):
        row["update_s"] = time.perf_counter() - row.pop("scored")


with tempfile.TemporaryDirectory() as scratch:
    trainer = Trainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        callbacks=[Steps()],
        train_dataset=Dataset.from_dict({"prompt": work["prompts"] * 4096}),
        args=trl.GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=work["peer_micro_batch_size"],
            gradient_accumulation_steps=micro_batches,
            steps_per_generation=micro_batches,  # all responses of a step in one call
            num_iterations=1,
            num_generations=work["group_size"],
            max_completion_length=work["response_tokens"],
            generation_kwargs=ends,
            shuffle_dataset=False,  # every step has each prompt once
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            loss_type="grpo",
            learning_rate=work["learning_rate"],
            optim="adamw_torch",
            weight_decay=0.0,
            max_steps=10**6,
            logging_steps=10**6,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    driver.report(
        versions={
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        prompt_tokens=[len(tokenizer(text)["input_ids"]) for text in work["prompts"]],
    )
    trainer.train()
