"""The floor of a start: connect to PostgreSQL, ask it one thing, post one mail, and end."""

import asyncio
import sys

import aiohttp
import psycopg
import uvloop


async def main(dsn: str, url: str) -> None:
    """Do it."""
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await connection.execute("SELECT 1")
    mail = {"to": "member-1@example.org", "member_id": 1, "template": "spring"}
    async with aiohttp.ClientSession() as session:
        await session.post(url, json=mail, headers={"Idempotency-Key": "spring:1"})


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
