# SPDX-License-Identifier: Apache-2.0
"""How users name a GPU: by UUID, by the unique beginning of a UUID, or by NODE/NUMBER."""

from collections.abc import Sequence

from aliquot_cli.errors import NotFoundError
from aliquot_cli.model import Gpu, Node

LEAST_PREFIX = 6
"""Characters that the beginning of a UUID must have: ``GPU-`` alone would match every GPU."""


def find_gpu(nodes: Sequence[Node], name: str) -> Gpu:
    """Return the GPU of that name. Raises NotFoundError, also when several GPUs match."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    found = [gpu for gpu in gpus if name in (gpu.uuid, gpu.name)] or _by_prefix(gpus, name)
    if len(found) == 1:
        return found[0]
    if found:
        uuids = ", ".join(gpu.uuid for gpu in found[:4])
        raise NotFoundError(f"{name} is the beginning of {len(found)} UUIDs: {uuids}; write more characters")
    example = gpus[0].name if gpus else "node-1/0"
    raise NotFoundError(f"no GPU is named {name}; expected a UUID, or NODE/NUMBER such as {example}")


def _by_prefix(gpus: Sequence[Gpu], prefix: str) -> list[Gpu]:
    return [gpu for gpu in gpus if gpu.uuid.startswith(prefix)] if len(prefix) >= LEAST_PREFIX else []
