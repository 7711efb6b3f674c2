"""The composition root of `sender run`: signals, deadline, start, pipeline, exit code."""

import asyncio
import gc
import resource
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Final

import anyio
import stamina.instrumentation
import uvloop

from sender import exit_code
from sender.database import connect
from sender.domain import Counts
from sender.errors import CampaignError, DatabaseUnavailable
from sender.events import RunEnded, RunStarted
from sender.pace import AHEAD_S, Pace
from sender.pipeline import Pipeline, PipelineConfig, Stop, StopReason
from sender.ports import Observer, StoreUnavailable
from sender.providers import open_provider
from sender.retry import RetryPolicy
from sender.schema import check_schema
from sender.settings import RunSettings
from sender.store import PostgresStore, StoreConfig
from sender.telemetry.logs import LogObserver

_START_PATIENCE_S: Final = 30.0
_CLAIM_S: Final = 0.25
_LAST_WORDS_S: Final = 1.0
_LAST_COUNT_S: Final = 10.0
_SPARE_FILES: Final = 64


def main(settings: RunSettings) -> int:
    """Run the campaign to an end; returns the process's exit code.

    Raises:
        ConfigurationError: schema or campaign are wrong (exit code 78).
        DatabaseUnavailable: the database did not answer at the start (exit code 1).
    """
    stamina.instrumentation.set_on_retry_hooks([])
    _raise_file_limit(settings.send_concurrency)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(settings, LogObserver()))


async def run(settings: RunSettings, observer: Observer) -> int:
    """Run the campaign under signals and deadline; see `main`."""
    began_at = time.monotonic()
    stop = Stop()
    _watch_signals(stop)
    config = pipeline_config(settings)
    observer(
        RunStarted(
            settings.campaign_id, version("sender"), settings.describe(), config.repeats_at_most
        )
    )
    async with AsyncExitStack() as stack:
        try:
            store = await _unless_stopped(stop, lambda: _open(settings, stack))
            if store is None:
                return _end(observer, settings, stop, None, None, began_at)
            provider = open_provider(
                settings.mail_provider,
                url=_secret(settings.mail_url),
                api_key=_secret(settings.mail_api_key),
                campaign_id=settings.campaign_id,
                connect_timeout_s=settings.mail_connect_timeout_s,
                read_timeout_s=settings.mail_read_timeout_s,
                concurrency=settings.send_concurrency,
            )
            stack.push_async_callback(provider.aclose)
            pipeline = Pipeline(store, provider, observer, config, stop)
            _settle_memory()
            await _work(pipeline, stop, settings, began_at)
        except ExceptionGroup as group:
            raise _first(group) from None
        counts = await _last_count(store)
        return _end(observer, settings, stop, counts, pipeline, began_at)


def pipeline_config(settings: RunSettings) -> PipelineConfig:
    """The pipeline's sizes from the settings."""
    return PipelineConfig(
        campaign=settings.campaign_id,
        limit_per_s=settings.mail_rate_per_s,
        concurrency=settings.send_concurrency,
        lease_s=settings.lease_s,
        retry=RetryPolicy(
            max_attempts=settings.max_attempts,
            base_s=settings.retry_backoff_base_s,
            cap_s=settings.retry_backoff_cap_s,
            usable_s=settings.usable_window_s,
        ),
    )


# --- start ----------------------------------------------------------------------------------------


async def _open(settings: RunSettings, stack: AsyncExitStack) -> PostgresStore:
    """Check the database and open the store."""
    dsn = settings.db_dsn.get_secret_value()
    connection = await connect(dsn, _START_PATIENCE_S)
    async with connection:
        await check_schema(connection)
    store = await stack.enter_async_context(
        PostgresStore(
            StoreConfig(
                dsn=dsn,
                campaign=settings.campaign_id,
                account=settings.mail_account,
                rate_per_s=Pace(settings.mail_rate_per_s).rate_per_s,
                batch_size=min(
                    settings.batch_size, max(1, int(settings.mail_rate_per_s * _CLAIM_S))
                ),
                lease_s=settings.lease_s,
                usable_s=settings.usable_window_s,
                pace_ahead_s=AHEAD_S,
            )
        )
    )
    try:
        exists = await store.open_campaign()
    except StoreUnavailable as error:
        raise DatabaseUnavailable(f"the database went away at the start ({error})") from error
    if not exists:
        raise CampaignError(
            f"CAMPAIGN_ID: campaign {settings.campaign_id} has no rows in campaign_targets"
        )
    return store


async def _unless_stopped[T](stop: Stop, begin: Callable[[], Coroutine[None, None, T]]) -> T | None:
    """The result, or None if a signal came first."""
    result: T | None = None
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            await stop.claiming.wait()
            group.cancel_scope.cancel()

        group.start_soon(watch)
        result = await begin()
        group.cancel_scope.cancel()
    return result


def _settle_memory() -> None:
    """Keep what the start made out of every later collection."""
    gc.collect()
    gc.freeze()


def _raise_file_limit(concurrency: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < concurrency + _SPARE_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _secret(value: object) -> str | None:
    reveal = getattr(value, "get_secret_value", None)
    return None if reveal is None else str(reveal())


# --- stop -----------------------------------------------------------------------------------------


def _watch_signals(stop: Stop) -> None:
    """The first signal stops claiming, the second stops working."""

    def on_signal(number: signal.Signals) -> None:
        if stop.reason is StopReason.SIGNAL:
            stop.stop_working()
        else:
            stop.stop_claiming(StopReason.SIGNAL, number.name)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


async def _work(pipeline: Pipeline, stop: Stop, settings: RunSettings, began_at: float) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(_keep_deadline, stop, began_at + settings.deadline_s)
        group.start_soon(_keep_grace, stop, settings.shutdown_grace_s)
        await pipeline.run()
        group.cancel_scope.cancel()


async def _keep_deadline(stop: Stop, deadline: float) -> None:
    await anyio.sleep(max(0.0, deadline - time.monotonic()))
    stop.stop_claiming(StopReason.DEADLINE)


async def _keep_grace(stop: Stop, grace_s: float) -> None:
    """Whatever stopped the claiming: what is in flight has this long to end."""
    await stop.claiming.wait()
    await anyio.sleep(max(0.0, grace_s - _LAST_WORDS_S))
    stop.stop_working()


async def _last_count(store: PostgresStore) -> Counts | None:
    with anyio.move_on_after(_LAST_COUNT_S):
        try:
            return await store.counts()
        except StoreUnavailable:
            return None
    return None


def _end(
    observer: Observer,
    settings: RunSettings,
    stop: Stop,
    counts: Counts | None,
    pipeline: Pipeline | None,
    began_at: float,
) -> int:
    reason = stop.reason or StopReason.DONE
    code, why = exit_code.decide(reason, counts, settings.failed_ratio_limit)
    traffic = pipeline.traffic if pipeline else None
    detail = f" ({stop.detail})" if stop.detail else ""
    observer(
        RunEnded(
            campaign=settings.campaign_id,
            exit_code=code,
            reason=f"{why}{detail}",
            counts=counts,
            requests=traffic.requests if traffic else 0,
            accepted=traffic.accepted if traffic else 0,
            refused_writes=traffic.refused_writes if traffic else 0,
            seconds=time.monotonic() - began_at,
        )
    )
    return code


def _first(error: Exception) -> Exception:
    """The first error in a group of errors: one is what a person can act on."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
