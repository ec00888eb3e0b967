"""Tests over RDMA on a machine without any: ``python3 tools/rdma_guest.py BINARY...`` runs them under a second kernel.

QEMU emulates a machine (no KVM, no network, nothing installed but QEMU itself) that boots Debian's kernel over this
machine's own files, read-only, with two pairs of Soft-RoCE devices, each on a cable of its own. The kernel and a
busybox are downloaded as packages and unpacked into ``build/rdma-guest``, never installed. What cannot be had is said
in a line that begins with ``not run:``, which the totals of CI count; the exit status is that of the tests, 0 if they
were not run.
"""

import argparse
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

CACHE = Path("build/rdma-guest")
KERNEL_META = "linux-image-amd64"
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "veth", "crc32_generic", "ib_uverbs", "rdma_rxe")
"""Loaded in the guest, behind what each needs. The CRC is one that Soft-RoCE asks for by name."""

FOLDERS = ("virtio", "9p", "netfs", "fscache", "overlayfs", "infiniband", "net", "crypto", "lib", "ipv4", "ipv6")
"""Of the kernel's modules; those that the ones above need are in there."""

MEMORY_MIB = 2048
BOOT_SECONDS_MAX = 240.0
BOOTS_MAX = 2
"""An emulated machine was once seen to stop while it started."""

SECONDS_MIN, SECONDS_MAX, SECONDS_PER_BOOT_SECOND = 1200.0, 2400.0, 40.0
"""For the tests, from when the guest is up: more on a machine where that took longer, within bounds."""

COMMAND_SECONDS_MAX = 300.0
NEEDED = ("qemu-system-x86_64", "apt-get", "dpkg-deb", "ip", "rdma")

INIT = """#!/bin/busybox sh
b=/bin/busybox
$b mkdir -p /proc /sys /dev /host /memory /merged
$b mount -t proc none /proc
$b mount -t sysfs none /sys
$b mount -t devtmpfs none /dev
for module in /modules/*; do $b insmod $module; done
options=trans=virtio,version=9p2000.L,msize=262144
$b mount -t 9p -o $options,ro,cache=loose host /host
$b mount -t tmpfs -o size=50% none /memory
$b mkdir /memory/changed /memory/work
$b mount -t overlay -o lowerdir=/host,upperdir=/memory/changed,workdir=/memory/work none /merged
for name in proc sys dev; do $b mount -o move /$name /merged/$name; done
for link in fd:fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do $b ln -s /proc/self/${link#*:} /merged/dev/${link%:*}; done
$b mkdir -p /merged/dev/shm /merged@JOB@
$b mount -t tmpfs -o mode=1777,size=75% none /merged/dev/shm
$b mount -t tmpfs none /merged/run
$b mount -t 9p -o $options,cache=none job /merged@JOB@
$b chroot /merged /bin/bash @JOB@/start </merged/dev/null >/merged/dev/console 2>&1
$b sync
$b poweroff -f
"""

START = """export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/
ulimit -l unlimited
# Soft-RoCE works in ksoftirqd; behind whoever polls, every message would wait for a tick.
for comm in /proc/[0-9]*/comm; do
    read -r name <$comm
    case $name in ksoftirqd*) pid=${comm#/proc/}; chrt -f -p 1 ${pid%/comm};; esac
done
# Both ends of a cable are in the one namespace that Soft-RoCE listens in. What one sends to the other would stay on
# the loopback, where it is dropped: so who the host itself is, is asked last.
cat >/run/cable <<'EOF'
# END up|down, and up again: what is down has lost its routes and neighbours.
end=end$1 net=10.97.$(($1 / 2)) mine=$(($1 % 2 + 1))
[ $2 = up ] || exec ip link set $end down
ip link set $end up
ip route replace $net.$((3 - mine)) dev $end src $net.$mine table $((50 + $1))
ip neigh replace $net.$((3 - mine)) lladdr $(</sys/class/net/end$(($1 ^ 1))/address) dev $end nud permanent
EOF
ip link set lo up
for end in 0 2; do ip link add end$end mtu 4500 type veth peer name end$((end + 1)); done
for end in 0 1 2 3; do
    net=10.97.$((end / 2)) mine=$((end % 2 + 1))
    ip addr add $net.$mine/24 dev end$end
    ip rule add pref $((10 + end)) iif lo from $net.$mine to $net.$((3 - mine)) lookup $((50 + end))
    echo 1 >/proc/sys/net/ipv4/conf/end$end/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/end$end/rp_filter
done
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
for end in 0 1 2 3 0 1 2 3; do bash /run/cable $end up; done
ip rule add pref 100 lookup local
ip rule del pref 0
for end in 0 1 2 3; do rdma link add rxe$end type rxe netdev end$end; done
[ -d /sys/class/infiniband/rxe3 ] || exit 1
: >@JOB@/ready
cd @FOLDER@
bash @JOB@/command >@JOB@/output 2>&1 </dev/null
echo $? >@JOB@/status
"""


FOUND = """failed=0
found=$(PYTHONPATH=../.. @PYTHON@ -c '
from pegaflow.p2p.devices import choose, find_ports
print(*(port.name for port in choose(find_ports(), None)))')
[ "$found" = "rxe0:1 rxe1:1 rxe2:1 rxe3:1" ] || { echo "ports chosen by themselves: $found"; failed=1; }"""
"""What an engine would use, by sysfs alone."""

DEVICES = (
    "export PEGAFLOW_RDMA_DEVICES=rxe0,rxe1 PEGAFLOW_RDMA_CABLES=rxe0,rxe1,rxe2,rxe3 PEGAFLOW_RDMA_SWITCH=/run/cable "
    "PEGAFLOW_RDMA_FORGETFUL=1"
)
"""What the tests use: the client's and the server's, in turns, what takes a cable out (``END up|down``), and that
Soft-RoCE may say that a READ is done of which no byte has come."""


def cases() -> list[str]:
    """How many of each fault, if ``PEGAFLOW_PEER_CASES`` says so."""
    wanted = os.environ.get("PEGAFLOW_PEER_CASES")
    return [f"export PEGAFLOW_PEER_CASES={int(wanted)}"] if wanted else []


class CannotRun(Exception):
    """Why there is no guest."""


def run(*command: str, folder: Path | None = None) -> str:
    """Standard output of a program that has to succeed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, check=False, timeout=COMMAND_SECONDS_MAX
        )
    except subprocess.TimeoutExpired:
        raise CannotRun(f"{' '.join(command[:3])}: not done after {COMMAND_SECONDS_MAX:.0f} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
        raise CannotRun(f"{' '.join(command[:3])}: {last}")
    return done.stdout


def fetched(package: str) -> Path:
    """The file of a package, downloaded."""
    for old in CACHE.glob(f"{package}_*.deb"):
        old.unlink()
    run("apt-get", "download", "-q", package, folder=CACHE)
    found = list(CACHE.glob(f"{package}_*.deb"))
    if not found:
        raise CannotRun(f"apt-get downloaded no {package}")
    return found[0]


def members(package: Path) -> Iterator[tuple[PurePosixPath, IO[bytes]]]:
    """The regular files in a package."""
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as unpacker,
        tarfile.open(fileobj=unpacker.stdout, mode="r|") as archive,
    ):
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield PurePosixPath(member.name), file


def plain(name: str, data: bytes) -> bytes:
    """A module, unpacked."""
    return lzma.decompress(data) if name.endswith(".xz") else data


def in_order(modules: dict[str, bytes]) -> list[str]:
    """Names of the wanted modules and of all that they need, what is needed first."""
    order: list[str] = []

    def add(name: str) -> None:
        if name in order or name not in modules:
            return  # or built in
        needs = re.search(rb"depends=([^\0]*)\0", modules[name])
        for needed in needs[1].decode().split(",") if needs else ():
            add(needed.replace("-", "_"))
        order.append(name)

    for name in MODULES:
        add(name)
    if "rdma_rxe" not in order:
        raise CannotRun("this kernel has no Soft-RoCE")
    return order


def archive_entry(name: str, mode: int, data: bytes = b"") -> bytes:
    """One file or folder of an initramfs."""
    path = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)


def prepare(job: Path) -> None:
    """Write kernel and initramfs into ``CACHE``; what was unpacked before is used again. Raises ``CannotRun``."""
    try:
        write_images(job)
    except (OSError, tarfile.TarError, lzma.LZMAError, LookupError) as error:
        raise CannotRun(f"the packages of kernel and busybox cannot be unpacked: {error}") from error


def write_images(job: Path) -> None:
    """As ``prepare``, with whatever a damaged package or a full disk raises."""
    kernel, kept = CACHE / "vmlinuz", CACHE / "modules"
    CACHE.mkdir(parents=True, exist_ok=True)
    if not (CACHE / "ready").exists():
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        named = re.search(r"Depends: (linux-image-[0-9]\S*)", run("apt-cache", "depends", KERNEL_META))
        if not named:
            raise CannotRun(f"{KERNEL_META} names no kernel: is this Debian, and were its lists fetched?")
        modules: dict[str, bytes] = {}
        for path, file in members(fetched(named[1])):
            if path.name.startswith("vmlinuz-"):
                kernel.write_bytes(file.read())
            elif ".ko" in path.suffixes and not set(FOLDERS).isdisjoint(path.parts):
                name = path.name.partition(".ko")[0].replace("-", "_")
                modules[name] = plain(path.name, file.read())
        for number, name in enumerate(in_order(modules)):
            (kept / f"{number:02}-{name}.ko").write_bytes(modules[name])
        busybox = [file.read() for path, file in members(fetched("busybox-static")) if path.name == "busybox"]
        (CACHE / "busybox").write_bytes(busybox[0])
        for package in CACHE.glob("*.deb"):
            package.unlink()
        (CACHE / "ready").touch()
    entries = [archive_entry(folder, 0o40755) for folder in ("bin", "modules")]
    entries.append(archive_entry("bin/busybox", 0o100755, (CACHE / "busybox").read_bytes()))
    entries.append(archive_entry("init", 0o100755, INIT.replace("@JOB@", str(job)).encode()))
    entries += [archive_entry(f"modules/{one.name}", 0o100644, one.read_bytes()) for one in sorted(kept.iterdir())]
    (CACHE / "initramfs").write_bytes(b"".join([*entries, archive_entry("TRAILER!!!", 0)]))


def machine(job: Path) -> list[str]:
    """QEMU's command line."""
    shares = []
    for tag, path, how in (("host", "/", ",readonly=on"), ("job", str(job), "")):
        shares += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap{how}"]
        shares += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return [
        "qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2",
        "-m", str(MEMORY_MIB), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-serial", f"file:{job}/console", *shares,
        "-kernel", str(CACHE / "vmlinuz"), "-initrd", str(CACHE / "initramfs"),
        "-append", "console=ttyS0 quiet panic=-1 mitigations=off nokaslr random.trust_cpu=on",
    ]  # fmt: skip


def boot(job: Path) -> None:
    """Run the guest until it has ended. Raises ``CannotRun`` if it does not come up."""
    ready = job / "ready"
    for _ in range(BOOTS_MAX):
        started, seconds_max = time.monotonic(), BOOT_SECONDS_MAX
        up = False
        with subprocess.Popen(machine(job), stdin=subprocess.DEVNULL) as guest:
            while guest.poll() is None:
                if not up and ready.exists():
                    seconds = time.monotonic() - started
                    seconds_max = min(max(SECONDS_MIN, seconds * SECONDS_PER_BOOT_SECOND), SECONDS_MAX)
                    up, started = True, time.monotonic()
                    print(f"the guest is up after {seconds:.0f} s, and has {seconds_max:.0f} s", flush=True)
                if time.monotonic() > started + seconds_max:
                    guest.kill()
                    print(f"the guest was stopped after {seconds_max:.0f} s", flush=True)
                    break
                time.sleep(0.2)
        if ready.exists():
            return
    console = (job / "console").read_text(errors="replace").splitlines() if (job / "console").exists() else []
    raise CannotRun(f"the guest does not come up: {console[-1] if console else 'it says nothing'}")


def main() -> int:
    """Run, print what the tests print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("binaries", nargs="+", type=Path, help="of tests, run in rust/peers")
    binaries = [one.resolve() for one in parser.parse_args().binaries]
    job = Path(tempfile.mkdtemp(prefix="rdma-guest-"))
    try:
        missing = [name for name in NEEDED if shutil.which(name) is None]
        if missing:
            raise CannotRun(f"{', '.join(missing)} missing")
        prepare(job)
        python = shlex.quote(sys.executable)
        tests = [f"{shlex.quote(str(one))} --test-threads 1 || failed=1" for one in binaries]
        (job / "command").write_text(
            "\n".join([FOUND.replace("@PYTHON@", python), DEVICES, *cases(), *tests, "exit $failed", ""])
        )
        folder = shlex.quote(os.path.abspath("rust/peers"))
        (job / "start").write_text(START.replace("@JOB@", str(job)).replace("@FOLDER@", folder))
        boot(job)
        output = job / "output"
        print(output.read_text(errors="replace") if output.exists() else "the guest ran nothing", flush=True)
        status = job / "status"
        if not status.exists():
            print("the guest ended before its tests did", flush=True)
            return 1
        return int(status.read_text())
    except CannotRun as reason:
        print(f"not run: tests over RDMA ({reason})", flush=True)
        return 0
    finally:
        shutil.rmtree(job, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
