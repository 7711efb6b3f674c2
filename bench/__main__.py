"""`python -m bench rate|cpu|memory|database|start [--json] [--repeats N]`."""

import argparse
import json
import sys
from importlib import import_module

from bench.measure import machine, rounded

BENCHES = ("rate", "cpu", "memory", "database", "start")


def main() -> None:
    """Measure and print: a table for people, or JSON for `bench.plot`."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="bench", required=True)
    for name in BENCHES:
        module = import_module(f"bench.{name}")
        command = commands.add_parser(name, description=module.__doc__)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("--repeats", type=int, default=5, help="the median of them counts")
        module.add_arguments(command)
    args = parser.parse_args()
    module = import_module(f"bench.{args.bench}")
    found = {
        "command": "python -m bench " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "repeats": args.repeats,
        "result": module.measure(args),
    }
    print(json.dumps(rounded(found), indent=1) if args.json else module.table(found["result"]))


if __name__ == "__main__":
    main()
