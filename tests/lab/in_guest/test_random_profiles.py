"""Random profiles on the real kernel: a rollback always restores the host.

A round draws two profiles of one to twelve settings from everything that this guest can set. It
applies the first, then the second, then rolls back. A profile that is refused must leave no trace
either. `TWINE_ROUNDS` and `TWINE_SEED` choose others.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_host import GuestHost, differences, everything, output_of, profile

from sidekick.profile import Profile
from sidekick.report import ProfileState, Report
from sidekick.settings import SETTINGS
from sidekick.status import verify

ROUNDS = int(os.environ.get("TWINE_ROUNDS", "500"))
SEED = int(os.environ.get("TWINE_SEED", "1"))
HARMFUL = re.compile(
    r"kernel\.(.*panic.*|sysrq|.*_pid.*|pid_max|threads-max|.*random.*|keys\..*|printk.*|core_.*"
    r"|ctrl-alt-del|perf_event_paranoid|io_uring.*|hung_task_.*|reset_devices|acct|seccomp.*)"
    r"|fs\.(file-max|nr_open|suid.*|protected.*|pipe.*|inotify.*|epoll.*|mount-max|aio.*|mqueue.*)"
    r"|vm\.(min_free_kbytes|admin_reserve.*|user_reserve.*|overcommit.*|.*panic.*|max_map_count"
    r"|mmap.*|nr_.*|lowmem.*|watermark.*|legacy.*|memory_failure.*|hugetlb.*)"
    r"|net\.ipv[46]\.(tcp_mem|udp_mem|conf\..*|.*ttl.*|neigh\..*delay.*|ip_unprivileged.*)"
    r"|net\.(core\.(bpf.*|.*default)|ipv4\.(ping_group_range|tcp_(wmem|rmem)|.*fib.*|fwmark.*))"
    r"|user\..*|abi\..*|debug\..*|dev\.(cdrom|scsi|tty|hpet|mac_hid|raid).*|sunrpc\..*"
)
"""Settings that, with random values, would end the guest, its network or the test itself."""
BOOLEAN = ("0", "1")
BLOCK = {
    "scheduler": ("none", "mq-deadline"),
    "read_ahead_kb": (0, 16, 64, 4096),
    "nr_requests": (16, 64),
    "rq_affinity": (0, 1, 2),
    "wbt_lat_usec": (0, 75000),
}
THP = {"enabled": ("always", "madvise", "never"), "defrag": ("always", "defer", "never")}
KINDS, WEIGHTS = ("sysctl", "thp", "block.flash", "modules"), (12, 1, 2, 1)
MODULES = ("br_netfilter", "bfq", "tcp_bbr", "dummy")


class Drawn:
    """The settings that this guest supports, and the profiles drawn from them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sysctls = dict(self._sysctls())

    def _sysctls(self) -> Iterator[tuple[str, str]]:
        section = SETTINGS["sysctl"]
        for line in output_of("sysctl -a 2>/dev/null").splitlines():
            name, _, value = line.partition(" = ")
            path = Path("/proc/sys", *name.split("."))
            if HARMFUL.fullmatch(name) or not path.exists() or not path.stat().st_mode & 0o200:
                continue
            if section.check(Profile(name="x", sections={"sysctl": {name: value or 0}})):
                continue
            if re.fullmatch(r"-?\d+(\s+-?\d+)*", value):
                yield name, value

    def value(self, now: str) -> str:
        """Return another plausible value."""
        parts = now.split()
        at = self.random.randrange(len(parts))
        number = int(parts[at])
        if number in (0, 1):
            others = [1 - number, 2]
        else:
            others = [number + 1, number - 1, number * 2, number // 2]
        parts[at] = str(self.random.choice(others))
        return " ".join(parts)

    def profile(self, name: str) -> str:
        """Write a profile and return its name."""
        tables: dict[str, list[str]] = {}
        for _ in range(self.random.randint(1, 12)):
            (kind,) = self.random.choices(KINDS, WEIGHTS)
            if kind == "sysctl":
                key = self.random.choice(sorted(self.sysctls))
                line = f"'{key}' = '{self.value(self.sysctls[key])}'"
            elif kind == "modules":
                key, line = "load", f"load = ['{self.random.choice(MODULES)}']"
            else:
                choices = THP if kind == "thp" else BLOCK
                key = self.random.choice(sorted(choices))
                chosen = self.random.choice(choices[key])
                line = f"{key} = {chosen!r}"
            lines = tables.setdefault(kind, [])
            if not any(one.startswith((f"{key} ", f"'{key}' ")) for one in lines):
                lines.append(line)
        return profile(name, "\n".join(f"[{k}]\n" + "\n".join(v) for k, v in tables.items()))


def applied(host: GuestHost, name: str) -> Report:
    report = host.apply(name)
    if report.state is ProfileState.VERIFIED:
        assert verify(host.host(), host.state).state is ProfileState.VERIFIED, name
    else:
        assert report.state is ProfileState.DEGRADED, report
        assert report.rolled_back, report
        print(f"refused: {report.detail}")
    return report


@pytest.mark.behaviour("BUG-SK26", "BUG-SK29", "BUG-SK36", "F-73", "HP12")
@pytest.mark.long
def test_random_profiles_leave_no_trace(host: GuestHost, untouched: dict[str, str]) -> None:

    drawn, before = Drawn(SEED), dict(untouched)
    wrong: list[str] = []
    counts = dict.fromkeys(("verified", "degraded"), 0)
    for number in range(ROUNDS):
        names = [drawn.profile(f"r{number}{which}") for which in "ab"]
        found = len(wrong)
        try:
            for name in names:
                counts[applied(host, name).state.value] += 1
            report = host.release()
            assert report.state is ProfileState.NONE, report
        except AssertionError as e:
            wrong.append(f"round {number}: {e}")
        left = differences(before, everything())
        if left:
            text = "\n".join(output_of(f"cat /run/profiles-of-the-test/{n}.toml") for n in names)
            wrong.append(f"round {number}: {left}\n{text}")
            before = everything()
        print(f"round {number}: {len(wrong)} wrong, {counts}", *wrong[found:], sep="\n", flush=True)
    assert wrong == [], "\n\n".join(wrong)
    assert counts["verified"] > ROUNDS // 2
