"""Index and number of processes, from recorded environments of clusters."""

import pytest

from configs import default
from semrl_jax.cluster import SINGLE, Place, find_place
from semrl_jax.support.addresses import split_address
from semrl_jax.support.errors import UserError

FOUND_OUT = {"coordinator": "", "num_processes": 0, "process_id": -1}
# The variables that srun sets for task 1 of `srun -n 4`, on two of a job's three nodes.
SLURM_TASK = {
    "SLURM_JOB_ID": "70001",
    "SLURM_JOB_NODELIST": "gpu[01-03]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[02-03]",
    "SLURM_STEP_NUM_TASKS": "4",
}
JOBSET_POD = {
    "JOBSET_NAME": "semrl",
    "REPLICATED_JOB_NAME": "trainer",
    "REPLICATED_JOB_REPLICAS": "2",
    "PODS_PER_JOB": "4",
    "JOB_INDEX": "1",
    "JOB_COMPLETION_INDEX": "2",
}
TPU_HOST = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t-0.s,t-1.s"}
TPU_SLICES = TPU_HOST | {
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "job-slice-0-0.job:8080",
}


def find(environ, **settings):
    return find_place(FOUND_OUT | settings, environ)


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def test_default_settings_detect_the_place():
    assert find_place(default.get_config().distributed, {}) == SINGLE
    assert SINGLE[:3] == ("", 1, 0)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # The node of task 0 is the step's first, not the job's; 61440 + 70001 mod 4096 = 61809.
        (SLURM_TASK, Place("gpu02:61809", 4, 1, "Slurm")),
        (SLURM_TASK | {"SLURM_STEP_ID": "2"}, Place("gpu02:61811", 4, 1, "Slurm")),
        (without(SLURM_TASK, "SLURM_STEP_NUM_TASKS"), Place("gpu02:61809", 4, 1, "Slurm")),
        (without(SLURM_TASK, "SLURM_STEP_NODELIST"), Place("gpu01:61809", 4, 1, "Slurm")),
        (JOBSET_POD, Place("semrl-trainer-0-0.semrl:8482", 8, 6, "JobSet")),
        (TPU_HOST, Place("t-0.s:8482", 2, 1, "the TPU slice")),
        (TPU_SLICES, Place("job-slice-0-0.job:8482", 6, 5, "the TPU slice")),
        # On GKE a pod of a JobSet has both.
        (JOBSET_POD | TPU_HOST, Place("semrl-trainer-0-0.semrl:8482", 8, 6, "JobSet")),
    ],
)
def test_place_is_read_from_the_environment(environ, expected):
    assert find(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # salloc's shell on the login node, and commands typed into it
        without(SLURM_TASK, "SLURM_PROCID", *[n for n in SLURM_TASK if "STEP" in n]),
        # a batch script: not a step, but it has a SLURM_PROCID
        without(SLURM_TASK | {"SLURM_PROCID": "0"}, *[n for n in SLURM_TASK if "STEP" in n]),
        # an interactive step: one task, but with the SLURM_NTASKS of the whole job
        SLURM_TASK | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        # srun -n 1
        SLURM_TASK | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        without(SLURM_TASK, "SLURM_PROCID"),
        {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "a"},
        # an indexed Job whose pods are independent runs
        {"JOB_COMPLETION_INDEX": "3"},
        JOBSET_POD | {"REPLICATED_JOB_REPLICAS": "1", "PODS_PER_JOB": "1"},
        # one host of TPUs
        {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"},
        {"TPU_WORKER_ID": "0"},
    ],
)
def test_environment_of_a_single_process(environ):
    assert find(environ) == SINGLE


def test_single_slurm_task_on_a_tpu_slice_is_a_host_of_the_slice():
    assert find(SLURM_TASK | {"SLURM_STEP_NUM_TASKS": "1"} | TPU_HOST).source == "the TPU slice"


def test_settings_override_the_environment():
    broken = SLURM_TASK | {"SLURM_PROCID": "x"}  # this variable must not be read
    settings = {"coordinator": "[::1]:99", "num_processes": 3, "process_id": 2}
    assert find(broken, **settings) == Place("[::1]:99", 3, 2, "settings")
    assert find(broken, num_processes=1) == SINGLE
    assert find(broken, num_processes=1, coordinator="a:1") == SINGLE
    assert find(SLURM_TASK, coordinator="a:1") == Place("a:1", 4, 1, "Slurm")
    assert find(SLURM_TASK, num_processes=4).num_processes == 4
    assert find(SLURM_TASK, process_id=3).process_id == 3
    assert find(SLURM_TASK, num_processes=8, process_id=7)[1:3] == (8, 7)


@pytest.mark.parametrize(
    ("settings", "environ", "message"),
    [
        ({"num_processes": 2}, {}, "set distributed.coordinator and distributed.process_id too"),
        ({"num_processes": 2, "process_id": 1}, {}, "set distributed.coordinator too"),
        ({"coordinator": "a:1", "num_processes": 2}, {}, "set distributed.process_id too"),
        ({"coordinator": "a:1"}, {}, "distributed.coordinator=a:1, but neither Slurm"),
        ({"process_id": 0}, {}, "distributed.process_id=0, but neither Slurm"),
        ({"num_processes": -1}, {}, "distributed.num_processes=-1 must be at least 0"),
        ({"process_id": -2}, {}, "distributed.process_id=-2 must be at least -1"),
        ({"num_processes": 2, "process_id": 2}, {}, "process_id=2 must be below"),
        ({"num_processes": 1, "process_id": 1}, {}, "process_id=1 must be below"),
        ({"process_id": 4}, SLURM_TASK, "process_id=4 must be below the 4 processes that Slurm"),
        ({"num_processes": 8}, SLURM_TASK, "num_processes=8, but Slurm runs 4 processes"),
        ({"coordinator": "host"}, {}, "coordinator='host' must be host:port"),
        ({"coordinator": "host:"}, {}, "coordinator='host:' must be host:port"),
        ({"coordinator": ":80"}, {}, "coordinator=':80' must be host:port"),
        ({"coordinator": "host:http"}, {}, "must be host:port"),
        ({"coordinator": "host:65536"}, {}, "must be host:port"),
        ({"coordinator": "host:0", "num_processes": 1}, {}, "must be host:port"),
        ({"coordinator": "http://host:80"}, {}, "must be host:port"),
        ({"coordinator": "::1:80"}, {}, "must be host:port"),
        ({"coordinator": "a..b:8482"}, {}, "each part of a host name"),
        ({"coordinator": "a" * 64 + ".b:8482"}, {}, "aaa.b:8482': each part of a host name"),
        ({}, SLURM_TASK | {"SLURM_STEP_NODELIST": "gpu[1-"}, "SLURM_STEP_NODELIST='gpu[1-' cannot"),
        ({}, SLURM_TASK | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set, but Slurm"),
        ({}, SLURM_TASK | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 must be below 4"),
        ({}, SLURM_TASK | {"SLURM_PROCID": "one"}, "SLURM_PROCID='one' must be a whole number"),
        ({}, SLURM_TASK | {"SLURM_STEP_NUM_TASKS": "-1"}, "SLURM_STEP_NUM_TASKS='-1' must be"),
        ({}, without(SLURM_TASK, "SLURM_JOB_ID"), "SLURM_JOB_ID is not set"),
        ({}, without(JOBSET_POD, "PODS_PER_JOB"), "PODS_PER_JOB is not set, but JobSet"),
        ({}, without(JOBSET_POD, "JOB_INDEX"), "JOB_INDEX is not set"),
        ({}, without(JOBSET_POD, "REPLICATED_JOB_NAME"), "REPLICATED_JOB_NAME is not set"),
        ({}, JOBSET_POD | {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX=4 must be below 4"),
        ({}, without(TPU_HOST, "TPU_WORKER_ID"), "TPU_WORKER_ID is not set"),
        ({}, TPU_HOST | {"TPU_WORKER_ID": "2"}, "TPU_WORKER_ID=2 must be below 2"),
        ({}, without(TPU_SLICES, "MEGASCALE_SLICE_ID"), "MEGASCALE_SLICE_ID is not set"),
        ({}, without(TPU_SLICES, "MEGASCALE_COORDINATOR_ADDRESS"), "COORDINATOR_ADDRESS is not"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(settings, environ, message):
    with pytest.raises(UserError) as caught:
        find(environ, **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_addresses_are_split():
    assert split_address("10.0.0.1:8482", "f") == ("10.0.0.1", 8482)
    assert split_address("[fe80::1%eth0]:1", "f") == ("fe80::1%eth0", 1)
    assert split_address("pod-0.svc:65535", "f") == ("pod-0.svc", 65535)


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("node7", "node7"),
        ("host[001-003,7],other", "host001"),
        ("other,host[001-003,7]", "other"),
        ("a[098-101]-ib,b", "a098-ib"),
        ("r[1-2]n[3,5]", "r1n3"),
    ],
)
def test_process_0_is_on_the_first_node(node_list, first):
    assert find(SLURM_TASK | {"SLURM_STEP_NODELIST": node_list}).coordinator == f"{first}:61809"


@pytest.mark.parametrize(
    "node_list", [",", "a[", "a]", "a[]", "a[1", "a[x]", "a[1]]", "a b", "a[٣]"]
)
def test_invalid_node_list_is_refused(node_list):
    with pytest.raises(UserError, match=r"SLURM_STEP_NODELIST=.* cannot be read"):
        find(SLURM_TASK | {"SLURM_STEP_NODELIST": node_list})
