# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``nvidia-cuda-mps-control``: the same command line, environment, pipe directory and commands, without a GPU.

``-d`` starts a daemon that listens in the pipe directory. Without arguments, the program sends the commands of standard input to it. In
addition to the real commands, ``fake-start-server PID``, ``fake-fault PID`` and ``fake-hang`` simulate clients and faults; after the last
the daemon replies no more. As the real daemon it appends five lines to its log for each command.
"""

import os
import socket
import sys
import time
from pathlib import Path
from typing import TextIO


def pipes() -> Path:
    return Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])


def main() -> int:
    return daemonize() if sys.argv[1:] == ["-d"] else talk()


def daemonize() -> int:
    """Start the daemon in its own session, and return when it listens."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(pipes() / "control"))
    except OSError:
        print("An instance of this daemon is already running")
        return 1
    listener.listen()
    if os.fork():
        return 0
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    (pipes() / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    with Path(os.environ["CUDA_MPS_LOG_DIRECTORY"], "control.log").open("a") as log:
        print(f"device {os.environ['CUDA_VISIBLE_DEVICES']}", file=log, flush=True)
        serve(listener, log)
    os._exit(0)


def serve(listener: socket.socket, log: TextIO) -> None:
    servers: dict[str, str] = {}
    listener.settimeout(1.0)
    while pipes().exists():  # after a failed test, the daemon ends with its directory
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            command = connection.makefile().readline().split()
            reply = answer(command, servers)
            for line in ("Accepting connection...", "NEW UI", f"Cmd:{' '.join(command)}", reply.strip(), "UI closed"):
                print(f"[{time.strftime('%F %T')} Control {os.getpid():5}] {line}", file=log, flush=True)
            connection.sendall(reply.encode())
        if command[:1] == ["fake-hang"]:
            time.sleep(3600)
        if command[:1] == ["quit"]:
            (pipes() / "control").unlink()
            return


def answer(command: list[str], servers: dict[str, str]) -> str:
    match command:
        case ["get_server_list"]:
            return "".join(f"{pid}\n" for pid in servers)
        case ["get_server_status", pid]:
            return f"{servers.get(pid, 'Server not found')}\n"
        case ["shutdown_server", pid, "-f"]:
            servers.pop(pid, None)
        case ["fake-start-server", pid]:
            servers[pid] = "ACTIVE"
        case ["fake-fault", pid]:
            servers[pid] = "FAULT"
    return ""


def talk() -> int:
    for line in sys.stdin:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(pipes() / "control"))
        except OSError:
            print("Cannot find MPS control daemon process")
            return 1
        with connection:
            connection.sendall(line.encode())
            print(connection.makefile().read(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
