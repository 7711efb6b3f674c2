"""The trials' fixtures.

pytest -m chaos                       the short form, for every change
SENDER_CHAOS=long pytest -m chaos     the long form
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
    # The longest of all first, or one worker would be left with it at the end.
    items.sort(key=lambda item: "nights" not in item.path.parts)


type Begin = Callable[..., Any]


@pytest.fixture
def run_dsn() -> str | None:
    """What the runs are given, where it is not what the trial itself looks at."""
    return None


@pytest.fixture
async def begin(dsn: str, run_dsn: str | None) -> AsyncIterator[Begin]:
    """Begin a trial: `await begin(rows, far=False, **options of the provider)`."""
    async with AsyncExitStack() as stack:

        async def begin(rows: int, *, far: bool = False, dsn: str = dsn, **options: Any) -> Trial:
            mail: Mail = await stack.enter_async_context((apart if far else near)(**options))
            trial = await stack.enter_async_context(trial_of(dsn, mail, run_dsn))
            if rows:
                await trial.load(rows)
            return trial

        yield begin
