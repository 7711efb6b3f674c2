"""The strict fake mail provider, for the demo and the tests: inside a test, here, or apart.

Real HTTP, scripted faults, statistics as JSON. `FakeProvider` serves inside a running loop, `run`
serves in this process until a signal, `start_process` in a process of its own, which load needs.

    GET  /stats                     counters, see `fake_stats.Stats`
    POST /control                   {"outage": "503", "outage_s": 3, "latency_s": 0.1, ...}
    GET  /deliveries[?template=]    mails by member (without template: by template and member)
    GET  /requests[?member_id=]     [[monotonic time, key, status], ...]; status 0: left unanswered
    GET  /health
"""

import argparse
import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import IO, cast

import uvloop

from sender.dev.fake_options import FakeOptions
from sender.dev.fake_server import LOOPBACK, FakeProvider
from sender.errors import SenderError

__all__ = ["FakeOptions", "FakeProvider", "run", "serve", "start_process", "stop_process"]

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_LOOK_FOR_PARENT_S = 0.5
_MODULE = "sender.dev.fake_provider"


def serve(
    options: FakeOptions,
    *,
    host: str,
    port: int,
    on_ready: Callable[[FakeProvider], None],
    with_parent: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        options: how to behave.
        host: address to listen at.
        port: port to listen at, 0 for any free one.
        on_ready: called once, when connections are accepted.
        with_parent: end also when the process that started this one is gone.
    """
    uvloop.run(_serve(options, host, port, on_ready, with_parent=with_parent))


async def _serve(
    options: FakeOptions,
    host: str,
    port: int,
    on_ready: Callable[[FakeProvider], None],
    *,
    with_parent: bool,
) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    parent = os.getppid()

    def look_for_parent() -> None:
        if os.getppid() != parent:
            ended.set()
        loop.call_later(_LOOK_FOR_PARENT_S, look_for_parent)

    async with FakeProvider(options, host=host, port=port) as fake:
        on_ready(fake)
        if with_parent:
            look_for_parent()
        await ended.wait()


def run(options: FakeOptions, host: str, port: int, *, with_parent: bool = False) -> None:
    """Serve until SIGTERM or SIGINT; one line of JSON on stdout says where, once it is ready.

    Args:
        options: how to behave.
        host: address to listen at.
        port: port to listen at, 0 for any free one.
        with_parent: end also when the process that started this one is gone.
    """

    def tell(fake: FakeProvider) -> None:
        line = {"url": fake.url, "origin": fake.origin, "pid": os.getpid()}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    serve(options, host=host, port=port, on_ready=tell, with_parent=with_parent)


def start_process(
    options: FakeOptions | None = None, *, host: str = LOOPBACK, port: int = 0
) -> tuple[subprocess.Popen[bytes], str]:
    """Serve in a process of its own, which ends with this one at the latest.

    Args:
        options: how to behave.
        host: address to listen at.
        port: port to listen at, 0 for any free one.

    Returns:
        The process, to be ended by `stop_process`, and the URL where mails are posted.

    Raises:
        SenderError: it did not become ready.
    """
    text = json.dumps((options or FakeOptions()).to_json())
    command = [sys.executable, "-m", _MODULE, "--json-options", text, "--with-parent"]
    process = subprocess.Popen(
        [*command, "--host", host, "--port", str(port)], stdout=subprocess.PIPE
    )
    with cast("IO[bytes]", process.stdout) as stdout:
        ready, _, _ = select.select([stdout], [], [], START_TIMEOUT_S)
        line = stdout.readline() if ready else b""
    if not line:
        stop_process(process)
        raise SenderError(f"the fake provider did not start (exit code {process.returncode})")
    return process, cast("dict[str, str]", json.loads(line))["url"]


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """End a process of `start_process` and wait for its end.

    Args:
        process: the process; it may have ended already.
    """
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """`python -m sender.dev.fake_provider`."""
    parser = argparse.ArgumentParser(description="A strict fake mail provider.")
    parser.add_argument("--json-options", default="{}", help="FakeOptions as a JSON object")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--with-parent", action="store_true", help="end with the starting process")
    asked = parser.parse_args()
    try:
        values = cast("dict[str, object]", json.loads(cast("str", asked.json_options)))
        options = FakeOptions.from_json(values)
    except SenderError as error:
        sys.exit(str(error))
    run(
        options,
        cast("str", asked.host),
        cast("int", asked.port),
        with_parent=cast("bool", asked.with_parent),
    )


if __name__ == "__main__":
    main()
