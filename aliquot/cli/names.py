"""How people name a GPU: its UUID, the beginning of one that is like no other, or its node and number."""

from collections.abc import Sequence

from aliquot.cli.errors import NotFoundError
from aliquot.cli.model import Gpu, Node

LEAST_PREFIX = 6
"""Characters of a UUID that are taken for one: ``GPU-`` alone names them all."""


def find_gpu(nodes: Sequence[Node], name: str) -> Gpu:
    """Return the GPU of that name. Raises NotFoundError, also when the name fits several."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    exact = [gpu for gpu in gpus if name in (gpu.uuid, gpu.name)]
    found = exact or ([gpu for gpu in gpus if gpu.uuid.startswith(name)] if len(name) >= LEAST_PREFIX else [])
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFoundError(f"{name} is the beginning of {len(found)} UUIDs: {', '.join(gpu.uuid for gpu in found[:4])}; write more of it")
    raise NotFoundError(f"no GPU is named {name}; want a UUID, or NODE/NUMBER such as {gpus[0].name if gpus else 'node-1/0'}")
