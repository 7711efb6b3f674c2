"""The whole pipeline in one process: real PostgreSQL, real HTTP, and what may go wrong between."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from conftest import add_targets, as_role

from sender.dev.fake_options import FakeOptions
from sender.dev.fake_provider import FakeProvider
from sender.domain import Answer, Counts, Target
from sender.events import AccountPaused, AttemptBroke, Event
from sender.pace import Turns
from sender.pipeline import Pipeline, PipelineConfig, Stop, StopReason
from sender.ports import Gate, Provider
from sender.providers import open_provider
from sender.retry import RetryPolicy
from sender.store import PostgresStore, StoreConfig

CAMPAIGN = "spring"
CONFIG = PipelineConfig(
    campaign=CAMPAIGN,
    limit_per_s=500.0,
    concurrency=100,
    lease_s=30.0,
    retry=RetryPolicy(max_attempts=2, base_s=0.05, cap_s=0.1, usable_s=3600.0),
)


def http(fake: FakeProvider) -> Provider:
    return open_provider(
        "http",
        url=fake.url,
        api_key=None,
        campaign_id=CAMPAIGN,
        connect_timeout_s=2.0,
        read_timeout_s=5.0,
        concurrency=CONFIG.concurrency,
    )


class Trial:
    """One pipeline over a store, and what it told."""

    def __init__(self, dsn: str, config: PipelineConfig = CONFIG) -> None:
        self.config = config
        self.events: list[Event] = []
        self.stop = Stop()
        self.store = PostgresStore(
            StoreConfig(
                dsn=as_role(dsn, "sender"),
                campaign=CAMPAIGN,
                account="acct",
                rate_per_s=config.limit_per_s,
                batch_size=50,
                lease_s=config.lease_s,
                usable_s=config.retry.usable_s,
                pace_ahead_s=0.2,
            )
        )

    async def run(self, provider: Provider, meanwhile: Callable[[], None] = lambda: None) -> Counts:
        async with self.store, asyncio.timeout(30):
            assert await self.store.open_campaign()
            pipeline = Pipeline(self.store, provider, self.events.append, self.config, self.stop)
            meanwhile()
            await pipeline.run()
            counts = await self.store.counts()
        await provider.aclose()
        return counts


async def test_a_campaign_is_sent_once_and_the_run_is_done(dsn, conn):
    await add_targets(conn, CAMPAIGN, 300)
    async with FakeProvider(FakeOptions(first_503=0.1, accept_then_cut=0.05)) as fake:
        trial = Trial(dsn)
        assert await trial.run(http(fake)) == Counts(sent=300)
        assert set(fake.deliveries(CAMPAIGN).values()) == {1}
    assert trial.stop.reason is StopReason.DONE


@pytest.mark.slow
async def test_a_loop_that_stalls_loses_slots_but_never_the_pace(dsn, conn):
    """After a stall every slot in hand is past. They must be dropped, not waited for."""
    await add_targets(conn, CAMPAIGN, 700)
    async with FakeProvider(FakeOptions(latency_s=0.2, limit_per_s=500)) as fake:
        loop = asyncio.get_running_loop()

        def stall() -> None:
            for at in (0.2, 0.7, 1.2):
                loop.call_later(at, time.sleep, 0.3)

        assert await Trial(dsn).run(http(fake), stall) == Counts(sent=700)
        assert fake.stats()["rate_limited"] == 0


class BreaksOn:
    """A provider whose code fails on one member, as a template may."""

    def __init__(self, inner: Provider, member_id: int) -> None:
        self._inner, self._member_id = inner, member_id

    async def send(self, target: Target, gate: Gate) -> Answer | None:
        if target.member_id == self._member_id:
            raise RuntimeError("member 7 at seven@example.com")
        return await self._inner.send(target, gate)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def test_a_row_that_breaks_the_provider_costs_itself(dsn, conn):
    await add_targets(conn, CAMPAIGN, 20)
    async with FakeProvider(FakeOptions()) as fake:
        trial = Trial(dsn)
        counts = await trial.run(BreaksOn(http(fake), 7))
        assert counts == Counts(sent=19, in_doubt=1)
        assert 7 not in fake.deliveries(CAMPAIGN)
    broke = [e for e in trial.events if isinstance(e, AttemptBroke)]
    assert [(e.member_id, e.error) for e in broke] == [(7, "RuntimeError")] * 2


async def test_when_all_is_refused_few_requests_are_made_whatever_the_latency(dsn, conn):
    await add_targets(conn, CAMPAIGN, 600)
    config = replace(CONFIG, concurrency=1000)
    async with FakeProvider(FakeOptions(always="422", latency_s=0.3)) as fake:
        trial = Trial(dsn, config)
        counts = await trial.run(http(fake))
        assert trial.stop.reason is StopReason.REFUSED
        assert 100 <= fake.stats()["requests"] <= 250
        assert counts.failed == fake.stats()["requests"]
        assert counts.pending == 600 - counts.failed


async def test_a_pause_is_obeyed_while_the_provider_makes_everybody_wait(dsn, conn):
    await add_targets(conn, CAMPAIGN, 5)
    async with FakeProvider(FakeOptions(throttle=True, retry_after=300)) as fake:
        trial = Trial(dsn)
        run = asyncio.create_task(trial.run(http(fake)))
        await fake.until(lambda state: state.stats()["throttled"] > 0)
        await conn.execute("UPDATE campaigns SET control = 'paused'")
        assert await run == Counts(pending=5)
    assert trial.stop.reason is StopReason.PAUSED


async def test_the_other_processes_are_told_of_a_429_whoever_has_the_next_turn(
    dsn, conn, monkeypatch
):
    await add_targets(conn, CAMPAIGN, 5)
    # After its first slots this process would leave the next hour to others.
    monkeypatch.setattr(Turns, "next_at", lambda turns: 0.0 if turns._ends_at is None else 1e18)
    async with FakeProvider(FakeOptions(throttle=True, retry_after=300)) as fake:
        trial = Trial(dsn)
        run = asyncio.create_task(trial.run(http(fake)))
        async with asyncio.timeout(20):
            while not [e for e in trial.events if isinstance(e, AccountPaused)]:
                await asyncio.sleep(0.01)
        cursor = await conn.execute("SELECT blocked_until > now() FROM provider_accounts")
        assert await cursor.fetchall() == [(True,)]
        trial.stop.stop_claiming(StopReason.PAUSED)
        await run
