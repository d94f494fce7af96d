"""The kinds of events that can befall a simulated region."""

from __future__ import annotations

KINDS: dict[str, str] = {
    "power-off": "machines lose power, and get it back",
    "reboot": "machines reboot by themselves",
    "agent-restart": "agents are restarted; their hosts refuse connections meanwhile",
    "agent-hang": "agents stop answering and go on later",
    "slow-agent": "answers take `value` seconds longer",
    "garbled": "answers cannot be understood",
    "task-crash": "a task of a machine ends by itself",
    "task-sick": "a task of a machine is unhealthy for a while",
    "task-lost": "a task is removed behind everybody's back",
    "start-fails": "no task starts there",
    "pull-fails": "no image arrives there",
    "slow-pull": "images take `value` times as long",
    "drift": "a host's settings are changed by hand",
    "cut": "nothing gets through, either way",
    "cut-in": "nothing reaches the machines",
    "cut-out": "nothing comes back from the machines",
    "delay": "each way takes up to `value` seconds longer, so messages overtake each other",
    "loss": "a share `value` of the connections breaks, before or after the request was done",
    "duplicate": "a share `value` of the requests arrives twice",
    "flap": "machines come and go, every `value` seconds",
    "store-slow": "each operation takes up to `value` seconds longer",
    "store-full": "nothing can be written",
    "store-failing": "nothing can be written or read",
    "store-unknown": "a share `value` of the writes ends without an answer, made or not",
    "plane-pause": "the control plane's process is stopped and goes on later",
    "plane-kill": "the control plane's process is killed, and started again",
    "plane-kill-at-step": "… before one of its next `value` steps",
    "plane-kill-at-write": "… before one of its next `value` transactions",
    "plane-kill-after-write": "… after one of them, before any client hears of it",
    "plane-restart": "the control plane is restarted in good order",
    "plane-clock": "the clock of its host steps by `value` seconds",
    "role-pause": "the process that leads a role is stopped and goes on later",
    "role-kill": "… is killed, and started again",
    "role-kill-at-step": "… before one of its next `value` steps",
    "role-kill-at-write": "… before one of its next `value` transactions",
    "role-kill-after-write": "… after one of them, before it hears of it",
    "role-pause-at-write": "… is stopped as one of its next `value` transactions is on its way",
    "role-pause-after-write": "… as the answer of one of them is",
    "role-clock": "the clock of its host steps by `value` seconds",
    "role-cut": "nothing gets to it or from it, either way",
    "role-cut-in": "nothing reaches it",
    "role-cut-out": "nothing that it sends arrives",
    "etcd-cut": "nothing gets through between it and etcd; agents hear it",
    "etcd-cut-in": "nothing of etcd reaches it",
    "etcd-cut-out": "nothing that it sends to etcd arrives",
    "etcd-late": "what it sends to etcd arrives up to `value` seconds later, and back",
    "crash-in-move": "operators give an entitlement to another shard, and one of the processes is"
    " killed before one of its next `value` transactions",
    "host-clock": "the clocks of hosts step by `value` seconds",
    "resize": "a job gets another size",
    "release": "a job gets a new image",
    "bad-release": "a job that goes back by itself gets a version that never is healthy",
    "patience": "an owner changes how long tasks of a job may take to stop, and what a machine that"
    " is cut off does to them; by `value`",
    "move-task": "an owner has a task run elsewhere",
    "restart": "an owner has all tasks of a job restarted where they are",
    "move-job": "an owner has a job run in another entitlement",
    "move-entitlement": "operators give an entitlement to another shard",
    "propose-profile": "an owner proposes a host profile; one in three cannot be reached",
    "stop-job": "a job is stopped, and created again after a while",
    "controller-down": "the controller of a job does not answer",
    "controller-slow": "… answers just before it is given up",
    "controller-garbage": "… answers with something that is no answer",
    "controller-lies": "… acknowledges everything, twice, and what it was not asked",
    "drain": "machines are announced to go away, with a deadline, and come back",
    "upgrade": "machines are planned to reboot for a kernel, wave by wave, and operators do it;"
    " with a `value` all at once, with a deadline after so many seconds",
    "switch": "the switch of machines is replaced: after a notice they are unreachable for a while",
    "power-cap": "machines have less power, wave by wave, or with a `value` all at once;"
    " tasks leave what matters least first",
    "twice": "an owner sends the last request again",
    "push": "a conveyor pushes a new image to a share `value` of a job's tasks",
    "stage": "… pushes what is pushed to another share",
    "size": "an autoscaler writes another size",
    "stale-size": "… on top of one that was replaced meanwhile",
    "canary": "a tester has a canary, or ends it; by `value`",
    "hold": "operators hold a job, or end it; by `value`",
    "runtime": "operators want another runtime",
    "old-file": "an owner applies the file of before, whose dimensions have other writers by now",
}
"""Every kind of event, and what it is."""

ON_JOBS = frozenset(
    {
        *("resize", "release", "bad-release", "patience", "move-task", "move-job"),
        *("restart", "stop-job", "twice"),
        *("push", "stage", "size", "stale-size", "canary", "hold", "runtime", "old-file"),
        *("controller-down", "controller-slow", "controller-garbage", "controller-lies"),
    }
)
"""Those that are about a job."""

ON_MACHINES = frozenset(
    {
        *("power-off", "reboot", "agent-restart", "agent-hang", "slow-agent", "garbled"),
        *("task-crash", "task-sick", "task-lost", "start-fails", "pull-fails", "slow-pull"),
        *("drift", "host-clock", "cut", "cut-in", "cut-out", "delay", "loss", "duplicate"),
        *("flap", "drain"),
    }
)
"""Those that strike machines, which may be named as that of a job's first task: `job:job2`."""

ON_ROLES = tuple(kind for kind in KINDS if kind.startswith(("role-", "etcd-")))
"""Those that strike the process of a role, the one that leads or a standby."""

INSTANT = frozenset(
    {
        *("reboot", "task-crash", "task-lost", "drift", "host-clock", "plane-clock"),
        *("bad-release", "move-task", "move-job", "propose-profile", "patience"),
        *("restart", "move-entitlement", "crash-in-move", "role-clock", "role-kill-at-step"),
        *("role-kill-at-write", "role-kill-after-write"),
        *("push", "stage", "size", "stale-size", "runtime", "old-file"),
        *("release", "resize", "twice", "plane-restart", "plane-kill-at-step"),
        *("plane-kill-at-write", "plane-kill-after-write"),
    }
)
"""Those that take no time; how long the others last is drawn."""
