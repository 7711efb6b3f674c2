"""`python -m bench BENCH [--json] [--repeats N]` measures; `show FILE` prints what was kept."""

import argparse
import json
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.measure import machine, rounded

BENCHES = ("rate", "cpu", "memory", "database", "migration", "start")


def main() -> None:
    """Measure and print: a table for people, or JSON to be kept, shown and drawn."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="bench", required=True)
    for name in BENCHES:
        module = import_module(f"bench.{name}")
        command = commands.add_parser(name, description=module.__doc__)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("--repeats", type=int, default=5, help="the median of them counts")
        module.add_arguments(command)
    show = commands.add_parser("show", description="The tables of JSON that was kept.")
    show.add_argument("file", type=Path, nargs="+")
    args = parser.parse_args()
    if args.bench == "show":
        for file in args.file:
            print(_shown(json.loads(file.read_text())), end="\n\n")
        return
    found = {
        "bench": args.bench,
        "command": "python -m bench " + shlex.join(sys.argv[1:]),
        "machine": machine(),
        "repeats": args.repeats,
        "result": import_module(f"bench.{args.bench}").measure(args),
    }
    print(json.dumps(rounded(found), indent=1) if args.json else _shown(found))


def _shown(found: dict[str, Any]) -> str:
    about = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    tables = import_module(f"bench.{found['bench']}").table(found["result"])
    return f"`{found['command']}`: median of {found['repeats']}; {about}\n\n{tables}"


if __name__ == "__main__":
    main()
