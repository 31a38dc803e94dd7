"""The launch files for clusters: their fields, their flags, and how they handle exit codes."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from absl import flags
from ml_collections import config_flags

from launch.cli import EXIT_USER_ERROR
from semrl_jax.cluster import SINGLE, find_place
from semrl_jax.cluster.environment import JOBSET_PORT
from semrl_jax.cluster.peers import EXIT_PEER_LOST
from semrl_jax.runs import EXIT_PREEMPTED, validate
from tests.launch.conftest import ROOT, run

JOBSET = ROOT / "launch" / "gke_jobset.yaml"
SBATCH = ROOT / "launch" / "slurm.sbatch"
RESTARTS = (1, EXIT_PREEMPTED, EXIT_PEER_LOST, 128 + 6, 128 + 9)  # the last two: abort, killed


# --- The JobSet. This schema has the fields that the file uses, from the published definitions:
# kubernetes-sigs/jobset, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml (v1alpha2, which
# embeds batch/v1 JobSpec and core/v1 PodTemplateSpec). A field that is missing here is a typing
# error, or has to be looked up there and added.


def of(required=(), **fields):
    return {"type": dict, "fields": fields, "required": set(required)}


def many(item):
    return {"type": list, "item": item}


def one_of(*values):
    return {"type": str, "values": values}


TEXT, NUMBER, YES_NO = {"type": str}, {"type": int}, {"type": bool}
TEXTS = {"type": dict, "item": TEXT}  # any names, such as labels
QUANTITIES = {"type": dict, "item": {"type": (str, int)}}
METADATA = of(name=TEXT, labels=TEXTS, annotations=TEXTS)
KEYS = many(of(required=("key", "path"), key=TEXT, path=TEXT))
VOLUME = of(
    required=("name",),
    name=TEXT,
    persistentVolumeClaim=of(required=("claimName",), claimName=TEXT, readOnly=YES_NO),
    secret=of(secretName=TEXT, items=KEYS),
    emptyDir=of(medium=TEXT, sizeLimit=TEXT),
)
VARIABLE = of(
    required=("name",),
    name=TEXT,
    value=TEXT,
    valueFrom=of(
        fieldRef=of(required=("fieldPath",), fieldPath=TEXT),
        secretKeyRef=of(required=("key",), name=TEXT, key=TEXT),
    ),
)
CONTAINER = of(
    required=("name",),
    name=TEXT,
    image=TEXT,
    command=many(TEXT),
    args=many(TEXT),
    env=many(VARIABLE),
    ports=many(of(required=("containerPort",), containerPort=NUMBER)),
    resources=of(limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=many(
        of(required=("name", "mountPath"), name=TEXT, mountPath=TEXT, readOnly=YES_NO)
    ),
)
POD = of(
    required=("containers",),
    containers=many(CONTAINER),
    volumes=many(VOLUME),
    nodeSelector=TEXTS,
    restartPolicy=one_of("Never", "OnFailure", "Always"),
    terminationGracePeriodSeconds=NUMBER,
)
POD_FAILURE_RULE = of(
    required=("action",),
    action=one_of("FailJob", "FailIndex", "Ignore", "Count"),
    onExitCodes=of(
        required=("operator", "values"),
        containerName=TEXT,
        operator=one_of("In", "NotIn"),
        values=many(NUMBER),
    ),
    onPodConditions=many(of(required=("type", "status"), type=TEXT, status=TEXT)),
)
JOB = of(
    required=("template",),
    parallelism=NUMBER,
    completions=NUMBER,
    completionMode=one_of("Indexed", "NonIndexed"),
    backoffLimit=NUMBER,
    podFailurePolicy=of(required=("rules",), rules=many(POD_FAILURE_RULE)),
    template=of(metadata=METADATA, spec=POD),
)
FAILURE_RULE = of(
    required=("action", "name"),
    name=TEXT,
    action=one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    onJobFailureReasons=many(TEXT),
    targetReplicatedJobs=many(TEXT),
)
JOB_SET = of(
    required=("apiVersion", "kind", "metadata", "spec"),
    apiVersion=one_of("jobset.x-k8s.io/v1alpha2"),
    kind=one_of("JobSet"),
    metadata=METADATA,
    spec=of(
        successPolicy=of(
            required=("operator",),
            operator=one_of("All", "Any"),
            targetReplicatedJobs=many(TEXT),
        ),
        failurePolicy=of(
            maxRestarts=NUMBER,
            restartStrategy=one_of("Recreate", "BlockingRecreate"),
            rules=many(FAILURE_RULE),
        ),
        replicatedJobs=many(
            of(
                required=("name", "template"),
                name=TEXT,
                replicas=NUMBER,
                template=of(metadata=METADATA, spec=JOB),
            )
        ),
    ),
)


def problems(value, schema, path="") -> list[str]:
    """Every path at which `value` does not follow `schema`."""
    kind = schema["type"]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return [f"{path}: {value!r} is no {kind}"]
    if "values" in schema and value not in schema["values"]:
        return [f"{path}: {value!r} is none of {schema['values']}"]
    if kind is list:
        return [p for i, v in enumerate(value) for p in problems(v, schema["item"], f"{path}[{i}]")]
    if kind is dict and "item" in schema:
        return [p for k, v in value.items() for p in problems(v, schema["item"], f"{path}.{k}")]
    if kind is not dict:
        return []
    found = [f"{path}: no {name}" for name in sorted(schema["required"] - value.keys())]
    for name, item in value.items():
        if name in schema["fields"]:
            found += problems(item, schema["fields"][name], f"{path}.{name}")
        else:
            found.append(f"{path}: {name} is unknown")
    return found


@pytest.fixture
def manifest():
    return yaml.safe_load(JOBSET.read_text())


def replicated_job(manifest, name):
    (job,) = (job for job in manifest["spec"]["replicatedJobs"] if job["name"] == name)
    return job


def container(manifest, name):
    pod = replicated_job(manifest, name)["template"]["spec"]["template"]["spec"]
    (only,) = pod["containers"]
    return only


def arguments(manifest, name):
    """The arguments after `python -m` in a container's command."""
    only = container(manifest, name)
    if only["command"] == ["bash", "-c"]:
        words = shlex.split(only["args"][0].replace("\\\n", " "), comments=True)
        words = words[: next(i for i, word in enumerate(words) if word.startswith("code="))]
    else:
        words = only["command"]
    assert words[:2] == ["python", "-m"]
    return words[2:]


def config_of(words):
    """The config that flags of launch.train give, and the remaining flags."""
    values, words = flags.FlagValues(), ["launch.train", *words]
    holder = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=words)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    values(words)
    return holder.value, values.workdir


def test_the_jobset_has_known_fields_only(manifest):
    assert problems(manifest, JOB_SET) == []


def test_invalid_manifests_are_detected(manifest):
    trainer = replicated_job(manifest, "trainer")
    trainer["replica"] = 1
    trainer["template"]["spec"]["backoffLimit"] = "0"
    trainer["template"]["spec"]["template"]["spec"]["restartPolicy"] = "never"
    del manifest["spec"]["failurePolicy"]["rules"][0]["name"]
    found = "\n".join(problems(manifest, JOB_SET))
    for problem in ("replica is unknown", "'0' is no", "'never' is none of", "rules[0]: no name"):
        assert problem in found
    assert len(found.splitlines()) == 4


def test_the_rules_beyond_the_schema_hold(manifest):
    """Checks the rules in the descriptions of the CRD and of the Job."""
    names = [job["name"] for job in manifest["spec"]["replicatedJobs"]]
    assert manifest["spec"]["successPolicy"]["targetReplicatedJobs"] == ["trainer"]
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    for name in names:
        job = replicated_job(manifest, name)["template"]["spec"]
        pod = job["template"]["spec"]
        assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
        assert pod["restartPolicy"] == "Never"  # podFailurePolicy requires it
        for rule in job["podFailurePolicy"]["rules"]:
            assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
            if codes := rule.get("onExitCodes"):
                assert codes["containerName"] in [each["name"] for each in pod["containers"]]
                assert codes["values"] == sorted(set(codes["values"])) and 0 not in codes["values"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["name"] for mount in container(manifest, name)["volumeMounts"]}
        assert mounts == volumes


def outcome(manifest, name, code):
    """The action of JobSet after a process of a job ended with this code, without a lost node."""
    job = replicated_job(manifest, name)["template"]["spec"]
    if code == 0:
        return "done"
    reason = "BackoffLimitExceeded" if job["backoffLimit"] == 0 else None
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes and (code in codes["values"]) == (codes["operator"] == "In"):
            assert rule["action"] == "FailJob"
            reason = "PodFailurePolicy"
            break
    if reason is None:
        return "pod restarts"
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        if reason in rule.get("onJobFailureReasons", [reason]):
            return rule["action"]
    return "RestartJobSet"


def test_exit_codes_in_the_jobset(manifest):
    assert outcome(manifest, "trainer", 0) == "done"
    assert outcome(manifest, "trainer", EXIT_USER_ERROR) == "FailJobSet"
    assert {outcome(manifest, "trainer", code) for code in RESTARTS} == {"RestartJobSet"}
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert outcome(manifest, "rollout", EXIT_USER_ERROR) == "FailJobSet"
    assert {outcome(manifest, "rollout", code) for code in (1, 75, 137)} == {"pod restarts"}


def test_a_drained_replica_is_not_done(manifest, tmp_path):
    """Runs the container's script, with a `python` that ends as a replica does."""
    script = container(manifest, "rollout")["args"][0]
    for ends, expected in ((0, 75), (1, 1), (2, 2)):
        executable(tmp_path / "python", f"exit {ends}")
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        assert subprocess.run(["bash", "-c", script], env=environment).returncode == expected


def test_the_grace_period_leaves_time_to_save(manifest):
    config, _ = config_of(arguments(manifest, "trainer")[1:])
    pod = replicated_job(manifest, "trainer")["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= config.training.grace_s + 15


@pytest.mark.parametrize("name", ["trainer", "rollout"])
def test_the_commands_take_their_flags(manifest, name):
    module, *words = arguments(manifest, name)
    assert module == {"trainer": "launch.train", "rollout": "launch.rollout"}[name]
    # All flags are parsed first: an unknown flag or a wrong type ends with 2.
    assert run(module, *words, "--help").returncode == 0
    assert run(module, *words, "--config.no_such=1", "--help").returncode == 2


def test_the_trainers_config_is_valid_and_names_the_replicas(manifest):
    config, workdir = config_of(arguments(manifest, "trainer")[1:])
    validate(config)
    name = manifest["metadata"]["name"]
    replicas = replicated_job(manifest, "rollout")["replicas"]
    expected = tuple(f"{name}-rollout-{index}-0.{name}:50051" for index in range(replicas))
    assert tuple(config.rollout.addresses) == expected
    assert container(manifest, "rollout")["ports"] == [{"containerPort": 50051}]
    for address in expected:  # the certificate must name it too
        assert f"DNS:{address.split(':')[0]}" in JOBSET.read_text()
    shared = [m["mountPath"] for m in container(manifest, "trainer")["volumeMounts"]]
    for path in (workdir, config.model.path, config.rollout.tls_ca_file, *config.data.files):
        assert any(pathlib.Path(path).is_relative_to(mount) for mount in shared), path


def environment_of_pod(manifest, name, job, pod):
    """The environment variables of a pod that has the annotations which JobSet writes."""
    replicated = replicated_job(manifest, name)
    prefix = "jobset.sigs.k8s.io/"
    annotations = {
        f"metadata.annotations['{prefix}jobset-name']": manifest["metadata"]["name"],
        f"metadata.annotations['{prefix}replicatedjob-name']": name,
        f"metadata.annotations['{prefix}replicatedjob-replicas']": str(replicated["replicas"]),
        f"metadata.annotations['{prefix}job-index']": str(job),
    }
    found = {"JOB_COMPLETION_INDEX": str(pod)}
    for variable in container(manifest, name)["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            found[variable["name"]] = annotations[source["fieldRef"]["fieldPath"]]
        else:
            found[variable["name"]] = variable.get("value", "from a secret")
    return found


@pytest.mark.parametrize("slices", [1, 3])
def test_every_pod_finds_its_place(manifest, slices):
    trainer = replicated_job(manifest, "trainer")
    trainer["replicas"] = slices
    pods = trainer["template"]["spec"]["completions"]
    config, _ = config_of(arguments(manifest, "trainer")[1:])
    places = [
        find_place(config.distributed, environment_of_pod(manifest, "trainer", job, pod))
        for job in range(slices)
        for pod in range(pods)
    ]
    assert [place.process_id for place in places] == list(range(slices * pods))
    assert {place.num_processes for place in places} == {slices * pods}
    assert {place.coordinator for place in places} == {f"semrl-trainer-0-0.semrl:{JOBSET_PORT}"}
    assert container(manifest, "trainer")["ports"] == [{"containerPort": JOBSET_PORT}]
    assert find_place(config.distributed, environment_of_pod(manifest, "rollout", 0, 0)) == SINGLE


# --- Slurm: the script runs with fake srun and scontrol, which record their arguments.

# Starts two tasks as srun does, on the nodes of the job. Exits with the highest exit code.
SRUN = """
printf '%s\\n' "$@" > "$RECORDS/srun"
while [[ $1 == --* ]]; do shift; done
highest=0
for task in 0 1; do
  SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2 \
    SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST "$@"
  code=$?
  ((code > highest)) && highest=$code
done
exit $highest
"""
# In place of python: prints which process it would be, and its arguments.
TASK = f"""exec {shlex.quote(sys.executable)} -c '
import os, sys
from semrl_jax.cluster import find_place
settings = {{"coordinator": "", "num_processes": 0, "process_id": -1}}
place = find_place(settings, os.environ)
file = open(os.environ["RECORDS"] + f"/task{{place.process_id}}", "w")
print(*place, *sys.argv[1:], sep="\\n", file=file)
sys.exit(int(os.environ["ENDS"].split(",")[place.process_id]))
' "$@"
"""


def executable(path, script):
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def sbatch(tmp_path, ends, words=(), **variables):
    """Runs the script as the batch step would; returns its result and the recorded arguments."""
    executable(tmp_path / "srun", SRUN)
    executable(tmp_path / "scontrol", 'printf "%s\\n" "$@" > "$RECORDS/scontrol"')
    executable(tmp_path / "python", TASK)
    records = tmp_path / "records"
    records.mkdir(exist_ok=True)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "RECORDS": str(records),
        "ENDS": ends, "PYTHONPATH": str(ROOT),
        # As in a batch step: the variables of the whole job, and a SLURM_PROCID.
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "4242", "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "gpu[07-08]",
    } | variables  # fmt: skip
    copy = tmp_path / "slurm_script"  # sbatch runs a copy of it
    copy.write_text(SBATCH.read_text())
    result = subprocess.run(
        ["bash", str(copy), *words], env=environment, cwd="/", capture_output=True, text=True
    )
    recorded = {file.name: file.read_text().splitlines() for file in records.iterdir()}
    return result, recorded


def test_slurm_starts_the_trainer_on_every_node(tmp_path):
    result, recorded = sbatch(
        tmp_path, "0,0", ["--config.seed=7"], ROLLOUT_ADDRESSES="r1:50051 r2:50052",
        ROLLOUT_CA_FILE="ca.crt",
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
    assert "scontrol" not in recorded
    address = f"gpu07:{61440 + 4242 % 4096}"
    for index in range(2):
        assert recorded[f"task{index}"][:4] == [address, "2", str(index), "Slurm"]
    module, *words = recorded["task0"][5:]
    assert recorded["task0"][4:6] == ["-m", "launch.train"] and module == "launch.train"
    config, workdir = config_of(words)
    validate(config)
    assert workdir == "runs/gsm8k" and config.seed == 7
    assert tuple(config.rollout.addresses) == ("r1:50051", "r2:50052")
    assert config.rollout.token_file == f"{tmp_path}/.semrl_rollout_token"
    assert config.rollout.tls_ca_file == "ca.crt"
    assert "--kill-on-bad-exit=0" in recorded["srun"] and "--wait=0" in recorded["srun"]
    assert run("launch.train", *words, "--help").returncode == 0


def test_slurm_leaves_time_to_save(tmp_path):
    _, recorded = sbatch(tmp_path, "0,0")
    config, _ = config_of(recorded["task0"][6:])
    assert tuple(config.rollout.addresses) == () and config.rollout.token_file == ""
    before_end = int(re.search(r"^#SBATCH --signal=TERM@(\d+)$", SBATCH.read_text(), re.M)[1])
    assert before_end >= config.training.grace_s + 60  # Slurm may be a minute early or late


@pytest.mark.parametrize("code", RESTARTS)
def test_slurm_queues_the_job_again(tmp_path, code):
    result, recorded = sbatch(tmp_path, f"0,{code}")
    assert result.returncode == code and "queued again" in result.stdout
    assert recorded["scontrol"] == ["requeue", "4242"]


def test_slurm_does_not_queue_a_wrong_setting_again(tmp_path):
    result, recorded = sbatch(tmp_path, f"0,{EXIT_USER_ERROR}")
    assert result.returncode == EXIT_USER_ERROR and "not queued again" in result.stdout
    assert "scontrol" not in recorded
    result, recorded = sbatch(tmp_path, f"0,{EXIT_PREEMPTED}", SLURM_RESTART_COUNT="50")
    assert result.returncode == EXIT_PREEMPTED and "after 50 restarts" in result.stdout
    assert "scontrol" not in recorded


def test_the_batch_script_is_sound():
    assert subprocess.run(["bash", "-n", str(SBATCH)]).returncode == 0
    lines = SBATCH.read_text().splitlines()
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    # sbatch reads options only before the first non-comment line. An option must not be followed
    # by a comment.
    assert all(line.startswith("#") for line in lines[: options[-1]] if line)
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[i]) for i in options)
    assert "#SBATCH --requeue" in lines and "#SBATCH --ntasks-per-node=1" in lines
