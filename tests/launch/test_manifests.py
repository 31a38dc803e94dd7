"""The launch files for clusters: their fields, their flags, and how they handle exit codes."""

import functools
import json
import operator
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import jsonschema
import pytest
import yaml
from absl import flags
from kubernetes_validate import ValidationError as KubernetesError
from kubernetes_validate import validate as validate_kubernetes
from ml_collections import config_flags

from launch.cli import EXIT_USER_ERROR
from semrl_jax.cluster import SINGLE, find_place
from semrl_jax.cluster.discovery import JOBSET_PORT
from semrl_jax.cluster.peers import EXIT_PEER_LOST
from semrl_jax.runs import EXIT_PREEMPTED, validate
from tests.launch.conftest import ROOT, run, run_each

JOBSET = ROOT / "launch" / "gke_jobset.yaml"
SBATCH = ROOT / "launch" / "slurm.sbatch"
TPU_VM = ROOT / "launch" / "tpu_vm.sh"
SCHEMAS = ROOT / "tests" / "launch" / "schemas"
JOBSET_SCHEMA = json.loads((SCHEMAS / "jobset.json").read_text())
KUBERNETES = "1.33"  # release
POD = ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec")
RESTARTS = (1, EXIT_PREEMPTED, EXIT_PEER_LOST, 128 + 6, 128 + 9)  # the last two: abort, killed


# --- The JobSet, by its published definition, and its jobs and pods by that of Kubernetes.


def problems(manifest) -> list[str]:
    """What the API server would refuse, without the rules that the definitions state as text."""
    found = [
        f"{error.json_path}: {error.message}"
        for error in jsonschema.Draft7Validator(JOBSET_SCHEMA).iter_errors(manifest)
    ]
    for job in manifest["spec"]["replicatedJobs"]:
        metadata = {"name": job["name"]}
        as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
        try:
            validate_kubernetes(as_job | {"spec": job["template"]["spec"]}, KUBERNETES, strict=True)
        except KubernetesError as error:
            found.append(f"{job['name']}: {error}")
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


def test_the_jobset_follows_the_published_schemas(manifest):
    assert problems(manifest) == []


def field(manifest, *path):
    return functools.reduce(operator.getitem, path, manifest)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicatedJobs", 0, "replica"), 1),  # no such field
        (("spec", "failurePolicy", "restartStrategy"), "Never"),
        (("spec", "failurePolicy", "rules", 0), {"action": "FailJobSet"}),  # without its name
        (("spec", "replicatedJobs", 0, "template", "spec", "backoffLimit"), "0"),
        ((*POD, "restartPolicy"), 1),
        ((*POD, "containers", 0, "imagePull"), "Always"),
        ((*POD, "volumes", 0, "persistentVolumeClaim"), {}),
    ],
)
def test_invalid_manifests_are_detected(manifest, path, value):
    field(manifest, *path[:-1])[path[-1]] = value
    assert problems(manifest)


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


def test_the_commands_take_their_flags(manifest):
    for name, command in (("trainer", "launch.train"), ("rollout", "launch.rollout")):
        module, *words = arguments(manifest, name)
        assert module == command
        # All flags are parsed first: an unknown flag or a wrong type ends with 2.
        found = run_each(module, [*words, "--help"], [*words, "--config.no_such=1", "--help"])
        assert [done.returncode for done in found] == [0, 2]


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

# Starts two tasks as srun does, on the first nodes of the job. Exits with the highest exit code. A
# step on later nodes has the replicas: it runs until it is killed, or ends with $REPLICAS_END.
SRUN = """
if [[ "$*" == *--relative=* ]]; then
  printf '%s\\n' "$@" > "$RECORDS/replicas"
  certificate=$(sed -n 's/^--tls_certificate=//p' "$RECORDS/replicas")
  cp "$certificate" "$RECORDS/tls.pem"
  printf '%s' "$SEMRL_ROLLOUT_TOKEN" > "$RECORDS/token"
  [[ ${REPLICAS_END:-} != 2 ]] || touch "${certificate%/*}/wrong"
  [[ -z ${REPLICAS_END:-} ]] || exit 143  # as srun, if it ended other tasks
  exec sleep 60
fi
[[ -z ${REPLICAS_END:-} ]] || sleep 1
printf '%s\\n' "$@" > "$RECORDS/srun"
while [[ $1 == --* ]]; do shift; done
highest=0
for task in 0 1; do
  SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2 \
    SLURM_STEP_NODELIST="gpu[05-06]" "$@"
  code=$?
  ((code > highest)) && highest=$code
done
exit $highest
"""
SCONTROL = """
if [[ $1 == show ]]; then printf '%s\\n' gpu05 gpu06 gpu07 gpu08; exit; fi
printf '%s\\n' "$@" > "$RECORDS/scontrol"
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
    executable(tmp_path / "scontrol", SCONTROL)
    executable(tmp_path / "python", TASK)
    records = tmp_path / "records"
    records.mkdir(exist_ok=True)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "RECORDS": str(records),
        "ENDS": ends, "PYTHONPATH": str(ROOT),
        # A batch step has the variables of the whole job, and a SLURM_PROCID.
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "4242", "SLURM_PROCID": "0",
        "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[05-08]", "SLURM_CPUS_PER_TASK": "32",
    } | variables  # fmt: skip
    copy = tmp_path / "slurm_script"  # sbatch runs a copy of it
    copy.write_text(SBATCH.read_text())
    result = subprocess.run(
        ["bash", str(copy), *words], env=environment, cwd="/", capture_output=True, text=True
    )
    recorded = {file.name: file.read_text().splitlines() for file in records.iterdir()}
    return result, recorded


def test_slurm_starts_trainers_and_replicas(tmp_path):
    result, recorded = sbatch(
        tmp_path, "0,0", ["--config.seed=7", "--config.training.micro_batch_size=16"],
        SLURM_GPUS_ON_NODE="8",
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
    assert "scontrol" not in recorded
    address = f"gpu05:{61440 + 4242 % 4096}"
    for index in range(2):
        assert recorded[f"task{index}"][:4] == [address, "2", str(index), "Slurm"]
    module, *words = recorded["task0"][5:]
    assert recorded["task0"][4:6] == ["-m", "launch.train"] and module == "launch.train"
    config, workdir = config_of(words)
    validate(config)
    assert workdir == "runs/grpo_qwen2_5_7b" and config.seed == 7
    ports = [f"{node}:{port}" for node in ("gpu07", "gpu08") for port in (50051, 50052)]
    assert list(config.rollout.addresses) == ports
    flags = {"--nodes=2", "--ntasks=2", "--cpus-per-task=32", "--kill-on-bad-exit=0", "--wait=0"}
    assert flags <= set(recorded["srun"])
    assert run("launch.train", *words, "--help").returncode == 0

    replicas = recorded["replicas"]
    flags = {"--relative=2", "--ntasks=4", "--cpus-per-task=16", "--gpus-per-task=4"}
    assert flags <= set(replicas)
    module, *words = replicas[replicas.index("-m") + 1 :]
    assert module == "launch.rollout" and "--engine=vllm" in words
    of_replica, _ = config_of([word for word in words if word.startswith("--config")])
    assert of_replica.rollout.vllm_tensor_parallelism == 4 and of_replica.seed == 7
    assert run(module, *words, "--help").returncode == 0

    assert len(recorded["token"][0]) == 64
    read = ["openssl", "x509", "-noout", "-ext", "subjectAltName"]
    names = subprocess.run([*read, "-in", tmp_path / "records" / "tls.pem"], capture_output=True)
    assert b"DNS:gpu07, DNS:gpu08\n" in names.stdout
    assert not list(tmp_path.glob(".semrl-*"))  # neither key nor token stays


def test_slurm_without_replicas_leaves_time_to_save(tmp_path):
    """REPLICA_GPUS, 4 by default, is not read."""
    _, recorded = sbatch(tmp_path, "0,0", REPLICA_NODES="0", SLURM_GPUS_ON_NODE="2")
    assert "replicas" not in recorded and "--nodes=4" in recorded["srun"]
    config, _ = config_of(recorded["task0"][6:])
    assert tuple(config.rollout.addresses) == () and config.rollout.tls_ca_file == ""
    before_end = int(re.search(r"^#SBATCH --signal=TERM@(\d+)$", SBATCH.read_text(), re.M)[1])
    assert before_end >= config.training.grace_s + 60  # Slurm may be a minute early or late


@pytest.mark.parametrize(
    "wrong", [{"REPLICA_NODES": "4"}, *({"REPLICA_GPUS": gpus} for gpus in ("0", "3", "16"))]
)
def test_slurm_refuses_nodes_or_gpus_of_replicas_that_do_not_fit(tmp_path, wrong):
    result, recorded = sbatch(tmp_path, "0,0", SLURM_GPUS_ON_NODE="8", **wrong)
    assert result.returncode == 2 and not recorded
    ((name, value),) = wrong.items()
    assert f"{name}={value}" in result.stdout


@pytest.mark.parametrize(("ends", "expected"), [("2", 2), ("0", 75)])
def test_slurm_ends_with_replicas_of_a_wrong_setting_only(tmp_path, ends, expected):
    """Replicas that were asked to end, as before a preemption, leave the trainers time to save."""
    result, recorded = sbatch(tmp_path, "0,75", REPLICAS_END=ends)
    assert result.returncode == expected
    assert ("scontrol" in recorded) == (expected == 75)


def test_slurm_starts_a_failed_replica_again(tmp_path):
    """Runs what a task of the replicas' step runs, with a replica that fails once."""
    _, recorded = sbatch(tmp_path, "0,0")
    step = recorded["replicas"]
    first = next(i for i, word in enumerate(step) if word.endswith("/wrong"))
    again = "\n".join(step[step.index("-c") + 1 : first])
    executable(tmp_path / "sleep", "exit 0")
    replica = tmp_path / "once"
    executable(replica, 'echo "$@"; [[ -e ${0}d ]] && exit 0; touch "${0}d"; exit 1')
    environment = os.environ | {"SLURM_LOCALID": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def task(*command):
        words = ["bash", "-c", again, tmp_path / "wrong", *command]
        return subprocess.run(words, env=environment, capture_output=True, text=True)

    done = task(replica)
    assert (done.returncode, done.stdout) == (0, "--port=50052\n" * 2)
    assert not (tmp_path / "wrong").exists()
    executable(replica, 'echo "$@"; exit 2')
    done = task(replica)
    assert (done.returncode, done.stdout) == (2, "--port=50052\n" * 6)
    assert (tmp_path / "wrong").exists()


@pytest.mark.parametrize("code", [1, EXIT_PREEMPTED])
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
    lines = SBATCH.read_text().splitlines()
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    # sbatch reads options only before the first non-comment line. An option must not be followed
    # by a comment.
    assert all(line.startswith("#") for line in lines[: options[-1]] if line)
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[i]) for i in options)
    assert "#SBATCH --requeue" in lines and "#SBATCH --ntasks-per-node=1" in lines


@pytest.mark.parametrize("script", [SBATCH, TPU_VM], ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_the_scripts(script):
    shellcheck = pathlib.Path(sys.executable).with_name("shellcheck")
    result = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def parsed_by_sbatch(tmp_path, text):
    """What sbatch itself says of a script, on a cluster whose controller does not answer."""
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(
        "ClusterName=test\nSlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=2\n"
        "AuthType=auth/none\nCredType=cred/none\nGresTypes=gpu\n"
        "NodeName=localhost Gres=gpu:8\nPartitionName=all Nodes=ALL Default=YES\n"
    )
    script = tmp_path / "script"
    script.write_text(text)
    environment = os.environ | {"SLURM_CONF": str(configuration)}
    result = subprocess.run(
        ["sbatch", "--test-only", script], env=environment, capture_output=True, text=True
    )
    return result.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("sbatch") is None, reason="needs sbatch: apt-get install slurm-client"
)
def test_sbatch_takes_all_options(tmp_path):
    text = SBATCH.read_text()
    # All options were read before the controller is asked.
    assert "Unable to contact slurm controller" in parsed_by_sbatch(tmp_path, text)
    for right, wrong, said in (
        ("--requeue", "--requeues", "unrecognized option '--requeues'"),
        ("TERM@300", "END@300", "Invalid --signal"),
        ("--gpus-per-node=8", "--gpus-per-node=tpu:x:y", "Invalid"),
        ("--time=24:00:00", "--time=tomorrow", "Invalid --time"),
    ):
        assert right in text
        assert said in parsed_by_sbatch(tmp_path, text.replace(right, wrong)), wrong


# --- Cloud TPU VMs: the script runs with a fake gcloud, whose hosts are directories.

# Records each call, and runs the commands of `ssh` in the home directory of each host.
GCLOUD = """
printf '%s\\n' "$@" > "$RECORDS/$4$(ls "$RECORDS" | wc -l)"
for word in "$@"; do [[ $word == --command=* ]] && remote=${word#--command=}; done
[[ -z ${remote:-} || -n ${RECORD_ONLY:-} ]] && exit 0
for host in 0 1; do (cd "$HOSTS/$host" && HOST_INDEX=$host bash -c "$remote") || exit 1; done
"""
# What the server of a TPU VM answers: the index of the worker, and name:port:address of each.
CURL = """
case ${*: -1} in
  */instance/attributes/agent-worker-number) echo "$HOST_INDEX" ;;
  */instance/attributes/worker-network-endpoints) echo "a:8470:10.0.0.2,b:8470:10.0.0.3" ;;
  *) exit 22 ;;
esac
"""
# In place of python: records its arguments, and ends with the codes of ENDS one after the other.
TRAINER = """
trap 'exit 75' TERM  # before the file is written: a test sends the signal when it sees the file
n=$(ls started* 2> /dev/null | wc -l)
printf '%s\\n' "$@" > "started$n"
codes=($ENDS)
while [[ ${codes[$n]} == wait ]]; do sleep 0.05; done
exit "${codes[$n]}"
"""


class TpuVms:
    """Two hosts with this repository, and what their trainers and gcloud were told."""

    def __init__(self, directory, ends):
        self.records = directory / "records"
        self.hosts = [directory / str(index) / "semrl_jax" for index in range(2)]
        for host in self.hosts:
            (host / ".venv" / "bin").mkdir(parents=True)
            (host / "launch").mkdir()
            shutil.copy(TPU_VM, host / "launch")
            executable(host / ".venv" / "bin" / "python", TRAINER)
        self.records.mkdir()
        executable(directory / "gcloud", GCLOUD)
        executable(directory / "curl", CURL)
        self.environment = os.environ | {
            "PATH": f"{directory}:{os.environ['PATH']}", "RECORDS": str(self.records),
            "HOSTS": str(directory), "ENDS": ends,
        }  # fmt: skip

    def run(self, *words):
        result = subprocess.run(
            [TPU_VM, *words], env=self.environment, cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr

    def calls(self):
        """Words of each call of gcloud, in order."""
        files = sorted(self.records.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        return [file.read_text().splitlines() for file in files]

    def logs(self, text):
        """The logs of both hosts, when each of them has the text."""
        deadline = time.monotonic() + 20
        while True:
            logs = [(host / "run.log").read_text() for host in self.hosts]
            if all(text in log for log in logs):
                return logs
            assert time.monotonic() < deadline, logs
            time.sleep(0.05)

    def flags(self, host, attempt):
        """Arguments of launch.train."""
        option, module, *words = (self.hosts[host] / f"started{attempt}").read_text().splitlines()
        assert (option, module) == ("-m", "launch.train")
        return words


def test_gcloud_knows_all_flags_of_the_tpu_script(tmp_path):
    vms = TpuVms(tmp_path, "")
    vms.environment["RECORD_ONLY"] = "1"
    known = json.loads((SCHEMAS / "gcloud.json").read_text())
    for command in ("create", "setup", "train", "log", "stop", "delete"):
        vms.run(command)
    calls = vms.calls()
    assert [call[3] for call in calls] == ["create", "scp", "ssh", "ssh", "ssh", "ssh", "delete"]
    for call in calls:
        words = {word.split("=")[0] for word in call[4:] if word.startswith("--")}
        assert "--zone=us-east5-b" in call and words <= set(known[" ".join(call[:4])])


def test_every_host_of_a_tpu_slice_trains_and_starts_again(tmp_path):
    vms = TpuVms(tmp_path, "76 1 0")
    vms.run("train", "--config.seed=7", "--config.data.system_prompt=two words; $(no)")
    for log in vms.logs("ended with exit code 0"):
        assert log.count("started again") == 2 and "exit code 76" in log
    for index in range(2):
        assert vms.flags(index, 0) == vms.flags(index, 2)
        config, workdir = config_of(vms.flags(index, 0))
        place = find_place(config.distributed, {})
        assert tuple(place) == ("10.0.0.2:8482", 2, index, "settings")
        assert workdir == "/mnt/runs/gsm8k" and config.seed == 7
        assert config.data.system_prompt == "two words; $(no)"


def test_a_tpu_slice_does_not_start_a_wrong_setting_again(tmp_path):
    vms = TpuVms(tmp_path, "2 0")
    vms.run("train")
    assert not any("started again" in log for log in vms.logs("ended with exit code 2"))


def test_a_run_on_a_tpu_slice_is_stopped(tmp_path):
    vms = TpuVms(tmp_path, "wait 0")
    vms.run("train")
    deadline = time.monotonic() + 20
    while not all((host / "started0").exists() for host in vms.hosts):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    vms.run("stop")
    assert not any("started again" in log for log in vms.logs("ended with exit code 75"))
