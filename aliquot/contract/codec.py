# SPDX-License-Identifier: Apache-2.0
"""The text forms of values that cross a process boundary: the assignment annotation, replica IDs and comma lists.

Invariants: decoders trust no input. They limit its size, check each field, and raise a ContractError for anything invalid. For each value
that an encoder accepts, decoding its text returns the same value.

The assignment annotation, version 1, is compact JSON::

    {"v":1,"uid":"<pod UID>","containers":[{"name":"main","devices":[{"uuid":"GPU-…","mib":4096,"cores":50}]}]}

``cores`` is absent if the share reserves no cores. Readers ignore unknown fields, so a minor change may add some; a change that old readers
must not miss gets a new ``v``, which they refuse.
"""

import re
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import ContractError, StaleAssignmentError, quote
from aliquot.contract.model import ContainerAssignment, DeviceShare, PodAssignment

ASSIGNMENT_VERSION: Final = 1
MAX_ASSIGNMENT_CHARS: Final = 64 * 1024
"""A pod of 30 containers with 16 devices each needs 45 KiB; Kubernetes allows 256 KiB for all annotations together."""

MAX_DEVICE_ID_CHARS: Final = 63
"""The device plugin API's documented limit."""
MAX_REPLICAS: Final = 10_000
MAX_LIST_CHARS: Final = 4096

_DEVICE_UUID: Final = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z-]{1,64}(?:/[0-9]{1,3}/[0-9]{1,3})?", re.ASCII)
"""Both forms of NVML: ``GPU-<uuid>`` and ``MIG-<uuid>``, and the ``MIG-GPU-<uuid>/<gi>/<ci>`` of drivers before R470."""
_MIG_PLACE: Final = re.compile(r"(GPU-[0-9A-Za-z-]{1,64})/([0-9a-z.+-]{1,40})@(0|[1-9][0-9]?)", re.ASCII)
_CONTAINER_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_POD_UID: Final = re.compile(r"[0-9A-Za-z._-]{1,128}", re.ASCII)
_REPLICA_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,3}", re.ASCII)


# --- assignments --------------------------------------------------------------------------------------------------

_MAX_MIB: Final = units.MAX_MEMORY_BYTES // units.MIB


class _ShareV1(msgspec.Struct, omit_defaults=True):
    uuid: str
    mib: Annotated[int, msgspec.Meta(ge=1, le=_MAX_MIB)]
    cores: Annotated[int, msgspec.Meta(ge=1, le=units.WHOLE_GPU_PERCENT)] | None = None


class _ContainerV1(msgspec.Struct):
    name: str
    devices: Annotated[list[_ShareV1], msgspec.Meta(min_length=1, max_length=contract.MAX_DEVICES_PER_CONTAINER)]


class _AssignmentV1(msgspec.Struct):
    v: int
    uid: str
    containers: Annotated[list[_ContainerV1], msgspec.Meta(min_length=1)]


class _Versioned(msgspec.Struct):
    v: int


_Form = TypeVar("_Form", _AssignmentV1, _Versioned)


def encode_assignment(assignment: PodAssignment) -> str:
    """Encode an assignment as the annotation's text. Raises ContractError for a value that no pod can have."""
    _check_assignment(assignment)
    containers = [
        _ContainerV1(
            name=container.container,
            devices=[
                _ShareV1(share.device_uuid, units.bytes_to_mib(share.memory_bytes), share.cores_percent) for share in container.shares
            ],
        )
        for container in assignment.containers
    ]
    text = msgspec.json.encode(_AssignmentV1(ASSIGNMENT_VERSION, assignment.pod_uid, containers)).decode("ascii")
    if len(text) > MAX_ASSIGNMENT_CHARS:
        raise ContractError(f"expected an assignment of at most {MAX_ASSIGNMENT_CHARS} characters, found {len(text)}")
    return text


def decode_assignment(text: str, *, pod_uid: str) -> PodAssignment:
    """Decode the annotation of the pod with this UID.

    Raises: StaleAssignmentError: it was written for another pod UID.
            ContractError: not an assignment, an unknown version, or values that our scheduler cannot have written.
    """
    if len(text) > MAX_ASSIGNMENT_CHARS:
        raise ContractError(f"expected an assignment of at most {MAX_ASSIGNMENT_CHARS} characters, found {len(text)}")
    version = _parse_json(text, _Versioned).v
    if version != ASSIGNMENT_VERSION:
        raise ContractError(
            f"expected an assignment of version {ASSIGNMENT_VERSION}, found version {version}: upgrade the older of agent and scheduler"
        )
    form = _parse_json(text, _AssignmentV1)
    assignment = PodAssignment(
        pod_uid=form.uid,
        containers=tuple(
            ContainerAssignment(
                container.name,
                tuple(DeviceShare(share.uuid, units.mib_to_bytes(share.mib), share.cores) for share in container.devices),
            )
            for container in form.containers
        ),
    )
    _check_assignment(assignment)
    if assignment.pod_uid != pod_uid:
        raise StaleAssignmentError(
            f"expected an assignment for pod UID {quote(pod_uid)}, found one for {quote(assignment.pod_uid)}: "
            f"it belongs to an earlier pod of this name; remove the annotation {contract.ANNOTATION_ASSIGNMENT} and recreate the pod"
        )
    return assignment


def _parse_json(text: str, form: type[_Form]) -> _Form:
    # RecursionError: nesting deep enough to exhaust the decoder. UnicodeEncodeError: a lone surrogate in the text.
    try:
        return msgspec.json.decode(text, type=form)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as exc:
        raise ContractError(f"expected an assignment in JSON, found {quote(text)}: {exc}") from exc


def _check_assignment(assignment: PodAssignment) -> None:
    if _POD_UID.fullmatch(assignment.pod_uid) is None:
        raise ContractError(f"expected a pod UID, found {quote(assignment.pod_uid)}")
    if not assignment.containers:
        raise ContractError("expected at least one container in an assignment, found 0")
    names = [container.container for container in assignment.containers]
    _check_distinct(names, "container")
    for container in assignment.containers:
        if _CONTAINER_NAME.fullmatch(container.container) is None:
            raise ContractError(f"expected a container name (lower-case DNS label), found {quote(container.container)}")
        _check_shares(container)


def _check_shares(container: ContainerAssignment) -> None:
    if not 1 <= len(container.shares) <= contract.MAX_DEVICES_PER_CONTAINER:
        raise ContractError(
            f"expected 1 to {contract.MAX_DEVICES_PER_CONTAINER} devices for container {container.container}, found {len(container.shares)}"
        )
    _check_distinct([share.device_uuid for share in container.shares], "device")
    for share in container.shares:
        check_device_uuid(share.device_uuid)
        if not 1 <= units.bytes_to_mib(share.memory_bytes) <= _MAX_MIB:
            raise ContractError(f"expected 1 to {_MAX_MIB} MiB of {share.device_uuid}, found {share.memory_bytes} bytes")
        if share.cores_percent is not None and not 1 <= share.cores_percent <= units.WHOLE_GPU_PERCENT:
            raise ContractError(
                f"expected 1 to {units.WHOLE_GPU_PERCENT} percent of the cores of {share.device_uuid}, found {share.cores_percent}"
            )


def _check_distinct(names: list[str], what: str) -> None:
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ContractError(f"expected every {what} once, found {quote(twice)} twice")


# --- device IDs ---------------------------------------------------------------------------------------------------


class Replica(NamedTuple):
    """One of the IDs under which the agent offers a physical GPU to kubelet."""

    device_uuid: str
    number: int


class MigPlace(NamedTuple):
    """A place at which the agent creates a MIG instance on demand; written ``GPU-1b2c…/1g.10gb@3``.

    Shares name the place and not the instance: the instance does not exist yet when they are assigned, and each new one has another UUID.
    """

    device_uuid: str
    profile: str
    start: int
    """The first memory slice."""

    def __str__(self) -> str:
        return f"{self.device_uuid}/{self.profile}@{self.start}"


def decode_place(text: str) -> MigPlace | None:
    """Decode the name of a place; None for a UUID or any other text."""
    match = _MIG_PLACE.fullmatch(text)
    return None if match is None else MigPlace(match[1], match[2], int(match[3]))


def check_device_uuid(uuid: str) -> None:
    """Raise ContractError unless this can be the UUID of a GPU or MIG instance, or the name of a place for one.

    Such a text is safe in a message and a label.
    """
    if _DEVICE_UUID.fullmatch(uuid) is None and _MIG_PLACE.fullmatch(uuid) is None:
        raise ContractError(f"expected a device UUID such as GPU-1b2c… or MIG-1b2c…, found {quote(uuid)}")


def encode_replica(device_uuid: str, number: int) -> str:
    """Encode the ID of one replica, ``<uuid>::<number>``. Raises ContractError for an ID that kubelet cannot accept."""
    check_device_uuid(device_uuid)
    if not 0 <= number < MAX_REPLICAS:
        raise ContractError(f"expected a replica number from 0 to {MAX_REPLICAS - 1}, found {number}")
    text = f"{device_uuid}{contract.REPLICA_SEPARATOR}{number}"
    if len(text) > MAX_DEVICE_ID_CHARS:
        raise ContractError(f"expected a device ID of at most {MAX_DEVICE_ID_CHARS} characters, found {quote(text)}")
    return text


def decode_replica(text: str) -> Replica:
    """Decode ``<uuid>::<number>``. Raises ContractError for any text that encode_replica does not write."""
    uuid, _, number = text.partition(contract.REPLICA_SEPARATOR)
    if len(text) > MAX_DEVICE_ID_CHARS or _REPLICA_NUMBER.fullmatch(number) is None:
        raise ContractError(f"expected a replica ID such as GPU-1b2c…{contract.REPLICA_SEPARATOR}0, found {quote(text)}")
    check_device_uuid(uuid)
    return Replica(uuid, int(number))


# --- comma lists --------------------------------------------------------------------------------------------------


def encode_list(items: tuple[str, ...]) -> str:
    """Encode a comma list. Raises ContractError for an item that decoding would change."""
    text = ",".join(items)
    if decode_list(text) != items:
        raise ContractError(f"expected items without commas and surrounding blanks, found {quote(repr(items))}")
    return text


def decode_list(text: str) -> tuple[str, ...]:
    """Decode a comma list; blanks around items are ignored. Raises ContractError if the list or an item is empty."""
    if len(text) > MAX_LIST_CHARS:
        raise ContractError(f"expected a list of at most {MAX_LIST_CHARS} characters, found {len(text)}")
    items = tuple(item.strip() for item in text.split(","))
    if not all(items):
        raise ContractError(f"expected names separated by single commas, such as A100,H100, found {quote(text)}")
    return items
