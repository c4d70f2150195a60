# SPDX-License-Identifier: Apache-2.0
"""Moves under way as the annotation of the waiting pod, from which another process goes on.

Only names and nodes are in it. Devices are planned again, and every pod is checked again, because the cluster may have changed.
"""

from typing import Final

import msgspec

from scheduler_plugin.core.cluster.pods import PodFacts

VERSION: Final = 1


class MoveRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One move."""

    uid: str
    namespace: str
    controller_uid: str
    to_node: str


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The moves for one waiting pod."""

    version: int
    node: str
    moves: tuple[MoveRecord, ...]


class RecordError(ValueError):
    """An annotation that is no record of this version."""


def encode_run(node: str, moves: list[tuple[PodFacts, str]]) -> str:
    """Write the annotation. Args: node: of the waiting pod's place. moves: the pods with the nodes of their seats, in order."""
    records = tuple(MoveRecord(pod.uid, pod.namespace, pod.controller_uid, to_node) for pod, to_node in moves)
    return msgspec.json.encode(RunRecord(VERSION, node, records)).decode()


def decode_run(text: str) -> RunRecord:
    """Read the annotation. Raises RecordError."""
    try:
        record = msgspec.json.decode(text, type=RunRecord)
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        raise RecordError(f"expected moves as the scheduler wrote them: {exc}") from exc
    if record.version != VERSION:
        raise RecordError(f"expected moves of version {VERSION}, found {record.version}")
    return record
