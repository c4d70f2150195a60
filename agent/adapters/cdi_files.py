# SPDX-License-Identifier: Apache-2.0
"""The CDI specs on the host: Aliquot's, one file per grant, and NVIDIA's, from which Aliquot's are made.

The host's spec is large (and often YAML), so it is read again only if a file in the CDI directories changed.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from agent.adapters.durable import list_directory, names_in, remove_anything, remove_temporaries, write_over
from agent.adapters.regular_files import read_regular
from agent.core.cdi import (
    HOST_SPEC_KINDS,
    CapabilityNode,
    HostSpec,
    HostSpecError,
    file_name,
    grant_id_of_file,
    is_host_spec,
    parse_host_spec,
)
from agent.errors import StorageError
from aliquot import contract
from aliquot.file_cache import FileCache

_Signature = tuple[tuple[str, int, int, int], ...]
HostSpecSource = Callable[[Collection[str]], HostSpec | None]
_CAPABILITIES = Path("/proc/driver/nvidia/capabilities")
_KERNEL_DRIVERS = Path("/proc/devices")
_CAPABILITY_DRIVER = "nvidia-caps"
_HOST_SPEC_BYTES_MAX = 64 << 20

logger = logging.getLogger(__name__)


class CdiDirectory:
    """Implements ``ports.CdiFiles``."""

    def __init__(
        self,
        dynamic: Path,
        static: Path,
        *,
        devices: Path = Path("/dev"),
        capabilities: Path = _CAPABILITIES,
        kernel_drivers: Path = _KERNEL_DRIVERS,
        generate: HostSpecSource | None = None,
    ) -> None:
        """Create the directory of Aliquot's specs.

        Args: dynamic: the directory of Aliquot's specs; the runtime and the agent prefer its files to those in ``static``.
              devices, capabilities: the kernel's directories.
              kernel_drivers: the kernel's list of drivers and their major numbers.
              generate: generates the host's spec if no file has it.
        """
        self._dynamic = dynamic
        self._generate = generate or _no_generator
        self._static = static
        self._devices = devices
        self._capabilities = capabilities
        self._kernel_drivers = kernel_drivers
        self._signature: _Signature | None = None
        self._host_spec: HostSpec | None = None
        self._looks_left: int | None = None
        """0 while the host's spec is used as it was at the last look; None without a limit."""
        self._digests = FileCache(lambda path: _digest(read_regular(path)))
        self._sizes: dict[str, int] = {}
        """Of Aliquot's specs by name, in bytes, as far as known without a look: only Aliquot writes them."""
        try:  # the directory is shared with the container runtime, so its mode is not ours to set
            dynamic.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StorageError(f"creating {dynamic}: {exc.strerror}") from exc
        remove_temporaries(dynamic)

    def host_spec(self, wanted: Collection[str] = ()) -> HostSpec | None:
        """See ``ports.CdiFiles``."""
        written = self._written()
        if written is not None and not any(_is_made_later(uuid, written) for uuid in wanted):
            return written
        return self._generate(wanted) or written

    @contextmanager
    def one_look(self) -> Iterator[None]:
        """See ``ports.CdiFiles``."""
        self._looks_left = 1
        try:
            yield
        finally:
            self._looks_left = None

    def has_host_spec(self) -> bool:
        """See ``ports.CdiFiles``."""
        return self._written() is not None

    def present_nodes(self) -> Sequence[str]:
        """See ``ports.CdiFiles``."""
        return [str(path) for path in list_directory(self._devices) if path.name.startswith("nvidia")]

    def capability_nodes(self, minor: int, gpu_instance_id: int, compute_instance_id: int) -> tuple[CapabilityNode, ...]:
        """See ``ports.CdiFiles``."""
        instance = self._capabilities / f"gpu{minor}" / "mig" / f"gi{gpu_instance_id}"
        major = _major_number(self._kernel_drivers)
        return tuple(_capability_node(path, major) for path in (instance / "access", instance / f"ci{compute_instance_id}" / "access"))

    def write(self, grant_id: str, spec: Mapping[str, object]) -> None:
        """See ``ports.CdiFiles``."""
        name, content = file_name(grant_id), msgspec.json.encode(spec)
        self._sizes[name] = len(content)
        write_over(f"{self._dynamic}/{name}", content, mode=0o644)

    def mentioned(self, paths: Iterable[str]) -> Set[str]:
        """See ``ports.CdiFiles``."""
        wanted, found = list(paths), set[str]()
        for identifier in self.ids():
            try:
                content = read_regular(self._dynamic / file_name(identifier))
            except FileNotFoundError:  # removed meanwhile
                continue
            found.update(path for path in wanted if path.encode() in content)
        return found

    def digest(self, grant_id: str) -> str | None:
        """See ``ports.CdiFiles``."""
        try:
            return self._digests.read(f"{self._dynamic}/{file_name(grant_id)}")
        except (OSError, StorageError):
            return None

    def digest_of(self, spec: Mapping[str, object]) -> str:
        """See ``ports.CdiFiles``."""
        return _digest(msgspec.json.encode(spec))

    def total_bytes(self) -> int:
        """See ``ports.CdiFiles``."""
        names = names_in(self._dynamic)
        for name in names:
            if name not in self._sizes and grant_id_of_file(name) is not None:
                self._sizes[name] = _signature_of(self._dynamic / name)[2]
        own = sum(self._sizes.get(name, 0) for name in names)
        return own + sum(min(_signature_of(path)[2], _HOST_SPEC_BYTES_MAX) for path in self._foreign_specs())

    def ids(self) -> Sequence[str]:
        """See ``ports.CdiFiles``."""
        return [identifier for name in names_in(self._dynamic) if (identifier := grant_id_of_file(name)) is not None]

    def remove(self, grant_id: str) -> None:
        """See ``ports.CdiFiles``."""
        name = file_name(grant_id)
        path = f"{self._dynamic}/{name}"
        self._digests.forget(path)
        self._sizes.pop(name, None)
        remove_anything(path)

    def _written(self) -> HostSpec | None:
        """Return the host's spec from a file, if one exists."""
        if self._looks_left == 0:
            return self._host_spec
        candidates = self._foreign_specs()
        signature = tuple(_signature_of(path) for path in candidates)
        if signature != self._signature:
            self._host_spec = _read_first(candidates)
            self._signature = signature
        if self._looks_left is not None:
            self._looks_left = 0
        return self._host_spec

    def _foreign_specs(self) -> list[Path]:
        """Return the specs of other programs. This is called for each container, so a spec of Aliquot costs little here."""
        return [
            directory / name
            for directory in (self._dynamic, self._static)
            for name in names_in(directory)
            if not name.startswith(contract.CDI_FILE_PREFIX) and name.endswith((".json", ".yaml", ".yml"))
        ]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_made_later(uuid: str, written: HostSpec) -> bool:
    """Whether a MIG instance is missing because the file is older. A missing GPU proves nothing: it may be listed by its index."""
    return uuid.startswith("MIG-") and uuid not in written.devices


def _no_generator(wanted: Collection[str]) -> HostSpec | None:
    """Act as on a host without ``nvidia-ctk``."""
    del wanted
    return None


def _signature_of(path: Path) -> tuple[str, int, int, int]:
    try:
        status = path.stat()
    except OSError:  # missing, or a link that leads nowhere
        return str(path), 0, 0, 0
    return str(path), status.st_ino, status.st_size, status.st_mtime_ns


def _read_first(candidates: Sequence[Path]) -> HostSpec | None:
    """Return the host's spec, of the preferred kind if there are several. The others are not parsed."""
    found = [(path, document) for path in candidates if is_host_spec(document := _parse(path))]
    found.sort(key=lambda one: HOST_SPEC_KINDS.index(one[1]["kind"]))
    if not found:
        return None
    path, document = found[0]
    try:
        return parse_host_spec(document, str(path))
    except HostSpecError as exc:
        raise StorageError(str(exc)) from exc


def _parse(path: Path) -> Any:
    """Return the document, or None for a missing file or one that is no CDI spec: errors in other vendors' files are ignored."""
    try:
        content = read_regular(path, _HOST_SPEC_BYTES_MAX, follow=True)
        return msgspec.json.decode(content) if path.suffix == ".json" else msgspec.yaml.decode(content)
    except FileNotFoundError:
        return None
    except StorageError as exc:
        logger.warning("a CDI spec of another program is ignored: %s", exc)
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _major_number(kernel_drivers: Path) -> int | None:
    """Return the major number of the driver's capability nodes; None if no such driver is loaded, as on simulated nodes.

    Not cached, because the kernel assigns the number each time the module is loaded.
    """
    try:
        listed = kernel_drivers.read_text()
    except OSError as exc:
        raise StorageError(f"reading {kernel_drivers}: {exc.strerror}; it has the major number of MIG instances' device nodes") from exc
    match = re.search(rf"^\s*(\d+) {_CAPABILITY_DRIVER}$", listed, re.MULTILINE)
    return int(match[1]) if match is not None else None


def _capability_node(access: Path, major: int | None) -> CapabilityNode:
    """Return the device node that a capability file describes, in lines such as ``DeviceFileMinor: <n>``, with decimal numbers."""
    try:
        content = access.read_text()
    except OSError as exc:
        raise StorageError(f"reading {access}: {exc.strerror}; it names the device node of a MIG instance") from exc
    minor, mode = (re.search(rf"^{name}:\s*(\d+)", content, re.MULTILINE) for name in ("DeviceFileMinor", "DeviceFileMode"))
    if minor is None:
        raise StorageError(f"{access}: want a line DeviceFileMinor: <number>")
    return CapabilityNode(int(minor[1]), major, int(mode[1]) if mode is not None else None)
