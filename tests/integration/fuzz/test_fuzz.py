"""Malformed bytes at each place that reads foreign bytes: no crash, no hang.

Each place may refuse, in the one way that it has for it; anything else is a crash. An example that
takes longer than `HANG_S` is a hang: a signal ends it. CI runs a fixed slice; `make fuzz` draws new
examples. TWINE_FUZZ sets the number of examples for each place.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import signal
import ssl
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from builders import a_record
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oci import sha

from agent import api
from agent.images.core.oci import (
    Processor,
    choose,
    is_index,
    location_of,
    read_config,
    read_manifest,
)
from agent.machine import layer
from agent.runtime.core.records import Tombstone
from agent.runtime.journal import Journal
from control_plane.api.jobs import ControllerRef, JobSpec
from control_plane.api.validate import job_errors, job_relations, job_spec
from control_plane.identity.authority import CertificateSubject, OwnIdentity, open_authority
from control_plane.task_control.caller import ControllerCaller
from control_plane.task_control.core.addresses import address_rules
from taskcontrol.api import TaskControlRequest, TaskControlResponse
from wire import tls
from wire.errors import ConfigError, InvalidInput, TwineError
from wire.routes import decode_json

pytestmark = [
    pytest.mark.root,
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),  # of a failing example
]

EXAMPLES = int(os.environ.get("TWINE_FUZZ", "150"))
HANG_S = 60.0
fuzzed = settings(max_examples=EXAMPLES, deadline=None)

JOB: dict[str, Any] = {
    "name": "web",
    "entitlement": "front",
    "tasks": 6,
    "image": "sha256:" + "a" * 64,
    "command": ["/usr/sbin/nginx", "-p", "${port:http}", "${HOME}"],
    "ports": ["http"],
    "probe": {"port": "http"},
    "environment": {"WHERE": "${machine}:${port:http}"},
    "requires": ["gpus > 1", {"property": "rack", "values": ["r"]}],
    "update": {"at_once": 2},
    "limits": {"memory_max_bytes": 1 << 28},
}
TASK: dict[str, Any] = {"image": "sha256:" + "a" * 64, "command": ["/bin/x"], "generation": 3}

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=30)
    | st.sampled_from(["${port:http}", "${", "a = b and c > 1", "48MiB", "\0", "\ud800", "5s"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


class Hung(AssertionError):
    """An example did not end."""


@contextmanager
def in_time() -> Iterator[None]:
    """End an example that hangs."""

    def over(_: int, __: FrameType | None) -> None:
        raise Hung(f"not over after {HANG_S:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a document with each of its keys."""
    found: list[tuple[Any, Any]] = []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


@st.composite
def documents(draw: Callable[..., Any], good: dict[str, Any]) -> Any:
    """Return a valid document with other content in some places."""
    if draw(st.integers(0, 9)) == 0:
        return draw(PLAIN)
    found = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 4))):
        everywhere = places(found)
        if not everywhere:
            break
        holder, key = draw(st.sampled_from(everywhere))
        if draw(st.booleans()):
            holder[key] = draw(PLAIN)
        elif isinstance(holder, dict):
            holder[draw(st.text(max_size=9))] = holder.pop(key)
        else:
            del holder[key]
    return found


@st.composite
def changed(draw: Callable[..., Any], good: bytes) -> bytes:
    """Return valid bytes that were flipped, cut, filled or lengthened."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "put", "drop", "twice"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "put":
                data[at:at] = draw(st.binary(max_size=24))
            case "drop":
                del data[at : at + draw(st.integers(1, 600))]
            case "twice":
                data[at:at] = data[at : at + 600]
    return bytes(data)


@pytest.mark.behaviour("F-76")
@fuzzed
@given(documents(JOB))
@example("\ud800")
@example(JOB | {"name": "\udc80"})
@example(JOB | {"environment": {"\udc80": "\udc80"}})
@example(JOB | {"environment": {"A": "\udc80"}})
@example(JOB | {"command": "\ud800"})
@example(JOB | {"command": ["\ud800"]})
def test_fuzz_of_a_job_specification(document: Any) -> None:
    """The result is a job, or a list of errors."""
    with in_time():
        errors = job_errors(document)
        if errors:
            with pytest.raises(InvalidInput):
                job_spec(document, "web.toml")
            assert all(e.reason for e in errors)
        else:
            found = job_spec(document, "web.toml")
            again = msgspec.json.decode(msgspec.json.encode(found), type=JobSpec)
            assert again == found


@pytest.mark.behaviour("F-76")
@fuzzed
@given(st.one_of(changed(json.dumps(JOB).encode()), changed(json.dumps(TASK).encode())))
@example(b"[" * 100_000)
@example(b'{"a":' * 50_000)
@example(b'{"tasks": 1e999, "tasks": NaN}')
@example('{"name": "x"}'.encode("utf-16"))
def test_fuzz_of_bytes_in_place_of_a_specification(data: bytes) -> None:
    """The bytes are sent as a job at the front end, and for a task at an agent."""
    with in_time():
        for kind, relations in ((JobSpec, job_relations), (api.TaskSpec, None)):
            try:
                decode_json(data, kind, "it", relations)
            except InvalidInput:
                continue


@st.composite
def headers(draw: Callable[..., Any]) -> bytes:
    """Return an archive with odd headers and correct checksums."""
    out = io.BytesIO()
    names = st.text(max_size=40) | st.sampled_from(
        ["a", "a/b", "../x", "/etc/passwd", "dev/null", ".wh.a", ".wh..wh..opq", "a/" * 200, ""]
    )
    numbers = st.integers(-(2**40), 2**62)
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for _ in range(draw(st.integers(1, 5))):
            info = tarfile.TarInfo(draw(names))
            info.type = bytes([draw(st.integers(48, 55) | st.integers(0, 255))])
            info.mode, info.linkname = draw(st.integers(0, 0o7777)), draw(names)
            info.uid, info.gid = draw(numbers), draw(numbers)
            info.mtime = draw(numbers)
            info.devmajor = draw(st.integers(0, 300))
            data = draw(st.binary(max_size=700))
            info.size = len(data)
            keys = st.sampled_from(
                ["mtime", "uid", "size", "path", "linkpath", "SCHILY.xattr.user.a"]
            )
            info.pax_headers = draw(st.dictionaries(keys, st.text(max_size=20), max_size=3))
            try:
                tar.addfile(info, io.BytesIO(data))
            except (ValueError, UnicodeError, OverflowError):
                continue  # no archive can contain that
    return out.getvalue()


def _archive() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind in (
            ("d", tarfile.DIRTYPE),
            ("d/f", tarfile.REGTYPE),
            ("l", tarfile.SYMTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mtime = kind, "d/f", 1.5
            info.pax_headers = {"SCHILY.xattr.user.a": "1"}
            info.size = 3 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"abc"))
    return out.getvalue()


ARCHIVE = _archive()


def _applied(data: bytes, plain: bytes, how: str) -> None:
    """Apply a layer as the sandboxed program does; it ends with 0 or 1, and reports the reason."""
    with tempfile.TemporaryDirectory(prefix="twine-fuzz-") as folder:
        top = Path(folder)
        (top / "blob").write_bytes(data)
        (top / "tree").mkdir()
        (top / "neighbour").write_text("untouched")
        names = [str(top), "blob", how, sha(data), sha(plain), str(top / "tree")]
        with in_time():
            assert layer.main(names) in (0, 1)
        assert sorted(os.listdir(top)) == ["blob", "neighbour", "tree"]
        assert (top / "neighbour").read_text() == "untouched"


@pytest.mark.behaviour("F-31", "F-32")
@fuzzed
@given(st.one_of(headers(), changed(ARCHIVE)))
def test_fuzz_of_the_headers_of_an_archive(data: bytes) -> None:
    """Nothing outside the tree is touched, whatever the headers contain."""
    _applied(data, data, "tar")


@pytest.mark.behaviour("F-29")
@fuzzed
@given(changed(gzip.compress(ARCHIVE, mtime=0)))
@example(gzip.compress(b"", mtime=0) * 1000)
def test_fuzz_of_a_compressed_stream(data: bytes) -> None:
    """Bits are flipped, ends are cut off, bytes are appended."""
    _applied(data, ARCHIVE, "gzip")


MANIFEST = {
    "schemaVersion": 2,
    "mediaType": "application/vnd.oci.image.manifest.v1+json",
    "config": {
        "mediaType": "application/vnd.oci.image.config.v1+json",
        "digest": "sha256:" + "b" * 64,
        "size": 20,
    },
    "layers": [
        {
            "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
            "digest": "sha256:" + "c" * 64,
            "size": 20,
        }
    ],
}
CONFIG = {
    "architecture": "amd64",
    "os": "linux",
    "config": {"Cmd": ["a"], "Env": ["A=b"], "User": "1", "StopSignal": "SIGTERM"},
    "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "d" * 64]},
}


@pytest.mark.behaviour("F-30")
@fuzzed
@given(documents(MANIFEST), documents(CONFIG), st.text(max_size=80))
def test_fuzz_of_image_descriptions(manifest: Any, config: Any, reference: str) -> None:
    """Covers manifest, configuration and reference of an OCI image."""
    good = read_manifest(json.dumps(MANIFEST).encode())
    data = json.dumps(manifest).encode()
    with in_time():
        for ask in (
            lambda: is_index(data),
            lambda: choose(data, Processor("x86_64")),
            lambda: read_manifest(data),
            lambda: read_config(json.dumps(config).encode(), good, Processor("x86_64")),
            lambda: location_of(reference),
        ):
            try:
                ask()
            except TwineError:
                continue


def _written(record: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Journal(Path(folder)).save(record, durable=False)
        return (Path(folder) / "web.json").read_bytes()


RECORDS = [
    _written(a_record()),
    _written(Tombstone(task_id="web", generation=1, epoch=0, at=1e12)),
]


def _with_checksum(body: bytes) -> bytes:
    head = {"schema": 1, "kind": "task", "crc": zlib.crc32(body)}
    return json.dumps(head).encode() + b"\n" + body + b"\n"


_BODY = msgspec.to_builtins(a_record())
_HEADS = st.builds(
    lambda head, body: json.dumps(head).encode() + b"\n" + body,
    documents({"schema": 1, "kind": "task", "crc": 7}),
    st.binary(max_size=40),
)


@pytest.mark.behaviour("F-06", "F-07")
@fuzzed
@given(
    st.one_of(
        st.sampled_from(RECORDS).flatmap(changed),
        documents(_BODY).map(lambda d: _with_checksum(json.dumps(d).encode())),
        _HEADS,
    )
)
def test_fuzz_of_a_record_of_the_journal(data: bytes) -> None:
    """A record is read whole, reported as unreadable, or reported as of a newer release; others are
    read.
    """
    with tempfile.TemporaryDirectory() as folder, in_time():
        journal = Journal(Path(folder))
        journal.save(a_record(task_id="other"), durable=False)
        (Path(folder) / "web.json").write_bytes(data)
        try:
            found = journal.replay()
        except ConfigError:
            assert json.loads(data.partition(b"\n")[0])["schema"] > 1
            return
        assert "other" in found.tasks
        reported = "web" in found.tasks or "web" in found.tombstones or "web" in found.unreadable
        assert reported or not (Path(folder) / "web.json").exists()


ANSWER = msgspec.json.encode(TaskControlResponse())
REQUEST = TaskControlRequest(job_handle="db", sequence_number=1, tasks=1, at=0.0)


def _http(body: bytes) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


REPLIES = [
    _http(ANSWER),
    _http(b'{"ack": ["a", "b"]}'),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    _http(b'{"type": "about:blank", "title": "x", "status": 500}').replace(b"200 OK", b"500 No"),
]


@pytest.mark.behaviour("F-55")
@fuzzed
@given(
    st.lists(
        st.one_of(
            st.sampled_from(REPLIES).flatmap(changed),
            documents({"ack": ["a", {"operation": "b"}]}).map(
                lambda d: _http(json.dumps(d).encode())
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_fuzz_of_a_controllers_reply(replies: list[bytes]) -> None:
    """The result is an answer, or one of our errors."""
    asyncio.run(_send_all(replies))


async def _send_all(replies: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        authority = open_authority(Path(folder) / "a.pem", "test")
        subject = CertificateSubject("controller", "db", ("127.0.0.1",))
        context = tls.server_context(authority.credential(subject, ""), require_client=True)
        left = iter(replies)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(next(left))
                await writer.drain()
                writer.close()
            except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
                pass

        identity = OwnIdentity(authority, ["127.0.0.1"])
        call = ControllerCaller(
            identity.agents_context(), address_rules(["127.0.0.0/8"], []), HANG_S
        )
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as served:
            port = served.sockets[0].getsockname()[1]
            ref = ControllerRef(url=f"https://127.0.0.1:{port}", name="db")
            for _ in replies:
                with in_time():
                    try:
                        assert isinstance(await call(ref, REQUEST), TaskControlResponse)
                    except TwineError:
                        continue
