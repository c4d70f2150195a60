"""The node's own identity: the secret that names CDI devices, and which boot this is."""

import secrets
from pathlib import Path

from agent.adapters.durable import make_directory, write_whole
from agent.errors import StorageError

SECRET_BYTES = 32


def load_secret(path: Path) -> bytes:
    """Return the node's secret, made at the first start.

    It must outlive reboots: kubelet replays its remembered Allocate answers, and with another secret their CDI names would mean nothing.

    Raises: StorageError; a damaged secret is not replaced, because only its owner can say that no container of it is left.
    """
    make_directory(path.parent, 0o700)
    if not path.exists():
        write_whole(path, secrets.token_bytes(SECRET_BYTES), mode=0o600, durable=True)
    try:
        secret = path.read_bytes()
    except OSError as exc:
        raise StorageError(f"reading {path}: {exc.strerror}") from exc
    if len(secret) != SECRET_BYTES:
        raise StorageError(
            f"{path}: want {SECRET_BYTES} bytes, found {len(secret)}; drain the node, remove the file and start the agent again"
        )
    return secret


def boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """Return the kernel's id of this boot. Raises StorageError."""
    try:
        return path.read_text().strip()
    except OSError as exc:
        raise StorageError(f"reading {path}: {exc.strerror}") from exc
