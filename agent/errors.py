"""What can go wrong in the agent, as one small tree. Adapters translate into it; services decide what to do about it.

    AgentError
    ├── SettingsError           the configuration is wrong: exit 2 with the sentence
    ├── DriverError             NVML answered with an error
    │   ├── DriverMissingError  no NVML library, no kernel module, or the two disagree: wait for a driver
    │   └── DriverTimeoutError  a call into NVML has not come back
    ├── KubeletError            the kubelet's sockets: registration, PodResources
    ├── KubeApiError            the Kubernetes API
    │   └── KubeExpiredError    the watch's version is too old (410): list again
    ├── StorageError            a file of ours could not be read or written
    └── ShimError               the shim's artefacts are missing or cannot be installed

A refusal (no room, no valid assignment) is no error but a result: ``core.refusal.Refusal``.
"""


class AgentError(Exception):
    """Base of everything the agent raises on purpose."""


class SettingsError(AgentError):
    """A setting is unknown, malformed or out of range."""


class DriverError(AgentError):
    """NVML reported an error."""


class DriverMissingError(DriverError):
    """There is no usable NVIDIA driver on this node yet."""


class DriverTimeoutError(DriverError):
    """The driver does not answer."""


class KubeletError(AgentError):
    """One of the kubelet's sockets refused or did not answer."""


class KubeApiError(AgentError):
    """The Kubernetes API refused or did not answer."""


class KubeExpiredError(KubeApiError):
    """The API no longer knows the version a watch wants to continue from."""


class StorageError(AgentError):
    """A file the agent keeps could not be read or written."""


class ShimError(AgentError):
    """The shim cannot be installed for containers."""
