# SPDX-License-Identifier: Apache-2.0
"""The one list of names that cross a process boundary.

Users write resources and annotations. Agent, shim and container runtime share paths and file names. Operators build dashboards on the names
of metrics, events and reasons. Renaming one is a breaking change.
"""

from typing import Final

# --- resources (pod limits) -------------------------------------------------------------------------------------

RESOURCE_DOMAIN: Final = "nvidia.com"
RESOURCE_VGPU: Final = "nvidia.com/vgpu"
"""Number of vGPUs, each on a different physical GPU. The only fractional resource that kubelet allocates by ID."""
RESOURCE_VGPU_MEMORY: Final = "nvidia.com/vgpu-memory"
"""MiB of device memory, the container's total over its vGPUs."""
RESOURCE_VGPU_MEMORY_PERCENT: Final = "nvidia.com/vgpu-memory-percent"
"""Device memory as a percentage instead of MiB, 100 = all of one GPU's; the container's total over its vGPUs. It is resolved on the GPU
that the scheduler chooses, rounded down to MiB."""
RESOURCE_VGPU_CORES: Final = "nvidia.com/vgpu-cores"
"""Percent of SM time, 100 = one whole GPU, the container's total over its vGPUs."""
RESOURCE_MIG_PREFIX: Final = "nvidia.com/mig-"
"""Followed by the profile as NVML spells it, with ``+`` written as ``.``: ``nvidia.com/mig-1g.10gb.me``."""

RESOURCES_OF_VGPUS: Final = (RESOURCE_VGPU, RESOURCE_VGPU_MEMORY, RESOURCE_VGPU_MEMORY_PERCENT, RESOURCE_VGPU_CORES)
"""All resources of a container with vGPUs."""

# --- annotations and labels (pods, namespaces) -----------------------------------------------------------------------

ANNOTATION_PREFIX: Final = "aliquot.dev/"
ANNOTATION_ASSIGNMENT: Final = "aliquot.dev/assignment"
"""The devices that the scheduler chose for each container, as JSON. Only the scheduler may set it."""
ANNOTATION_GPU_TYPE: Final = "aliquot.dev/gpu-type"
"""Comma list: only GPUs of these models. ``H20`` is a word of the model name, so no H200; ``A10*`` and ``*H20*`` are parts of it;
``=NVIDIA H200`` is the whole name. Upper and lower case are equal."""
ANNOTATION_GPU_TYPE_NOT: Final = "aliquot.dev/gpu-type-not"
"""Comma list: no GPU of these models, in the forms of gpu-type."""
ANNOTATION_GPU_UUID: Final = "aliquot.dev/gpu-uuid"
"""Comma list: only these GPUs."""
ANNOTATION_GPU_UUID_NOT: Final = "aliquot.dev/gpu-uuid-not"
"""Comma list: not these GPUs."""
ANNOTATION_PLACEMENT: Final = "aliquot.dev/placement"
"""``binpack``, ``spread`` or ``topology`` instead of the fragmentation-aware default, ``frag``."""
ANNOTATION_NUMA: Final = "aliquot.dev/numa"
"""``strict``: all GPUs of each container must be on one NUMA node; not for MIG instances. ``prefer``: if possible."""
ANNOTATION_ISOLATION: Final = "aliquot.dev/isolation"
"""The backend that enforces the container's share: ``shim``, ``mps``, ``mig``, ``driver`` or ``exclusive``."""
ANNOTATION_PRIORITY: Final = "aliquot.dev/priority"
"""``high`` goes first on a shared GPU; ``low`` uses idle time and keeps a minimum."""
ANNOTATION_CORES_MODE: Final = "aliquot.dev/cores-mode"
"""``ceiling``: never more than vgpu-cores. ``weight``: may borrow idle time of others."""
ANNOTATION_MEMORY_BURST: Final = "aliquot.dev/memory-burst"
"""Ratio, such as ``1.5``: how far memory may exceed vgpu-memory if the node allows oversubscription."""
ANNOTATION_PAUSED: Final = "aliquot.dev/paused"
"""``true``: the pod launches no kernel and no graph, and keeps its memory. Changeable at any time; ``false`` or no annotation resumes."""
ANNOTATION_GANG: Final = "aliquot.dev/gang"
"""Name of a group of pods in the namespace that start together or not at all."""
ANNOTATION_GANG_MIN: Final = "aliquot.dev/gang-min"
"""Minimum number of pods of the group with GPUs that must fit at once."""
ANNOTATION_GANG_MAX: Final = "aliquot.dev/gang-max"
"""Maximum number of pods of the group that run at the same time; the pods beyond ``gang-min`` end first for more important pods."""
ANNOTATION_GANG_ROLE: Final = "aliquot.dev/gang-role"
"""The pod's role in its gang, such as ``worker``. Each role has its own minimum."""
ANNOTATION_GANG_ROLE_MIN: Final = "aliquot.dev/gang-role-min"
"""How many pods of the role count towards ``gang-min``, from 0. With ``gang-min`` as the sum of all roles, no role fills in for another."""
ANNOTATION_GANG_RESTART: Final = "aliquot.dev/gang-restart"
"""``whole``: if a member ends without success and fewer than ``gang-min`` are left, the scheduler evicts the others too."""
ANNOTATION_DOMAIN: Final = "aliquot.dev/domain"
"""``required``: a gang waits until one domain (NVLink fabric, rack, zone) has room for all of it. ``preferred``: few domains."""
ANNOTATION_DOMAIN_LEVEL: Final = "aliquot.dev/domain-level"
"""Which domains count: ``clique`` (NVLink fabric, the default), ``rack``, ``zone``, or the key of a node label."""
ANNOTATION_MOVABLE: Final = "aliquot.dev/movable"
"""``true``: consolidation may evict the pod and let its controller recreate it on another GPU. ``false``: never, also at the priority of
``aliquot-best-effort``. Pods of that class may move without the annotation."""
ANNOTATION_MIN_RUNTIME: Final = "aliquot.dev/min-runtime"
"""Duration, such as ``90s``, ``30m``, ``12h`` or ``2d``: how long the pod runs before a more important pod may end it, or
consolidation move it. Without it preemption does not wait, and consolidation waits 5 minutes."""
ANNOTATION_PREEMPTION_DELAY: Final = "aliquot.dev/preemption-delay"
"""Duration, such as ``30s``: how long the pod waits for free room before other pods end for it."""
ANNOTATION_EXPECTED_RUNTIME: Final = "aliquot.dev/expected-runtime"
"""Duration, such as ``30m``: how long the pod runs, as its owner expects. With the feature gate ``Backfill`` it says when a waiting pod
gets room, and the pod may use room that is held until then. The pod is not ended when it runs longer."""
ANNOTATION_LAST_CHECKPOINT: Final = "aliquot.dev/last-checkpoint"
"""RFC 3339 time of the pod's latest checkpoint, which the workload writes: only the work since then is lost if the pod moves."""
ANNOTATION_CONSOLIDATION: Final = "aliquot.dev/consolidation"
"""On a waiting pod: the moves under way that free its place, as JSON, so that another scheduler goes on. Only the scheduler may set it."""
ANNOTATION_HOLD: Final = "aliquot.dev/hold"
"""On pods of a workload that Kueue admitted: WORKLOAD/POD-SET, for which the scheduler keeps seats. Kueue copies it from the answer of the
admission check ``aliquot.dev/fits``."""
ANNOTATION_MAX_WAIT: Final = "aliquot.dev/max-wait"
"""On a PriorityClass, or a WorkloadPriorityClass of Kueue: duration, such as ``30m``, after which a workload of the class that still waits
for quota goes first in its queue (alpha)."""
ANNOTATION_RETRY: Final = "aliquot.dev/retry"
"""The scheduler changes it on a pending pod, so that kube-scheduler tries the pod again. The value has no meaning."""

LABEL_WEBHOOK: Final = "aliquot.dev/webhook"
"""``ignore`` on a namespace: the webhook skips its pods, and they get no GPU from Aliquot."""
LABEL_ADOPT: Final = "aliquot.dev/adopt"
"""Whether pods that ask for GPUs in other systems' words are served. ``true``, on a namespace or a pod: yes. ``dry-run``, on a namespace:
no; a warning and a metric say what they would become. ``false``: no, also with the component ``adopt-all``."""
LABEL_CLASS: Final = "aliquot.dev/class"
"""On a pod or a pod template: ``training``, ``inference``, ``interactive``, or a class of the setting ``classes``. It sets the priority and
other defaults; what the pod says itself wins."""
LABEL_GANG_FROM_OWNER: Final = "aliquot.dev/gang-from-owner"
"""``true`` or ``false`` on a namespace, or on a pod, which counts more: whether the pod is in the gang that its owners, such as its JobSet,
state (alpha)."""
LABEL_VGPU_MEMORY: Final = "aliquot.dev/vgpu-memory"
"""``required`` on a namespace: its containers that ask for GPUs must set the memory (component ``require-memory``)."""

# --- the node inventory (gpunode.py) ----------------------------------------------------------------------------

GPU_NODE_GROUP: Final = "aliquot.dev"
GPU_NODE_VERSION: Final = "v1alpha1"
GPU_NODE_KIND: Final = "GpuNode"
GPU_NODE_PLURAL: Final = "gpunodes"
"""Cluster-scoped, one object per node with the node's name."""

# --- kubelet ----------------------------------------------------------------------------------------------------

DEVICE_PLUGIN_API_VERSION: Final = "v1beta1"
KUBELET_DIR: Final = "/var/lib/kubelet"
"""The default of kubelet's flag ``--root-dir``. PodResources, and the sockets of drivers in ``plugins`` and ``plugins_registry``, are below
it."""
KUBELET_DEVICE_PLUGIN_DIR: Final = "/var/lib/kubelet/device-plugins"
"""Kubelet has this path fixed: ``--root-dir`` does not change it."""
DEVICE_PLUGINS: Final = "device-plugins"
POD_RESOURCES: Final = "pod-resources"
KUBELET_SOCKET_NAME: Final = "kubelet.sock"
DEVICE_HEALTHY: Final = "Healthy"
DEVICE_UNHEALTHY: Final = "Unhealthy"
REPLICA_SEPARATOR: Final = "::"
"""``<GPU-UUID>::<n>``: the form dcgm-exporter and NVIDIA's plugin use for replicas of a device."""
PRESTART_TIMEOUT_SECONDS: Final = 30.0
"""How long kubelet waits for PreStartContainer."""

# --- dynamic resource allocation --------------------------------------------------------------------------------------

DRA_DRIVER: Final = "gpu.aliquot.dev"
"""The name of the agent as a driver in ResourceSlices, DeviceClasses and claims."""
DRA_CLASS: Final = "vgpu.aliquot.dev"
"""The DeviceClass of shared GPUs."""
DRA_CLASS_WHOLE: Final = DRA_DRIVER
"""The DeviceClass of whole GPUs."""
LABEL_ALLOCATION: Final = "aliquot.dev/allocation"
"""``dra``, ``planned`` or ``plugin`` on a pod, or on its namespace: whether its requests for vGPUs become ResourceClaims, with the
component ``dra-translate``, and whether Aliquot's scheduler allocates its claims (``planned``)."""
PLANNED: Final = "aliquot.dev/planned"
"""The taint of devices that Aliquot's scheduler alone allocates, and the scheduling gate of pods that wait for that."""
LABEL_TRANSLATED: Final = "aliquot.dev/translated"
"""``true`` on the ResourceClaimTemplates that the webhook made from requests for vGPUs."""
ANNOTATION_LAST_USED: Final = "aliquot.dev/last-used"
"""On a ResourceClaimTemplate that the webhook made: when a pod was last admitted with it, to the hour; in RFC 3339."""
PARAMETERS_API_VERSION: Final = "aliquot.dev/v1alpha1"
PARAMETERS_KIND: Final = "VgpuParameters"
"""The opaque parameters in claims and DeviceClasses."""

# --- CDI --------------------------------------------------------------------------------------------------------

CDI_KIND: Final = "aliquot.dev/vgpu"
CDI_VERSION: Final = "0.6.0"
"""The oldest spec version with all fields that we write, so that old runtimes can read it."""
CDI_FILE_PREFIX: Final = "aliquot.dev-vgpu-"
CDI_DYNAMIC_DIR: Final = "/var/run/cdi"
CDI_STATIC_DIR: Final = "/etc/cdi"
NVIDIA_CDI_KIND: Final = "nvidia.com/gpu"
NVIDIA_PLUGIN_CDI_KIND: Final = "k8s.device-plugin.nvidia.com/gpu"
NVIDIA_MANAGEMENT_CDI_KIND: Final = "management.nvidia.com/gpu"
"""The kind that the GPU Operator's container toolkit writes for the Operator's own pods: the driver's files, and all GPUs as one device."""

# --- files on the node ------------------------------------------------------------------------------------------

STATE_DIR: Final = "/var/lib/aliquot"
"""Survives reboots: the node secret, the ledger and the installed shims."""
RUNTIME_DIR: Final = "/run/aliquot"
"""Limits files and usage regions of containers; a reboot removes them, as it does the containers."""

# --- files in a container (compiled into the shim: cuda_shim/region/layout.h) ------------------------------------

CONTAINER_DIR: Final = "/run/aliquot"
CONTAINER_LIMITS: Final = "/run/aliquot/limits"
CONTAINER_REGION: Final = "/run/aliquot/region"
CONTAINER_PRIORITY: Final = "/run/aliquot/priority"
"""The node's priority file, in containers that state a priority: writable for high, read-only for low (cuda_shim/limit/priority.h)."""
CONTAINER_TURNS: Final = "/run/aliquot/turns"
"""The node's time slots, as a writable file in containers that may hold more memory than guaranteed (cuda_shim/limit/turns.h)."""
CONTAINER_MPS_PIPE: Final = "/run/aliquot/mps"
"""Where an MPS client finds the control daemon of its GPU."""
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
"""NVIDIA's container runtime injects nothing for this value. Without it the image's own setting counts, and many images set ``all``."""
ENV_NVIDIA_MEMORY_LIMIT: Final = "NVIDIA_GPU_MEMORY_LIMIT"
ENV_NVIDIA_MEMORY_REQUEST: Final = "NVIDIA_GPU_MEMORY_REQUEST"
"""Limit and reservation of a container in MiB, for the hook of NVIDIA's toolkit that sets them in the driver."""
NVIDIA_DEVICES_DIR: Final = "/var/run/nvidia-container-devices"
"""Mounts of /dev/null below it, named by device, request devices from NVIDIA's runtime, which may accept only these and no variable."""
NVIDIA_DEVICES_SOURCE: Final = "/dev/null"

# --- what users and operators see -------------------------------------------------------------------------------

PRODUCT: Final = "aliquot"
METRIC_PREFIX: Final = "aliquot_"
SCHEDULER_NAME: Final = "aliquot-scheduler"
NODE_CONDITION_GPUS_HEALTHY: Final = "aliquot.dev/GPUsHealthy"
"""Condition type in the node's status: False while a GPU of the node gets no new work because of its state."""
EVENT_REASON_GPU_UNHEALTHY: Final = "AliquotGpuUnhealthy"
"""On the node, and on the pods with a share of the GPU: the GPU gets no new work, and why."""
EVENT_REASON_GPU_HEALTHY: Final = "AliquotGpuHealthy"
"""On the node, and on the pods with a share of the GPU: the GPU gets new work again."""
EVENT_REASON_REFUSED: Final = "AliquotRefused"
"""On a pod: the agent refused a container its devices, and why. It retries."""
EVENT_REASON_GRANTED: Final = "AliquotGranted"
"""On a pod: a container got its devices."""
EVENT_REASON_PAUSED: Final = "AliquotPaused"
"""On a pod: the pod's annotation paused the launches of a running container."""
EVENT_REASON_RESUMED: Final = "AliquotResumed"
"""On a pod: a paused container launches again."""
EVENT_REASON_PAUSE_IGNORED: Final = "AliquotPauseIgnored"
"""On a pod: its pause annotation has no effect on a running container, and why."""
EVENT_REASON_MPS_RESTARTED: Final = "AliquotMpsRestarted"
"""On a pod: the MPS control daemon of its GPU died and was restarted; its clients must restart."""
EVENT_REASON_DRIVER_LIMIT: Final = "AliquotDriverLimit"
"""On a pod: the driver does not limit the memory of a container with ``isolation: driver``, and why."""
EVENT_REASON_NO_GPU_FITS: Final = "AliquotNoGpuFits"
"""On a waiting pod: what the nodes lack, and the smallest change that would make it fit."""
EVENT_REASON_PREEMPTED: Final = "AliquotPreempted"
"""On a pod that ends because a pod of higher priority needs its GPU: the name of that pod."""
EVENT_REASON_GANG_RESTARTED: Final = "AliquotGangRestarted"
"""On a member of a gang with ``gang-restart: whole`` that is evicted because another member ended: the name of that one."""
EVENT_REASON_IDLE: Final = "AliquotIdle"
"""On a pod that does not use its GPU: it gives way to pods that wait, or was evicted, because its class says so."""
EVENT_REASON_MOVED: Final = "AliquotMoved"
"""On a pod that consolidation evicts: for which pod, and where its replacement has a seat."""
EVENT_REASON_CONSOLIDATION: Final = "AliquotConsolidation"
"""On a waiting pod: the moves that free its place, or why they ended."""
EVENT_REASON_DRIFT: Final = "AliquotDrift"
"""On a pod: the devices that it holds differ from its grant."""
EVENT_REASON_AUDIT: Final = "AliquotAudit"
"""On a pod: it uses devices or memory beyond its grant."""
