"""One version: everything that tells it tells the same, and a release changes all of it."""

import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest
from dockerfile import instructions
from kustomize import render
from manifest_rules import manifests_of

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## \[(.+?)\](?: - (\S+))?$", re.MULTILINE)
FILES = (
    *("pyproject.toml", "uv.lock", "CHANGELOG.md", "README.md", "RUNBOOK.md", "Dockerfile"),
    *("k8s", ".ci/release.py", ".python-version"),
)


def version_of(root: Path) -> str:
    """The one place."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]


def versions_told(root: Path) -> dict[str, str]:
    """What else names the version, as people and machines read it."""
    packages = tomllib.loads((root / "uv.lock").read_text())["package"]
    args = [rest for name, rest in instructions((root / "Dockerfile").read_text()) if name == "ARG"]
    tag = manifests_of(render(root / "k8s" / "base")).container["image"].partition(":")[2]
    return {
        "uv.lock": next(p["version"] for p in packages if p["name"] == "sender"),
        "Dockerfile": next(a.partition("=")[2] for a in args if a.startswith("VERSION=")),
        "manifest": tag,
    }


def entries(root: Path) -> list[tuple[str, str]]:
    """Versions and dates of the changelog, newest first, without what is not released."""
    found = HEADING.findall((root / "CHANGELOG.md").read_text())
    return found[1:] if found[0][0] == "Unreleased" else found


def test_everything_tells_the_same_version() -> None:
    assert set(versions_told(ROOT).values()) == {version_of(ROOT)}


def test_the_program_tells_it() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "sender", "--version"], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"sender {version_of(ROOT)}\n"


def test_the_changelogs_top_entry_is_this_version() -> None:
    found = entries(ROOT)
    assert found[0][0] == version_of(ROOT)
    assert all(date.fromisoformat(day) for _, day in found)


def test_the_changelog_goes_back_in_time() -> None:
    numbered = [(tuple(map(int, name.split("."))), day) for name, day in entries(ROOT)]
    assert all(newer > older for newer, older in itertools.pairwise(numbered))


# --- To make one ----------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a release changes, with something to release."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, tmp_path / name)
    path = tmp_path / "CHANGELOG.md"
    text = path.read_text().replace("## [Unreleased]\n\n", "", 1)
    head, first, rest = text.partition("\n## [")
    path.write_text(f"{head}\n## [Unreleased]\n\n### Fixed\n\n- A thing.\n{first}{rest}")
    return tmp_path


def release(checkout: Path, version: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, checkout / ".ci" / "release.py", version],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_a_release_changes_every_place(checkout: Path) -> None:
    if not shutil.which("uv"):
        pytest.skip("uv is not to be found")
    old, new = version_of(checkout), "77.0.1"
    ran = release(checkout, new)
    assert ran.returncode == 0, ran.stderr
    assert version_of(checkout) == new
    assert set(versions_told(checkout).values()) == {new}
    assert [name for name, _ in entries(checkout)] == [new, *(v for v, _ in entries(ROOT))]
    assert f"## [{new}] - {date.today():%Y}" in (checkout / "CHANGELOG.md").read_text()  # noqa: DTZ011
    for name in ("README.md", "RUNBOOK.md"):
        assert f"sender:{old}" not in (checkout / name).read_text()
        assert f"newTag: {old}" not in (checkout / name).read_text()
    assert f"sender:{new}" in (checkout / "RUNBOOK.md").read_text()


@pytest.mark.parametrize(
    ("version", "told"), [("0.0.1", "is not later than"), ("1.2", "is not a version")]
)
def test_a_wrong_version_is_refused(checkout: Path, version: str, told: str) -> None:
    before = (checkout / "CHANGELOG.md").read_text()
    ran = release(checkout, version)
    assert (ran.returncode, told in ran.stderr) == (1, True)
    assert (version_of(checkout), (checkout / "CHANGELOG.md").read_text()) == (
        version_of(ROOT),
        before,
    )


def test_without_a_change_there_is_no_release(checkout: Path) -> None:
    path = checkout / "CHANGELOG.md"
    path.write_text(path.read_text().replace("### Fixed\n\n- A thing.\n", ""))
    ran = release(checkout, "77.0.1")
    assert (ran.returncode, "nothing below [Unreleased]" in ran.stderr) == (1, True)
    assert version_of(checkout) == version_of(ROOT)
