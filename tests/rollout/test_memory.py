"""The available memory of a process, read from copies of the kernel's files."""

import pytest

from semrl_jax.rollout.host_memory import available_bytes, total_bytes

GIB = 2**30


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path):
    """A machine of 64 GiB, half of it free."""
    write(
        tmp_path, {"proc/meminfo": f"MemTotal:  {64 * 2**20} kB\nMemAvailable:   {32 * 2**20} kB"}
    )
    return tmp_path


@pytest.mark.parametrize("groups", ["1:cpu:/", "0::/", "2:cpu,cpuacct:/a\n0::/"])
def test_without_limits_the_machines_memory_counts(machine, groups):
    write(machine, {"proc/self/cgroup": groups})
    assert available_bytes(machine) == 32 * GIB


def test_a_containers_limit_counts_with_the_cache_of_files_given_up(machine):
    group = "sys/fs/cgroup/job"
    write(
        machine,
        {
            "proc/self/cgroup": "0::/job/task",
            f"{group}/memory.max": 8 * GIB,
            f"{group}/memory.current": 5 * GIB,
            f"{group}/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file 7",
            f"{group}/task/memory.max": "max",
            f"{group}/task/memory.current": 4 * GIB,
        },
    )
    assert available_bytes(machine) == 5 * GIB
    write(machine, {f"{group}/memory.current": 11 * GIB})
    assert available_bytes(machine) == 0


def test_a_limit_of_the_first_version_counts_and_one_above_the_machine_does_not(machine):
    """The path is the host's, the files the container's; 2**63 rounded to pages is no limit."""
    group = "sys/fs/cgroup/memory"
    write(
        machine,
        {
            "proc/self/cgroup": "4:memory:/docker/0123\n0::/",
            f"{group}/memory.limit_in_bytes": 2 * GIB,
            f"{group}/memory.usage_in_bytes": GIB,
            f"{group}/memory.stat": f"cache 5\ntotal_inactive_file {GIB // 2}",
        },
    )
    assert available_bytes(machine) == 3 * GIB // 2
    write(machine, {f"{group}/memory.limit_in_bytes": 9223372036854771712})
    assert available_bytes(machine) == 32 * GIB


def test_this_machine_has_some():
    assert 0 < available_bytes() < 2**50


def test_all_memory_is_the_limit_of_the_innermost_group_and_swap(machine):
    assert total_bytes(machine) == 64 * GIB
    group = "sys/fs/cgroup/job"
    write(
        machine,
        {
            "proc/self/cgroup": "0::/job/task",
            f"{group}/memory.max": 8 * GIB,
            f"{group}/memory.current": 7 * GIB,
            f"{group}/task/memory.max": "max",
            f"{group}/task/memory.current": 4 * GIB,
        },
    )
    assert total_bytes(machine) == 8 * GIB  # also if part of it is in use
    meminfo = machine / "proc/meminfo"
    meminfo.write_text(meminfo.read_text() + f"SwapTotal:  {2 * 2**20} kB\n")
    assert total_bytes(machine) == 10 * GIB
    assert total_bytes() >= available_bytes()
