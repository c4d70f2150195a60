# SPDX-License-Identifier: Apache-2.0
"""A way in: a port of this machine's loopback, or of another node, that leads to the API server inside a node's network namespace.

The listening socket is made first, then this process enters the node's network namespace and dials from there; a socket
stays in the namespace it was made in. Run as a program::

    python -m tests.e2e.cluster.forward LISTENING_FD NODE_PID ADDRESS PORT
"""

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_CHUNK_BYTES = 65536


def start(node_pid: int, address: str, port: int, log: Path, on_node: int | None = None) -> tuple[int, subprocess.Popen[bytes]]:
    """Start forwarding.

    Args: on_node: the PID of another node that has the same address. Its pods get the port there.
    Returns: the port on 127.0.0.1 or on that address, and the process, which ends when the node does.
    """
    with _listening("127.0.0.1") if on_node is None else _listening_on(on_node, address) as listening:
        descriptor = listening.fileno()
        command = [sys.executable, "-m", __name__, str(descriptor), str(node_pid), address, str(port)]
        forwarding = subprocess.Popen(
            command,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # whoever reads the output of ``cluster up`` would wait for this process
            stderr=log.open("ab"),
            start_new_session=True,
        )
        return listening.getsockname()[1], forwarding


def _listening(address: str) -> socket.socket:
    return socket.create_server((address, 0), backlog=128)


def _listening_on(node_pid: int, address: str) -> socket.socket:
    """Return a socket that listens in a node's network namespace: only the thread that makes it enters there."""
    with ThreadPoolExecutor(1, initializer=_enter_network, initargs=(node_pid,)) as thread:
        return thread.submit(_listening, address).result()


def _enter_network(node_pid: int) -> None:
    with Path(f"/proc/{node_pid}/ns/net").open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace of process {node_pid}")


async def _serve(listening: socket.socket, node_pid: int, address: str, port: int) -> None:
    async def connected(near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(address, port)
        except OSError:
            near_writer.close()  # the caller sees a closed connection, as from a server that is down
            return
        await asyncio.gather(_copy(near_reader, far_writer), _copy(far_reader, near_writer))

    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    node = os.pidfd_open(node_pid)
    asyncio.get_running_loop().add_reader(node, _finish, ended)
    async with await asyncio.start_server(connected, sock=listening):
        await ended


def _finish(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # one side went away; the close below ends the other
    finally:
        writer.close()


def _main() -> None:
    descriptor, node_pid, address, port = sys.argv[1:]
    _enter_network(int(node_pid))
    asyncio.run(_serve(socket.socket(fileno=int(descriptor)), int(node_pid), address, int(port)))


if __name__ == "__main__":
    _main()
