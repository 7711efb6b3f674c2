"""Each guard removed in a copy of the program: exactly its tests turn red.

Run with `uv run pytest -m mutation`; .ci/run does. A test that stays green without its guard proves
nothing, and one that turns red for another guard's sake names the wrong thing.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mutations.guards import GUARDS, Mutation

TOP = Path(__file__).parents[2]
GUARD_TESTS = "tests/test_guards.py"
_RED = re.compile(rf"^(?:FAILED|ERROR) {re.escape(GUARD_TESTS)}::(\w+)", re.MULTILINE)

pytestmark = pytest.mark.mutation


def copied(to: Path) -> Path:
    for name in ("sender", "sql", "tests"):
        shutil.copytree(TOP / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TOP / "pyproject.toml", to)
    return to


def remove(mutation: Mutation, top: Path) -> None:
    file = top / mutation.file
    text = file.read_text()
    start = text.index(mutation.after)
    assert text.count(mutation.old, start) >= mutation.places, f"{mutation.guard}: its text is gone"
    removed = text[start:].replace(mutation.old, mutation.new, mutation.places)
    file.write_text(text[:start] + removed)


def red_tests(top: Path) -> set[str]:
    run = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            GUARD_TESTS,
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
        ],
        cwd=top,
        env={**os.environ, "PYTHONPATH": str(top), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert re.search(r"\d+ (?:passed|failed)", run.stdout), run.stdout + run.stderr
    return set(_RED.findall(run.stdout))


def test_nothing_is_red_while_every_guard_stands(tmp_path):
    assert red_tests(copied(tmp_path)) == set()


@pytest.mark.parametrize("mutation", GUARDS, ids=lambda m: m.guard.replace(" ", "-"))
def test_exactly_its_tests_turn_red(mutation, tmp_path):
    top = copied(tmp_path)
    remove(mutation, top)
    assert red_tests(top) - mutation.may == mutation.red
