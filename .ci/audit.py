"""Looks what is installed with `sender`, as locked, up among the known vulnerabilities.

Exit code 1 if there is one, or the look-up itself is broken. Without a way to where they are
published it says so and ends with 0: whoever has no network may still run everything else.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCKED = ("export", "--quiet", "--frozen", "--no-dev", "--no-emit-project", "--extra", "demo")
ONE_ANSWER_S, ALL_OF_IT_S = 10, 120
# The last line of pip-audit where nobody answered, or somebody else did.
AWAY = re.compile(r"(Connect|Proxy|SSL|HTTP|Service|JSONDecode)\w*Error|Time(d )?out|not connect")

type Service = tuple[str, ...]
type Found = list[dict[str, Any]]


def services(osv_url: str | None) -> Sequence[Service]:
    """Whom to ask, one after another until one knows; for a test only its own."""
    if osv_url:
        return [("osv", "--osv-url", osv_url)]
    return [("osv",), ("pypi",)]


def asked(service: Service, requirements: Path) -> Found | None:
    """What a service knows of each requirement; None if it did not answer for all of them."""
    command = [
        *(sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes"),
        *("--requirement", requirements, "--cache-dir", requirements.with_name("cache")),
        *("--format", "json", "--progress-spinner", "off", "--timeout", str(ONE_ANSWER_S)),
        *("--vulnerability-service", *service),
    ]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=ALL_OF_IT_S, check=False
        )
        found: Found = json.loads(ran.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        return told(service, f"no end within {ALL_OF_IT_S} s")
    except json.JSONDecodeError:
        last = ran.stderr.strip().rpartition("\n")[2]
        if not AWAY.search(last):
            raise SystemExit(f"pip-audit is broken:\n{ran.stderr}") from None
        return told(service, last)
    # A mirror of the index that has packages only answers 404, which pip-audit lets pass.
    unknown = [one["name"] for one in found if "skip_reason" in one]
    if unknown:
        return told(service, f"{len(unknown)} of {len(found)} could not be looked up")
    return found


def told(service: Service, why: str) -> None:
    print(f"{service[0]}: {why}")


def vulnerabilities(found: Found) -> Iterator[str]:
    for one in found:
        for known in one["vulns"]:
            better = ", ".join(known["fix_versions"]) or "no release yet"
            yield f"{one['name']} {one['version']}: {known['id']}; corrected in {better}"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--osv-url", help="ask only here")
    osv_url = arguments.parse_args().osv_url
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        uv = os.environ.get("UV", "uv")  # `uv run` tells where it is itself
        subprocess.run([uv, *LOCKED, "--output-file", requirements], cwd=ROOT, check=True)
        answers = (asked(service, requirements) for service in services(osv_url))
        found = next((answer for answer in answers if answer is not None), None)
    if found is None:
        print("NOT LOOKED UP: the known vulnerabilities could not be reached from here")
        return 0
    if known := list(vulnerabilities(found)):
        print("\n".join(known))
        return 1
    print(f"{len(found)} locked packages, no known vulnerability")
    return 0


if __name__ == "__main__":
    sys.exit(main())
