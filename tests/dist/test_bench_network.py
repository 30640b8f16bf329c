"""`bench.network`: limited links between the workers, made, measured and gone again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.errors import UserError
from dlrm.bench import network
from dlrm.bench.network import (
    LinkFigures,
    Network,
    describe_network,
    network_figures,
    open_network,
    rate_bits_per_s,
    why_no_namespaces,
)
from dlrm.config import BenchConfig, BenchRun, LaunchConfig
from dlrm.launch import launch
from tests.commands import TINY_DATA, dlrm
from tests.dist import entries

NAMESPACES = Path("/var/run/netns")


def ip(*arguments: str) -> str:
    """Runs `ip`; what it prints."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def limits_in(namespace: str) -> str:
    """What `tc` tells of its interfaces."""
    command = ["tc", "-n", namespace, "qdisc"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def our_namespaces() -> list[str]:
    """Those of this process."""
    return [path.name for path in NAMESPACES.glob(f"dlrm-{os.getpid()}-*")]


@pytest.fixture(scope="module")
def namespaces() -> Iterator[None]:
    """Skips where this machine has no such networks, as plain commands find it."""
    reason = why_no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    name = f"dlrm-{os.getpid()}-probe"
    link = ("link", "add", "probe0", "netns", name, "type", "veth", "peer", "name", "probe1")
    limit = ("qdisc", "add", "dev", "probe0", "root", "tbf", "rate", "1gbit", "burst", "80000")
    try:
        ip("netns", "add", name)
        ip(*link, "netns", name)
        ip("-n", name, "link", "add", "probe2", "type", "bridge")
        subprocess.run(
            ["tc", "-n", name, *limit, "limit", "80000"], check=True, capture_output=True
        )
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{error.cmd}: {error.stderr}")
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    yield
    assert not our_namespaces()


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "bits_per_s"),
    [
        ("loopback", None),
        ("1gbit", 1_000_000_000),
        ("10gbit", 10_000_000_000),
        ("100mbit", 100_000_000),
        ("2.5gbit", 2_500_000_000),
    ],
)
def test_a_name_is_a_rate_in_powers_of_ten(name: str, bits_per_s: int | None) -> None:
    assert rate_bits_per_s(name) == bits_per_s


@pytest.mark.parametrize("name", ["", "fast", "1Gbit", "1", "gbit", "-1gbit", "0mbit", "500gbit"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"^bench.network=.*: must be loopback, or a rate"):
        BenchConfig(network=name)


def test_one_process_needs_no_network() -> None:
    with pytest.raises(UserError, match=r"bench.network=1gbit: one process sends nothing.*nproc=2"):
        BenchRun(bench=BenchConfig(network="1gbit"))


def no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_effective_capabilities", lambda: 1 << 21)


def no_tc(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"ip": "/sbin/ip"}
    monkeypatch.setattr(shutil, "which", lambda tool, path: found.get(tool))


def no_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        (no_root, "needs root, and this process lacks CAP_NET_ADMIN. Run it as root"),
        (no_tc, "`tc` isn't installed. Install iproute2"),
        (no_linux, "needs Linux's network namespaces"),
    ],
)
def test_what_this_machine_lacks_is_told(
    lacks: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks is no_root:  # Which is looked at last.
        monkeypatch.setattr(shutil, "which", lambda tool, path: f"/sbin/{tool}")
    lacks(monkeypatch)
    with pytest.raises(UserError) as caught, open_network("1gbit", 2):
        pass
    message = str(caught.value)
    assert message.startswith("bench.network=1gbit: ")
    assert reason in message
    assert message.endswith("or set bench.network=loopback")


def test_loopback_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    no_root(monkeypatch)
    with open_network("loopback", 2) as opened:
        assert opened == Network("loopback")


def test_the_command_refuses_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(network, "why_no_namespaces", lambda: "no root. Run it as root")
    arguments = ("launch.nproc=2", "bench.network=1gbit", "hydra.run.dir=run", "data.cache=cache")
    assert dlrm("bench", "train", *TINY_DATA, *arguments) == 2
    assert "dlrm: bench.network=1gbit: no root" in capfd.readouterr().err
    assert not Path("run/measurements.jsonl").exists()
    assert not Path("cache").exists(), "data were prepared for nothing"
    assert json.loads(Path("run/result.json").read_text())["status"].startswith("failed: ")


# -------------------------------------------------------------------------------- made and gone


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_end_is_limited_and_all_is_gone_after_a_failure(
    world_size: int, namespaces: None
) -> None:
    before = ip("-br", "link")
    ends = 2 if world_size == 2 else 2 * world_size  # Also those at the bridge.

    def fail_within() -> None:
        with open_network("1gbit", world_size) as opened:
            assert opened.ranks is not None
            assert len(opened.ranks) == world_size
            assert opened.rate_bytes_per_s == 125e6
            assert len(our_namespaces()) == (2 if world_size == 2 else world_size + 1)
            limits = "".join(map(limits_in, our_namespaces()))
            assert limits.count("qdisc tbf") == limits.count("rate 1Gbit") == ends
            assert ip("-br", "link") == before, "an interface among the machine's own"
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail_within()
    assert not our_namespaces()


def test_a_kernel_that_refuses_is_told_and_nothing_stays(
    namespaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = network._run

    def no_tbf(tool: str, *arguments: object) -> None:
        run(tool, *("tbx" if argument == "tbf" else argument for argument in arguments))

    monkeypatch.setattr(network, "_run", no_tbf)
    with (
        pytest.raises(UserError, match=r"^bench.network=1gbit: `tc .*` says: .*loopback$"),
        open_network("1gbit", 2),
    ):
        pass
    assert not our_namespaces()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_leave_nothing(number: signal.Signals, namespaces: None) -> None:
    before = signal.getsignal(number)
    error = KeyboardInterrupt if number is signal.SIGINT else SystemExit
    interrupt = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
    signal.signal(number, interrupt)
    try:
        with pytest.raises(error), open_network("1gbit", 2):
            os.kill(os.getpid(), number)
        assert not our_namespaces()
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)


def test_leftovers_of_a_killed_run_are_removed_and_no_others(namespaces: None) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        alive = f"dlrm-{process.pid}-{network._start_ticks(process.pid)}-00000000-0"
        # The number of a process that was killed, since used by another.
        dead = f"dlrm-{process.pid}-1-00000000-bridge"
        names = {alive, dead, f"dlrm-{process.pid}-somebody-elses"}
        for name in names:
            ip("netns", "add", name)
        try:
            with open_network("1gbit", 2):
                found = {path.name for path in NAMESPACES.glob(f"dlrm-{process.pid}-*")}
            assert found == names - {dead}
        finally:
            process.kill()
            for path in NAMESPACES.glob(f"dlrm-{process.pid}-*"):
                ip("netns", "delete", path.name)


# --------------------------------------------------------------------------------- what travels


def test_the_interface_counts_what_a_rank_sends(namespaces: None, tmp_path: Path) -> None:
    """Headers and acknowledgements are less than 5 %. What is sent again, because a busy machine
    was slow to acknowledge it, only adds: the least of three is taken."""
    num_bytes = 300_000
    with open_network("100mbit", 2) as opened:
        found = launch(
            entries.send_bytes,
            (num_bytes,),
            LaunchConfig(nproc=2, num_threads=1, timeout_s=60),
            tmp_path,
            networks=opened.ranks,
        )
    interfaces, sent_bytes, link = found["interfaces"], found["sent_bytes"], found["link"]
    assert all(names == ["dlrm0", "lo"] for names in interfaces), "the machine's own are in sight"
    for rank, counts in enumerate(sent_bytes):
        # Unequal on purpose: a rank's own bytes, not another's.
        assert min(counts) == pytest.approx((rank + 1) * num_bytes, rel=0.05)
    assert link.measured_bytes_per_s > 0
    assert link.all_to_all_bytes_per_s > 0
    assert link.round_trip_us > 0


@pytest.mark.parametrize(
    ("rate", "reached", "text"),
    [
        (125e6, 117e6, "1gbit: 125 MB/s set, 117 reached, 58.5 by all-to-all; round trip 90 µs"),
        (125e6, 60e6, "1gbit: 125 MB/s set, 60.0 reached (CPU-bound), 30.0 by all-to-all; round"),
        (None, 117e6, "1gbit: 117 MB/s reached, 58.5 by all-to-all; round trip 90 µs"),
    ],
)
def test_the_figures_say_what_was_reached(rate: float | None, reached: float, text: str) -> None:
    figures = network_figures(Network("1gbit", rate), LinkFigures(reached, reached / 2, 90.0))
    assert figures["rate_bytes_per_s_set"] == rate
    assert figures["measured_bytes_per_s"] == reached
    assert ("processors" in (figures["note"] or "")) == (reached == 60e6)
    assert describe_network(figures).startswith(text)


def test_a_line_is_short_enough_for_a_terminal() -> None:
    figures = network_figures(Network("100gbit", 12.5e9), LinkFigures(1.2345e9, 5.4321e8, 12345.6))
    assert len(describe_network(figures)) <= 92
    assert network_figures(Network("loopback"), None)["measured_bytes_per_s"] is None
    assert describe_network(network_figures(Network("loopback"), None)) == "loopback"
