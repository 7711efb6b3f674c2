"""The trials' fixtures, and their figures at the end.

pytest tests/chaos -m chaos                       the short form, for every change
SENDER_CHAOS=long pytest tests/chaos -m chaos     the long form
"""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from chaos.harness import Mail, Trial, apart, near, trial_of

_HERE = Path(__file__).parent
LONG = os.environ.get("SENDER_CHAOS") == "long"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.chaos)
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = [
        (report.nodeid.rpartition("::")[2], value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "figure"
    ]
    if lines:
        terminalreporter.section("trials")
        for name, value in lines:
            terminalreporter.write_line(f"{name.removeprefix('test_'):<58} {value}")


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Tell the trial's figure; it is printed at the end."""
    return lambda text: record_property("figure", text)


type Begin = Callable[..., Any]


@pytest.fixture
async def begin(dsn: str) -> AsyncIterator[Begin]:
    """Begin a trial: `await begin(rows, apart=False, **options of the provider)`."""
    async with AsyncExitStack() as stack:

        async def begin(rows: int, *, far: bool = False, dsn: str = dsn, **options: Any) -> Trial:
            mail: Mail = await stack.enter_async_context((apart if far else near)(**options))
            trial = await stack.enter_async_context(trial_of(dsn, mail))
            if rows:
                await trial.load(rows)
            return trial

        yield begin
