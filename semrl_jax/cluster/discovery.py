"""Which process of a job this is: from the settings, or else from variables of the cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from semrl_jax.support.addresses import split_address
from semrl_jax.support.errors import UserError

TPU_PORT = 8482  # the port that JAX itself uses on TPU slices
JOBSET_PORT = 8482
SLURM_PORTS = (61440, 4096)  # first and number; above Linux's ports for outgoing connections
ALONE = "distributed.num_processes=1 runs this process alone"


class Place(NamedTuple):
    """Index of a process in its job, and how to reach process 0."""

    coordinator: str  # host:port where process 0 waits for the others; empty for a single process
    num_processes: int  # of the job, at least 1
    process_id: int  # index of this process, in [0, num_processes)
    source: str  # of these values, for messages: settings, Slurm, JobSet, TPU or single process


SINGLE = Place("", 1, 0, "single process")


def find_place(settings: Mapping[str, Any] | ConfigDict, environ: Mapping[str, str]) -> Place:
    """Finds the index of this process and the number of processes, without network and JAX.

    Settings have priority over the environment. If all three are given, or num_processes=1, the
    environment is not read. Otherwise it is read in the order Slurm, JobSet, TPU slice. If none of
    them has several processes, this is a single process.

    The detection of `jax.distributed.initialize` (0.10.2) reports neither address nor number of
    processes before it connects, so `join` could not name a process that is missing. It also counts
    the job's tasks in an interactive step of Slurm, binds a Slurm task to one GPU, and needs a
    Kubernetes client with the right to read pods.

    Raises UserError if settings of config.distributed or variables contradict each other, or an
    address is missing.
    """
    names = ("coordinator", "num_processes", "process_id")
    coordinator, num_processes, process_id = map(settings.__getitem__, names)
    if coordinator:
        split_address(coordinator, "distributed.coordinator")
    if num_processes < 0:
        raise UserError(f"distributed.num_processes={num_processes} must be at least 0.")
    if process_id < -1:
        raise UserError(f"distributed.process_id={process_id} must be at least -1.")
    if num_processes > 0 and process_id >= num_processes:
        raise UserError(
            f"distributed.process_id={process_id} must be below "
            f"distributed.num_processes={num_processes}; ids count from 0."
        )
    if num_processes == 1:
        return SINGLE
    if coordinator and num_processes and process_id >= 0:
        return Place(coordinator, num_processes, process_id, "settings")
    found = _slurm(environ) or _jobset(environ) or _tpu(environ)
    if found is None:
        return _without_cluster(coordinator, num_processes, process_id)
    if num_processes not in (0, found.num_processes) and process_id < 0:
        raise UserError(
            f"distributed.num_processes={num_processes}, but {found.source} runs "
            f"{found.num_processes} processes; leave the setting at 0, or set "
            "distributed.process_id too."
        )
    place = Place(
        coordinator or found.coordinator,
        num_processes or found.num_processes,
        process_id if process_id >= 0 else found.process_id,
        found.source,
    )
    if place.process_id >= place.num_processes:
        raise UserError(
            f"distributed.process_id={place.process_id} must be below the {place.num_processes} "
            f"processes that {place.source} runs; ids count from 0."
        )
    return place


def _without_cluster(coordinator: str, num_processes: int, process_id: int) -> Place:
    """The place if at least one setting is missing and no cluster was found."""
    given = {
        "coordinator": coordinator,
        "num_processes": num_processes or "",
        "process_id": process_id if process_id >= 0 else "",
    }
    missing = [f"distributed.{name}" for name, value in given.items() if value == ""]
    if len(missing) == len(given):
        return SINGLE
    settings = ", ".join(f"distributed.{name}={v}" for name, v in given.items() if v != "")
    raise UserError(
        f"{settings}, but neither Slurm, JobSet nor a TPU slice of several processes was found "
        f"to take the rest from; set {' and '.join(missing)} too, or none of them."
    )


def _slurm(environ: Mapping[str, str]) -> Place | None:
    """The place of a task that srun started.

    A batch script or an interactive shell inherits SLURM_PROCID=0 and the SLURM_NTASKS of the whole
    job. Only srun sets the variables of a step, and SLURM_STEP_NUM_TASKS never has the job's value.
    """
    in_step = "SLURM_STEP_NUM_TASKS" in environ or "SLURM_STEP_NODELIST" in environ
    if "SLURM_PROCID" not in environ or not in_step:
        return None
    counted = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    num_processes = _number(environ, counted, "Slurm") if counted in environ else 1
    if num_processes <= 1:
        return None
    process_id = _number(environ, "SLURM_PROCID", "Slurm", below=num_processes)
    listed = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    nodes = _text(environ, listed, "Slurm")
    # Slurm gives task 0 to the first node of the step: node008-ib of node[008-011,20]-ib,other.
    host = re.sub(r"\[(\d+)[\d,-]*\]", r"\1", nodes, flags=re.ASCII).split(",")[0]
    if not host or set(host) & set("[] \t"):
        raise UserError(
            f"{listed}={nodes!r} cannot be read: it has no first node; set distributed.coordinator "
            "to host:port of the first node."
        )
    # Two steps of one job may run side by side. The id of the step gives them different ports.
    number = _number(environ, "SLURM_JOB_ID", "Slurm")
    if environ.get("SLURM_STEP_ID", "").isdecimal():
        number += int(environ["SLURM_STEP_ID"])
    first, count = SLURM_PORTS
    return Place(f"{host}:{first + number % count}", num_processes, process_id, "Slurm")


def _jobset(environ: Mapping[str, str]) -> Place | None:
    """The place of a pod. launch/gke_jobset.yaml exports the variables that Kubernetes does not."""
    if "JOBSET_NAME" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None  # an ordinary Job may be one of many independent runs
    pods = _number(environ, "PODS_PER_JOB", "JobSet")
    jobs = _number(environ, "REPLICATED_JOB_REPLICAS", "JobSet")
    if pods * jobs <= 1:
        return None
    pod = _number(environ, "JOB_COMPLETION_INDEX", "JobSet", below=pods)
    job = _number(environ, "JOB_INDEX", "JobSet", below=jobs)
    name = environ["JOBSET_NAME"]
    # The name that the JobSet's headless service gives to pod 0 of job 0.
    host = f"{name}-{_text(environ, 'REPLICATED_JOB_NAME', 'JobSet')}-0-0.{name}"
    return Place(f"{host}:{JOBSET_PORT}", pods * jobs, job * pods + pod, "JobSet")


def _tpu(environ: Mapping[str, str]) -> Place | None:
    """The place of a host of one or several TPU slices."""
    hosts = [host for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    source, slices = "the TPU slice", 1
    if environ.get("MEGASCALE_NUM_SLICES"):
        slices = _number(environ, "MEGASCALE_NUM_SLICES", source)
    if len(hosts) * slices <= 1:
        return None
    process_id, host = _number(environ, "TPU_WORKER_ID", source, below=len(hosts)), hosts[0]
    if slices > 1:
        process_id += len(hosts) * _number(environ, "MEGASCALE_SLICE_ID", source, below=slices)
        # The port in this variable is for the slices' own traffic.
        host = _text(environ, "MEGASCALE_COORDINATOR_ADDRESS", source).split(":")[0]
    return Place(f"{host}:{TPU_PORT}", len(hosts) * slices, process_id, source)


def _text(environ: Mapping[str, str], name: str, source: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise UserError(
            f"{name} is not set, but {source} runs several processes and needs it; export it as "
            f"docs/clusters.md says, or set the fields of distributed ({ALONE})."
        )
    return value


def _number(environ: Mapping[str, str], name: str, source: str, below: int | None = None) -> int:
    """The value of a variable as a whole number in [0, below)."""
    value = _text(environ, name, source)
    if not re.fullmatch(r"\d{1,18}", value, re.ASCII):
        raise UserError(
            f"{name}={value!r} must be a whole number, as set by {source}; unset it, or set the "
            f"fields of distributed ({ALONE})."
        )
    if below is not None and int(value) >= below:
        raise UserError(
            f"{name}={value} must be below {below}, the number given by {source}; export both as "
            f"docs/clusters.md says, or set the fields of distributed ({ALONE})."
        )
    return int(value)
