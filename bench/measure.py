"""What all benches share: medians, what /proc tells of a process, and the machine.

Linux only. CPU of a process that sleeps is exact to the nanosecond (`cpu_ns`), of a whole server
to a hundredth of a second (`family_cpu_s`), which counts children that have ended too.
"""

import os
import platform
import re
import resource
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PACKAGES = ("aiohttp", "anyio", "httpx", "psycopg", "uvloop")
_SIGNIFICANT = 4


def say(text: str) -> None:
    """Tell a person who waits; figures go to standard output, this does not."""
    print(text, file=sys.stderr, flush=True)


# --- figures --------------------------------------------------------------------------------------


def median(runs: Sequence[Any]) -> Any:
    """The median of each number in equal structures of dicts and lists; anything else as it is."""
    first = runs[0]
    if isinstance(first, Mapping):
        return {key: median([run[key] for run in runs]) for key in first}
    if isinstance(first, list):
        return [median(parts) for parts in zip(*runs, strict=True)]
    numbers = [run for run in runs if isinstance(run, int | float) and not isinstance(run, bool)]
    if len(numbers) < len(runs):
        return first if all(run == first for run in runs) else None
    return statistics.median(numbers)


def rounded(value: Any) -> Any:
    """The same with four significant digits: the rest is noise."""
    if isinstance(value, Mapping):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.{_SIGNIFICANT}g}")
    return value


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def most_in_any_second(times: Sequence[float]) -> int:
    """Most events in any sliding second; `times` in order."""
    most = first = 0
    for last, at in enumerate(times):
        while times[first] <= at - 1.0:
            first += 1
        most = max(most, last - first + 1)
    return most


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table as Markdown, line by line."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


# --- processes ------------------------------------------------------------------------------------


def _stat(pid: int) -> list[str]:
    # Behind the name, which may hold anything: state, parent, ... utime, stime, cutime, cstime.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, all its threads."""
    return sum(map(int, _stat(pid)[11:13])) * _TICK_S


def cpu_ns(pid: int) -> int:
    """CPU nanoseconds of the first thread of a process; exact while it sleeps."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def family_cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children, those that have ended included."""
    total = sum(map(int, _stat(pid)[11:15])) * _TICK_S
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            total += cpu_s(int(child))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def parent(pid: int) -> int:
    """The process that started `pid`."""
    return int(_stat(pid)[1])


def memory_mib(pid: int | str = "self") -> dict[str, float]:
    """Resident memory of a process now and at its peak."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB", status, re.MULTILINE))
    return {"now": int(found["VmRSS"]) / 1024, "peak": int(found["VmHWM"]) / 1024}


def own_cpu_s() -> float:
    """CPU seconds of this process, all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def pin(pid: int, core: int) -> None:
    """Let a process run on one core only, where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(pid, {cores[core % len(cores)]})


# --- the machine ----------------------------------------------------------------------------------


def machine() -> dict[str, object]:
    """What figures depend on; nothing that names a machine or a person."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu[1] if cpu else platform.machine(),
        "memory_gib": round(int(memory[1]) / 1024**2, 1) if memory else None,
        "linux": platform.release().split("-")[0],
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
