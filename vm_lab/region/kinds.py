"""The kinds of events that a story of a simulated region can have."""

from __future__ import annotations

KINDS: dict[str, str] = {
    "power-off": "machines lose power, and get it back",
    "reboot": "machines reboot without a command",
    "agent-restart": "agents are restarted; their hosts refuse connections meanwhile",
    "agent-hang": "agents stop answering, and resume later",
    "slow-agent": "answers take `value` seconds longer",
    "garbled": "answers cannot be understood",
    "task-crash": "a task of a machine crashes",
    "task-sick": "a task of a machine is unhealthy for a while",
    "task-lost": "a task is removed without a command of the control plane",
    "start-fails": "no task starts there",
    "pull-fails": "no image can be fetched there",
    "slow-pull": "fetching an image takes `value` times as long",
    "drift": "a host's settings are changed by hand",
    "cut": "no message arrives, in either direction",
    "cut-in": "no message reaches the machines",
    "cut-out": "no message of the machines arrives",
    "delay": "messages take up to `value` seconds longer, so they overtake each other",
    "loss": "a share `value` of the connections breaks, before or after the request was done",
    "duplicate": "a share `value` of the requests arrives twice",
    "flap": "machines become unreachable and reachable again, every `value` seconds",
    "store-slow": "each operation takes up to `value` seconds longer",
    "store-full": "the store cannot be written",
    "store-failing": "the store can be neither written nor read",
    "store-unknown": "a share `value` of the writes gets no answer, carried out or not",
    "plane-pause": "the control plane's process is stopped, and resumes later",
    "plane-kill": "the control plane's process is killed, and started again",
    "plane-kill-at-step": "… before one of its next `value` steps",
    "plane-kill-at-write": "… before one of its next `value` transactions",
    "plane-kill-after-write": "… after one of them, before any client gets its answer",
    "plane-restart": "the control plane is restarted regularly",
    "plane-clock": "the clock of its host steps by `value` seconds",
    "role-pause": "the process that leads a role is stopped, and resumes later",
    "role-kill": "… is killed, and started again",
    "role-kill-at-step": "… before one of its next `value` steps",
    "role-kill-at-write": "… before one of its next `value` transactions",
    "role-kill-after-write": "… after one of them, before the process gets the answer",
    "role-pause-at-write": "… is stopped while one of its next `value` transactions is in transfer",
    "role-pause-after-write": "… while the answer of one of them is in transfer",
    "role-clock": "the clock of its host steps by `value` seconds",
    "role-cut": "no message of it or to it arrives",
    "role-cut-in": "no message reaches it",
    "role-cut-out": "no message that it sends arrives",
    "etcd-cut": "no message between it and etcd arrives; agents remain reachable",
    "etcd-cut-in": "no message of etcd reaches it",
    "etcd-cut-out": "no message that it sends to etcd arrives",
    "etcd-late": "messages between it and etcd arrive up to `value` seconds later",
    "crash-in-move": "operators move an entitlement to another shard, and one of the processes is"
    " killed before one of its next `value` transactions",
    "host-clock": "the clocks of hosts step by `value` seconds",
    "resize": "a job gets another size",
    "release": "a job gets a new image",
    "bad-release": "a job with automatic rollback gets a version that never becomes healthy",
    "patience": "an owner changes how long tasks of a job may take to stop, and whether a cut-off"
    " machine stops them; by `value`",
    "move-task": "an owner moves a task",
    "restart": "an owner restarts all tasks of a job in place",
    "move-job": "an owner moves a job to another entitlement",
    "move-entitlement": "operators move an entitlement to another shard",
    "propose-profile": "an owner proposes a host profile; one in three cannot be applied",
    "stop-job": "a job is stopped, and created again after a while",
    "controller-down": "the controller of a job does not answer",
    "controller-slow": "… answers just before its timeout",
    "controller-garbage": "… answers with a malformed answer",
    "controller-lies": "… acknowledges everything twice, and operations that were not requested",
    "drain": "maintenance of machines is announced with a deadline, and cancelled later",
    "upgrade": "machines are planned to reboot for a kernel, wave by wave, and operators do it;"
    " with a `value` all at once, with a deadline after that many seconds",
    "switch": "the switch of machines is replaced: after a notice they are unreachable for a while",
    "power-cap": "machines have less power, wave by wave, or with a `value` all at once;"
    " the least important tasks leave first",
    "twice": "an owner repeats the last request",
    "push": "a conveyor pushes a new image to a share `value` of a job's tasks",
    "stage": "… changes the share of the pushed image",
    "size": "an autoscaler writes another size",
    "stale-size": "… expecting a version that was replaced meanwhile",
    "canary": "a tester starts a canary, or ends it; by `value`",
    "hold": "operators hold a job, or end the hold; by `value`",
    "runtime": "operators write another runtime",
    "old-file": "an owner applies an old job file, whose dimensions have other writers by now",
}
"""Kind of event → its effect."""

ON_JOBS = frozenset(
    {
        *("resize", "release", "bad-release", "patience", "move-task", "move-job"),
        *("restart", "stop-job", "twice"),
        *("push", "stage", "size", "stale-size", "canary", "hold", "runtime", "old-file"),
        *("controller-down", "controller-slow", "controller-garbage", "controller-lies"),
    }
)
"""Kinds with a job as their target."""

ON_MACHINES = frozenset(
    {
        *("power-off", "reboot", "agent-restart", "agent-hang", "slow-agent", "garbled"),
        *("task-crash", "task-sick", "task-lost", "start-fails", "pull-fails", "slow-pull"),
        *("drift", "host-clock", "cut", "cut-in", "cut-out", "delay", "loss", "duplicate"),
        *("flap", "drain"),
    }
)
"""Kinds with machines as their target; `job:job2` is the machine of the job's first task."""

ON_ROLES = tuple(kind for kind in KINDS if kind.startswith(("role-", "etcd-")))
"""Kinds with the process of a role as their target: its leader or a standby."""

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
"""Kinds without a duration; that of the others is drawn."""
