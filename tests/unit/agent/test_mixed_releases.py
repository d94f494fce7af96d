"""A control plane and agents of different releases understand each other's messages."""

from __future__ import annotations

import msgspec

from agent import api
from wire.routes import decode_json

FIRST_RELEASE = {
    "generation",
    "epoch",
    "image",
    "command",
    "environment",
    "entitlement",
    "job",
    "limits",
    "restart",
    "probe",
    "stop_timeout_s",
    "offline_restart",
    "disconnect",
}
"""The fields of a task that an agent of release 0.1.0 knows; it refuses all others by name."""
PLAIN = api.TaskSpec(generation=7, image="sha256:" + "0" * 64, command=["/bin/true"])


def test_earlier_agents_accept_a_task_without_new_fields():
    """Control planes are upgraded first and do not send fields that they do not use."""
    sent = msgspec.json.decode(msgspec.json.encode(PLAIN))
    assert set(sent) <= FIRST_RELEASE
    assert set(sent) == {"generation", "image", "command"}


def test_an_omitted_field_keeps_its_earlier_meaning():
    """A default is part of the contract: each side fills in its own default."""
    assert decode_json(msgspec.json.encode(PLAIN), api.TaskSpec, "task") == PLAIN
    assert PLAIN.limits == api.Limits()
    assert (PLAIN.epoch, PLAIN.entitlement, PLAIN.job) == (0, "local", "")
    assert (PLAIN.probe, PLAIN.stop_timeout_s, PLAIN.offline_restart) == (None, 10.0, False)
    restart, disconnect = PLAIN.restart, PLAIN.disconnect
    assert msgspec.json.encode([restart, disconnect]) == b"[{},{}]"


def test_an_answer_may_have_unknown_fields():
    """Agents are upgraded later, one by one; unknown fields of a newer agent are ignored."""
    reported = {
        "task_id": "web-0",
        "generation": 1,
        "epoch": 0,
        "image": PLAIN.image,
        "state": "running",
        "health": "healthy",
        "of_the_next_release": {"more": [1, 2, 3]},
    }
    assert msgspec.convert(reported, api.TaskStatus).task_id == "web-0"
