"""Makes this checkout a release: its version in every place, a date in the changelog.

    uv run .ci/release.py 0.2.0

The version's own place is pyproject.toml; a built image and the manifests name it as well. Commits
nothing and publishes nothing: README.md says what to type next.
"""

import os
import re
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"
ALSO_IN = ("Dockerfile", "k8s/base/kustomization.yaml", "README.md", "RUNBOOK.md")
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
UNRELEASED = re.compile(r"^## \[Unreleased\]\n(?=\s*\S)(?!\s*## )", re.MULTILINE)
RELEASED = re.compile(rf"^## \[({VERSION.pattern})\]", re.MULTILINE)


def number(version: str) -> tuple[int, ...]:
    found = VERSION.fullmatch(version)
    if not found:
        raise SystemExit(f"{version} is not a version; write it as 1.2.3")
    return tuple(map(int, found.groups()))


def dated(version: str) -> str:
    """The changelog with the version in place of what was not released."""
    text = CHANGELOG.read_text()
    released = RELEASED.search(text)
    if released and number(version) <= number(released[1]):
        raise SystemExit(
            f"{version} is not later than {released[1]}, the last one in the changelog"
        )
    if not UNRELEASED.search(text):
        raise SystemExit("there is nothing below [Unreleased] in the changelog")
    return UNRELEASED.sub(f"## [{version}] - {datetime.now(UTC):%Y-%m-%d}\n", text, count=1)


def renamed(text: str, old: str, new: str) -> str:
    """A file in which an image or a manifest of the old version is of the new one."""
    return re.sub(rf"(ARG VERSION=|newTag: |\bsender:){re.escape(old)}\b", rf"\g<1>{new}", text)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("which version? uv run .ci/release.py 1.2.3")
    new = sys.argv[1]
    changelog = dated(new)
    old: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    uv = os.environ.get("UV", "uv")  # `uv run` tells where it is itself
    # pyproject.toml and uv.lock.
    subprocess.run([uv, "version", "--quiet", "--no-sync", new], cwd=ROOT, check=True)
    for path in map(ROOT.joinpath, ALSO_IN):
        path.write_text(renamed(path.read_text(), old, new))
    CHANGELOG.write_text(changelog)
    print(f"this is {new} now; look at it: git diff")


if __name__ == "__main__":
    main()
