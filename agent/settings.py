"""The agent's configuration: each field of ``Settings`` is a setting with its default, meaning and bounds (``program.settings``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from agent.core.audit import AuditPolicy
from agent.core.backends import MigStrategy
from agent.core.cdi import Interposition
from agent.core.compat_metrics import CompatMetrics
from agent.core.drift import DriftPolicy
from agent.core.health import HealthRules, parse_xids
from agent.core.injection import DeviceInjection
from agent.core.limits import FailPolicy
from program.listening import WILDCARDS
from program.settings import LogFormat, LogLevel, Row, SettingsError, Table, split_address
from proto import contract
from proto.model import Policy


class Placement(StrEnum):
    """Who chooses the devices of a pod."""

    ASSIGNED = "assigned"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be configured. Paths are absolute; durations are in seconds."""

    node_name: Annotated[str, Row("name of this Kubernetes node (default: the host name)")] = ""
    kubelet_device_plugin_dir: Annotated[str, Row("directory of the kubelet's and the plugins' sockets", absolute=True)] = (
        contract.KUBELET_DEVICE_PLUGIN_DIR
    )
    pod_resources_socket: Annotated[str, Row("the kubelet's PodResources socket", absolute=True)] = contract.POD_RESOURCES_SOCKET
    cdi_dir: Annotated[str, Row("directory for the CDI specs written for containers", absolute=True)] = contract.CDI_DYNAMIC_DIR
    cdi_static_dir: Annotated[str, Row("second directory searched for the host's NVIDIA CDI spec", absolute=True)] = contract.CDI_STATIC_DIR
    state_dir: Annotated[str, Row("node secret, ledger and installed shims; kept over reboots", absolute=True)] = contract.STATE_DIR
    runtime_dir: Annotated[str, Row("limits and usage regions of containers; gone after a reboot", absolute=True)] = contract.RUNTIME_DIR
    shim_dir: Annotated[
        str, Row("directory with the shim's libraries (default: build/lib/shim of a source tree, else /usr/local/lib/aliquot)")
    ] = ""
    shares_per_gpu: Annotated[int, Row("virtual GPUs offered per physical GPU", least=1, most=1000)] = 16
    placement: Annotated[Placement, Row("who chooses devices: the scheduler (by annotation), or this agent")] = Placement.ASSIGNED
    placement_policy: Annotated[Policy, Row("how local placement chooses among GPUs that fit")] = Policy.FRAG
    publish_node_capacity: Annotated[bool, Row("publish vgpu-memory and vgpu-cores in the node's capacity")] = True
    publish_node_condition: Annotated[bool, Row("publish in a condition of the node whether all its GPUs are healthy")] = True
    publish_gpu_node: Annotated[bool, Row("publish the node's gpunodes object, and follow the cordons written there")] = True
    metrics_address: Annotated[
        str, Row("host:port of /metrics, /healthz and /readyz; 0.0.0.0 is every address, IPv6 too; port 0 chooses a free one")
    ] = "0.0.0.0:9402"
    pod_ip: Annotated[
        str, Row("this pod's IP, which `aliquot doctor` is told where metricsAddress is a wildcard; empty: it looks on the node's loopback")
    ] = ""
    compat_metrics: Annotated[CompatMetrics, Row("whose metric names are served beside our own, for dashboards that use them")] = (
        CompatMetrics.NONE
    )
    nvml_library: Annotated[str, Row("path of libnvidia-ml.so.1 (default: the loader's)")] = ""
    simulate: Annotated[str, Row("profile name or topology file of a simulated node to make and use")] = ""
    kube_api_url: Annotated[str, Row("Kubernetes API server (default: the in-cluster service)")] = ""
    kube_token_file: Annotated[str, Row("bearer token for the API (default: the in-cluster service account's)")] = ""
    kube_ca_file: Annotated[str, Row("CA bundle of the API (default: the in-cluster service account's)")] = ""
    device_injection: Annotated[DeviceInjection, Row("how devices enter containers: CDI, Allocate's answer, or as the node allows")] = (
        DeviceInjection.AUTO
    )
    interposition: Annotated[Interposition, Row("how the shim enters containers")] = Interposition.FRONT
    fail_policy: Annotated[FailPolicy, Row("when the shim cannot read its limits: refuse to run, or pass through")] = FailPolicy.CLOSED
    mig_strategy: Annotated[
        MigStrategy,
        Row("what GPUs in MIG mode are offered as: nothing, all instances as vGPUs (of one profile), or each profile as a resource"),
    ] = MigStrategy.MIXED
    mig_dynamic: Annotated[
        bool, Row("make MIG instances when containers start, where GPUs in MIG mode have room; needs the capability SYS_ADMIN")
    ] = False
    driver_limits_hook: Annotated[
        str, Row("host path of nvidia-cdi-hook 1.20.1 or later, which applies the driver's limits; empty: isolation driver is not offered")
    ] = ""
    host_dir: Annotated[str, Row("where the host's root is seen, of which driverLimitsHook is looked at", absolute=True)] = "/"
    cgroup_dir: Annotated[str, Row("the host's cgroup v2 directory, where the driver's limits are looked at", absolute=True)] = (
        "/sys/fs/cgroup"
    )
    memory_oversubscription: Annotated[
        float, Row("how far above its memory a container may burst, as a ratio (annotation memory-burst); 1 = not at all", 1, 10)
    ] = 1.0
    nvidia_ctk: Annotated[str, Row("nvidia-ctk, as a path or on PATH: makes the host's NVIDIA CDI spec where no file has it")] = (
        "nvidia-ctk"
    )
    nvidia_ctk_timeout_seconds: Annotated[float, Row("how long nvidia-ctk may take", 0.05, 20)] = 10.0
    nvml_timeout_seconds: Annotated[float, Row("how long one call into the driver may take before it counts as hung", 0.05, 600)] = 5.0
    driver_poll_seconds: Annotated[float, Row("period of reading the GPUs' health and use", 0.05, 600)] = 5.0
    health_recovery_seconds: Annotated[
        float, Row("how long a GPU that was in trouble must answer cleanly to get new work; doubled for one that relapses", 0, 3600)
    ] = 30.0
    health_quarantine_seconds: Annotated[float, Row("the same after an XID that points to the hardware", 0, 86400)] = 300.0
    health_max_recovery_seconds: Annotated[float, Row("the longest that a GPU is kept waiting so, however often it relapsed", 0, 86400)] = (
        3600.0
    )
    health_application_xids: Annotated[str, Row("XIDs, beside NVIDIA's, that are a program's own fault; a comma list")] = ""
    health_hard_xids: Annotated[str, Row("XIDs, beside NVIDIA's, that take a GPU out of service at once; a comma list")] = ""
    reconcile_seconds: Annotated[
        float,
        Row(
            "period of comparing ledger, pods, files and processes, at most the ten seconds that are promised for it; bounds how long a "
            "dead pod's share is held",
            0.05,
            10,
        ),
    ] = 10.0
    drift_policy: Annotated[DriftPolicy, Row("what is done about a pod whose drift no file can cure")] = DriftPolicy.REPORT
    audit_policy: Annotated[AuditPolicy, Row("what is done about a container that uses what it was not granted")] = AuditPolicy.REPORT
    audit_exempt_namespaces: Annotated[str, Row("namespaces whose pods may use GPUs without a grant; a comma list")] = ""
    proc_dir: Annotated[str, Row("the host's /proc, in whose process ids the driver answers", absolute=True)] = "/proc"
    pod_wait_seconds: Annotated[
        float,
        Row("how long PreStart waits for a pod to appear; the kubelet gives it 30 s", 0, contract.PRESTART_TIMEOUT_SECONDS - 5),
    ] = 20.0
    log_level: Annotated[LogLevel, Row("least severity that is logged")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Row("form of the log lines")] = LogFormat.JSON

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> "Settings":
        """Read flags, environment and file.

        Raises: SettingsError with one sentence; SystemExit(0) after printing help.
        """
        settings = cls(**TABLE.read(argv, environ))
        if settings.mig_dynamic and settings.mig_strategy is not MigStrategy.MIXED:
            raise SettingsError(
                f"migDynamic makes instances of any profile, and migStrategy is {settings.mig_strategy}: set migStrategy: mixed, "
                "or leave migDynamic off"
            )
        split_address("metricsAddress", settings.metrics_address)
        _ = settings.health_rules
        return settings

    @property
    def health_rules(self) -> HealthRules:
        """The rules of GPU health. Raises SettingsError when a list of XIDs is none."""
        return HealthRules(
            recovery_seconds=self.health_recovery_seconds,
            quarantine_seconds=self.health_quarantine_seconds,
            max_recovery_seconds=max(self.health_max_recovery_seconds, self.health_recovery_seconds),
            application_xids=_xids("healthApplicationXids", self.health_application_xids),
            hard_xids=_xids("healthHardXids", self.health_hard_xids),
        )

    @property
    def exempt_namespaces(self) -> frozenset[str]:
        """The namespaces of ``audit_exempt_namespaces``."""
        return frozenset(name for part in self.audit_exempt_namespaces.split(",") if (name := part.strip()))

    @property
    def metrics_host_port(self) -> tuple[str, int]:
        """The listening address, split."""
        return split_address("metricsAddress", self.metrics_address)

    def address_from_node(self, listening: str) -> str:
        """Return where programs of the node find the status server, which listens at ``host:port``.

        A wildcard is no address to them: the agent's pod has a network of its own, and the node's loopback is not in it.
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
    purpose="Offers this node's GPUs as shares to the kubelet and gives each container what its pod was assigned.",
    config_env="ALIQUOT_CONFIG",
)
