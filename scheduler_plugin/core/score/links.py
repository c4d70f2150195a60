# SPDX-License-Identifier: Apache-2.0
"""The link quality of the best set of devices, as a table over all sets of free devices of a node class.

Nodes of one kind have the same link table, so they share a class, and a query costs one look-up per node. Qualities are those of
aliquot.placement.topology, so placement finds the same quality on the node.
"""

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from aliquot.contract.model import Device, Link
from aliquot.placement.topology import LinkTable

REFERENCE_QUALITY: Final = 1850
"""A pair with 18 NVLinks, the best available today: qualities are compared with it."""
MAX_TABLE_DEVICES: Final = 16
"""Nodes with more devices are not compared by their links: the table has a row for each subset of devices."""

Matrix: TypeAlias = tuple[tuple[int, ...], ...]


def matrix_of(devices: Sequence[Device], links: Iterable[Link]) -> Matrix:
    """Return the qualities of all pairs, in the order of the devices."""
    table, uuids = LinkTable.of(links, devices), [device.uuid for device in devices]
    return tuple(tuple(table.between(a, b) if a != b else 0 for b in uuids) for a in uuids)


class LinkClass:
    """One link table, and the best quality in each subset of its devices."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = np.array(matrix, dtype=np.int64).reshape(len(matrix), len(matrix))
        self._best: dict[int, npt.NDArray[np.int64]] = {}

    def best_quality(self, fitting: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.int64]:
        """Return for each row of fitting devices the quality of the best ``count`` of them; 0 if there are fewer."""
        devices = len(self.matrix)
        if count < 2 or devices > MAX_TABLE_DEVICES or not self.matrix.any():
            return np.zeros(len(fitting), dtype=np.int64)
        if count not in self._best:
            self._best[count] = self._table(count)
        masks = fitting[:, :devices].astype(np.int64) @ (1 << np.arange(devices, dtype=np.int64))
        best: npt.NDArray[np.int64] = np.maximum(self._best[count][masks], 0)
        return best

    def _table(self, count: int) -> npt.NDArray[np.int64]:
        """Rate all subsets: those of ``count`` devices by their own pairs, then each larger one by the best subset inside it."""
        devices = len(self.matrix)
        subsets = np.arange(1 << devices, dtype=np.int64)
        member = ((subsets[:, None] >> np.arange(devices)) & 1).astype(np.int64)
        quality = np.einsum("si,ij,sj->s", member, self.matrix, member, optimize=True) // 2
        best = np.where(member.sum(axis=1) == count, quality, -1)
        for device in range(devices):
            having = subsets[member[:, device] == 1]
            np.maximum.at(best, having, best[having ^ (1 << device)])
        return best
