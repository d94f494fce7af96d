"""The delivery demo's pipeline on three VMs, with Debian's Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.lab_client import NAME, LabClient
from vm_lab.delivery_demo import DeliveryDemo
from vm_lab.image.app import BAD_VERSIONS, build_app

pytestmark = [pytest.mark.long, pytest.mark.behaviour("CV1", "CV2", "CV4", "CV5")]


@pytest.fixture
def deliveries(web: LabClient) -> Iterator[DeliveryDemo]:
    demo = DeliveryDemo(NAME)
    try:
        demo.begin()
        yield demo
    finally:
        demo.end()
        web.lab("proxy", "stop")


@pytest.mark.behaviour("CV4")
def test_a_good_version_arrives_and_bad_ones_are_stopped_at_the_canary(
    web: LabClient, images: dict[str, str], deliveries: DeliveryDemo
) -> None:
    """The size changes and a machine loses its power meanwhile, and no request fails (CV4)."""
    bad = {v: web.ctl("image", "push", str(build_app(v, print)))["digest"] for v in BAD_VERSIONS}
    outcome = deliveries.deliver_good_version(images["v2"])
    assert [step["name"] for step in outcome["run"]["steps"]] == ["canary 1", "50 %", "all"]
    assert outcome["failed"] == 0, outcome["failures"]
    assert outcome["answers"]["Twine demo v2"] > 0
    assert len(web.tasks()) == 8
    web.usable()
    for version, gate in (("v3", "gate latency"), ("v4", "gate errors")):
        outcome = deliveries.deliver_bad_version(bad[version])
        assert [step["name"] for step in outcome["run"]["steps"]] == ["canary 1", "rollback"]
        assert outcome["run"]["reason"].startswith(gate)
        job = web.job()
        assert job["record"]["spec"]["image"] == images["v2"]
        assert job["healthy"] == 8
