"""The migrations as squawk and the runner's own rules see them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "sql" / "migrations").glob("*.sql"))
SQUAWK = Path(sys.executable).with_name("squawk")


def test_squawk_finds_nothing() -> None:
    lint = subprocess.run(
        [SQUAWK, "--config", ROOT / ".squawk.toml", "--reporter", "gcc", *FILES],
        capture_output=True,
        text=True,
        check=False,
        env={},
    )
    assert (lint.returncode, lint.stdout) == (0, "")


def test_squawk_looks(tmp_path: Path) -> None:
    bad = tmp_path / "bad.sql"
    bad.write_text("CREATE INDEX i ON campaign_targets (email);\n")
    lint = subprocess.run(
        [SQUAWK, "--config", ROOT / ".squawk.toml", "--reporter", "gcc", bad],
        capture_output=True,
        text=True,
        check=False,
        env={},
    )
    assert "require-concurrent-index-creation" in lint.stdout


def test_versions_count_from_one() -> None:
    assert [int(path.name[:4]) for path in FILES] == list(range(1, len(FILES) + 1))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_records_itself_once(path: Path) -> None:
    recorded = re.findall(
        r"INSERT INTO sender_migrations .* VALUES \((\d+), '(\w+)'\)", path.read_text()
    )
    assert recorded == [(str(int(path.stem[:4])), path.stem[5:])]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transactions_bound_their_waits_and_end_in_their_step(path: Path) -> None:
    for step in path.read_text().split("\n-- step\n"):
        assert len(re.findall(r"^BEGIN;$", step, re.M)) == len(re.findall(r"^COMMIT;$", step, re.M))
        for transaction in step.split("\nBEGIN;")[1:]:
            assert "SET LOCAL lock_timeout" in transaction
            assert "SET LOCAL statement_timeout" in transaction
