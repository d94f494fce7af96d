"""Describes how a task ended."""

from __future__ import annotations

from agent.api import Exit
from wire.units import seconds_text

START_TIMEOUT_S = 600
"""Timeout of all steps before a task's command: volumes, network, sandbox, loading the program. The
default of systemd, 90 s, was too short on an emulated host with a quarter of a CPU. The agent's
unit has the same timeout."""

STEPS: dict[int, str] = {
    200: "its working directory could not be entered: does the image have it, and may every "
    "user read it and the image's root?",
    201: "its scheduling priority could not be set",
    202: "its file descriptors could not be set up",
    203: "its command could not be executed: it is missing from the image, not executable, "
    "unreadable on the disk, or built for another processor",
    204: "memory was too short to set it up",
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
    220: "it could not get a session of its own",
    221: "its start was not confirmed",
    222: "its standard error could not be opened",
    224: "no PAM session could be opened",
    225: "its network could not be set up",
    226: "its mount namespace could not be set up: is the image a complete root file system?",
    227: "new privileges could not be blocked",
    228: "its system call filter could not be set",
    229: "its SELinux context could not be set",
    230: "its execution domain could not be set",
    231: "its AppArmor profile could not be set",
    232: "its address families could not be restricted",
    233: "its runtime directory could not be made",
    235: "the owner of a file could not be changed to its user",
    236: "its SMACK label could not be set",
    237: "its keyring could not be set up",
    238: "its state directory could not be made",
    239: "its cache directory could not be made",
    240: "its logs directory could not be made",
    241: "its configuration directory could not be made",
    242: "its memory policy could not be set",
    243: "its credentials could not be set up",
}
"""systemd's exit codes for failed steps before the command.

Source: systemd.exec(5), "Process Exit Codes".
"""

RESULTS = {
    "oom-kill": "it used more memory than its limit and was killed (oom-kill)",
    "timeout": "it did not end in time after its stop, and was killed",
    "start-timeout": f"its host did not start it within {START_TIMEOUT_S // 60} minutes and "
    "cancelled the start",
    "startup": "its startup probe exceeded its failure limit",
    "liveness": "its liveness probe exceeded its failure limit",
    "evicted": "its host was short of memory and evicted it",
    "oomd-kill": "systemd-oomd killed it, since its host was short of memory",
    "external-stop": "its unit was stopped by another program on the host",
    "lost": "the host was rebooted",
    "cut-off": "its host had no contact with its control plane for the limit of its job",
    "resources": "systemd lacked a resource to start it",
    "watchdog": "its watchdog expired",
    "start-limit-hit": "it was started too often in a row",
}


OOM_KILL = "oom-kill"
"""systemd's result of a unit after the kernel killed one of its processes for memory."""
_RESULTS_WITH_STATUS = ("exit-code", "signal", "core-dump")
"""Results of systemd that come with an exit code or a signal of the main process."""


def result_of(result: str, signal: str | None) -> str:
    """Return the result of a unit; an end by any signal is one.

    systemd counts SIGHUP, SIGINT, SIGTERM and SIGPIPE as success (systemd.service(5),
    SuccessExitStatus=), because it sends them to stop a service. Stops by the agent are not
    counted, so here the program was killed, or wrote to a closed pipe, before its work was done.
    """
    return "signal" if result == "success" and signal is not None else result


def describe(
    end: Exit, *, ran_s: float = 0.0, max_run_s: float | None = None, started: bool = False
) -> str:
    """Return one sentence on how the main process ended after `ran_s` seconds.

    If its command `started`, a code of systemd (`STEPS`) is the command's own.

    systemd reports the result `timeout` in two cases: the task exceeded `max_run_s`, or it did not
    end in time after another program had stopped it.
    """
    if end.result == "timeout" and max_run_s is not None and ran_s >= max_run_s:
        return f"it ran for longer than its max_run_s ({seconds_text(max_run_s)}) and was ended"
    if end.result in RESULTS:
        return RESULTS[end.result]
    if end.signal is not None:
        return f"it was ended by signal {end.signal}"
    failed_step = end.code in STEPS and end.result != "success" and not started
    if end.code is not None and failed_step:
        return f"it never started: {STEPS[end.code]} (exit code {end.code})"
    if end.code is not None:
        return f"it ended with exit code {end.code}"
    if end.result in _RESULTS_WITH_STATUS:
        return f"it never started: a step before its command failed ({end.result})"
    return f"it ended: {end.result}"
