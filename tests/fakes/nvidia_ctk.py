# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``nvidia-ctk cdi generate`` on a simulated node: prints a CDI spec of the current GPUs and MIG instances.

Run as ``python -m tests.fakes.nvidia_ctk cdi generate --format=json --device-name-strategy=uuid``, in the environment of the node.
"""

import ctypes
import json
import os
import sys

import pynvml

from aliquot import contract
from aliquot.paths import built

WANTED = ["cdi", "generate", "--format=json", "--device-name-strategy=uuid"]


def main() -> int:
    if sys.argv[1:] != WANTED:
        print(f'level=error msg="want {" ".join(WANTED)}, found {" ".join(sys.argv[1:])}"', file=sys.stderr)
        return 1
    pynvml.nvmlLib = ctypes.CDLL(str(built(f"lib/sim/{contract.NVML_SONAME}")))
    pynvml.nvmlInit()
    version = pynvml.nvmlSystemGetDriverVersion()
    libraries = {soname: built(f"lib/sim/{soname}") for soname in (contract.CUDA_SONAME, contract.NVML_SONAME)}
    mounts = [
        {
            "hostPath": str(path),
            "containerPath": f"/usr/lib/x86_64-linux-gnu/{soname.removesuffix('.1')}.{version}",
            "options": ["ro", "bind"],
        }
        for soname, path in libraries.items()
    ]
    edits = {"env": [f"{contract.ENV_SIM_DIR}={os.environ[contract.ENV_SIM_DIR]}"], "mounts": mounts}
    devices = [device for index in range(pynvml.nvmlDeviceGetCount()) for device in devices_of(pynvml.nvmlDeviceGetHandleByIndex(index))]
    spec = {"cdiVersion": "0.6.0", "kind": contract.NVIDIA_CDI_KIND, "devices": devices, "containerEdits": edits}
    print(json.dumps(spec))
    return 0


def devices_of(gpu: object) -> list[dict[str, object]]:
    """Yield the GPU and its instances; an environment entry makes each visible to a container."""
    minor = pynvml.nvmlDeviceGetMinorNumber(gpu)
    found = [device(pynvml.nvmlDeviceGetUUID(gpu), str(minor))]
    for slot in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)
        except pynvml.NVMLError:
            continue
        found.append(device(pynvml.nvmlDeviceGetUUID(instance), f"{minor}_{slot}"))
    return found


def device(uuid: str, suffix: str) -> dict[str, object]:
    return {"name": uuid, "containerEdits": {"env": [f"{contract.ENV_SIM_DEVICE_PREFIX}{suffix}={uuid}"]}}


if __name__ == "__main__":
    sys.exit(main())
