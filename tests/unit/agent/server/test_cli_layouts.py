"""A tag selects one image of a layout with several; messages show the name that was given."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from oci import Layout, files

from agent import api
from agent.cli.image import resolve_image
from agent.cli.layout import archived, split
from agent.client import AgentClient
from agent.images.core.oci import TAG
from wire.errors import InvalidInput, Unprocessable


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Return a layout with two images, 1.0 and 2.0, that share a layer."""
    found = Layout(tmp_path / "shop")
    for tag in ("1.0", "2.0"):
        found.image(files(base="base"), files(app=tag))
        found.index[-1]["annotations"] = {TAG: tag}
    found.close()
    return found


def in_archive(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {m.name: data.read() for m in tar if (data := tar.extractfile(m)) is not None}


@pytest.mark.behaviour("BUG-AG36")
def test_a_tag_names_one_image_of_a_folder_and_brings_its_blobs_alone(layout: Layout) -> None:
    """A layout with two images was refused, and oci-layout:FOLDER:TAG did not exist."""
    with archived("oci-layout", f"{layout.path}:2.0") as archive:
        found = in_archive(archive)
        first = archive.read_bytes()
    listed = json.loads(found["index.json"])["manifests"]
    assert [m["annotations"][TAG] for m in listed] == ["2.0"]
    blobs = {name for name in found if name.startswith("blobs/")}
    assert len(blobs) == 4, "manifest, configuration and two layers"
    with archived("oci-layout", f"{layout.path}:2.0") as archive:
        assert archive.read_bytes() == first, "so its digest is the same"


@pytest.mark.behaviour("BUG-AG36")
def test_a_tag_names_one_image_of_an_archive(layout: Layout, tmp_path: Path) -> None:
    whole = tmp_path / "shop.tar"
    whole.write_bytes(layout.archive())
    with archived("oci-archive", f"{whole}:1.0") as archive:
        found = in_archive(archive)
    with archived("oci-layout", f"{layout.path}:1.0") as archive:
        assert in_archive(archive) == found
    with archived("oci-archive", str(whole)) as archive:
        assert archive == whole


@pytest.mark.behaviour("BUG-AG36")
def test_an_image_is_found_by_its_tag(layout: Layout) -> None:
    with pytest.raises(InvalidInput, match="holds 2 images") as raised:  # noqa: SIM117
        with archived("oci-layout", str(layout.path)):
            pass
    assert raised.value.hint == f"name one: oci-layout:{layout.path}:TAG, of 1.0, 2.0"
    with pytest.raises(InvalidInput, match=r"no image with the tag '3\.0'") as raised:  # noqa: SIM117
        with archived("oci-layout", f"{layout.path}:3.0"):
            pass
    assert raised.value.hint == "tags: 1.0, 2.0"


@pytest.mark.behaviour("BUG-AG98")
def test_an_index_that_contains_itself_is_passed_to_the_agent(tmp_path: Path) -> None:
    """The command followed each mention of the index again, and never ended."""
    blobs = tmp_path / "blobs/sha256"
    blobs.mkdir(parents=True)
    itself = {"digest": "sha256:loop", "mediaType": "index", "annotations": {TAG: "1.0"}}
    (blobs / "loop").write_text(json.dumps({"manifests": [itself, itself]}))
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [itself]}))

    with archived("oci-layout", f"{tmp_path}:1.0") as archive:
        assert {*in_archive(archive)} == {"index.json", "blobs/sha256/loop"}


@pytest.mark.behaviour("BUG-AG98")
@pytest.mark.parametrize("annotations", ["1.0", [], 7, None, {TAG: None}])
def test_annotations_without_a_tag_are_ignored(tmp_path: Path, annotations: object) -> None:
    index = {"manifests": [{"annotations": annotations}]}
    (tmp_path / "index.json").write_text(json.dumps(index))

    with archived("oci-layout", str(tmp_path)) as archive:
        assert {*in_archive(archive)} == {"index.json"}


def test_a_path_that_is_there_is_no_tag(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    assert split(f"{tmp_path}/a:b") == (tmp_path / "a:b", "")
    assert split(f"{tmp_path}/a:c") == (tmp_path / "a", "c")
    assert split(f"{tmp_path}/x:y/z") == (Path(f"{tmp_path}/x:y/z"), "")


@pytest.mark.behaviour("BUG-AG37")
def test_an_archive_that_is_no_layout_or_leads_out_of_it_is_refused_by_name(tmp_path: Path) -> None:
    """The messages contained names of temporary files."""
    evil = tmp_path / "evil.tar"
    with tarfile.open(evil, "w") as tar:
        entry = tarfile.TarInfo("../out")
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(InvalidInput, match=rf"^oci-archive:{evil} is not an OCI layout"):  # noqa: SIM117
        with archived("oci-archive", f"{evil}:1"):
            pass
    assert not (tmp_path / "out").exists()
    (tmp_path / "index.json").write_text("[")
    with pytest.raises(InvalidInput, match=r"index\.json of oci-layout"):  # noqa: SIM117
        with archived("oci-layout", str(tmp_path)):
            pass


@pytest.mark.behaviour("BUG-AG37")
async def test_a_refusal_names_the_request(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The messages showed `reading /tmp/tmpk3x.tar` and a digest that the user had not given."""

    async def refuse(
        _client: AgentClient, digest: str, _format: api.ImageFormat, _data: AsyncIterator[bytes]
    ) -> api.ImageInfo:
        raise Unprocessable(f"layer {digest} is refused", hint="look")

    monkeypatch.setattr(AgentClient, "put_image", refuse)
    reference = f"oci-layout:{layout.path}:1.0"
    async with AgentClient("unix:/nowhere") as client:
        with pytest.raises(Unprocessable, match=rf"^{reference}: layer sha256:") as raised:
            await resolve_image(client, reference)
    assert raised.value.hint == "look"
    assert capsys.readouterr().err == f"reading {reference}\n"
