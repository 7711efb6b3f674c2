"""The clock of the nights: runs in real time, and skips what lies between two nights.

While no run lives, all instants in the database and the provider's memory of keys are moved into
the past together: afterwards both are as if that much time had gone by.
"""

import time

from chaos.harness import Trial
from psycopg import AsyncConnection, sql

_COLUMNS = """
SELECT table_name, column_name FROM information_schema.columns
JOIN information_schema.tables USING (table_schema, table_name)
WHERE table_schema = 'public' AND table_type = 'BASE TABLE'
  AND data_type = 'timestamp with time zone'
ORDER BY 1, 2
"""


class Calendar:
    """Days of a given length, the first of which begins now."""

    def __init__(self, day_s: float) -> None:
        self._day_s = day_s
        self._skipped_s = 0.0
        self._begun_at = time.monotonic()

    def now(self) -> float:
        """Monotonic seconds with what was skipped; the provider's clock."""
        return time.monotonic() + self._skipped_s

    async def wait_until(self, day: float, trial: Trial) -> None:
        """Skip to the beginning of a day, counted from 0; half days are allowed."""
        left_s = self._begun_at + day * self._day_s - self.now()
        assert left_s > 0, f"the night took {-left_s:.0f} s more than there are"
        assert not any(run.is_running for run in trial.runs)
        self._skipped_s += left_s
        async with await AsyncConnection.connect(trial.dsn) as conn:
            found = await (await conn.execute(_COLUMNS)).fetchall()
            for table, column in found:
                move = sql.SQL("UPDATE {0} SET {1} = {1} - make_interval(secs => %s)").format(
                    sql.Identifier(table), sql.Identifier(column)
                )
                await conn.execute(move, (left_s,))
