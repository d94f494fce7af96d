"""How a task ended, in words."""

from __future__ import annotations

from agent.api import Exit
from wire.units import seconds_text

START_TIMEOUT_S = 600
"""For all that comes before a task's command: volumes, network, sandbox, and the load of what is
executed. systemd's own 90 s were too few on an emulated host with a quarter of a CPU; the agent's
unit has as much."""

STEPS: dict[int, str] = {
    200: "its working directory could not be entered: is it in the image, and may everybody read "
    "it and the image's root?",
    201: "its scheduling priority could not be set",
    202: "its file descriptors could not be set up",
    203: "its command could not be executed: no such file in the image, not executable, "
    "not to be read from the disk, or built for another processor",
    204: "there was no memory to set it up",
    205: "a resource limit could not be set",
    206: "its OOM score could not be set",
    207: "its signal mask could not be set",
    208: "its standard input could not be opened",
    209: "its standard output could not be opened",
    210: "its root could not be entered",
    211: "its IO priority could not be set",
    212: "its timer slack could not be set",
    213: "its secure bits could not be set",
    214: "its CPU scheduling could not be set",
    215: "its CPUs could not be set",
    216: "its group could not be set",
    217: "its user could not be set",
    218: "its capabilities could not be dropped",
    219: "it could not be put into its cgroup",
    220: "it could not be made a session of its own",
    221: "its start was not confirmed",
    222: "its standard error could not be opened",
    224: "no PAM session could be opened",
    225: "its network could not be set up",
    226: "its mount namespace could not be set up: is the image a whole root file system?",
    227: "it could not be kept from new privileges",
    228: "its system call filter could not be set",
    229: "its SELinux context could not be set",
    230: "its execution domain could not be set",
    231: "its AppArmor profile could not be set",
    232: "its address families could not be restricted",
    233: "its runtime directory could not be made",
    235: "a file could not be given to its user",
    236: "its SMACK label could not be set",
    237: "its keyring could not be set up",
    238: "its state directory could not be made",
    239: "its cache directory could not be made",
    240: "its logs directory could not be made",
    241: "its configuration directory could not be made",
    242: "its memory policy could not be set",
    243: "its credentials could not be set up",
}
"""Exit codes of systemd for the steps before the command that can fail.

Source: systemd.exec(5), "Process Exit Codes".
"""

RESULTS = {
    "oom-kill": "it used more memory than its limit and was killed (oom-kill)",
    "timeout": "it did not end in time after it was stopped, and was killed",
    "start-timeout": f"its host did not have it started after {START_TIMEOUT_S // 60} minutes and "
    "gave that start up",
    "startup": "its startup probe failed for good",
    "liveness": "its liveness probe failed for good",
    "evicted": "its host was short of memory, and it had to go",
    "oomd-kill": "systemd-oomd killed it, since its host was short of memory",
    "external-stop": "its unit was stopped by another program on the host",
    "lost": "the host was rebooted",
    "cut-off": "its host did not hear its control plane for as long as its job asks",
    "resources": "systemd could not get what it needs to start it",
    "watchdog": "its watchdog ran out",
    "start-limit-hit": "it was started too often in a row",
}


def describe(end: Exit, *, ran_s: float = 0.0, max_run_s: float | None = None) -> str:
    """Return one sentence on how the main process ended after `ran_s` seconds.

    systemd has one result for a task that ran for too long and for one that was stopped by
    another program and did not end in time.
    """
    if end.result == "timeout" and max_run_s is not None and ran_s >= max_run_s:
        return f"it ran for longer than its max_run_s ({seconds_text(max_run_s)}) and was ended"
    if end.result in RESULTS:
        return RESULTS[end.result]
    if end.signal is not None:
        return f"it was ended by signal {end.signal}"
    if end.code is not None and end.result != "success" and end.code in STEPS:
        return f"it never started: {STEPS[end.code]} (exit code {end.code})"
    if end.code is not None:
        return f"it ended with exit code {end.code}"
    return f"it ended: {end.result}"
