"""What can go wrong in the agent, as one small tree. Adapters translate into it; services decide what to do about it.

    AgentError
    ├── DriverError             NVML answered with an error
    │   ├── DriverMissingError  no NVML library, no kernel module, or the two disagree: wait for a driver
    │   │   └── DriverMismatchError  the two disagree
    │   ├── DriverTimeoutError  a call into NVML has not come back
    │   └── PartitionError      a MIG instance cannot be made or removed
    │       └── PartitionInUseError  because processes use it
    ├── MpsError                an MPS control daemon cannot be started, or does not answer
    ├── KubeletError            the kubelet's sockets: registration, PodResources
    │   └── KubeletBusyError    it answers no more calls at this moment: ask again
    ├── KubeApiError            the Kubernetes API
    │   ├── KubeExpiredError    the watch's version is too old (410): list again
    │   ├── KubeBehindError     the API server's memory has not come to the version asked for (504)
    │   ├── KubeExistsError     the API has what was to be created, or another version of what was to be changed (409)
    │   ├── KubeRefusedError    the API will not do it, however often it is asked (400, 403, 413, 422)
    │   └── KubeAbsentError     the API does not have the object, or the kind of object (404)
    ├── StorageError            a file of ours could not be read or written
    ├── ProcessError            a process of a container could not be ended
    └── ShimError               the shim's artefacts are missing or cannot be installed

A refusal (no room, no valid assignment) is no error but a result: ``core.refusal.Refusal``.
A wrong configuration is ``program.settings.SettingsError``: exit 2 with the sentence.
"""


class AgentError(Exception):
    """Base of everything the agent raises on purpose."""


class DriverError(AgentError):
    """NVML reported an error."""


class DriverMissingError(DriverError):
    """There is no usable NVIDIA driver on this node yet."""


class DriverMismatchError(DriverMissingError):
    """The NVML library that can be loaded here is of another version than the kernel module."""


class DriverTimeoutError(DriverError):
    """The driver does not answer."""

    def __init__(self, message: str, device_uuid: str | None = None) -> None:
        """Args: device_uuid: the GPU whose call has not come back; None where that concerns no single GPU."""
        super().__init__(message)
        self.device_uuid = device_uuid


class DriverLeftError(DriverError):
    """The driver is kept out of on purpose, which says nothing of its GPUs."""


class PartitionError(DriverError):
    """A MIG instance cannot be made or removed."""


class PartitionInUseError(PartitionError):
    """A MIG instance cannot be removed yet: processes use it."""


class MpsError(AgentError):
    """An MPS control daemon cannot be started, or does not answer."""


class KubeletError(AgentError):
    """One of the kubelet's sockets refused or did not answer."""


class KubeletBusyError(KubeletError):
    """The kubelet has answered as many calls as it allows for now, of all its clients together."""


class KubeApiError(AgentError):
    """The Kubernetes API refused or did not answer."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        """Args: retry_after_seconds: how long the server wants to be left alone; 0 where it says nothing."""
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class KubeExpiredError(KubeApiError):
    """The API no longer knows the version a watch wants to continue from."""


class KubeBehindError(KubeApiError):
    """The API server, or what stands before it, did not come to an answer of the version asked for."""


class KubeExistsError(KubeApiError):
    """What was to be created is there already, or what was to be changed is not what it was."""


class KubeRefusedError(KubeApiError):
    """The API does not do what was asked for, and will not the next time: it is not allowed, or not well formed."""


class KubeAbsentError(KubeApiError):
    """The API does not have what was asked for."""


class StorageError(AgentError):
    """A file the agent keeps could not be read or written."""


class ProcessError(AgentError):
    """A process could not be ended."""


class ShimError(AgentError):
    """The shim cannot be installed for containers."""
