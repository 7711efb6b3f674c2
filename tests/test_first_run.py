"""README.md, *From a clone to a run*: typed as it stands, in a fresh copy of this project.

Only the server's place, the provider's port and the wait for it are put in. `uv run` makes the copy
its own environment, as it would for somebody new.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from documents import ROOT, blocks, commands
from psycopg.conninfo import conninfo_to_dict

from sender.dev.postgres import EmbeddedPostgres

SECTION = "From a clone to a run"
TABLE = """
CREATE TABLE campaign_targets (campaign_id text, member_id bigint, email text, sent_at timestamptz,
                               PRIMARY KEY (campaign_id, member_id))
"""
MEMBERS, SENT_BEFORE = 40, 10


@dataclass(frozen=True, slots=True)
class Overlay:
    """The kustomization that the section shows.

    Attributes:
        name: where it is to be put.
    """

    name: str
    text: str

    def put_into(self, checkout: Path) -> Path:
        place = checkout / self.name
        place.parent.mkdir(parents=True)
        place.write_text(self.text)
        return place


def overlay() -> Overlay:
    ((section, text),) = blocks("README.md", "yaml")
    assert section == SECTION
    return Overlay(text.partition("\n")[0].removeprefix("# "), text)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a clone would hold, changes that are not committed yet included."""
    files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    named = subprocess.run(files, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, named.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def members(postgres: EmbeddedPostgres) -> Iterator[str]:
    """The application's database as it was before us; its DSN."""
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        admin.execute("CREATE ROLE members LOGIN")
        admin.execute("CREATE DATABASE members OWNER members")
    dsn = postgres.dsn_of("members")
    with psycopg.connect(dsn) as conn:
        conn.execute("SET ROLE members")
        conn.execute(TABLE)
        conn.execute(
            "INSERT INTO campaign_targets SELECT 'spring', n, 'member' || n || '@example.com',"
            " CASE WHEN n <= %s THEN now() END FROM generate_series(1, %s) AS n",
            [SENT_BEFORE, MEMBERS],
        )
    yield dsn
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        for database in ("members_copy", "members"):
            admin.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)".encode())
        admin.execute("DROP ROLE members")


def script(port: int) -> str:
    """The section's commands, one after another; the first that fails ends it all."""
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for command in commands("README.md"):
        if command.section == SECTION:
            lines += [f"echo '$' {command.program} >&2", command.line.replace("8025", str(port))]
            if command.line.endswith("&"):
                lines.append(f"until (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>&-; do sleep 0.1; done")
    return "\n".join(lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def counted(dsn: str, query: str) -> int:
    with psycopg.connect(dsn) as conn:
        row = conn.execute(query.encode()).fetchone()
    assert row
    return row[0]


@pytest.mark.slow
def test_somebody_new_gets_from_a_clone_to_a_run(
    clone: Path, members: str, postgres: EmbeddedPostgres
) -> None:
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not to be found")
    overlay().put_into(clone)
    port = free_port()
    place = conninfo_to_dict(members)
    typed = script(port).replace("PGHOST=db", f"PGHOST={place['host']} PGPORT={place['port']}")
    path = os.pathsep.join([str(postgres.bin_dir), str(Path(uv).parent), os.environ["PATH"]])
    ours = ("VIRTUAL_ENV", "PYTEST_", "PYTHONPATH", "COV_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    ran = subprocess.run(
        ["bash", "-c", typed],
        cwd=clone, env={**env, "PATH": path},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
    assert "k8s/overlays/mine" in overlay().name
    for told in ("passed", "5 migrations applied", "role sender may do what a run does"):
        assert told in ran.stdout, told
    copy = postgres.dsn_of("members_copy")
    sent = "SELECT count(*) FROM campaign_targets WHERE state = 'sent' AND sent_at IS NOT NULL"
    assert counted(copy, sent) == MEMBERS
    columns = "SELECT count(*) FROM pg_attribute WHERE attnum > 0 AND attrelid = "
    assert counted(members, f"{columns} 'campaign_targets'::regclass") == 4
