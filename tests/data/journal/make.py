"""Writes the records of this release into a folder named by its commit.

    PYTHONPATH=<tree of the release> python tests/data/journal/make.py tests/data/journal/<commit>

`key` is the name that a running unit was started under: a later release that computes another
would restart every task.
"""

import json
import sys
import time
from pathlib import Path

from agent.api import Exit, Health, Limits, Probe, RestartPolicy, TaskSpec, TaskState
from agent.runtime.core.records import TaskRecord, Tombstone, key_of
from agent.runtime.journal import Journal

IMAGE = "sha256:" + "1" * 64
FULL = TaskRecord(
    task_id="web-0",
    spec=TaskSpec(
        generation=7,
        epoch=3,
        image=IMAGE,
        command=["/bin/server", "--port", "80"],
        environment={"MODE": "a=b"},
        entitlement="front",
        job="web",
        limits=Limits(cpu_max_cores=1.5, memory_max_bytes=64 << 20),
        restart=RestartPolicy(backoff_s=2.0),
        probe=Probe(port=80, path="/healthz"),
        offline_restart=True,
    ),
    state=TaskState.RUNNING,
    health=Health.HEALTHY,
    invocation_id="a" * 32,
    boot_id="00000000-0000-4000-8000-000000000001",
    started_at=1.7e9,
    started_boot_s=100.0,
    restarts=2,
    streak=1,
    last_exit=Exit(result="exit-code", code=3, at=1.6e9),
)
SMALL = TaskRecord(task_id="job", spec=TaskSpec(image=IMAGE, command=["/bin/true"]))

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    journal = Journal(folder)
    for record in (FULL, SMALL):
        journal.save(record)
    # Far in the future: a tombstone is forgotten after a day.
    journal.save(Tombstone(task_id="gone", generation=4, epoch=2, at=time.time() + 1e10))
    keys = {r.task_id: key_of(r.spec) for r in (FULL, SMALL)}
    (folder / "keys").write_text(json.dumps(keys) + "\n")
