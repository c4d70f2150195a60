# SPDX-License-Identifier: Apache-2.0
"""The node names of a call and their rows. The names of thousands of nodes come with each call, so a known text is not read again."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from scheduler_plugin.core.cluster.columns import Ints, Rows
from scheduler_plugin.core.cluster.names import NamesText, NameTable
from scheduler_plugin.core.cluster.state import UNKNOWN_ROW, ClusterState
from scheduler_plugin.errors import WireError
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.cache import CALLS_KEPT


@dataclass(frozen=True, slots=True)
class NodeList:
    """The nodes of a call."""

    rows: Rows
    """UNKNOWN_ROW for nodes without an inventory."""
    unknown_nodes: Mapping[int, str]
    """The names of nodes without an inventory, by position."""
    text: bytes
    """The names in JSON, as the call had them."""
    places: NamesText | None = None
    """Where each name is in the text, if the text has no escapes."""
    known: npt.NDArray[np.int32] = field(init=False)
    """The rows of nodes with an inventory, as records keep them."""

    def __post_init__(self) -> None:
        known = self.rows if not self.unknown_nodes else self.rows[self.rows != UNKNOWN_ROW]
        object.__setattr__(self, "known", known.astype(np.int32))


class NodeLists:
    """The node lists of recent calls. They are dropped when a node comes or goes."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._recent: deque[NodeList] = deque(maxlen=CALLS_KEPT)
        """Compared one by one: to hash 5,000 names takes ten times as long as to find that two texts differ."""
        self._table = NameTable(())
        self.names_by_row: tuple[str, ...] = ()
        """The names of all nodes at the latest call, by row."""
        self.naming = -1
        """The state's naming counter at the latest call."""

    def read(self, text: bytes) -> NodeList | None:
        """Read the node names of a call; None for ``null``. Raises WireError."""
        self._follow_names()
        nodes = next((recent for recent in self._recent if recent.text == text), None)
        if nodes is None:
            nodes = self._decode(text)
            if nodes is not None:
                self._recent.appendleft(nodes)
        return nodes

    def look_up(self, names: Sequence[str], text: bytes = b"[]") -> NodeList:
        """Look up the rows of names one by one. Raises WireError."""
        wire.check_count(len(names))
        rows = np.fromiter(map(self._state.rows_by_name.__getitem__, names), dtype=np.int64, count=len(names))
        return NodeList(rows, {position: names[position] for position in np.flatnonzero(rows == UNKNOWN_ROW).tolist()}, text)

    def select(self, nodes: NodeList, positions: Ints) -> NodeList:
        """Return the nodes at some positions, all with an inventory. kube-scheduler sends this very list next, so it is kept."""
        rows = nodes.rows[positions]
        if nodes.places is not None:
            text = nodes.places.part(positions)
        else:
            text = msgspec.json.encode([self._state.names[row] for row in rows.tolist()])
        selected = NodeList(rows, {}, text)
        self._recent.appendleft(selected)
        return selected

    def names_of(self, nodes: NodeList, positions: Ints | None = None) -> list[str]:
        """Return the names at some positions, or all."""
        if positions is None:
            positions = np.arange(len(nodes.rows))
        names, unknown = self._state.names, nodes.unknown_nodes
        pairs = zip(positions.tolist(), nodes.rows[positions].tolist(), strict=True)
        return [unknown[position] if row == UNKNOWN_ROW else names[row] for position, row in pairs]

    def _follow_names(self) -> None:
        """Drop all lists once a node came or went."""
        if self.naming != self._state.naming_count:
            self.naming = self._state.naming_count
            self._recent.clear()
            self.names_by_row = tuple(self._state.names)
            self._table = NameTable(self.names_by_row)

    def _decode(self, text: bytes) -> NodeList | None:
        try:
            found = self._table.read(text)
            if found is None:
                names = wire.decode_names(text)
                return None if names is None else self.look_up(names, text)
            places, rows = found
            wire.check_count(len(rows))
            unknown = {position: places.name(position) for position in np.flatnonzero(rows == UNKNOWN_ROW).tolist()}
        except UnicodeDecodeError as exc:
            raise WireError(f"expected a list of names in NodeNames: {exc}") from exc
        return NodeList(rows, unknown, text, places)
