"""A host verifies the signature before it fetches an image and before it accepts a task."""

from __future__ import annotations

import pytest
from builders import IMAGE, FakeHost, a_spec, running, until
from msgspec.structs import replace

from agent.api import (
    ImagePull,
    ImageSignature,
    ImageTrust,
    RestartPolicy,
    RestartWhen,
    TaskState,
)
from wire import signatures
from wire.errors import InvalidInput, Unprocessable

KEY, OTHER = signatures.new_key(), signatures.new_key()
PUBLIC = signatures.public_key(KEY)


def trust(pem: bytes, digest: str = IMAGE, key: str = PUBLIC) -> ImageTrust:
    by, made = signatures.sign(pem, "web/1", digest)
    return ImageTrust(keys=[key], signatures=[ImageSignature(name="web/1", key=by, signature=made)])


GOOD = trust(KEY)


async def test_nothing_is_fetched_of_an_image_that_no_key_of_the_policy_signed(
    host: FakeHost,
) -> None:
    digest = "sha256:" + "7" * 64
    path = f"/v1/images/{digest}/stream"
    async with host.agent() as client:
        for bad in (ImageTrust(keys=[PUBLIC]), trust(OTHER, digest), GOOD):
            with pytest.raises(Unprocessable, match="image pulls are off"):
                await client.pull_image(ImagePull(digest=digest, path=path, trust=bad))
        with pytest.raises(Unprocessable, match="joined no control plane"):
            await client.pull_image(ImagePull(digest=digest, path=path, trust=trust(KEY, digest)))
        # although the image is present
        with pytest.raises(Unprocessable, match="image pulls are off"):
            await client.pull_image(ImagePull(digest=IMAGE, path="/x", trust=trust(OTHER)))


async def test_a_task_is_taken_only_with_the_signature_of_its_image(host: FakeHost) -> None:
    async with host.agent() as client:
        for bad, why in (
            (ImageTrust(keys=[PUBLIC]), "it has no signature"),
            (trust(OTHER), "only other keys"),
            (trust(KEY, "sha256:" + "9" * 64), "does not match this image"),
        ):
            with pytest.raises(Unprocessable, match=why):
                await client.put_task("web-0", a_spec(image_trust=bad))
        assert (await client.list_tasks()).tasks == []
        await client.put_task("web-0", a_spec(image_trust=GOOD))
        assert (await running(client, "web-0")).state is TaskState.RUNNING


async def test_a_signature_that_is_cut_short_is_no_specification(host: FakeHost) -> None:
    cut = replace(GOOD.signatures[0], signature=GOOD.signatures[0].signature[:-4])
    bad = ImageTrust(keys=[PUBLIC], signatures=[cut])
    async with host.agent() as client:
        with pytest.raises(InvalidInput, match=r"image_trust\.signatures\[0\]\.signature"):
            await client.put_task("web-0", a_spec(image_trust=bad))


async def test_keys_may_change_while_a_task_runs_and_the_next_generation_is_judged_by_the_new(
    host: FakeHost,
) -> None:
    other = signatures.public_key(OTHER)
    async with host.agent() as client:
        await client.put_task("web-0", a_spec(image_trust=GOOD))
        await running(client, "web-0")
        before = host.invocation("web-0")
        both = ImageTrust(keys=[PUBLIC, other], signatures=GOOD.signatures)
        await client.put_task("web-0", a_spec(image_trust=both))  # the same generation
        gone = ImageTrust(keys=[other], signatures=GOOD.signatures)
        with pytest.raises(Unprocessable, match="only other keys"):
            await client.put_task("web-0", a_spec(generation=2, image_trust=gone))
        status = await client.get_task("web-0")
        assert (status.generation, status.state) == (1, TaskState.RUNNING)
        assert host.invocation("web-0") == before


async def test_an_ended_task_is_not_started_again_because_its_keys_changed(host: FakeHost) -> None:
    async with host.agent() as client:
        spec = a_spec(image_trust=GOOD, restart=RestartPolicy(when=RestartWhen.NEVER))
        await client.put_task("web-0", spec)
        await running(client, "web-0")
        host.fake.systemd.exit("twine-task-web-0.service")
        await until(client, "web-0", lambda s: s.state is TaskState.STOPPED)
        reported = await client.put_task("web-0", replace(spec, image_trust=ImageTrust()))
        assert reported.state is TaskState.STOPPED
