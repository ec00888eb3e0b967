"""How close do blocks of a peer come to the network itself, by TCP and by RDMA, and how soon does a peer answer?"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import _peer_queries
from benchmarks._common import Result, finish, median, note

BUILD = ("cargo", "build", "--release", "--locked", "--quiet", "--package", "pegaflow-peers", "--example", "peer-speed")
PROGRAM = Path("target/release/examples/peer-speed")
ROUNDS = 5
SECONDS = 3.0
BLOCKS, BLOCK_BYTES = 64, 2 << 20
"""By TCP: 128 MiB, more than a cache holds, as blocks of a pool are."""
NAMES = ("pegaflow-bench-a", "pegaflow-bench-b")
ADDRESSES = ("10.98.7.1", "10.98.7.2")
PORT = 7611
READ_BLOCKS, READ_BYTES, READ_DEPTH, READ_PORT = 16, 1 << 20, 16, 7612
"""By RDMA: one READ per block, as many at a time as ib_read_bw is told."""
RAW_PORT = 18515
"""Where ib_read_bw listens."""
AIMS = {"TCP": 0.85, "RDMA": 0.90}


def run(*command: str, seconds: float = 120) -> str:
    """Standard output of a program that has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr or done.stdout}")
    return done.stdout


@contextmanager
def started(*command: str, ready: str | None = None) -> Iterator[None]:
    """A program that runs meanwhile; entered once it has printed ``ready``."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if ready is None or ready in line:
                break
        else:
            raise SystemExit(f"{' '.join(command)} ended early")
        yield
    finally:
        try:
            # It ends with its client, and takes its pool along.
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()


@contextmanager
def two_hosts() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Two network namespaces and a cable between them; what to put before commands to run them there."""
    first, second = NAMES
    ends = ("pegabencha", "pegabenchb")
    for name in NAMES:
        subprocess.run(("ip", "netns", "del", name), capture_output=True)
    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", ends[0], "netns", first, "type", "veth", "peer", "name", ends[1], "netns", second)
        for name, end, address in zip(NAMES, ends, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            run("ip", "-n", name, "link", "set", end, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield ("ip", "netns", "exec", first), ("ip", "netns", "exec", second)
    finally:
        for name in NAMES:
            subprocess.run(("ip", "netns", "del", name), capture_output=True)


def ours(
    server: Sequence[str],
    client: Sequence[str],
    address: str,
    sizes: Sequence[int],
    rdma: Sequence[Sequence[str]] = ((), ()),
) -> dict[str, float]:
    """One run of the program on both sides; what the reader prints."""
    numbers = [str(size) for size in sizes]
    serve = (*server, str(PROGRAM), "serve", address, *numbers, *rdma[0])
    with started(*serve, ready="ready"):
        text = run(*client, str(PROGRAM), "read", address, *numbers, str(SECONDS), *rdma[1])
    answer: dict[str, float] = json.loads(text.splitlines()[-1])
    return answer


def iperf(server: Sequence[str], client: Sequence[str]) -> float:
    """Bytes per second of one stream of iperf3."""
    with started(*server, "iperf3", "--server", "--one-off", "--forceflush", ready="listening"):
        text = run(*client, "iperf3", "--client", ADDRESSES[1], "--json", "--time", str(int(SECONDS)), "--reverse")
    return float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 8


def wait_for_listener(port: int) -> None:
    """Until something on this machine listens on a TCP port; what it prints comes only when it ends."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
            if any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in table.open()):
                return
        time.sleep(0.05)
    raise SystemExit(f"Nothing listens on port {port}.")


def ib_read_bw(devices: Sequence[str], gid: str, address: str) -> float:
    """Bytes per second of READs by ib_read_bw, with the size and depth of ours."""
    options = ("-x", gid, "-F", "-s", str(READ_BYTES), "-t", str(READ_DEPTH), "-n", "64", "--report_gbits")
    server = subprocess.Popen(
        ("ib_read_bw", "-d", devices[1], *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_listener(RAW_PORT)
        text = run("ib_read_bw", "-d", devices[0], *options, address, seconds=300)
    finally:
        server.terminate()
        server.wait()
    rows = [line.split() for line in text.splitlines() if line.strip().startswith(str(READ_BYTES))]
    return float(rows[-1][3]) * 1e9 / 8


def in_turns(name: str, measure: Callable[[], dict[str, float]], raw: Callable[[], float], tool: str) -> list[Result]:
    """Both in turns, since machines have other work; medians, and the median of the ratios of each turn."""
    own, cpu, reference = [], [], []
    for turn in range(ROUNDS):
        note(f"{name}, {turn + 1} of {ROUNDS} ...")
        reference.append(raw())
        answer = measure()
        own.append(answer["bytes_per_s"])
        cpu.append(answer["cpu_s_per_gb"])
    ratios = [one / other for one, other in zip(own, reference, strict=True)]
    return [
        Result(f"{name}", median(own) / 1e9, "GB/s", tool, median(reference) / 1e9),
        Result(f"{name}, in the same turn", median(ratios), f"of {tool}", "aim", AIMS[name]),
        Result(f"{name}, CPU of the reader", median(cpu), "s/GB"),
    ]


def tcp() -> list[Result]:
    """One stream over a pair of virtual Ethernet devices, against iperf3."""
    with two_hosts() as (first, second):
        address = f"{ADDRESSES[1]}:{PORT}"
        sizes = (BLOCKS, BLOCK_BYTES)
        return in_turns("TCP", lambda: ours(second, first, address, sizes), lambda: iperf(second, first), "iperf3")


def rdma(devices: Sequence[str]) -> list[Result]:
    """READs between two devices of this machine, against ib_read_bw."""
    gid = os.environ.get("PEGAFLOW_RDMA_GID", "1")
    address = os.environ.get("PEGAFLOW_RDMA_ADDRESS", "127.0.0.1")
    options = ((devices[1], gid), (devices[0], gid, "1"))
    local, sizes = f"127.0.0.1:{READ_PORT}", (READ_BLOCKS, READ_BYTES)
    return in_turns(
        "RDMA",
        lambda: ours((), (), local, sizes, options),
        lambda: ib_read_bw(devices, gid, address),
        "ib_read_bw",
    )


def main() -> None:
    """Run, print, write. ``PEGAFLOW_RDMA_DEVICES=rxe0,rxe1`` names two devices that reach each other; ``queries``: only
    how soon a peer answers."""
    results = _peer_queries.measure()
    if sys.argv[1:] == ["queries"]:
        finish("peer_queries", results)
        return
    if sys.argv[1:] != ["--built"]:
        subprocess.run(BUILD, check=True)
    devices = [name for name in os.environ.get("PEGAFLOW_RDMA_DEVICES", "").split(",") if name]
    if len(devices) == 2:
        results += rdma(devices)
    else:
        note("no RDMA: name two devices by PEGAFLOW_RDMA_DEVICES")
    if shutil.which("iperf3") is None or os.geteuid() != 0:
        note("no TCP: iperf3 is not installed, or this user cannot make network namespaces")
    else:
        results += tcp()
    finish("peers", results)


if __name__ == "__main__":
    main()
