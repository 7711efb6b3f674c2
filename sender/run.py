"""The composition root of `sender run`: signals, deadline, start, pipeline, exit code."""

import asyncio
import gc
import resource
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, cast

import anyio
import psycopg
import stamina.instrumentation
import uvloop
from pydantic import SecretStr

from sender import exit_code
from sender.database import connect, describe, is_transient
from sender.domain import Counts
from sender.errors import CampaignError, DatabaseUnavailable, SenderError, TableLocked
from sender.events import RunEnded, RunStarted
from sender.locks import briefly, naming_holders
from sender.pace import AHEAD_S, Pace
from sender.pipeline import Pipeline, PipelineConfig, Stop, StopReason, Traffic
from sender.ports import Observer, Provider, StoreUnavailable, TargetStore
from sender.providers import open_provider
from sender.queries.reports import CAMPAIGN
from sender.retry import RetryPolicy
from sender.rights import check_rights
from sender.schema import check_schema
from sender.settings import RunSettings
from sender.stopping import FORCED_EXIT_CODE, Patience
from sender.store import PostgresStore, StoreConfig
from sender.telemetry.logs import LogObserver, close_logging

_START_PATIENCE_S: Final = 30.0
_START_AGAIN_S: Final = 0.5
_CLAIM_S: Final = 0.25
_LAST_COUNT_S: Final = 10.0
_SPARE_S: Final = 0.5
_SPARE_FILES: Final = 64

_BUG_CODE: Final = 1
_BUG: Final = "an error of the sender's own, told on standard error"
_FORCED: Final = "a signal asked to stop, and it could not be done in time: ended by force"

type Watch = Callable[[TargetStore, Traffic], Coroutine[Any, Any, None]]


def main(settings: RunSettings, watch: Watch | None = None) -> int:
    """Run the campaign to an end; returns the process's exit code. `watch` looks on, to draw.

    Raises:
        ConfigurationError: schema or campaign are wrong (exit code 78).
        DatabaseUnavailable: the database did not answer at the start (exit code 1).
    """
    stamina.instrumentation.set_on_retry_hooks([])
    _raise_file_limit(settings.send_concurrency)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(settings, LogObserver(), watch))


async def run(settings: RunSettings, observer: Observer, watch: Watch | None = None) -> int:
    """Run the campaign under signals and deadline; see `main`."""
    stop = Stop()
    patience = Patience(stop, settings.shutdown_grace_s, lambda: _last_words(begun))
    begun = _Begun(settings, observer, stop, time.monotonic(), watch, patience)
    patience.watch_signals()
    observer(
        RunStarted(
            settings.campaign_id,
            version("sender"),
            settings.describe(),
            pipeline_config(settings).repeats_at_most,
        )
    )
    try:
        return await _run(begun)
    except SenderError as error:
        begun.end(error.exit_code, str(error), None, None)
        raise
    except Exception as error:
        begun.end(_BUG_CODE, f"{_BUG} ({type(error).__name__})", None, None)
        raise
    finally:
        patience.ignore_signals()


def _last_words(begun: "_Begun") -> None:
    """The process is about to be ended by force, out of another thread."""
    begun.end(FORCED_EXIT_CODE, _FORCED, None, None)
    close_logging(_SPARE_S)


async def _run(begun: "_Begun") -> int:
    settings, stop = begun.settings, begun.stop
    async with AsyncExitStack() as stack:
        store = await _unless_stopped(stop, lambda: _open(settings, stack))
        if store is None:
            return begun.decide_end(None, None)
        provider = _open_provider(settings)
        stack.push_async_callback(provider.aclose)
        pipeline = Pipeline(store, provider, begun.observer, pipeline_config(settings), stop)
        _settle_memory()
        await _work(pipeline, store, begun)
        counts = await _last_count(store, pipeline, begun.patience)
        return begun.decide_end(counts, pipeline.traffic)


@dataclass(slots=True)
class _Begun:
    """A run that has begun, and how it tells its end, once."""

    settings: RunSettings
    observer: Observer
    stop: Stop
    at: float
    watch: Watch | None
    patience: Patience
    _is_told: bool = False

    def decide_end(self, counts: Counts | None, traffic: Traffic | None) -> int:
        """End by the contract's order of exit codes."""
        reason = self.stop.reason or StopReason.DONE
        code, why = exit_code.decide(reason, counts, self.settings.failed_ratio_limit)
        detail = f" ({self.stop.detail})" if self.stop.detail else ""
        return self.end(code, why + detail, counts, traffic)

    def end(self, code: int, why: str, counts: Counts | None, traffic: Traffic | None) -> int:
        """Tell the end, unless it was told."""
        if self._is_told:
            return code
        self._is_told = True
        done = traffic or Traffic()
        self.observer(
            RunEnded(
                campaign=self.settings.campaign_id,
                exit_code=code,
                reason=why,
                counts=counts,
                requests=done.requests,
                accepted=done.accepted,
                refused_writes=done.refused_writes,
                seconds=time.monotonic() - self.at,
            )
        )
        return code


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
    give_up_at = time.monotonic() + _START_PATIENCE_S
    await _patiently(lambda: _check(dsn, settings.campaign_id, give_up_at), give_up_at)
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
    if not await _patiently(store.open_campaign, give_up_at):
        raise CampaignError(
            f"CAMPAIGN_ID: campaign {settings.campaign_id} has no rows in campaign_targets"
        )
    return store


async def _check(dsn: str, campaign: str, give_up_at: float) -> None:
    connection = await connect(dsn, max(0.0, give_up_at - time.monotonic()))
    connection.prepare_threshold = None  # few statements, and a pooler may be in between
    async with connection, naming_holders(connection, "then start it again"):
        async with briefly(connection):
            await check_schema(connection)
        await check_rights(connection)
        async with briefly(connection):  # the store would wait as long, and not know for whom
            await connection.execute(CAMPAIGN, {"campaign": campaign})


async def _patiently[T](step: Callable[[], Coroutine[Any, Any, T]], give_up_at: float) -> T:
    """Repeat a step of the start while the database is away, recovers, or takes no writes yet.

    Raises:
        DatabaseUnavailable: it still was when the time was up.
    """
    while True:
        try:
            return await step()
        except TableLocked:
            if time.monotonic() >= give_up_at:
                raise
        except (StoreUnavailable, psycopg.Error) as error:
            passes = isinstance(error, StoreUnavailable) or is_transient(error)
            if not passes:
                raise
            if time.monotonic() >= give_up_at:
                why = str(error) if isinstance(error, StoreUnavailable) else describe(error)
                raise DatabaseUnavailable(f"the database went away at the start ({why})") from error
        await asyncio.sleep(_START_AGAIN_S)


def _open_provider(settings: RunSettings) -> Provider:
    return open_provider(
        settings.mail_provider,
        url=_secret(settings.mail_url),
        api_key=_secret(settings.mail_api_key),
        campaign_id=settings.campaign_id,
        connect_timeout_s=settings.mail_connect_timeout_s,
        read_timeout_s=settings.mail_read_timeout_s,
        concurrency=settings.send_concurrency,
    )


async def _unless_stopped[T](stop: Stop, begin: Callable[[], Coroutine[None, None, T]]) -> T | None:
    """The result, or None if a signal came first."""
    result: T | None = None
    try:
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await stop.claiming.wait()
                group.cancel_scope.cancel()

            group.start_soon(watch)
            result = await begin()
            group.cancel_scope.cancel()
    except* Exception as errors:  # noqa: BLE001 - every error, as its own
        raise _first(errors) from None
    return result


def _settle_memory() -> None:
    """Keep what the start made out of every later collection."""
    gc.collect()
    gc.freeze()


def _raise_file_limit(concurrency: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < concurrency + _SPARE_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _secret(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()


# --- stop -----------------------------------------------------------------------------------------


async def _work(pipeline: Pipeline, store: TargetStore, begun: _Begun) -> None:
    """Run the pipeline under deadline and grace; of several errors the first is raised."""
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(begun.patience.keep_deadline, begun.at + begun.settings.deadline_s)
            group.start_soon(begun.patience.keep_grace)
            if begun.watch:
                group.start_soon(begun.watch, store, pipeline.traffic)
            await pipeline.run()
            group.cancel_scope.cancel()
    except* Exception as errors:  # noqa: BLE001 - every error, as its own
        raise _first(errors) from None


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    """The first error in nested groups: one is what a person can act on."""
    first = errors.exceptions[0]
    if isinstance(first, ExceptionGroup):
        return _first(cast("ExceptionGroup[Exception]", first))
    return first


async def _last_count(
    store: PostgresStore, pipeline: Pipeline, patience: Patience
) -> Counts | None:
    """Count the ledger, if there is time and somebody to ask."""
    if pipeline.health.is_away or patience.stop.working.is_set():
        return None
    with anyio.move_on_after(min(_LAST_COUNT_S, patience.left_s - _SPARE_S)):
        with suppress(StoreUnavailable):
            return await store.counts()
    return None
