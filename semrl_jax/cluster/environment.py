"""Which process of a job this is: from the settings, else from what the cluster put around it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from semrl_jax.errors import UserError

TPU_PORT = 8482  # the one JAX itself takes on TPU slices
JOBSET_PORT = 8482
SLURM_PORTS = (61440, 4096)  # first and number: above the ports Linux gives to outgoing connections
MAX_NODES = 100_000
ALONE = "distributed.num_processes=1 runs this process alone"


class Place(NamedTuple):
    """Where a process stands in its job.

    Attributes:
      coordinator: host:port on which process 0 gathers the others; empty for a single process.
      num_processes: of the job, at least 1.
      process_id: of this one, in [0, num_processes).
      source: what said so, for messages: settings, Slurm, JobSet, TPU or single process.
    """

    coordinator: str
    num_processes: int
    process_id: int
    source: str


SINGLE = Place("", 1, 0, "single process")


def find_place(settings: Mapping[str, Any] | ConfigDict, environ: Mapping[str, str]) -> Place:
    """Finds out which process of how many this is; touches neither network nor JAX.

    A setting that was given counts before anything found. All three given, or
    num_processes=1, and the environment is not read at all. Otherwise it is read in the order
    Slurm, JobSet, TPU slice; where none of them has several processes, this is a single one.

    JAX has a search of its own (`jax.distributed.initialize()` without arguments). It is not used:
    it takes a shell inside a Slurm allocation for a task of it, wants a Kubernetes client with the
    right to read pods, binds a Slurm task to one GPU, and tells neither address nor size before it
    waits for them. The variables read here are the same.

    Args:
      settings: coordinator, num_processes and process_id of config.distributed; others are ignored.
      environ: usually os.environ.

    Raises:
      UserError: for settings or variables that contradict each other or lack an address.
    """
    coordinator = settings["coordinator"]
    num_processes = settings["num_processes"]
    process_id = settings["process_id"]
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


def split_address(address: str, field: str) -> tuple[str, int]:
    """Splits host:port, the host an IPv6 address in brackets or without a colon.

    Raises:
      UserError: naming `field`, if there is no host, none that could be, no port or one outside
        1-65535.
    """
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\s\[\]/]+):(\d{1,5})", address, re.ASCII)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise UserError(
            f"{field}={address!r} must be host:port with a port from 1 to 65535, as "
            "10.0.0.1:8482 or [fd00::1]:8482."
        )
    host = match[1].strip("[]")
    try:
        host.encode("idna")  # as every look-up of a name does
    except UnicodeError:
        raise UserError(
            f"{field}={address!r}: {host!r} is no host name; between its dots are 1 to 63 letters."
        ) from None
    return host, int(match[2])


def expand_nodes(node_list: str) -> list[str]:
    """Expands a Slurm node list: host[001-003,7],other is host001, host002, host003, host7, other.

    Raises:
      ValueError: if it is not one, or has more than MAX_NODES nodes.
    """
    nodes = []
    # A comma inside brackets separates ranges, one outside of them node names.
    for entry in re.split(r",(?![^\[]*\])", node_list):
        parts = re.split(r"\[([^\[\]]*)\]", entry)  # text, ranges, text, ranges, ..., text
        if not entry or any(set(text) & set("[], \t") for text in parts[::2]):
            raise ValueError(f"{entry!r} is no node name")
        names = [parts[0]]
        for ranges, text in zip(parts[1::2], parts[2::2]):
            numbers = _numbers(ranges)
            if len(nodes) + len(names) * len(numbers) > MAX_NODES:
                raise ValueError(f"more than {MAX_NODES} nodes")
            names = [name + number + text for name in names for number in numbers]
        nodes += names
    return nodes


def _numbers(ranges: str) -> list[str]:
    """Expands 001-003,7: zeros in front stay."""
    numbers = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item, re.ASCII)
        if match is None:
            raise ValueError(f"{item!r} is neither a number nor a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 0 <= last - first < MAX_NODES:
            raise ValueError(f"{item!r} is no range of at most {MAX_NODES} nodes")
        numbers += [f"{number:0{len(match[1])}}" for number in range(first, last + 1)]
    return numbers


def _without_cluster(coordinator: str, num_processes: int, process_id: int) -> Place:
    """The place that settings alone describe, one of them at least left to be found out."""
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
        f"{settings}, but neither Slurm, JobSet nor a TPU slice of several processes is around "
        f"this one to find the rest in; set {' and '.join(missing)} too, or none of them."
    )


def _slurm(environ: Mapping[str, str]) -> Place | None:
    """The place of a task that srun started.

    The variables of a job are inherited by every shell inside it, and a batch script or an
    interactive one has SLURM_PROCID=0 beside the SLURM_NTASKS of the whole job. Only srun sets
    those of a step, and of them SLURM_STEP_NUM_TASKS alone is never the job's.
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
    try:
        # Slurm gives task 0 to the first node of the step.
        host = expand_nodes(_text(environ, listed, "Slurm"))[0]
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{listed}={environ[listed]!r} cannot be read: {error}; set distributed.coordinator "
            "to host:port of the first node."
        ) from None
    # Two steps of one job may run side by side: the id of the step tells their ports apart.
    number = _number(environ, "SLURM_JOB_ID", "Slurm")
    if environ.get("SLURM_STEP_ID", "").isdecimal():
        number += int(environ["SLURM_STEP_ID"])
    first, count = SLURM_PORTS
    return Place(f"{host}:{first + number % count}", num_processes, process_id, "Slurm")


def _jobset(environ: Mapping[str, str]) -> Place | None:
    """The place of a pod; launch/gke_jobset.yaml exports what Kubernetes itself does not."""
    if "JOBSET_NAME" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None  # a Job of its own may be one of many runs that share nothing
    pods = _number(environ, "PODS_PER_JOB", "JobSet")
    jobs = _number(environ, "REPLICATED_JOB_REPLICAS", "JobSet")
    if pods * jobs <= 1:
        return None
    pod = _number(environ, "JOB_COMPLETION_INDEX", "JobSet", below=pods)
    job = _number(environ, "JOB_INDEX", "JobSet", below=jobs)
    name = environ["JOBSET_NAME"]
    # Pod 0 of job 0, by the name that the headless service of the JobSet gives it.
    host = f"{name}-{_text(environ, 'REPLICATED_JOB_NAME', 'JobSet')}-0-0.{name}"
    return Place(f"{host}:{JOBSET_PORT}", pods * jobs, job * pods + pod, "JobSet")


def _tpu(environ: Mapping[str, str]) -> Place | None:
    """The place of a host of one TPU slice or of several."""
    hosts = [host for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    slices = 1
    if environ.get("MEGASCALE_NUM_SLICES"):
        slices = _number(environ, "MEGASCALE_NUM_SLICES", "the TPU slice")
    if len(hosts) * slices <= 1:
        return None
    worker = _number(environ, "TPU_WORKER_ID", "the TPU slice", below=len(hosts))
    host, slice_id = hosts[0], 0
    if slices > 1:
        slice_id = _number(environ, "MEGASCALE_SLICE_ID", "the TPU slice", below=slices)
        # Its port is that of the slices' own traffic.
        host = _text(environ, "MEGASCALE_COORDINATOR_ADDRESS", "the TPU slice").split(":")[0]
    return Place(
        f"{host}:{TPU_PORT}", len(hosts) * slices, slice_id * len(hosts) + worker, "the TPU slice"
    )


def _text(environ: Mapping[str, str], name: str, source: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise UserError(
            f"{name} is not set, but {source} runs several processes and needs it; export it as "
            f"docs/clusters.md says, or set the fields of distributed ({ALONE})."
        )
    return value


def _number(environ: Mapping[str, str], name: str, source: str, below: int | None = None) -> int:
    """A variable as a whole number, in [0, below)."""
    value = _text(environ, name, source)
    if not re.fullmatch(r"\d{1,18}", value, re.ASCII):
        raise UserError(
            f"{name}={value!r} must be a whole number, as {source} sets it; unset it, or set the "
            f"fields of distributed ({ALONE})."
        )
    if below is not None and int(value) >= below:
        raise UserError(
            f"{name}={value} must be below {below}, the number {source} tells; export them as "
            f"docs/clusters.md says, or set the fields of distributed ({ALONE})."
        )
    return int(value)
