"""The wheel, installed alone in an empty folder: it holds all that the commands need."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
MIGRATIONS = PROJECT / "sql" / "migrations"

pytestmark = pytest.mark.slow


def done(*command: str | Path, cwd: Path, **environ: str) -> str:
    """Run a command to its end; returns what it printed."""
    ran = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel and what `sender demo` needs, as locked."""
    uv = os.environ.get("UV") or shutil.which("uv")  # `uv run` tells where it is itself
    if uv is None:
        pytest.skip("uv is not to be found")
    work = tmp_path_factory.mktemp("wheel")
    # By way of the source archive, so that one is complete as well.
    done(uv, "build", "--quiet", "--out-dir", work, cwd=PROJECT)
    export = ("export", "--quiet", "--frozen", "--no-dev", "--no-hashes", "--no-emit-project")
    done(uv, *export, "--extra", "demo", "--output-file", work / "locked", cwd=PROJECT)
    done(uv, "venv", "--quiet", "--python", sys.executable, work / "venv", cwd=PROJECT)
    (wheel,) = work.glob("*.whl")
    install = ("pip", "install", "--quiet", "--python", work / "venv", "--constraint")
    done(uv, *install, work / "locked", f"{wheel}[demo]", cwd=PROJECT)
    return work / "venv" / "bin"


def test_the_program_is_that_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    where = "import sender; print(sender.__file__)"
    assert done(installed / "python", "-c", where, cwd=tmp_path).startswith(str(installed.parent))
    assert "sender demo" in done(installed / "sender", "--help", cwd=tmp_path)
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    assert done(installed / "sender", "--version", cwd=tmp_path) == f"sender {version}\n"


def test_it_holds_the_migrations_and_no_tests(installed: Path, tmp_path: Path) -> None:
    names = (
        "import json; from importlib import metadata, resources\n"
        "sql = resources.files('sender') / 'sql' / 'migrations'\n"
        "packed = [str(file) for file in metadata.files('sender')]\n"
        "print(json.dumps([[file.name for file in sql.iterdir()], packed]))"
    )
    migrations, packed = json.loads(done(installed / "python", "-c", names, cwd=tmp_path))
    assert sorted(migrations) == sorted(file.name for file in MIGRATIONS.glob("*.sql"))
    assert not [name for name in packed if name.startswith(("tests", "bench", "k8s"))]
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_its_demo_migrates_sends_and_ends_well(installed: Path, tmp_path: Path) -> None:
    told = json.loads(done(installed / "sender", "demo", "--targets", "60", "--json", cwd=tmp_path))
    assert (told["ok"], told["members"], told["lost"]) == (True, 60, 0)
    assert list(tmp_path.iterdir()) == []
