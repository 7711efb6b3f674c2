"""`kubectl kustomize` for the tests: resources, patches of maps, images. Refuses all else.

Where kubectl is to be found a test holds the two against each other.

    python tests/kustomize.py k8s/overlays/parallel
"""

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

type Manifest = dict[str, Any]

NAME = "kustomization.yaml"
_KNOWN = {"apiVersion", "kind", "resources", "patches", "images"}


class NotRenderable(Exception):
    """A kustomization that this does not understand, or that kustomize would not."""


def render(folder: Path) -> list[Manifest]:
    """The manifests of a folder, as they would be applied."""
    wanted = yaml.safe_load((folder / NAME).read_text())
    if unknown := wanted.keys() - _KNOWN:
        raise NotRenderable(f"{folder.name}: {sorted(unknown)}")
    found = [item for name in wanted["resources"] for item in _resource(folder / name)]
    for patch in wanted.get("patches", ()):
        _patch(found, yaml.safe_load(patch["patch"]))
    for image in wanted.get("images", ()):
        for container in _containers(found):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return found


def unlisted(folder: Path) -> set[str]:
    """Files of a folder that its kustomization does not name."""
    named = yaml.safe_load((folder / NAME).read_text())["resources"]
    return {path.name for path in folder.iterdir()} - {NAME, *named}


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    """The only manifest of its kind."""
    (found,) = (item for item in manifests if item["kind"] == kind)
    return found


def _resource(path: Path) -> list[Manifest]:
    return render(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))


def _patch(found: list[Manifest], patch: Manifest) -> None:
    def identity(item: Manifest) -> tuple[str, str]:
        return item["kind"], item["metadata"]["name"]

    matching = [item for item in found if identity(item) == identity(patch)]
    if len(matching) != 1:
        raise NotRenderable(f"a patch for {identity(patch)}, of which there are {len(matching)}")
    _merge(matching[0], patch)


def _merge(into: Manifest, patch: Manifest) -> None:
    for name, value in patch.items():
        if isinstance(value, list):
            raise NotRenderable(f"{name}: how lists are merged depends on the list")
        if isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        elif value is None:
            into.pop(name, None)
        else:
            into[name] = copy.deepcopy(value)


def _containers(manifests: list[Manifest]) -> Iterator[Manifest]:
    for item in manifests:
        if item["kind"] == "CronJob":
            yield from item["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]


if __name__ == "__main__":
    yaml.safe_dump_all(render(Path(sys.argv[1])), sys.stdout, sort_keys=False)
