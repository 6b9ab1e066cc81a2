"""What the processes of an app on this machine use: of the engine, the Gateways and the proxies."""

import os
from pathlib import Path

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PARTS = {
    "engine": "ServeReplica:default:Engine",
    "gateway": "ServeReplica:default:Gateway",
    "proxy": "ProxyActor",
    "haproxy": "haproxy",
}
"""What the command lines of an app's processes hold, by part."""


def running_now() -> frozenset[int]:
    """Ids of all processes."""
    return frozenset(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit())


def processes(others: frozenset[int]) -> dict[str, list[int]]:
    """Process ids by part of the app that has been started since there were those others."""
    found: dict[str, list[int]] = {name: [] for name in PARTS}
    for process in running_now() - others:
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        line = words.replace(b"\0", b" ").decode(errors="replace")
        part = next((name for name, mark in PARTS.items() if mark in line), None)
        if part is not None:
            found[part].append(process)
    return found


def cpu_seconds(process: int) -> float:
    """Processor time that a process has used; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def resident_bytes(process: int | str = "self") -> int:
    """Resident memory of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
