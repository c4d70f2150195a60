"""Every name that crosses a process boundary, once.

Resources and annotations are what users write; paths and file names are what agent, shim and container runtime agree on;
metric, event and reason names are what operators build dashboards on. Renaming one is a breaking change.
"""

from typing import Final

# --- resources (pod limits) -------------------------------------------------------------------------------------

RESOURCE_DOMAIN: Final = "nvidia.com"
RESOURCE_VGPU: Final = "nvidia.com/vgpu"
"""Count of virtual GPUs, each on a different physical GPU. The only fractional resource kubelet allocates by ID."""
RESOURCE_VGPU_MEMORY: Final = "nvidia.com/vgpu-memory"
"""MiB of device memory, the container's total over its vGPUs."""
RESOURCE_VGPU_CORES: Final = "nvidia.com/vgpu-cores"
"""Percent of SM time, 100 = one whole GPU, the container's total over its vGPUs."""
RESOURCE_MIG_PREFIX: Final = "nvidia.com/mig-"
"""Followed by the profile as NVML spells it, with ``+`` written as ``.``: ``nvidia.com/mig-1g.10gb.me``."""

# --- annotations and labels (pods, namespaces) -----------------------------------------------------------------------

ANNOTATION_PREFIX: Final = "aliquot.dev/"
ANNOTATION_ASSIGNMENT: Final = "aliquot.dev/assignment"
"""Which devices the scheduler chose, per container. Reserved for the scheduler; see codec.py for the form."""
ANNOTATION_GPU_TYPE: Final = "aliquot.dev/gpu-type"
"""Comma list: only GPUs whose model contains one of these texts, in any case."""
ANNOTATION_GPU_TYPE_NOT: Final = "aliquot.dev/gpu-type-not"
"""Comma list: no GPU whose model contains one of these texts."""
ANNOTATION_GPU_UUID: Final = "aliquot.dev/gpu-uuid"
"""Comma list: only these GPUs."""
ANNOTATION_GPU_UUID_NOT: Final = "aliquot.dev/gpu-uuid-not"
"""Comma list: none of these GPUs."""
ANNOTATION_PLACEMENT: Final = "aliquot.dev/placement"
"""``binpack``, ``spread`` or ``topology`` instead of the fragmentation-aware default, ``frag``."""
ANNOTATION_NUMA: Final = "aliquot.dev/numa"
"""``strict``: all GPUs of each container on one NUMA node, or none at all; not for MIG instances. ``prefer``: where possible."""
ANNOTATION_ISOLATION: Final = "aliquot.dev/isolation"
"""What holds the container to its share: ``shim``, ``mps``, ``mig``, ``driver`` or ``exclusive``."""
ANNOTATION_PRIORITY: Final = "aliquot.dev/priority"
"""``high`` goes first on a shared GPU; ``low`` takes what is idle and keeps a floor."""
ANNOTATION_CORES_MODE: Final = "aliquot.dev/cores-mode"
"""``ceiling``: never more than vgpu-cores. ``weight``: idle time of others may be borrowed."""
ANNOTATION_MEMORY_BURST: Final = "aliquot.dev/memory-burst"
"""Ratio, such as ``1.5``: how far memory may go above vgpu-memory where the node allows oversubscription."""
ANNOTATION_PAUSED: Final = "aliquot.dev/paused"
"""``true``: the pod launches no kernel and no graph, and keeps its memory. Changed at any time; ``false``, or none, lets it go on."""
ANNOTATION_GANG: Final = "aliquot.dev/gang"
"""Name of a group of pods in the namespace that start together or not at all."""
ANNOTATION_GANG_MIN: Final = "aliquot.dev/gang-min"
"""How many pods of the group, of those that ask for GPUs, have to fit at once."""
ANNOTATION_RETRY: Final = "aliquot.dev/retry"
"""Changed by the scheduler on a pending pod to have it tried again. Means nothing by its value."""

LABEL_WEBHOOK: Final = "aliquot.dev/webhook"
"""``ignore`` on a namespace: the webhook leaves its pods to another system, and they get no GPU of ours."""
LABEL_VGPU_MEMORY: Final = "aliquot.dev/vgpu-memory"
"""``required`` on a namespace: its containers that ask for GPUs say how much memory (component ``require-memory``)."""

# --- the node inventory (gpunode.py) ----------------------------------------------------------------------------

GPU_NODE_GROUP: Final = "aliquot.dev"
GPU_NODE_VERSION: Final = "v1alpha1"
GPU_NODE_KIND: Final = "GpuNode"
GPU_NODE_PLURAL: Final = "gpunodes"
"""Cluster-scoped, one object per node with the node's name."""

# --- kubelet ----------------------------------------------------------------------------------------------------

DEVICE_PLUGIN_API_VERSION: Final = "v1beta1"
KUBELET_DEVICE_PLUGIN_DIR: Final = "/var/lib/kubelet/device-plugins"
KUBELET_SOCKET_NAME: Final = "kubelet.sock"
POD_RESOURCES_SOCKET: Final = "/var/lib/kubelet/pod-resources/kubelet.sock"
DEVICE_HEALTHY: Final = "Healthy"
DEVICE_UNHEALTHY: Final = "Unhealthy"
REPLICA_SEPARATOR: Final = "::"
"""``<GPU-UUID>::<n>``: the form dcgm-exporter and NVIDIA's plugin use for replicas of a device."""
PRESTART_TIMEOUT_SECONDS: Final = 30.0
"""How long kubelet waits for PreStartContainer."""

# --- CDI --------------------------------------------------------------------------------------------------------

CDI_KIND: Final = "aliquot.dev/vgpu"
CDI_VERSION: Final = "0.6.0"
"""The oldest spec version that has every field we write, so that old runtimes can read it."""
CDI_FILE_PREFIX: Final = "aliquot.dev-vgpu-"
CDI_DYNAMIC_DIR: Final = "/var/run/cdi"
CDI_STATIC_DIR: Final = "/etc/cdi"
NVIDIA_CDI_KIND: Final = "nvidia.com/gpu"
NVIDIA_PLUGIN_CDI_KIND: Final = "k8s.device-plugin.nvidia.com/gpu"
NVIDIA_MANAGEMENT_CDI_KIND: Final = "management.nvidia.com/gpu"
"""What the GPU Operator's container toolkit writes for the Operator's own pods: the driver's files, and all GPUs as one device."""

# --- files on the node ------------------------------------------------------------------------------------------

STATE_DIR: Final = "/var/lib/aliquot"
"""Kept over reboots: the node secret, the ledger and the installed shims."""
RUNTIME_DIR: Final = "/run/aliquot"
"""Per-container limits and usage regions; gone after a reboot, as the containers are."""

# --- files in a container (compiled into the shim: cuda_shim/region/layout.h) ------------------------------------

CONTAINER_DIR: Final = "/run/aliquot"
CONTAINER_LIMITS: Final = "/run/aliquot/limits"
CONTAINER_REGION: Final = "/run/aliquot/region"
CONTAINER_PRIORITY: Final = "/run/aliquot/priority"
"""The node's priority page, in containers that state a priority: writable for high, read-only for low (cuda_shim/limit/priority.h)."""
CONTAINER_TURNS: Final = "/run/aliquot/turns"
"""The node's page of turns, writable, in containers that may hold more memory than they are guaranteed (cuda_shim/limit/turns.h)."""
CONTAINER_MPS_PIPE: Final = "/run/aliquot/mps"
"""Where a client of MPS finds the control daemon of its GPU."""
CONTAINER_DRIVER_DIR: Final = "/run/aliquot/driver"
CONTAINER_PRELOAD: Final = "/run/aliquot/libaliquot-preload.so"
LD_SO_PRELOAD: Final = "/etc/ld.so.preload"
CUDA_SONAME: Final = "libcuda.so.1"
NVML_SONAME: Final = "libnvidia-ml.so.1"
CUDA_DRIVER_SONAME: Final = "libcuda.aliquot-driver.so.1"
"""The name under which the front finds the real libcuda, below CONTAINER_DRIVER_DIR."""
NVML_DRIVER_SONAME: Final = "libnvidia-ml.aliquot-driver.so.1"
MAX_DEVICES_PER_CONTAINER: Final = 16

# --- the simulated driver ---------------------------------------------------------------------------------------

ENV_SIM_DIR: Final = "ALIQUOT_SIM_DIR"
ENV_SIM_DEVICE_PREFIX: Final = "ALIQUOT_SIM_DEVICE_"
ENV_CUDA_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
ENV_NVIDIA_VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
NO_VISIBLE_DEVICES: Final = "void"
"""What tells NVIDIA's container runtime to inject nothing; without it an image's own setting counts, and many say ``all``."""
NVIDIA_DEVICES_DIR: Final = "/var/run/nvidia-container-devices"
"""Mounts of /dev/null below it, named by device, ask NVIDIA's runtime for devices; it may be set to take these and no variable."""
NVIDIA_DEVICES_SOURCE: Final = "/dev/null"

# --- what users and operators see -------------------------------------------------------------------------------

PRODUCT: Final = "aliquot"
METRIC_PREFIX: Final = "aliquot_"
SCHEDULER_NAME: Final = "aliquot-scheduler"
NODE_CONDITION_GPUS_HEALTHY: Final = "aliquot.dev/GPUsHealthy"
"""The type of a condition in the node's status: False while a GPU of the node gets no new work because of its state."""
EVENT_REASON_GPU_UNHEALTHY: Final = "AliquotGpuUnhealthy"
"""On the node, and on the pods that hold the GPU: it gets no new work, and why."""
EVENT_REASON_GPU_HEALTHY: Final = "AliquotGpuHealthy"
"""On the node, and on the pods that hold the GPU: it gets new work again."""
EVENT_REASON_REFUSED: Final = "AliquotRefused"
"""On a pod: a container was refused its devices, and why. It is tried again."""
EVENT_REASON_GRANTED: Final = "AliquotGranted"
"""On a pod: a container got its devices."""
EVENT_REASON_PAUSED: Final = "AliquotPaused"
"""On a pod: a running container launches nothing from now on, because the pod's annotation says so."""
EVENT_REASON_RESUMED: Final = "AliquotResumed"
"""On a pod: a container that was paused launches again."""
EVENT_REASON_PAUSE_IGNORED: Final = "AliquotPauseIgnored"
"""On a pod: its annotation that pauses does nothing to a running container, and why."""
EVENT_REASON_MPS_RESTARTED: Final = "AliquotMpsRestarted"
"""On a pod: the MPS control daemon of its GPU had died and was started again; its clients have to start anew."""
EVENT_REASON_DRIVER_LIMIT: Final = "AliquotDriverLimit"
"""On a pod: the driver does not limit the memory of a container that has ``isolation: driver``, and why."""
EVENT_REASON_NO_GPU_FITS: Final = "AliquotNoGpuFits"
"""On a waiting pod: what the nodes lack for it, and the least that would make it fit."""
EVENT_REASON_PREEMPTED: Final = "AliquotPreempted"
"""On a pod that ends because a more important one needs its GPU: for which."""
EVENT_REASON_DRIFT: Final = "AliquotDrift"
"""On a pod: what it holds and what it was granted differ."""
EVENT_REASON_AUDIT: Final = "AliquotAudit"
"""On a pod: it uses what it was not granted."""
