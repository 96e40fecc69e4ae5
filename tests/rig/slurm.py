"""A Slurm cluster of one node on loopback, as a place that a real SkyPilot can launch on: no account, no cloud.

    python tests/rig/slurm.py up FOLDER      start it; prints the environment to run sky with
    python tests/rig/slurm.py down FOLDER    end what `up` started in that folder

Real: munge, slurmctld, slurmd, sshd, SkyPilot. Not real: the GPU, a device file that Slurm counts and nobody opens. Needs
root, Debian's slurm-wlm, munge, openssh-server, rsync, curl, and uv from PyPI beside this Python.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = (
    "munged",
    "mungekey",
    "slurmctld",
    "slurmd",
    "scontrol",
    "sshd",
    "ssh",
    "ssh-keygen",
    "rsync",
    "curl",
    "unshare",
)
CLUSTER = "loopback"
HOURLY_USD = 1.10
SBIN = "/usr/sbin:/usr/local/sbin:/sbin"


def missing() -> str | None:
    """Why the rig cannot run here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    lacking = [name for name in PROGRAMS if which(name) is None] + ([] if uv() else ["uv"])
    return f"not installed: {', '.join(lacking)}" if lacking else None


def which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}")


def uv() -> Path | None:
    path = Path(sys.executable).parent / "uv"
    return path if path.exists() else None


class Rig:
    """The cluster in ``folder``. Each daemon has a pid file there, so that ``down`` ends only what ``up`` began."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.home = self.folder / "home"
        self.run = self.folder / "run"

    def environment(self) -> dict[str, str]:
        """What SkyPilot's client and server run with: their own home folder and port."""
        return {
            "HOME": str(self.home),
            "SKYPILOT_API_SERVER_LOCAL_PORT": (self.folder / "api-port").read_text(),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "BURST_CANARY": "without-gpu",  # the GPU is a device file that nobody opens
        }

    def ssh(self, cluster: str) -> list[str]:
        """ssh for one of SkyPilot's clusters; OpenSSH takes ``~`` from the password database, not from HOME."""
        key = self.home / ".sky/generated/ssh-keys" / f"{cluster}.key"
        return ["ssh", "-F", str(self.home / ".ssh/config"), "-o", f"IdentityFile={key}", "-o", "LogLevel=ERROR"]

    def up(self) -> None:
        self.folder.mkdir(parents=True)
        os.chmod(self.folder, 0o755)
        for name in ("etc", "run", "state", "spool", "bin", "home/.ssh", "home/.slurm", "home/.sky/catalogs/v8/common"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "api-port").write_text(str(free_port()))
        self._munge()
        self._slurm()
        self._sshd()
        self._skypilot()

    def down(self) -> None:
        if (self.folder / "api-port").exists():
            subprocess.run(
                [Path(sys.executable).parent / "sky", "api", "stop"],
                env={**os.environ, **self.environment()},
                capture_output=True,
                check=False,
            )
        for name in ("slurmd", "slurmctld", "sshd", "munged"):
            self._end(name)

    def _end(self, name: str) -> None:
        try:
            pid = int((self.run / f"{name}.pid").read_text())
            os.kill(pid, signal.SIGTERM)
        except (OSError, ValueError):
            return
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists():
                return
            time.sleep(0.1)

    def _munge(self) -> None:
        """One authentication daemon for the machine; it is started only where none answers."""
        if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
            return
        if not Path("/etc/munge/munge.key").exists():
            run("mungekey", "-c")
        run("install", "-d", "-o", "munge", "-g", "munge", "-m", "755", "/run/munge")
        pid = Path("/run/munge/burst-rig.pid")
        run("su", "-s", "/bin/sh", "munge", "-c", f"{which('munged')} --force --pid-file={pid}")
        shutil.copyfile(pid, self.run / "munged.pid")

    def _slurm(self) -> None:
        host = socket.gethostname()
        device = self.folder / "gpu0"
        os.mknod(device, 0o20666, os.makedev(1, 3))
        (self.folder / "etc/gres.conf").write_text(f"NodeName={host} Name=gpu Type=A100 File={device}\n")
        controller, node = free_port(), free_port()
        settings = {
            "ClusterName": "burst",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": controller,
            "SlurmdPort": node,
            "SlurmUser": "root",
            "MpiDefault": "none",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "ReturnToService": 2,
            "SlurmctldPidFile": self.run / "slurmctld.pid",
            "SlurmdPidFile": self.run / "slurmd.pid",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool",
            "SlurmctldLogFile": self.folder / "slurmctld.log",
            "SlurmdLogFile": self.folder / "slurmd.log",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core_Memory",
            "AccountingStorageType": "accounting_storage/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "GresTypes": "gpu",
            "SlurmdParameters": "config_overrides",  # the node is as large as SkyPilot's smallest request, said and not measured
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        lines.append(f"NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=65536 Gres=gpu:A100:1 State=UNKNOWN")
        lines.append(f"PartitionName=gpu Nodes={host} Default=YES MaxTime=120 State=UP")
        (self.folder / "etc/slurm.conf").write_text("\n".join(lines) + "\n")
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "etc/slurm.conf")}
        self._stand_ins()
        run("slurmctld", env=environment)
        # mounted over curl in slurmd's own mount namespace: login shells reset PATH, and the machine keeps its curl
        mount = f"mount --bind {self.folder}/bin/curl {which('curl')} && exec {which('slurmd')}"
        run("unshare", "-m", "sh", "-c", mount, env=environment)
        wait_until(lambda: "idle" in output("sinfo", "-h", "-o", "%t", env=environment), "the Slurm node to be idle")

    def _stand_ins(self) -> None:
        """What a node downloads when SkyPilot sets it up, answered from here: uv's installer, and Python 3.10 for it."""
        tools = self.folder / "bin"
        shutil.copyfile(str(which("curl")), tools / "curl.real")
        (tools / "curl").write_text(
            "#!/bin/bash\n"
            'for word in "$@"; do\n'
            "  case $word in *astral.sh/uv/*)\n"
            f'    echo \'mkdir -p "$UV_INSTALL_DIR" && cp {tools}/uv "$UV_INSTALL_DIR/uv"\'; exit 0;;\n'
            "  esac\n"
            "done\n"
            f'exec {tools}/curl.real "$@"\n'
        )
        (tools / "uv").write_text(
            "#!/bin/bash\n"
            "export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt\n"
            "words=()\n"
            f'for word in "$@"; do [ "$word" = 3.10 ] && word={sys.executable}; words+=("$word"); done\n'
            f'exec {uv()} "${{words[@]}}"\n'
        )
        for name in ("curl", "curl.real", "uv"):
            os.chmod(tools / name, 0o755)

    def _sshd(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        identity, host_key = self.home / ".ssh/id_ed25519", self.folder / "etc/host_key"
        for path in (identity, host_key):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path)
        authorized = self.folder / "etc/authorized_keys"
        shutil.copyfile(f"{identity}.pub", authorized)
        os.chmod(authorized, 0o600)
        port = free_port()
        options = {
            "ListenAddress": "127.0.0.1",
            "PermitRootLogin": "yes",
            "StrictModes": "no",
            "AuthorizedKeysFile": authorized,
            "PidFile": self.run / "sshd.pid",
            "SetEnv": f"SLURM_CONF={self.folder}/etc/slurm.conf",
            "Subsystem": "sftp internal-sftp",
        }
        flags = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        run(str(which("sshd")), "-f", "/dev/null", "-p", str(port), "-h", host_key, *flags)
        (self.home / ".slurm/config").write_text(
            f"Host {CLUSTER}\n  HostName 127.0.0.1\n  Port {port}\n  User root\n  IdentityFile {identity}\n"
            "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
        )

    def _skypilot(self) -> None:
        """A catalog, so that SkyPilot asks no network for one, and a price for the pretended GPU."""
        (self.home / ".sky/catalogs/v8/common/accelerators.csv").write_text('AcceleratorName,Clouds\nA100,"[]"\n')
        (self.home / ".sky/config.yaml").write_text(
            f"slurm:\n  pricing:\n    accelerators:\n      A100: {HOURLY_USD}\n"
        )


def run(program: str, *arguments: object, env: dict[str, str] | None = None) -> None:
    command = [which(program) or program, *map(str, arguments)]
    result = subprocess.run(command, env=env, text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise RuntimeError(f"{program} ended with {result.returncode}: {result.stderr.strip()[-500:]}")


def output(program: str, *arguments: str, env: dict[str, str]) -> str:
    return subprocess.run([program, *arguments], env=env, text=True, capture_output=True, check=False).stdout


def wait_until(condition, what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if len(sys.argv) != 3 or not re.fullmatch("up|down", sys.argv[1]):
        sys.exit(__doc__)
    rig = Rig(Path(sys.argv[2]))
    if sys.argv[1] == "down":
        rig.down()
    elif reason := missing():
        sys.exit(f"the rig cannot run here: {reason}")
    else:
        rig.up()
        print("\n".join(f"export {key}={value}" for key, value in rig.environment().items()))
