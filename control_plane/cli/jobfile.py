"""Reads a job file: TOML, YAML or JSON by its suffix; `--set` overrides its fields.

All its errors are reported at once, here and again by the front end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.api.signing import ImageName
from control_plane.api.jobs import JobSpec
from control_plane.api.validate import MAX_JOB_FILE_BYTES, job_errors, job_spec
from control_plane.cli.show import progress
from wire.errors import FieldError, InvalidInput
from wire.quantity_fields import TEXT_ENCODING, parse_quantities
from wire.routes import invalid
from wire.toml_limits import parse_toml
from wire.unique_keys import json_with_unique_keys

MAX_DEPTH = 32
NO_IMAGE = "sha256:" + "0" * 64
"""Replaces the name of an image if the image store is not used."""


def read_job(
    path: Path,
    settings: Sequence[str],
    names: Callable[[], Mapping[str, str]] | None = None,
    *,
    is_image_known: bool = True,
) -> JobSpec:
    """Return the job of a file, or raise `InvalidInput` with every error in it.

    `names` returns the digests of image names; it is called if the file has such a name. Without
    `is_image_known` any name of an image is accepted, and means `NO_IMAGE`.
    """
    document = read_document(path)
    for setting in settings:
        put(document, setting)
    document = parse_quantities(document, JobSpec)
    unknown: list[FieldError] = []
    if not is_image_known and isinstance(document, dict) and _names_image(document):
        document = document | {"image": NO_IMAGE}
    if names is not None and isinstance(document, dict):
        document, unknown = _with_digest(document, names)
    try:
        if unknown:
            others = (error for error in job_errors(document) if error.field != "image")
            raise invalid([*unknown, *others], str(path))
        return job_spec(document, str(path))
    except InvalidInput as e:
        e.hint = e.hint or "nothing was changed; correct the file and apply it again"
        raise


def _names_image(document: Mapping[str, Any]) -> bool:
    """Return whether a job has a name of an image in place of a digest."""
    image = document.get("image")
    try:
        return not msgspec.convert(image, ImageName).startswith("sha256:")
    except msgspec.ValidationError:
        return False


def _with_digest(
    document: dict[str, Any], names: Callable[[], Mapping[str, str]]
) -> tuple[dict[str, Any], list[FieldError]]:
    """Return a job with its image name replaced by a digest, and errors of the name."""
    image = document.get("image")
    if not isinstance(image, str) or image.startswith("sha256:"):
        return document, []
    try:
        return document | {"image": digest_of(image, names)}, []
    except InvalidInput as e:
        return document, [FieldError(field="image", reason=str(e))]


def digest_of(image: str, names: Callable[[], Mapping[str, str]]) -> str:
    """Return the digest that a name of an image means now, or raise `InvalidInput`."""
    if image.startswith("sha256:"):
        return image
    digest = names().get(image)
    if digest is None:
        raise InvalidInput(
            f"the image store has no image with the name {image!r} (twinectl image list)"
        )
    progress(f"image {image} is {digest}")
    return digest


def read_document(path: Path) -> Any:
    """Return the content of a file as plain values."""
    data = read_bytes(path, MAX_JOB_FILE_BYTES)
    try:
        document = _parse(path, data.decode(TEXT_ENCODING))
    except InvalidInput:
        raise
    except (ValueError, RecursionError) as e:
        raise InvalidInput(f"{path} cannot be read: {_one_line(e)}") from e
    if _depth(document) > MAX_DEPTH:
        raise InvalidInput(f"{path} is nested deeper than {MAX_DEPTH} levels")
    return document


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes, or raise `InvalidInput`."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as e:
        raise InvalidInput(f"cannot read {path}: {e.strerror}") from e
    if len(data) > most:
        raise InvalidInput(f"{path} is over {most >> 10} KiB")
    return data


def _parse(path: Path, text: str) -> Any:
    match path.suffix.lower():
        case ".toml":
            return parse_toml(text)
        case ".yaml" | ".yml":
            return _parse_yaml(text)
        case ".json":
            return json_with_unique_keys(text)
        case suffix:
            raise InvalidInput(
                (
                    f"{path} cannot be read: the format of the suffix {suffix or '(none)'} "
                    "is unknown"
                ),
                hint="use .toml, .yaml or .json",
            )


def _parse_yaml(text: str) -> Any:
    """Return a YAML document without aliases (they can expand without bound) and double keys."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses YAML features that job files do not need."""

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            """Return the next node."""
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases (*name) are not allowed")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
            """Return a dict whose keys were each written once."""
            keys = [self.construct_object(k, deep=True) for k, _ in node.value]
            seen: set[Any] = set()
            for key, (written, _) in zip(keys, node.value, strict=True):
                if isinstance(key, Hashable) and key not in seen:
                    seen.add(key)
                    continue
                reason = f"{key!r} is written twice, or is not a name"
                raise yaml.MarkedYAMLError(None, None, reason, written.start_mark)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as e:
        raise ValueError(str(e).replace('in "<unicode string>", ', "at ")) from e


def put(document: Any, setting: str) -> None:
    """Set one `key.path=value` in a document.

    The value is read as TOML where it is a number, a truth value, a list or in quotes, and is
    text otherwise; what goes into `environment` is always text.
    """
    key, equals, text = setting.partition("=")
    path = key.split(".")
    if not equals or not all(path):
        raise InvalidInput(f"{setting!r} is not KEY=VALUE", hint="for instance --set tasks=3")
    target = document
    for name in path[:-1]:
        if not isinstance(target, dict):
            break
        target = target.setdefault(name, {})
    if not isinstance(target, dict):
        raise InvalidInput(f"cannot set {key}: {'.'.join(path[:-1])} is not a table")
    target[path[-1]] = text if path[0] == "environment" else _value(text)


def _value(text: str) -> Any:
    try:
        value = parse_toml(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | str | list | dict) else text


def _depth(value: Any) -> int:
    """Return how deep lists and tables are nested, without recursion."""
    depth, level = 0, [value]
    while level:
        inner = [list(v.values()) if isinstance(v, dict) else v for v in level]
        level = [x for items in inner if isinstance(items, list) for x in items]
        depth += 1
        if depth > MAX_DEPTH + 1:
            break
    return depth


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
