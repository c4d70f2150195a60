# SPDX-License-Identifier: Apache-2.0
"""The errors of the agent, as one small tree. Adapters translate into it; services decide what to do.

    AgentError
    ├── DriverError                  NVML returned an error
    │   ├── DriverMissingError       no usable driver: no NVML library or no kernel module; wait for one
    │   │   └── DriverMismatchError  library and kernel module have different versions
    │   ├── DriverTimeoutError       a call into NVML has not returned
    │   ├── DriverLeftError          the agent stays out of the driver on purpose
    │   └── PartitionError           a MIG instance cannot be created or removed
    │       └── PartitionInUseError  because processes use it
    ├── MpsError                     an MPS control daemon cannot be started, or does not reply
    ├── KubeletError                 a socket of kubelet: registration, PodResources
    │   └── KubeletBusyError         too many calls at this moment: retry
    ├── StorageError                 a file of the agent cannot be read or written
    ├── ProcessError                 a process of a container cannot be ended
    └── ShimError                    the shim's files are missing or cannot be installed

A failed request to the Kubernetes API is ``aliquot.kube.errors.KubeApiError``.
A refusal (no room, no valid assignment) is a result and no error: ``core.refusal.Refusal``.
A wrong configuration is ``aliquot.process.settings.SettingsError``: exit code 2 with the sentence.
"""


class AgentError(Exception):
    """Base of everything the agent raises on purpose."""


class DriverError(AgentError):
    """NVML reported an error."""


class DriverMissingError(DriverError):
    """This node has no usable NVIDIA driver yet."""


class DriverMismatchError(DriverMissingError):
    """The NVML library has another version than the kernel module."""


class DriverTimeoutError(DriverError):
    """A call into the driver has not returned in time."""

    def __init__(self, message: str, device_uuid: str | None = None) -> None:
        """Args: device_uuid: the GPU that the call is about; None when it concerns the driver as a whole."""
        super().__init__(message)
        self.device_uuid = device_uuid


class DriverLeftError(DriverError):
    """The agent stays out of the driver on purpose. The health of the GPUs is unknown, not bad."""


class PartitionError(DriverError):
    """A MIG instance cannot be created or removed."""


class PartitionInUseError(PartitionError):
    """A MIG instance cannot be removed yet: processes use it."""


class MpsError(AgentError):
    """An MPS control daemon cannot be started, or does not reply."""


class KubeletError(AgentError):
    """A socket of kubelet refused a call or did not reply."""


class KubeletBusyError(KubeletError):
    """Kubelet has reached its limit of calls per second, over all its clients."""


class StorageError(AgentError):
    """A file of the agent cannot be read or written."""


class ProcessError(AgentError):
    """A process cannot be ended."""


class ShimError(AgentError):
    """The shim cannot be installed for containers."""
