"""Ranges that the kernel accepts for common sysctls, so that lint can report a value early.

Only lint uses them: in a run the kernel refuses the value (EINVAL), and the run is undone. Every
kernel since 6.1 has these bounds. Source: Linux, the `extra1` and `extra2` of the tables of
kernel/sysctl.c, mm and net/ipv4, and Documentation/admin-guide/sysctl.
"""

from __future__ import annotations

RANGES: dict[str, tuple[int, int]] = {
    "kernel.numa_balancing": (0, 3),
    "kernel.panic_on_oops": (0, 1),
    "kernel.perf_cpu_time_max_percent": (0, 100),
    "kernel.sched_autogroup_enabled": (0, 1),
    "kernel.timer_migration": (0, 1),
    "net.core.netdev_max_backlog": (0, 2**31 - 1),
    "net.core.rmem_max": (2304, 2**31 - 1),
    "net.core.somaxconn": (0, 2**31 - 1),
    "net.core.wmem_max": (4608, 2**31 - 1),
    "net.ipv4.tcp_retries1": (0, 255),
    "vm.compaction_proactiveness": (0, 100),
    "vm.dirty_background_ratio": (0, 100),
    "vm.dirty_ratio": (0, 100),
    "vm.overcommit_memory": (0, 2),
    "vm.panic_on_oom": (0, 2),
    "vm.swappiness": (0, 200),
    "vm.watermark_scale_factor": (1, 3000),
}
RISING = {
    "net.ipv4.ip_local_port_range": 2,
    "net.ipv4.tcp_mem": 3,
    "net.ipv4.tcp_rmem": 3,
    "net.ipv4.tcp_wmem": 3,
    "net.ipv4.udp_mem": 3,
}
"""How many numbers a sysctl takes, none smaller than the one before it. The kernel accepts others
for most of these sysctls, and then misbehaves."""


def why_out_of_range(name: str, value: str) -> str:
    """Return why a value is out of range; "" if it is not, or if the range is unknown."""
    parts = value.split()
    if not all(part.lstrip("-").isdigit() for part in parts):
        return "must be a number" if name in RANGES or name in RISING else ""
    numbers = [int(part) for part in parts]
    if name in RISING:
        if len(numbers) != RISING[name]:
            return f"takes {RISING[name]} numbers, not {len(numbers)}"
        return "" if numbers == sorted(numbers) else "must not fall from one number to the next"
    if name in RANGES:
        low, high = RANGES[name]
        if len(numbers) != 1 or not low <= numbers[0] <= high:
            return f"must be {low} to {high}"
    return ""
