"""The node's own files: the secret that names CDI devices, which boot this is, and the pages that containers share."""

import secrets
from pathlib import Path

from agent.adapters.durable import make_directory, write_whole
from agent.core.node_pages import PRIORITY, TURNS, NodePage
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


def make_priority_page(directory: Path) -> Path:
    """Return the node's priority page, made unless containers may have it mapped. Raises StorageError."""
    return _make_page(directory, PRIORITY)


def make_turns_page(directory: Path) -> Path:
    """Return the node's page of turns, made unless containers may have it mapped. Raises StorageError."""
    return _make_page(directory, TURNS)


def _make_page(directory: Path, page: NodePage) -> Path:
    """Containers of every user must be able to open a page where it is mounted; on the host, the directory keeps others out."""
    path = make_directory(directory, 0o700) / "page"
    try:
        kept = page.accepts(path.read_bytes())
    except FileNotFoundError:
        kept = False
    except OSError as exc:
        raise StorageError(f"reading {path}: {exc.strerror}") from exc
    if not kept:
        write_whole(path, page.empty(), mode=0o666, durable=False)
    return path


def boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """Return the kernel's id of this boot. Raises StorageError."""
    try:
        return path.read_text().strip()
    except OSError as exc:
        raise StorageError(f"reading {path}: {exc.strerror}") from exc
