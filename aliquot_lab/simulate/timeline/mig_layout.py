# SPDX-License-Identifier: Apache-2.0
"""The MIG instances of a simulated GPU: a fixed partition, or every place at which an instance can be created on demand.

Source: NVIDIA's MIG user guide, the tables of profiles and placements of A100, H100 and H200. Sizes are memory slices; a GPU has eight.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from aliquot.contract.errors import ContractError
from aliquot.contract.model import MigInstance
from aliquot.placement.mig import parse_profile

ON_DEMAND: Final = "on-demand"
MEMORY_SLICES: Final = 8
_MIB_PER_GB: Final = 1024


class _Shape(NamedTuple):
    """What all GPU models have in common of one profile."""

    size: int
    starts: tuple[int, ...]
    most: int


_SHAPES: Final = (
    _Shape(1, (0, 1, 2, 3, 4, 5, 6), 7),
    _Shape(2, (0, 2, 4, 6), 4),
    _Shape(2, (0, 2, 4), 3),
    _Shape(4, (0, 4), 2),
    _Shape(4, (0,), 1),
    _Shape(8, (0,), 1),
)
_NAMES: Final = (
    (48_000, ("1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")),
    (100_000, ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")),
    (200_000, ("1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb")),
)
"""By the largest memory of a GPU in MiB, the names of the profiles."""


class LayoutError(ValueError):
    """A partition that a GPU cannot have. The message says what was expected and what was found."""


def profiles_of(gpu_memory_mib: int) -> Sequence[str]:
    """Return the names of the profiles of a GPU of this size. Raises LayoutError."""
    names = next((names for most, names in _NAMES if gpu_memory_mib <= most), None)
    if names is None:
        raise LayoutError(f"a GPU of at most {_NAMES[-1][0]} MiB, found {gpu_memory_mib} MiB")
    return names


def check_layout(layout: Sequence[str], gpu_memory_mib: int) -> None:
    """Check that a GPU can have these instances. Raises LayoutError."""
    instances("GPU-0", layout, gpu_memory_mib)


def instances(uuid: str, layout: Sequence[str], gpu_memory_mib: int) -> tuple[MigInstance, ...]:
    """Return the instances of a GPU, or the places for them. Args: layout: profiles, or ON_DEMAND alone. Raises LayoutError."""
    shapes = dict(zip(profiles_of(gpu_memory_mib), _SHAPES, strict=True))
    if tuple(layout) != (ON_DEMAND,):
        return _partition(uuid, layout, shapes)
    return tuple(
        MigInstance(f"{uuid}/{name}@{start}", uuid, name, _bytes(name), 0, 0, start, shape.size, shape.most)
        for name, shape in shapes.items()
        for start in shape.starts
    )


def _partition(uuid: str, layout: Sequence[str], shapes: Mapping[str, _Shape]) -> tuple[MigInstance, ...]:
    made: list[MigInstance] = []
    end = 0
    for number, name in enumerate(layout):
        if name not in shapes:
            raise LayoutError(f"{ON_DEMAND} or profiles of {', '.join(shapes)} joined by +, found {name}")
        # Instances lie side by side from the left; a wider one begins at the next start that its profile allows.
        start = next((start for start in shapes[name].starts if start >= end), MEMORY_SLICES)
        end = start + shapes[name].size
        if end > MEMORY_SLICES:
            raise LayoutError(f"instances that fit on one GPU in this order, found no room for {name}, number {number + 1}")
        made.append(MigInstance(f"MIG-{uuid}-{number}", uuid, name, _bytes(name), number, 0, start, shapes[name].size))
    return tuple(made)


def check_profile(name: str) -> str:
    """Return the canonical name of a profile. Raises LayoutError."""
    try:
        return str(parse_profile(name))
    except ContractError as exc:
        raise LayoutError(str(exc).removeprefix("expected ")) from exc


def _bytes(profile: str) -> int:
    return parse_profile(profile).memory_gb * _MIB_PER_GB * 1024 * 1024
