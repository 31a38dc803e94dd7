"""Every flag of every command is given once, to a command that runs to its end."""

import json
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import pytest

from launch.__main__ import commands
from semrl_jax import data
from tests.fixtures import save_model
from tests.launch.conftest import ROOT, TINY, environment, read_until, run, start
from tests.rollout.test_tls import make_files
from tests.training.test_reward_model import classifier

PROBLEMS = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(4)]
# Prints the flags that each command defines. They are global, so each command has a process.
LIST_FLAGS = """
import importlib, os, sys
from absl import flags
from launch import cli
for name in sys.argv[1:]:
    if not os.fork():
        importlib.import_module(f"launch.{name}")
        for flag in flags.FLAGS.flags_by_module_dict()[f"launch.{name}"]:
            print(name, flag.name)
        sys.exit()
    assert os.wait()[1] == 0
"""


class Case(NamedTuple):
    """A command line.

    Attributes:
      line: the command and its arguments; {home} is the directory of the inputs.
      text: standard input.
      until: ends with SIGINT after a line with this text; empty: ends by itself.
      code: the exit code.
    """

    line: str
    text: str = ""
    until: str = ""
    code: int = 0


SMALL = "--max_prompt_tokens=16 --max_response_tokens=8 --engine=jax --seed=1"
SAMPLED = f"--n=2 --temperature=0.9 --top_p=0.9 --top_k=5 --min_p=0.1 --metrics {SMALL}"
EVALUATION = (
    f"--benchmarks={{home}}/problems.jsonl --data_dir={{home}} --k=1,2 --num_problems=2 "
    f"--template={{input}} --verifier=gsm8k_strict --scores=pass_at_k "
    f"--reward_model={{home}}/judge {SAMPLED}"
)
GENERATION = (
    "--prompts={home}/problems.jsonl --num_prompts=3 --logprobs --hidden_states=-1,0 "
    "--states=decode,prefill --states_dtype=float32 --conversations=all --verifier=math "
    f"--template={{input}} {SAMPLED}"
)
DRY = [
    Case(f"evaluate --policy={{home}}/model --output={{home}}/no --dry_run {EVALUATION}"),
    Case(f"generate --policy={{home}}/model --output={{home}}/no --dry_run {GENERATION}"),
]
QUICK = [
    *DRY,
    Case(
        "prepare_data --dataset=gsm8k --split=test --input={home}/gsm8k.jsonl "
        "--output={home}/data/gsm8k.jsonl"
    ),
    Case("problems chain_sum:max_terms=2 gcd --count=2"),
    Case(
        "plan --config=configs/gsm8k_qwen2_5_0_5b.py --topology=h100:2x1 --replica_nodes=1 "
        "--estimate --json"
    ),
    # Refused before anything is fetched; tests/launch/test_real_model.py makes one.
    Case("prepare_model --name=smollm2-135m --output={home}", code=2),
]
SFT = (
    "--config=configs/sft.py --config.model.path={home}/model --config.sft.num_steps=1 "
    "--config.sft.max_tokens=64 "
    "--config.sft.files={home}/problems.jsonl"
)
SWEEP = (
    f"--config={TINY} --output={{home}}/sweep --config.training.num_steps=1 "
    "--config.warm_start.num_steps=0"
)
# In this order: the later ones read what the first ones have written.
THOROUGH = [
    Case(f"train --config={TINY} --workdir={{home}}/no --dry_run"),
    Case(
        f"train --config={TINY} --workdir={{home}}/run --config.training.num_steps=2 --quiet "
        "--config.warm_start.num_steps=0"
    ),
    Case(f"sft {SFT} --workdir={{home}}/no --dry_run"),
    Case(f"sft {SFT} --workdir={{home}}/sft --quiet"),
    Case(
        "local --processes=1 --devices_per_process=2 --grace_s=40 -- "
        f"--config={TINY} --workdir={{home}}/adapters --config.training.num_steps=1 "
        "--config.lora.rank=2 --config.warm_start.num_steps=0"
    ),
    Case(
        f"evaluate --policy={{home}}/run --config=configs/recorded.py:{{home}}/run/config.json "
        f"--steps=0,2 --output={{home}}/evaluated --quiet {EVALUATION}"
    ),
    Case(
        f"generate --policy={{home}}/run --config=configs/recorded.py:{{home}}/run/config.json "
        f"--output={{home}}/generated --quiet {GENERATION}"
    ),
    Case(
        "chat --policy={home}/model --config=configs/default.py --template=chat --multi_turn "
        f"--temperature=0.5 --top_p=0.9 --top_k=3 --min_p=0.1 --system_prompt=0 --metrics {SMALL}",
        text="1+1\n",
    ),
    Case(
        "chat --policy={home}/model --environment=tests.environments.users:Vowels "
        "--max_prompt_tokens=64 --max_response_tokens=64",
        text="3\n",
    ),
    Case(
        "mismatch --policy={home}/run --config=configs/recorded.py:{home}/run/config.json "
        "--engine=jax --samples={home}/run/rollouts/step_000001.parquet --num_responses=2 "
        "--max_tokens=8 --dtype=float32 --earlier=0 --output={home}/mismatch.html --quiet"
    ),
    Case("view --policy={home}/run --steps=0,2 --limit=1 --stride=4 --output={home}/steps.html"),
    Case(
        "view --policy={home}/run --samples={home}/generated/responses.parquet --show=all "
        "--verdicts=any,any,any --seed=1 --problem='problems 0' --output={home}/view.html"
    ),
    Case(
        "score --samples={home}/answers.jsonl --verifier=math --output={home}/graded.jsonl "
        "--response=text --reference=answer --row=level --group=level --prefix=new_ "
        "--timeout_s=5 --num_workers=1 --memory_limit_gib=4"
    ),
    Case(
        f"sweep {SWEEP} --vary=rewards.mode=mix,independent --random=1 --seeds=0 --parallel=2 "
        "--variant='algorithms.name=rloo shaping.target=none' --quiet"
    ),
    Case(
        f"sweep {SWEEP} --vary=rewards.mode=mix,independent --seeds=0 --replicas=127.0.0.1:1 "
        "--summarize"
    ),
    Case("env --run={home}/run"),
    Case(
        "replay {home}/run --from=0 --to=1 --output={home}/replay.html --weights={home}/run "
        "--set=seed=1", code=1,
    ),
    Case("replay {home}/run --from=0 --bisect --good=HEAD --bad=HEAD", code=2),
    Case("replay {home}/run --from=0 --recorded --code={home}", code=2),
    Case("report {home}/run {home}/adapters --output={home}/two.html --csv={home}/two.csv"),
    Case("report {home}/run --serve --port=0", until="http://"),
    Case(
        "convert --source={home}/run --target={home}/exported --step=1 --dtype=bfloat16 "
        "--max_shard_gb=1 --family=qwen2"
    ),
    Case(
        "convert --source={home}/run --target={home}/mixed --other={home}/exported --share=-0.5"
    ),
    Case("convert --source={home}/adapters --target={home}/adapter --adapter"),
    Case(
        "random_model --text={home}/problems.jsonl --family=llama --output={home}/random "
        "--vocab_size=270 --hidden_size=16 --intermediate_size=16 --num_layers=1 --num_heads=2 "
        "--num_kv_heads=1 --context=64 --seed=1"
    ),
    Case(
        "analyze metrics --input={home}/states.npz --stride=4 --window=exact --method=svd "
        "--output={home}/metrics"
    ),
    Case(
        "analyze study --input={home}/generated --policy={home}/run --measure=curvature "
        "--stride=2 --output={home}/study"
    ),
    Case("analyze study --run={home}/run --step=1 --stride=4 --output={home}/studied"),
    Case(
        "analyze curve --run={home}/run --key=reward/mean --compute=steps --skip=1 "
        "--fraction=0.5 --output={home}/curve", code=2,
    ),
    Case(
        f"rollout --config={TINY} --engine=jax --host=127.0.0.1 --port=0 --cores=0 "
        "--tls_certificate={home}/certs/replica-gpu7.pem "
        "--tls_key={home}/certs/replica-gpu7.key "
        "--http_host=127.0.0.1 --http_port=0 --until_stdin_closes",
        until="listens on",
    ),
    Case("rollout --policy={home}/run --port=0", until="serves run-step"),
    Case(
        "tinker --config=configs/default.py --model={home}/model --workdir={home}/tinker --name=a "
        "--max_tokens=64 --host=127.0.0.1 --port=0 --token_file={home}/key "
        "--tls_certificate={home}/certs/replica-gpu7.pem "
        "--tls_key={home}/certs/replica-gpu7.key",
        until="https://",
    ),
    Case(
        "plan --config=configs/default.py --topology=v5e:1x1 --programs=update --json "
        "--config.model.path={home}/model",
        # It needs the compiler of TPUs, which only the extra [tpu] installs.
        code=0 if find_spec("libtpu") else 2,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with a random model, a random reward model, and files."""
    path = tmp_path_factory.mktemp("every_flag")
    tokenizer = data.character_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    save_model(path / "model", tokenizer)
    classifier(path / "judge")
    np.savez(
        path / "states.npz",
        hidden_states=np.random.default_rng(0).normal(size=(2, 24, 8)).astype(np.float32),
    )
    make_files(path)
    (path / "key").write_text("tml-a-key-for-the-tests\n")
    for name, rows in {
        "problems": PROBLEMS,
        "gsm8k": [{"question": "1+1?", "answer": "It is 2.\n#### 2"}],
        "answers": [
            {"text": f"\\boxed{{{row['answer']}}}", "answer": row["answer"], "level": "{}"}
            for row in PROBLEMS
        ],
    }.items():
        file = path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags_of(cases) -> set[tuple[str, str]]:
    """Command and name of each flag; the arguments after -- are of another command."""
    return {
        (case.line.split()[0], name)
        for case in cases
        for name in re.findall(r" --(\w+)(?=[ =]|$)", case.line.partition(" -- ")[0])
    }


def problem(case, home) -> str:
    """What is wrong with a run of this command; "" if nothing is."""
    name, *words = shlex.split(case.line)
    arguments = [word.replace("{home}", str(home)) for word in words]
    if not case.until:
        done = run(f"launch.{name}", *arguments, text=case.text, timeout=300)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        process = start(
            f"launch.{name}", *arguments, stdin=subprocess.PIPE,
            # The background of a shell ignores SIGINT, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        read_until(process, case.until)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        code = process.returncode
    wrong = code != case.code or "Traceback" in err
    return f"{case.line}\nexit code {code}\n{out}{err}" if wrong else ""


@pytest.mark.slow
def test_every_flag_of_every_command_has_a_case():
    listed = subprocess.run(
        [sys.executable, "-c", LIST_FLAGS, *commands()],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    defined = {tuple(line.split()) for line in listed.stdout.splitlines()}
    assert {name for name, _ in defined} == commands().keys()
    assert flags_of([*QUICK, *THOROUGH]) == defined


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.line.split()[0])
def test_every_flag_quickly(case, home):
    assert not problem(case, home)
    assert not (home / "no").exists()


@pytest.mark.soak
def test_every_flag(home):
    problems = [problem(case, home) for case in THOROUGH]
    assert not any(problems), "\n\n".join(filter(None, problems))
    assert not (home / "no").exists()
