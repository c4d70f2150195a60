# SPDX-License-Identifier: Apache-2.0
"""The agent's configuration: each field of ``Settings`` is a setting with default, meaning and bounds (``aliquot.process.settings``)."""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from agent.core.audit import AuditPolicy
from agent.core.backends import MigStrategy
from agent.core.cdi import Interposition
from agent.core.compat_metrics import CompatMetrics
from agent.core.drift import DriftPolicy
from agent.core.health import HealthRules, parse_xids
from agent.core.injection import DeviceInjection
from agent.core.limits import FailPolicy
from aliquot import contract
from aliquot.contract import features
from aliquot.contract.features import ALL_ALPHA, FeatureGates, Gate, parse_gates, with_components
from aliquot.contract.model import Allocation, Policy
from aliquot.process.listening import WILDCARDS
from aliquot.process.settings import LogFormat, LogLevel, Row, SettingsError, Table, split_address


class Placement(StrEnum):
    """Who chooses the devices of a pod."""

    ASSIGNED = "assigned"
    LOCAL = "local"


class LostGpuPolicy(StrEnum):
    """What happens to the pods of a lost GPU. Values of the setting ``lostGpuPolicy``."""

    KEEP = "keep"
    """They stay, until an administrator deletes them."""
    EVICT = "evict"
    """Kubernetes deletes them, unless their claims tolerate the taint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be configured. Paths are absolute; durations are in seconds."""

    node_name: Annotated[str, Row("name of this Kubernetes node (default: the host name)", advanced=True)] = ""
    kubelet_dir: Annotated[
        str, Row("kubelet's directory; device-plugins, pod-resources, plugins and plugins_registry are below it", absolute=True)
    ] = contract.KUBELET_DIR
    allocation: Annotated[
        Allocation,
        Row(
            "how pods get GPUs of this node: by resources of the device plugin (plugin), by ResourceClaims (dra), by ResourceClaims "
            "that only Aliquot's scheduler allocates (planned), or by resources and such claims on the same GPUs (both)"
        ),
    ] = Allocation.PLUGIN
    dra_admin_access: Annotated[
        bool, Row("let ResourceClaims with adminAccess use GPUs beside all other claims, without a limit; only for monitoring")
    ] = False
    dra_profiles: Annotated[
        str, Row("fixed shares that a node in mode dra also offers as devices of their own, by GiB of memory, such as 10g,20g")
    ] = ""
    lost_gpu_policy: Annotated[LostGpuPolicy, Row("what happens to pods with ResourceClaims on a GPU that the driver has lost")] = (
        LostGpuPolicy.KEEP
    )
    cdi_dir: Annotated[str, Row("directory where the agent writes CDI specs for containers", absolute=True, advanced=True)] = (
        contract.CDI_DYNAMIC_DIR
    )
    cdi_static_dir: Annotated[
        str, Row("second directory in which the agent looks for the host's NVIDIA CDI spec", absolute=True, advanced=True)
    ] = contract.CDI_STATIC_DIR
    state_dir: Annotated[
        str, Row("directory of the node secret, the ledger and installed shims; must survive a reboot", absolute=True, advanced=True)
    ] = contract.STATE_DIR
    runtime_dir: Annotated[
        str, Row("directory of limits files and usage regions of containers; must be empty after a reboot", absolute=True, advanced=True)
    ] = contract.RUNTIME_DIR
    shim_dir: Annotated[
        str, Row("directory of the shim's libraries (default: build/lib/shim of a source tree, else /usr/local/lib/aliquot)", advanced=True)
    ] = ""
    shares_per_gpu: Annotated[int, Row("vGPUs offered per physical GPU", least=1, most=1000)] = 16
    placement: Annotated[Placement, Row("who chooses the devices of a pod: the scheduler (assigned) or this agent (local)")] = (
        Placement.ASSIGNED
    )
    placement_policy: Annotated[Policy, Row("how local placement chooses among the GPUs that fit")] = Policy.FRAG
    publish_node_capacity: Annotated[bool, Row("publish vgpu-memory and vgpu-cores in the node's capacity")] = True
    publish_node_condition: Annotated[bool, Row("publish a node condition that says whether all GPUs are healthy")] = True
    publish_gpu_node: Annotated[bool, Row("publish the node's gpunodes object, and apply the cordons set in it")] = True
    metrics_address: Annotated[
        str, Row("host:port of /metrics, /healthz and /readyz; 0.0.0.0 means all addresses, IPv6 included; port 0 picks a free port")
    ] = "0.0.0.0:9402"
    pod_ip: Annotated[
        str,
        Row(
            "IP of this pod, where `aliquot doctor` connects if metricsAddress is a wildcard; empty: the node's loopback address",
            advanced=True,
        ),
    ] = ""
    compat_metrics: Annotated[CompatMetrics, Row("also serve metrics under the names of another project, for its dashboards")] = (
        CompatMetrics.NONE
    )
    nvml_library: Annotated[str, Row("path of libnvidia-ml.so.1 (default: as the dynamic loader finds it)", advanced=True)] = ""
    simulate: Annotated[str, Row("create and use a simulated node: a profile name or a topology file")] = ""
    kube_api_url: Annotated[str, Row("Kubernetes API server (default: the in-cluster service)", advanced=True)] = ""
    kube_token_file: Annotated[
        str, Row("file with the bearer token for the API (default: the in-cluster service account's)", advanced=True)
    ] = ""
    kube_ca_file: Annotated[
        str, Row("file with the CA certificates of the API (default: the in-cluster service account's)", advanced=True)
    ] = ""
    device_injection: Annotated[
        DeviceInjection,
        Row("how devices enter containers: by CDI name, by the reply of Allocate (legacy), or as the node's versions allow (auto)"),
    ] = DeviceInjection.AUTO
    interposition: Annotated[
        Interposition, Row("how the shim enters containers: in place of the driver's libraries (front), or by /etc/ld.so.preload (preload)")
    ] = Interposition.FRONT
    fail_policy: Annotated[
        FailPolicy, Row("what the shim does when it cannot read its limits: refuse CUDA calls (closed), or not limit them (open)")
    ] = FailPolicy.CLOSED
    mig_strategy: Annotated[
        MigStrategy,
        Row(
            "how MIG instances are offered: not at all (none), as vGPUs of one profile (single), one resource per profile (mixed), or that "
            "and created when containers start, which needs the capability SYS_ADMIN (dynamic)"
        ),
    ] = MigStrategy.MIXED
    driver_limits_hook: Annotated[
        str,
        Row("host path of nvidia-cdi-hook 1.20.1 or later, which sets the driver's memory limits; empty: isolation driver is not offered"),
    ] = ""
    host_dir: Annotated[
        str, Row("path where the host's root file system is mounted; driverLimitsHook is looked up below it", absolute=True, advanced=True)
    ] = "/"
    cgroup_dir: Annotated[
        str,
        Row(
            "the host's cgroup v2 directory; the agent finds there which container a driver limit belongs to", absolute=True, advanced=True
        ),
    ] = "/sys/fs/cgroup"
    feature_gates: Annotated[
        str, Row(f"alpha features to turn on, such as {Gate.PAUSING}=true,{Gate.MPS_ISOLATION}=true, or {ALL_ALPHA}=true; comma-separated")
    ] = ""
    memory_oversubscription: Annotated[
        float, Row("largest ratio that the annotation memory-burst may set; 1 = no container may exceed its memory", 1, 10)
    ] = 1.0
    nvidia_ctk: Annotated[
        str, Row("nvidia-ctk, as a path or on PATH; it generates the host's NVIDIA CDI spec when no file has it", advanced=True)
    ] = "nvidia-ctk"
    nvidia_ctk_timeout_seconds: Annotated[float, Row("seconds that nvidia-ctk may take", 0.05, 20, advanced=True)] = 10.0
    nvml_timeout_seconds: Annotated[float, Row("seconds after which a call into the driver counts as hung", 0.05, 600, advanced=True)] = 5.0
    driver_poll_seconds: Annotated[float, Row("seconds between two reads of the GPUs' health and usage", 0.05, 600, advanced=True)] = 5.0
    health_recovery_seconds: Annotated[
        float, Row("seconds without an error before an unhealthy GPU gets new containers again; doubled with each relapse", 0, 3600)
    ] = 30.0
    health_quarantine_seconds: Annotated[
        float, Row("healthRecoverySeconds after an XID that points to the hardware", 0, 86400, advanced=True)
    ] = 300.0
    health_max_recovery_seconds: Annotated[
        float, Row("upper bound of healthRecoverySeconds and healthQuarantineSeconds after any number of relapses", 0, 86400, advanced=True)
    ] = 3600.0
    health_application_xids: Annotated[
        str, Row("further XIDs that an application causes, in addition to NVIDIA's list; comma-separated")
    ] = ""
    health_hard_xids: Annotated[
        str, Row("further XIDs that take a GPU out of service at once, in addition to NVIDIA's list; comma-separated")
    ] = ""
    reconcile_seconds: Annotated[
        float,
        Row(
            "seconds between two comparisons of ledger, pods, files and processes; a share is free at most so long after its pod has gone",
            0.05,
            10,
            advanced=True,
        ),
    ] = 10.0
    drift_policy: Annotated[DriftPolicy, Row("what to do about a pod with a drift that rewriting its files cannot cure")] = (
        DriftPolicy.REPORT
    )
    audit_policy: Annotated[AuditPolicy, Row("what to do about a container that uses more than its grant")] = AuditPolicy.REPORT
    audit_exempt_namespaces: Annotated[str, Row("namespaces in which pods may use GPUs without a grant; comma-separated")] = ""
    proc_dir: Annotated[str, Row("the host's /proc; the driver reports process ids of the host", absolute=True, advanced=True)] = "/proc"
    pod_wait_seconds: Annotated[
        float,
        Row(
            "seconds that PreStart waits for a pod to appear in the API; kubelet allows 30 s in all",
            0,
            contract.PRESTART_TIMEOUT_SECONDS - 5,
            advanced=True,
        ),
    ] = 20.0
    log_level: Annotated[LogLevel, Row("lowest severity that is logged")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Row("format of the log lines")] = LogFormat.JSON

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> "Settings":
        """Read flags, environment and file.

        Raises: SettingsError with one sentence; SystemExit(0) after printing help.
        """
        values = TABLE.read(argv, environ)
        settings = cls(**{**values, "feature_gates": with_components(values.get("feature_gates", ""), environ)})
        settings._check_gates()
        settings._check_profiles()
        split_address("metricsAddress", settings.metrics_address)
        _ = settings.health_rules
        return settings

    @property
    def node_name_or_host(self) -> str:
        """The node's name in Kubernetes."""
        return self.node_name or socket.gethostname().lower()

    def _check_gates(self) -> None:
        """Refuse a setting that only configures an alpha feature while the feature's gate is closed. Raises SettingsError."""
        needed = (
            (self.mig_strategy is MigStrategy.DYNAMIC, "migStrategy: dynamic", Gate.DYNAMIC_MIG),
            (bool(self.driver_limits_hook), "driverLimitsHook", Gate.DRIVER_ISOLATION),
            (self.allocation.by_claims, f"allocation: {self.allocation}", Gate.DYNAMIC_RESOURCE_ALLOCATION),
            (self.dra_admin_access, "draAdminAccess", Gate.DYNAMIC_RESOURCE_ALLOCATION),
            (bool(self.dra_profiles), "draProfiles", Gate.DYNAMIC_RESOURCE_ALLOCATION),
            (self.lost_gpu_policy is LostGpuPolicy.EVICT, "lostGpuPolicy: evict", Gate.DYNAMIC_RESOURCE_ALLOCATION),
            (self.memory_oversubscription > 1, "memoryOversubscription", Gate.MEMORY_BURST),
        )
        gates = self.gates
        for is_set, key, gate in needed:
            if is_set and (closed := gates.closed(gate)):
                raise SettingsError(f"{key} is set, but {closed}")

    def _check_profiles(self) -> None:
        """Refuse fixed shares where containers with device IDs use the same GPUs. Raises SettingsError.

        Such a container draws on the counters of its GPU, as all shares of stated amounts do. Beside a fixed share that is beyond the
        total, and kube-scheduler's search then takes no device of the node at all.
        """
        if self.profiles_gib and self.allocation is Allocation.BOTH:
            raise SettingsError("draProfiles is set, but allocation: both offers no fixed shares: remove draProfiles, or set planned")

    @property
    def device_plugin_dir(self) -> Path:
        """The directory of kubelet's socket and the device plugins' sockets."""
        return Path(self.kubelet_dir, contract.DEVICE_PLUGINS)

    @property
    def pod_resources_socket(self) -> Path:
        """Kubelet's PodResources socket."""
        return Path(self.kubelet_dir, contract.POD_RESOURCES, contract.KUBELET_SOCKET_NAME)

    @property
    def gates(self) -> FeatureGates:
        """The gates of ``feature_gates``. Raises SettingsError when the text is invalid."""
        try:
            return parse_gates(self.feature_gates)
        except ValueError as exc:
            raise SettingsError(f"{features.SETTING}: {exc}") from None

    @property
    def health_rules(self) -> HealthRules:
        """The rules of GPU health. Raises SettingsError when a list of XIDs is invalid."""
        return HealthRules(
            recovery_seconds=self.health_recovery_seconds,
            quarantine_seconds=self.health_quarantine_seconds,
            max_recovery_seconds=max(self.health_max_recovery_seconds, self.health_recovery_seconds),
            application_xids=_xids("healthApplicationXids", self.health_application_xids),
            hard_xids=_xids("healthHardXids", self.health_hard_xids),
        )

    @property
    def profiles_gib(self) -> tuple[int, ...]:
        """The sizes of ``dra_profiles``, in GiB, without repetitions. Raises SettingsError."""
        sizes = [part.strip() for part in self.dra_profiles.split(",") if part.strip()]
        if wrong := [size for size in sizes if not re.fullmatch(r"[1-9][0-9]{0,3}g", size)]:
            raise SettingsError(f"draProfiles {wrong[0]!r}: want GiB of memory, such as 10g,20g")
        return tuple(sorted({int(size.removesuffix("g")) for size in sizes}))

    @property
    def exempt_namespaces(self) -> frozenset[str]:
        """The namespaces of ``audit_exempt_namespaces``."""
        return frozenset(name for part in self.audit_exempt_namespaces.split(",") if (name := part.strip()))

    @property
    def metrics_host_port(self) -> tuple[str, int]:
        """The listening address, split."""
        return split_address("metricsAddress", self.metrics_address)

    def address_from_node(self, listening: str) -> str:
        """Return where programs of the node reach the status server, which listens at ``host:port``.

        They cannot connect to a wildcard: the agent's pod has its own network, without the node's loopback address.
        """
        if not self.pod_ip or self.metrics_host_port[0] not in WILDCARDS:
            return listening
        host = f"[{self.pod_ip}]" if ":" in self.pod_ip else self.pod_ip
        return f"{host}:{listening.rpartition(':')[2]}"


def _xids(key: str, text: str) -> frozenset[int]:
    try:
        return parse_xids(text)
    except ValueError:
        raise SettingsError(f"{key} {text!r}: want XIDs by number, such as 74,92") from None


TABLE = Table(
    Settings,
    program="agent",
    purpose="Offers shares of this node's GPUs to kubelet, and gives each container what its pod was assigned.",
    config_env="ALIQUOT_CONFIG",
)
