"""Which image of an index a processor runs (`config.md`, "variant")."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.images.core.oci import (
    MANIFEST,
    TAG,
    Processor,
    choose,
    digest_of,
    read_config,
    read_manifest,
)
from agent.machine.hardware import read_x86_level
from agent.machine.kernelfs import KernelFs
from wire.errors import Unprocessable

SMALL, LARGE, ARM = Processor("x86_64", 1), Processor("x86_64", 3), Processor("aarch64")
V1 = "fpu sse sse2"
V2 = f"{V1} cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"


def of(name: str) -> str:
    return digest_of(name.encode())


def index(*variants: str, architecture: str = "amd64") -> bytes:
    """Return an index with an image for each variant; "" is the image without a variant."""
    listed = [
        {
            "mediaType": MANIFEST,
            "digest": of(variant),
            "size": 1,
            "platform": {"os": "linux", "architecture": architecture, "variant": variant},
        }
        for variant in variants
    ]
    return json.dumps({"schemaVersion": 2, "manifests": listed}).encode()


@pytest.mark.behaviour("BUG-AG41")
def test_an_image_for_a_larger_processor_is_refused() -> None:
    """An index with amd64/v3 alone was accepted on a processor without v3."""
    with pytest.raises(Unprocessable, match="not for linux/amd64/v1, only for linux/amd64/v3"):
        choose(index("v3"), SMALL)
    with pytest.raises(Unprocessable, match="only for linux/arm64/v9"):
        choose(index("v9", architecture="arm64"), ARM)
    assert choose(index("v3"), LARGE) == of("v3")


def test_the_plain_variant_is_chosen_first_and_then_the_highest_that_runs() -> None:
    assert choose(index("v3", "", "v2"), LARGE) == of("")
    assert choose(index("v2", "v3", "v4"), LARGE) == of("v3")


@pytest.mark.behaviour("BUG-AG41")
def test_the_variant_of_an_image_without_an_index_counts_too() -> None:
    """The configuration's variant counts too; registries serve such images without an index."""
    config = {"os": "linux", "architecture": "amd64", "variant": "v2"}
    config["rootfs"] = {"type": "layers", "diff_ids": [of("layer")]}  # type: ignore[assignment]
    data = json.dumps(config).encode()
    layer = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": of("l"), "size": 1}
    described = {"mediaType": "x", "digest": digest_of(data), "size": len(data)}
    document = {"schemaVersion": 2, "config": described, "layers": [layer]}
    manifest = read_manifest(json.dumps(document).encode())
    with pytest.raises(Unprocessable, match="is for linux/amd64/v2, not for linux/amd64/v1"):
        read_config(data, manifest, SMALL)
    assert read_config(data, manifest, LARGE)[0][0].diff_id == of("layer")


@pytest.mark.behaviour("BUG-AG36")
def test_the_error_for_several_images_without_platform_lists_their_tags() -> None:
    """The message did not explain how to name one of them."""
    listed = [
        {"mediaType": MANIFEST, "digest": of(t), "size": 1, "annotations": {TAG: t}} for t in "ba"
    ]
    with pytest.raises(Unprocessable, match="has 2 images") as raised:
        choose(json.dumps({"schemaVersion": 2, "manifests": listed}).encode(), SMALL)
    assert raised.value.hint.endswith("oci-archive:FILE:TAG: a, b")


@pytest.mark.parametrize(("flags", "level"), [(V1, 1), (V2, 2), (V3, 3), (f"{V3} avx512f", 3)])
def test_the_kernels_flags_say_which_level_a_processor_has(
    tmp_path: Path, flags: str, level: int
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert read_x86_level(KernelFs(tmp_path)) == level


def test_another_processor_has_no_such_level(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert read_x86_level(KernelFs(tmp_path)) == 1
