"""A TaskController for the lab: it acknowledges requests once a file exists.

`python patient_controller.py CREDENTIAL HOST FILE LOG`; each request becomes a line of LOG.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from taskcontrol.api import TaskControlRequest, TaskControlResponse
from taskcontrol.server import run

credential, host, permission, log = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])


def process(request: TaskControlRequest) -> TaskControlResponse:
    """Acknowledge everything, or nothing while the file is missing."""
    ack = [operation.id for operation in request.request] if permission.exists() else []
    response = {
        "at": time.time(),
        "asked": [[o.task, o.kind, o.cause] for o in request.request],
        "unhealthy": sorted(request.down),
        "acknowledged": len(ack),
    }
    with log.open("a") as file:
        file.write(json.dumps(response) + "\n")
    return TaskControlResponse(ack=ack)


if __name__ == "__main__":
    run(process, credential=credential, host=host, port=7451)
