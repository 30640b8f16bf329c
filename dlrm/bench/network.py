"""`bench.network`: joins the workers by links of a set rate, so that networks are measured.

Each worker gets a Linux network namespace. Two are joined by a veth pair, more by veth pairs into a
bridge in a namespace of its own; `tc tbf` limits what leaves each end of each pair, so a worker
sends and receives at most at the rate, both at once, as by a full-duplex cable to a switch.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from data.errors import UserError
from dlrm.stop import SIGNALS, handlers_restored
from dlrm.worker import RankNetwork, WorkerContext

LOOPBACK = "loopback"
_INTERFACE = "dlrm0"
_NAMESPACES = Path("/var/run/netns")
# Process number, its start in clock ticks (numbers are used again), a random part, what it is for.
_NAME = re.compile(r"dlrm-(\d+)-(\d+)-[0-9a-f]{8}-(\d+|bridge)")
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
# TCP hands over up to 64 KiB at once, to be cut later; with the headers of its 46 parts that's what
# tbf wants a token for. A smaller burst has every packet cut by the processor.
_LEAST_BURST_BYTES = 72 * 1024
# tbf is woken by a timer, on busy cores that much too late; with a burst it catches up. A shorter
# one loses a tenth of 2.5 Gbit/s on two busy cores.
_BURST_S = 500e-6
# What waits at an end beyond that is dropped.
_QUEUE_S = 20e-3
_RATE = re.compile(r"(\d+(?:\.\d+)?)(mbit|gbit)")
_BITS_PER_S = {"mbit": 10**6, "gbit": 10**9}
_LEAST_BITS_PER_S, _MOST_BITS_PER_S = 10**6, 400 * 10**9

_EXCHANGE_S = 0.05
_LEAST_EXCHANGED_BYTES, _MOST_EXCHANGED_BYTES = 2**17, 64 * 2**20
_NUM_EXCHANGES = 5
_NUM_ROUND_TRIPS = 100
_REACHED = 0.8


def rate_bits_per_s(name: str) -> int | None:
    """The rate that a value of `bench.network` names, in bits/s; None of loopback.

    Raises:
        UserError: for a name that says no rate, or one out of range.
    """
    if name == LOOPBACK:
        return None
    found = _RATE.fullmatch(name)
    bits = round(float(found[1]) * _BITS_PER_S[found[2]]) if found else 0
    if not _LEAST_BITS_PER_S <= bits <= _MOST_BITS_PER_S:
        raise UserError(
            f"bench.network={name}: must be loopback, or a rate from 1mbit to 400gbit such as "
            "1gbit, 10gbit or 100mbit"
        )
    return bits


def check_processes(name: str, world_size: int) -> None:
    """Refuses a network that nothing would travel over.

    Raises:
        UserError: naming the keys.
    """
    if world_size == 1 and rate_bits_per_s(name) is not None:
        raise UserError(
            f"bench.network={name}: one process sends nothing. Set launch.nproc=2 or more, or "
            "bench.network=loopback"
        )


def why_no_namespaces() -> str | None:
    """Why this process can't make network namespaces, and what to do; None: it can, it seems."""
    if sys.platform != "linux":
        return "a limited network needs Linux's network namespaces. Run it on Linux"
    for tool in ("ip", "tc"):
        if _find(tool) is None:
            return f"`{tool}` isn't installed. Install iproute2 (apt-get install iproute2)"
    effective = _effective_capabilities()
    missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        return (
            "making network namespaces needs root, and this process lacks "
            f"{' and '.join(missing)}. Run it as root (a container: with these capabilities)"
        )
    return None


@dataclass(frozen=True)
class Network:
    """What joins the workers.

    Attributes:
        name: the value of `bench.network`.
        rate_bytes_per_s: at most so much leaves, and so much reaches, a worker; None: no limit.
        ranks: where each worker has its end of it, for `launch`; None: where the launcher is.
    """

    name: str
    rate_bytes_per_s: float | None = None
    ranks: tuple[RankNetwork, ...] | None = None


@contextmanager
def open_network(name: str, world_size: int) -> Iterator[Network]:
    """The network of `bench.network` for the workers of this process, gone again afterwards.

    It is gone after an error, SIGINT, SIGTERM and SIGHUP as well; what an earlier process has left
    that was killed is removed here.

    Args:
        name: `loopback`, or a rate: `1gbit`.
        world_size: number of workers, all on this host.

    Raises:
        UserError: with what to do where there can be no such network: no root, no `ip` or `tc`,
            another system than Linux, or a kernel that doesn't go along.
        SystemExit: on SIGTERM or SIGHUP, inside.
    """
    bits_per_s = rate_bits_per_s(name)
    if bits_per_s is None:
        yield Network(name)
        return
    check_processes(name, world_size)
    reason = why_no_namespaces()
    if reason is not None:
        raise UserError(f"bench.network={name}: {reason}, or set bench.network=loopback")
    prefix = f"dlrm-{os.getpid()}-{_start_ticks(os.getpid())}-{secrets.token_hex(4)}-"
    with _signals_raise():
        try:
            _remove_leftovers()
            try:
                ranks = _make(prefix, world_size, bits_per_s)
            except _CommandFailed as error:
                raise UserError(
                    f"bench.network={name}: {error}. Is this kernel built with network namespaces, "
                    "veth, bridge and sch_tbf, and may this container use them? Run it where they "
                    "are, or set bench.network=loopback"
                ) from None
            yield Network(name, bits_per_s / 8, ranks)
        finally:
            _ignore_signals()
            _remove(path.name for path in _namespaces() if path.name.startswith(prefix))


# ------------------------------------------------------------------------------- what it comes to


@dataclass(frozen=True)
class LinkFigures:
    """What a network comes to.

    Attributes:
        measured_bytes_per_s: what each rank sends over gloo while it receives as much; payload,
            without headers.
        all_to_all_bytes_per_s: the same through gloo's all-to-all. That starts sending before it
            tells its peers that it is ready to receive; the word then waits behind what is sent,
            so that a link carries large messages one way at a time, at half its rate.
        round_trip_us: of one byte from rank 0 to rank 1 and back over gloo: the least of many,
            since cores that are busy make the others longer.
    """

    measured_bytes_per_s: float
    all_to_all_bytes_per_s: float
    round_trip_us: float


def measure_link(context: WorkerContext) -> LinkFigures:
    """Measures what joins the ranks; all call it, within their process group, and all get the same.

    Takes about a second on any network from 100 Mbit/s on.
    """
    assert context.world_size > 1, "one rank sends nothing"
    context.heartbeat.beat(0, "link")
    round_trip_us = _round_trip_us(context.rank)
    num_peers = context.world_size - 1
    num_bytes = _LEAST_EXCHANGED_BYTES
    # The first also sets up and warms caches.
    while (
        _exchange_s(context, num_bytes, _send_and_receive) < _EXCHANGE_S
        and 2 * num_bytes * num_peers <= _MOST_EXCHANGED_BYTES
    ):
        num_bytes *= 2
    rates = []
    for exchange in (_send_and_receive, _all_to_all):
        times_s = [_exchange_s(context, num_bytes, exchange) for _ in range(_NUM_EXCHANGES)]
        rates.append(num_bytes * num_peers / statistics.median(times_s))
    figures = [*rates, round_trip_us]
    dist.broadcast_object_list(figures)
    return LinkFigures(*figures)


def network_figures(network: Network, link: LinkFigures | None) -> dict[str, Any]:
    """For result.json: the name, the set and the measured rate, and what to know about them.

    Args:
        network: what was set.
        link: what was measured; None: nothing was.
    """
    rate = network.rate_bytes_per_s
    figures: dict[str, Any] = {"name": network.name, "rate_bytes_per_s_set": rate}
    figures |= dict.fromkeys(LinkFigures.__dataclass_fields__) if link is None else asdict(link)
    note = None
    if rate is not None and link is not None and link.measured_bytes_per_s < _REACHED * rate:
        share = link.measured_bytes_per_s / rate
        note = (
            f"only {share:.0%} of the set rate was reached: the processors, which carry the "
            "packets, too, are slower than the link"
        )
    return figures | {"note": note}


def describe_network(figures: dict[str, Any]) -> str:
    """One line of at most 92 characters for the user, of `network_figures`."""
    measured, rate = figures["measured_bytes_per_s"], figures["rate_bytes_per_s_set"]
    parts = [] if rate is None else [f"{_mega(rate)} MB/s set"]
    if measured is not None:
        unit = " MB/s" if rate is None else ""
        slow = "" if figures["note"] is None else " (CPU-bound)"
        parts.append(f"{_mega(measured)}{unit} reached{slow}")
        parts.append(
            f"{_mega(figures['all_to_all_bytes_per_s'])} by all-to-all; "
            f"round trip {figures['round_trip_us']:,.0f} µs"
        )
    return ": ".join([figures["name"], *([", ".join(parts)] if parts else [])])


def _mega(number: float) -> str:
    return f"{number / 1e6:,.{0 if number >= 1e8 else 1}f}"


def read_sent_bytes(interfaces: str) -> int:
    """Bytes that interfaces have sent since they exist, link-level headers and all.

    Args:
        interfaces: names in the network namespace of this process, separated by commas, as
            GLOO_SOCKET_IFNAME has them.
    """
    # Not /sys/class/net: it shows the namespace that it was mounted in. A line here is the name, a
    # colon, 8 counts of what was received and 8 of what was sent, bytes first (proc(5)).
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): found.split() for name, _, found in (x.partition(":") for x in lines)}
    return sum(int(counts[name][8]) for name in interfaces.split(","))


def _exchange_s(
    context: WorkerContext, num_bytes: int, exchange: Callable[[list[Tensor], list[Tensor]], None]
) -> float:
    """Seconds until so many bytes went from each rank to each other; the slowest rank's.

    None goes from a rank to itself: that is no network.
    """
    sizes = [0 if rank == context.rank else num_bytes for rank in range(context.world_size)]
    received, sent = ([torch.zeros(size, dtype=torch.uint8) for size in sizes] for _ in range(2))
    dist.barrier()
    start_s = time.perf_counter()
    exchange(received, sent)
    seconds = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _send_and_receive(received: list[Tensor], sent: list[Tensor]) -> None:
    works = [dist.irecv(part, rank) for rank, part in enumerate(received) if part.numel()]
    works += [dist.isend(part, rank) for rank, part in enumerate(sent) if part.numel()]
    for work in works:
        assert work is not None
        work.wait()


def _all_to_all(received: list[Tensor], sent: list[Tensor]) -> None:
    splits = [part.numel() for part in received]
    dist.all_to_all_single(torch.cat(received), torch.cat(sent), splits, splits)


def _round_trip_us(rank: int) -> float:
    """The least, as rank 0 finds it; other ranks' figures mean nothing."""
    byte = torch.zeros(1, dtype=torch.uint8)
    times_s = []
    for _ in range(_NUM_ROUND_TRIPS):
        start_s = time.perf_counter()
        if rank == 0:
            dist.send(byte, 1)
            dist.recv(byte, 1)
        elif rank == 1:
            dist.recv(byte, 0)
            dist.send(byte, 0)
        times_s.append(time.perf_counter() - start_s)
    dist.barrier()
    return min(times_s) * 1e6


# ------------------------------------------------------------------------------------- namespaces


class _CommandFailed(Exception):
    """`ip` or `tc` has failed; the message has the command and its words."""


def _effective_capabilities() -> int:
    found = re.search(r"CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text())
    return int(found[1], 16) if found else 0


def _find(tool: str) -> str | None:
    """Where it is; users' PATH often lacks the folders that have it."""
    return shutil.which(
        tool, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    )


def _run(tool: str, *arguments: object) -> None:
    command = [_find(tool) or tool, *map(str, arguments)]
    # In a session of its own: Ctrl-C at the terminal isn't for it.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        words = done.stderr.strip() or f"exit status {done.returncode}"
        raise _CommandFailed(f"`{' '.join([tool, *command[1:]])}` says: {words}")


def _make(prefix: str, world_size: int, bits_per_s: int) -> tuple[RankNetwork, ...]:
    """Makes namespaces and links; interfaces are made inside, so that they go with them."""
    names = [f"{prefix}{rank}" for rank in range(world_size)]
    for name in names:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
    if world_size == 2:
        _make_pair(names[0], _INTERFACE, names[1], _INTERFACE)
    else:
        bridge = f"{prefix}bridge"
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "bridge0", "type", "bridge", "mcast_snooping", 0)
        _bring_up(bridge, "bridge0")
        for rank, name in enumerate(names):
            _make_pair(name, _INTERFACE, bridge, f"port{rank}")
            _run("ip", "-n", bridge, "link", "set", f"port{rank}", "master", "bridge0")
            _limit(bridge, f"port{rank}", bits_per_s)
            _bring_up(bridge, f"port{rank}")
    for rank, name in enumerate(names):
        address = f"10.0.{(rank + 1) // 256}.{(rank + 1) % 256}/16"
        _run("ip", "-n", name, "address", "add", address, "dev", _INTERFACE)
        _limit(name, _INTERFACE, bits_per_s)
        _bring_up(name, _INTERFACE)
    return tuple(RankNetwork(str(_NAMESPACES / name), _INTERFACE) for name in names)


def _make_pair(namespace: str, interface: str, other: str, other_interface: str) -> None:
    one = ("link", "add", interface, "netns", namespace, "type", "veth")
    _run("ip", *one, "peer", "name", other_interface, "netns", other)


def _limit(namespace: str, interface: str, bits_per_s: int) -> None:
    burst_bytes = max(_LEAST_BURST_BYTES, round(bits_per_s / 8 * _BURST_S))
    rule = ("tbf", "rate", f"{bits_per_s}bit", "burst", burst_bytes, "latency", f"{_QUEUE_S}s")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *rule)


def _bring_up(namespace: str, interface: str) -> None:
    # Without addresses of IPv6: their upkeep would be counted among what the ranks send.
    if Path("/proc/self/net/if_inet6").exists():
        _run("ip", "-n", namespace, "link", "set", interface, "addrgenmode", "none")
    _run("ip", "-n", namespace, "link", "set", interface, "up")


def _remove_leftovers() -> None:
    """Removes namespaces whose process is gone: it was killed."""
    _remove(path.name for path in _namespaces() if not _is_used(path.name))


def _is_used(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is None or _start_ticks(int(found[1])) == int(found[2])


def _start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot (field 22, see proc(5)); None if it is
    gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _namespaces() -> list[Path]:
    return list(_NAMESPACES.glob("dlrm-*"))


def _remove(names: Iterable[str]) -> None:
    """Removes namespaces, and with them their interfaces; goes on where one stays."""
    for name in names:
        try:
            _run("ip", "netns", "delete", name)
        except _CommandFailed as error:
            if (_NAMESPACES / name).exists():  # Nobody else has removed it meanwhile.
                warnings.warn(f"a network namespace stays: {error}", stacklevel=2)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, where they would end the process on the spot."""

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handlers_restored() as saved:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if saved[number] is signal.SIG_DFL:
                signal.signal(number, stop)
        yield


def _ignore_signals() -> None:
    """Until `_signals_raise` ends: what cleans up isn't to be stopped again."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
