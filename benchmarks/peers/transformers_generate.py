"""Responses of transformers' `generate`, without training. See benchmarks/step.py."""

import time

import torch
import transformers
from protocol import Driver

driver = Driver()
work = driver.work
tokenizer = transformers.AutoTokenizer.from_pretrained(work["model"], padding_side="left")
model = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
end_token_ids = torch.tensor(work["end_token_ids"], dtype=torch.long)
inputs = tokenizer(work["prompts"], padding=True, return_tensors="pt")
# Without end tokens, every response has its full length.
ends = {"eos_token_id": work["end_token_ids"]}
if not work["end_token_ids"]:
    ends = {"min_new_tokens": work["response_tokens"]}
driver.report(
    versions={"torch": torch.__version__, "transformers": transformers.__version__},
    num_params=sum(parameter.numel() for parameter in model.parameters()),
    prompt_tokens=inputs["attention_mask"].sum(1).tolist(),
)
while True:
    driver.wait()
    began = time.perf_counter()
    found = model.generate(
        **inputs,
        **ends,
        num_return_sequences=work["group_size"],
        max_new_tokens=work["response_tokens"],
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
    )
    rollout_s = time.perf_counter() - began
    is_end = torch.isin(found[:, inputs["input_ids"].shape[1] :], end_token_ids).int()
    # A token counts if no end token comes before it.
    num_tokens = int((is_end.cumsum(1) - is_end == 0).sum())
    driver.report(rollout_s=rollout_s, num_tokens=num_tokens)
