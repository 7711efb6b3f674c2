"""What a request costs through each HTTP transport, against a bare aiohttp loop.

    python bench/transport.py [--json] [--rounds 5] [--requests 1500] [--in-flight 1000]

Every figure is taken in a process of its own: CPU a request with 64 connections and no latency, and
the peak of resident memory with `--in-flight` requests waiting for their answers. CPU is given as a
ratio to bare aiohttp in the same round; the median of the rounds counts. A transport whose package
is not installed (httpx-aiohttp, pyreqwest) is left out. Both ends run on this machine.
"""

import argparse
import asyncio
import json
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import uvloop

CONNECTIONS = 64
KEY = "spring:123456"
BODY = b'{"to":"member-123456@example.org","member_id":123456,"template":"spring"}'
FIELDS = {"Content-Type": "application/json", "Idempotency-Key": KEY, "Authorization": "Bearer k"}
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n"
    b'{"id":"0123456"}'
)

type Post = Callable[[], Awaitable[object]]
type Opened = tuple[Post, Callable[[], Awaitable[object]]]


class Server(asyncio.Protocol):
    """Answers every request after `delay_s`; knows just enough HTTP for that."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head, found, rest = self._seen.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if len(rest) >= length:
            self._seen = b""
            asyncio.get_running_loop().call_later(self._delay_s, self._transport.write, ANSWER)


async def serve(listener: socket.socket, delay_s: float) -> None:
    """Run the server until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Server(delay_s), sock=listener, backlog=2048)
    await server.serve_forever()


async def bare_aiohttp(url: str, limit: int) -> Opened:
    """The yardstick: aiohttp alone, the answer read and parsed."""
    import aiohttp

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=30),
    )

    async def post() -> None:
        async with session.post(url, data=BODY, headers=FIELDS) as answer:
            json.loads(await answer.read())

    return post, session.close


async def provider(url: str, limit: int) -> Opened:
    """All of it: gate, clock, body, PlainClient, own transport, table of answers."""

    from sender.domain import Accepted, Lease, Target
    from sender.providers import open_provider

    opened = open_provider(
        "http",
        url=url,
        api_key="k",
        campaign_id="spring",
        connect_timeout_s=30,
        read_timeout_s=30,
        concurrency=limit,
    )

    target = Target(
        member_id=123456,
        email="member-123456@example.org",
        variables=None,
        attempts=0,
        unknowns=0,
        key_used_at=None,
        key_until=float("inf"),
        lease=cast("Lease", None),  # no provider looks at it
    )

    async def post() -> None:
        answer = await opened.send(target, lambda: True)
        if not isinstance(answer, Accepted):
            raise TypeError(answer)

    return post, opened.aclose


def _through(client: object, url: str) -> Opened:
    """`client.send(Request)` of any httpx.AsyncClient, the answer read and parsed."""
    import httpx

    assert isinstance(client, httpx.AsyncClient)
    parsed = httpx.URL(url)

    async def post() -> None:
        answer = await client.send(httpx.Request("POST", parsed, headers=FIELDS, content=BODY))
        json.loads(answer.content)

    return post, client.aclose


async def plain_client(url: str, limit: int) -> Opened:
    """Own transport behind `PlainClient.send`."""
    from sender.providers.client import PlainClient
    from sender.providers.transport import AiohttpTransport

    return _through(PlainClient(AiohttpTransport(limit=limit, keepalive_s=4)), url)


async def httpx_client(url: str, limit: int) -> Opened:
    """Own transport behind httpx's own `AsyncClient.send`."""
    import httpx

    from sender.providers.transport import AiohttpTransport

    return _through(httpx.AsyncClient(transport=AiohttpTransport(limit=limit, keepalive_s=4)), url)


async def httpx_alone(url: str, limit: int) -> Opened:
    """httpx with its own transport."""
    import httpx

    limits = httpx.Limits(max_connections=limit, max_keepalive_connections=limit)
    return _through(httpx.AsyncClient(limits=limits, timeout=30, trust_env=False), url)


async def httpx_aiohttp(url: str, limit: int) -> Opened:
    """The transport of the httpx-aiohttp package."""
    import aiohttp
    import httpx
    from httpx_aiohttp import AiohttpTransport

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=limit))
    return _through(httpx.AsyncClient(transport=AiohttpTransport(client=session), timeout=30), url)


async def pyreqwest(url: str, limit: int) -> Opened:
    """The httpx transport of pyreqwest (hyper, in threads of its own)."""
    import httpx
    from pyreqwest.client import ClientBuilder
    from pyreqwest.compatibility.httpx import HttpxTransport

    built = ClientBuilder().max_connections(limit).build()
    return _through(httpx.AsyncClient(transport=HttpxTransport(built), timeout=30), url)


CANDIDATES = {
    "aiohttp": (bare_aiohttp, "aiohttp"),
    "provider": (provider, "aiohttp"),
    "own transport, PlainClient.send": (plain_client, "aiohttp"),
    "own transport, AsyncClient.send": (httpx_client, "aiohttp"),
    "httpx-aiohttp, AsyncClient.send": (httpx_aiohttp, "httpx_aiohttp"),
    "pyreqwest, AsyncClient.send": (pyreqwest, "pyreqwest"),
    "httpx alone": (httpx_alone, "httpx"),
}


async def measure(name: str, url: str, requests: int, workers: int) -> dict[str, float]:
    """Send `requests` by `workers` workers; CPU a request in us and the peak of RSS in MB."""
    post, close = await CANDIDATES[name][0](url, workers)
    left = requests

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await post()

    await post()
    cpu, wall = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work())
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    await close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cpu_us": cpu / requests * 1e6, "per_s": requests / wall, "rss_mb": peak}


def in_own_process(*arguments: object) -> dict[str, float]:
    """One measurement in a fresh interpreter."""
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


class ServerProcess:
    """The server, in a process of its own, on a port of the kernel's choice."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def __enter__(self) -> str:
        with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
            fd = listener.fileno()
            command = [sys.executable, __file__, "--serve", str(fd), str(self._delay_s)]
            self._process = subprocess.Popen(command, pass_fds=[fd])
            return f"http://127.0.0.1:{listener.getsockname()[1]}/send"

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def compare(rounds: int, requests: int, in_flight: int) -> dict[str, dict[str, float]]:
    """Measure every candidate in turn, `rounds` times; then memory, once each."""
    names = [name for name, (_, package) in CANDIDATES.items() if find_spec(package)]
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with ServerProcess(0.0) as url:
        for _ in range(rounds):
            for name in names:
                count = requests // 10 if name == "httpx alone" else requests
                seen[name].append(in_own_process(name, url, count, CONNECTIONS))
    figures = {
        name: {
            "cpu_ratio": statistics.median(
                ours["cpu_us"] / base["cpu_us"]
                for ours, base in zip(runs, seen["aiohttp"], strict=True)
            ),
            "cpu_us": statistics.median(run["cpu_us"] for run in runs),
            "per_s": statistics.median(run["per_s"] for run in runs),
        }
        for name, runs in seen.items()
    }
    with ServerProcess(1.0) as url:
        for name in names:
            if name != "httpx alone":  # its pool would need minutes
                run = in_own_process(name, url, in_flight, in_flight)
                figures[name]["rss_mb"] = run["rss_mb"]
    return figures


def main() -> None:
    """Parse and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve(socket.socket(fileno=int(args.serve[0])), float(args.serve[1])))
    elif args.one:
        name, url, requests, workers = args.one
        print(json.dumps(uvloop.run(measure(name, url, int(requests), int(workers)))))
    else:
        figures = compare(args.rounds, args.requests, args.in_flight)
        if args.json:
            print(json.dumps(figures, indent=2))
            return
        print(f"{'':34}{'CPU':>7}{'us':>7}{'/s':>7}{'RSS MB':>8}")
        for name, row in figures.items():
            rss = f"{row['rss_mb']:8.0f}" if "rss_mb" in row else ""
            print(f"{name:34}{row['cpu_ratio']:6.2f}x{row['cpu_us']:7.0f}{row['per_s']:7.0f}{rss}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
