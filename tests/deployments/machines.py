"""Two machines and a laptop on this one: namespaces with networks, processes, homes of their own.

Needs root, `unshare` and `ip`; several need OpenSSH's server, too. A machine has this one's disk,
but its own home and `/tmp`; `ray stop` ends the processes of its machine only.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SSHD = Path("/usr/sbin/sshd")
TOOLS, TOOLS_OF_SSH = ("unshare", "nsenter", "ip"), ("ssh", "ssh-keygen", "rsync")

HOME = "/mnt"
"""Root's home on a machine; Python may be installed in root's real one."""

BOOT = """
set -e
mount --make-rprivate /
mount --bind {folder}/home {home}
sed 's#:/root:#:{home}:#' /etc/passwd >{folder}/passwd
mount --bind {folder}/passwd /etc/passwd
mount --bind {folder}/run /run
mkdir -p /run/sshd
ip link set lo up
touch {folder}/up
mount --bind {folder}/tmp /tmp
exec sleep infinity
"""


def can_be_made() -> bool:
    """Whether this machine can hold one."""
    return os.geteuid() == 0 and all(map(shutil.which, TOOLS))


def can_be_reached() -> bool:
    """Whether it can hold several that reach each other by SSH."""
    return can_be_made() and SSHD.is_file() and all(map(shutil.which, TOOLS_OF_SSH))


class Machine:
    """One of them. folder: holds its `home` and `tmp`."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self.folder, self._process = folder, process
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def run(self, command: str, timeout: float = 300) -> str:
        """What a command prints in a login shell there. Raises if it fails."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-p", "-m", "-r", "-w"]
        env = {"HOME": HOME, "PATH": os.environ["PATH"], "TERM": "dumb", "USER": "root"}
        done = subprocess.run(
            [*enter, "bash", "-c", f"cd; {command}"],
            capture_output=True, text=True, timeout=timeout, check=False, env=env,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def kill(self) -> None:
        """Pulls the plug: every process there is gone at once."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(30)


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """One machine, without a network yet."""
    for name in ("home", "tmp", "run"):
        (folder / name).mkdir(parents=True)
    process = subprocess.Popen(
        ["unshare", "-n", "-m", "-p", "-f", "--mount-proc", "--kill-child",
         "bash", "-c", BOOT.format(folder=folder, home=HOME)]
    )  # fmt: skip
    try:
        while not (folder / "up").exists():
            assert process.poll() is None, "no namespaces could be made"
            time.sleep(0.05)
        yield Machine(folder, process)
    finally:
        process.kill()
        process.wait(30)


def connect(machines: list[Machine], subnet: str) -> None:
    """Wires all to the first: addresses `subnet`.1 and up."""
    first, *others = machines
    for number, other in enumerate(others, 2):
        near, far = f"w{number}", "eth0"
        subprocess.run(
            ["ip", "link", "add", near, "netns", str(first.pid), "type", "veth",
             "peer", "name", far, "netns", str(other.pid)],
            check=True,
        )  # fmt: skip
        first.run(
            f"ip addr replace {subnet}.1/32 dev lo; ip addr add {subnet}.1 peer {subnet}.{number}"
            f" dev {near}; ip link set {near} up; echo 1 >/proc/sys/net/ipv4/ip_forward"
        )
        other.run(
            f"ip addr add {subnet}.{number}/24 dev {far}; ip link set {far} up;"
            f" ip route replace {subnet}.0/24 via {subnet}.1 dev {far} onlink;"
            # leads nowhere: Ray takes a machine's address to be the one towards the world
            f" ip route add default via {subnet}.1 dev {far} onlink"
        )


def open_ssh(machines: list[Machine], key: Path) -> None:
    """Runs an SSH server on each, for whoever has the key."""
    for one in machines:
        home = one.folder / "home" / ".ssh"
        home.mkdir(mode=0o700)
        (home / "authorized_keys").write_text(key.with_suffix(".pub").read_text())
        one.run(
            "ssh-keygen -q -t ed25519 -N '' -f /tmp/host && chmod 700 ~ &&"
            f" {SSHD} -h /tmp/host -o PidFile=none -o StrictModes=no -o PermitRootLogin=yes"
        )


@contextmanager
def laptop_and_machines(folder: Path, count: int, subnet: str) -> Iterator[list[Machine]]:
    """A laptop with the key `~/.ssh/id_ed25519`, and so many machines that take it."""
    with ExitStack() as stack:
        names = ["laptop", *(f"machine{i}" for i in range(count))]
        made = [stack.enter_context(machine(folder / name)) for name in names]
        connect(made, subnet)
        made[0].run("mkdir -m 700 .ssh && ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519")
        open_ssh(made[1:], folder / "laptop" / "home" / ".ssh" / "id_ed25519")
        yield made


PIP = """#!{python}
import pathlib, sys
assert sys.argv[1:] == ["install", "--quiet", "--disable-pip-version-check", "--editable", "."]
pathlib.Path("{site}/editable.pth").write_text(str(pathlib.Path.cwd()))
"""


def prepare_environment(one: Machine) -> None:
    """Makes `~/.flide` as `node_setup.sh` would leave it before its `pip install --editable`: with
    this environment's packages, and a pip that installs the folder it is called in and no more.
    """
    root = one.folder / "home"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(root / ".flide")], check=True
    )
    (site,) = (root / ".flide" / "lib").glob("python*/site-packages")
    here = Path(sys.executable).parent
    (own,) = (here.parent / "lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(str(own))
    python = Path(HOME, ".flide/bin/python")
    for name in ("ray", "serve"):
        script = (here / name).read_text().split("\n", 1)[1]
        (root / ".flide" / "bin" / name).write_text(f"#!{python}\n{script}")
    inside = Path(HOME) / site.relative_to(root)
    (root / ".flide" / "bin" / "pip").write_text(PIP.format(python=python, site=inside))
    for name in ("ray", "serve", "pip"):
        (root / ".flide" / "bin" / name).chmod(0o755)
