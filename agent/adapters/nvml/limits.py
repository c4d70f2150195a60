# SPDX-License-Identifier: Apache-2.0
"""The driver's own memory limits of a cgroup (R615 and later) through NVML."""

import pynvml

from agent.adapters.nvml.driver import NvmlDriver
from agent.errors import DriverError

LIMIT_RIGHTS = (
    "no permission: setting a limit needs the capability SYS_ADMIN (the component deploy/daemonset/components/mig). Usually NVIDIA's hook "
    "sets the limit when a container starts: check that the runtime runs driverLimitsHook, and delete the pod"
)
"""What to do about NO_PERMISSION."""
_NO_LIMIT = (pynvml.NVML_ERROR_NOT_FOUND,)


class NvmlLimits:
    """Implements ``ports.CgroupLimits`` in the session and thread of ``NvmlDriver``."""

    def __init__(self, driver: NvmlDriver) -> None:
        self._driver = driver

    async def limit_bytes(self, device_uuid: str, cgroup: str) -> int | None:
        """See ``ports.CgroupLimits``."""
        return await self._driver.run(lambda: self._limit_bytes(device_uuid, cgroup))

    async def set_limit(self, device_uuid: str, cgroup: str, limit_bytes: int) -> None:
        """See ``ports.CgroupLimits``."""
        await self._driver.run(lambda: self._set_limit(device_uuid, cgroup, limit_bytes))

    # --- below: in the NVML thread only ---

    def _limit_bytes(self, uuid: str, cgroup: str) -> int | None:
        handle = self._driver.handle_of(uuid)
        limits = pynvml.c_nvmlGetMemoryLimits_v1_t(nameSpace=cgroup.encode())
        try:
            self._driver.call("nvmlDeviceGetMemoryLimits_v1", handle, limits, of=uuid, expected=_NO_LIMIT)
        except pynvml.NVMLError as exc:
            if exc.value in _NO_LIMIT:
                return None
            raise DriverError(f"reading the memory limit of {cgroup} on {uuid}: {exc}") from exc
        return None if limits.hardLimit == pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX else int(limits.hardLimit)

    def _set_limit(self, uuid: str, cgroup: str, limit_bytes: int) -> None:
        handle = self._driver.handle_of(uuid)
        limits = pynvml.c_nvmlSetMemoryLimits_v1_t(nameSpace=cgroup.encode(), softLimit=0, hardLimit=limit_bytes)
        try:
            self._driver.call("nvmlDeviceSetMemoryLimits_v1", handle, limits, of=uuid)
        except pynvml.NVMLError as exc:
            why = LIMIT_RIGHTS if exc.value == pynvml.NVML_ERROR_NO_PERMISSION else exc
            raise DriverError(f"limiting {cgroup} to {limit_bytes} bytes on {uuid}: {why}") from exc
