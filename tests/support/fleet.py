"""A SuperLink and its SuperNodes as processes on loopback, started as a user would start them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

BIN = Path(sys.executable).parent
APP = Path(__file__).parents[2] / "deploy" / "flower"
NAME = "test"  # of the SuperLink in Flower's config


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def write_node_key(path: Path) -> None:
    """Write a pair of keys as `ssh-keygen -t ecdsa -b 384 -N '' -f PATH` does."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")


class Fleet:
    """The processes of one deployment; they write below `folder`."""

    def __init__(self, folder: Path, kits: Path) -> None:
        self.folder, self.kits, self.port, self.stream_port = folder, kits, free_port(), free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.marks: dict[str, int] = {}
        home = folder / "flwr"
        home.mkdir()
        ca = kits / "server" / "ca.pem"
        (home / "config.toml").write_text(
            f'[superlink.{NAME}]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{ca}"\n'
        )
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
        self.environment = {  # without the gRPC variables that glasu set in this process
            **inherited,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }

    def start(self, name: str, *words: object) -> None:
        """Start a process in its own process group, so its children can be ended with it."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [str(BIN / str(words[0])), *map(str, words[1:])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
        """Wait for something to become true while all processes live."""
        deadline = time.monotonic() + seconds
        while not condition():
            logs = {name: self.log(name)[-3000:] for name in self.running}
            assert time.monotonic() < deadline, (what, logs)
            ended = [name for name, process in self.running.items() if process.poll() is not None]
            assert not ended, (what, ended, logs)
            time.sleep(0.1)

    def flwr(self, *words: object, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Run one command against the SuperLink."""
        return subprocess.run(
            [str(BIN / "flwr"), *map(str, words)],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )

    def superlink(self) -> None:
        """Start the SuperLink with the certificate of the server's kit, and wait until it answers."""
        kit = self.kits / "server"
        self.start(
            "superlink",
            *("flower-superlink", "--host", "127.0.0.1", "--port", self.port),
            *("--ssl-certfile", kit / "certificate.pem", "--ssl-keyfile", kit / "key.pem"),
            *("--ssl-ca-certfile", kit / "ca.pem", "--enable-supernode-auth"),
            "--disable-runtime-dependency-installation",
        )
        self.wait(self._answers, "the SuperLink answers")

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def register(self, name: str) -> None:
        """Register a node's keys at the SuperLink."""
        done = self.flwr("supernode", "register", self.folder / f"{name}.pub", NAME)
        assert done.returncode == 0, done.stdout + done.stderr

    def supernode(self, name: str, **changes: str) -> None:
        """Start a party's SuperNode with its own config and kit."""
        own = {
            "party": str(self.folder / "parties" / name),
            "kit": str(self.kits / name),
            "server": f"localhost:{self.stream_port}",
            "out": str(self.folder / "runs" / name),
            **changes,
        }
        self.start(
            name,
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}"),
            *("--root-certificates", self.kits / "server" / "ca.pem"),
            *("--auth-supernode-private-key", self.folder / name),
            *("--host", "127.0.0.1", "--port", free_port()),
            *("--node-config", " ".join(f"{key}='{value}'" for key, value in own.items())),
        )

    def run(self, session: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Start the app by `flwr run`, and return its log when it has ended."""
        return self.flwr("run", APP, NAME, "--stream", "--run-config", self._run_config(session, changes))

    def begin(self, session: str, **changes: str) -> str:
        """Start the app by `flwr run`, and return the number of the run."""
        self.marks = {name: len(self.log(name)) for name in self.running}
        done = self.flwr("run", APP, NAME, "--run-config", self._run_config(session, changes))
        found = re.search(r"started run (\d+)", done.stdout)
        assert found, done.stdout + done.stderr
        return found[1]

    def since(self, name: str) -> str:
        """Return the output of a process since `begin`."""
        return self.log(name)[self.marks[name] :]

    def commands(self) -> list[str]:
        """Return the glasu commands that run here now."""
        lines = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
        started = "glasu.integrations.flower.child_process"
        return [line for line in lines if started in line and str(self.folder) in line]

    def _run_config(self, session: str, changes: dict[str, str]) -> str:
        own = {
            "session": session,
            "run": str(self.folder / "run.toml"),
            "listen": f"127.0.0.1:{self.stream_port}",
            "kit": str(self.kits / "server"),
            "out": str(self.folder / "runs" / "server"),
            **changes,
        }
        return " ".join(f"{key}='{value}'" for key, value in own.items())

    def stop(self) -> None:
        """End all processes and their children, SuperNodes first."""
        for process in reversed(self.running.values()):
            process.terminate()
        deadline = time.monotonic() + 15
        while any(process.poll() is None for process in self.running.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.running.clear()
        shutil.rmtree(self.folder / "flwr", ignore_errors=True)
