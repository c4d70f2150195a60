# SPDX-License-Identifier: Apache-2.0
"""The scheduler's settings: each field of ``Settings`` is one, with default, help text and bounds (``aliquot.process.settings``).

Weights and classes are mappings, so they can be set only in the file.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import ContractError
from aliquot.contract.features import SETTING, FeatureGates, Gate, parse_gates, with_components
from aliquot.contract.model import Policy
from aliquot.placement import mig
from aliquot.process.settings import FileOnly, LogFormat, LogLevel, Row, SettingsError, Table, split_address
from scheduler_plugin.core.classes import DEFAULT_CLASSES, ClassError, Profile, parse_classes
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS, Weights

HAMI_KEYS: Final = ("count", "memory", "percent", "cores", "priority")
"""HAMi's resources, by what they state."""


class Answer(StrEnum):
    """How many nodes filter returns."""

    ONE = "one"
    """Only the best one, where kube-scheduler has nothing to weigh besides our score; else all that fit."""
    ALL = "all"
    """All that fit."""


class Consolidation(StrEnum):
    """What consolidation does."""

    OFF = "off"
    """Nothing. ``aliquot defrag plan`` still plans on request."""
    PLAN = "plan"
    """Plans moves for waiting pods, and reports them in events."""
    ON = "on"
    """Moves pods."""


class GangsFromOwners(StrEnum):
    """Which pods are in the gangs that their owners state."""

    LABELLED = "labelled"
    """Those with the label ``aliquot.dev/gang-from-owner``, on themselves or on their namespace."""
    ALL = "all"
    """Those of all kinds of owners with pods that need each other, unless the label says no."""


def _classes(value: Any, source: str) -> Mapping[str, Profile]:
    """Lay profiles of classes over the defaults: ``{training: {priorityClass: batch}}``."""
    try:
        return parse_classes(value)
    except ClassError as exc:
        raise SettingsError(f"{source}: {exc}") from exc


def _weights(value: Any, source: str) -> Mapping[Policy, Weights]:
    """Replace single weights of single policies in the defaults: ``{frag: {host: 2.0}}``."""
    try:
        overlays = msgspec.convert(value, dict[Policy, dict[str, float]])
        return {policy: dataclasses.replace(weights, **overlays.get(policy, {})) for policy, weights in DEFAULT_WEIGHTS.items()}
    except (msgspec.ValidationError, TypeError) as exc:
        terms = ", ".join(field.name for field in dataclasses.fields(Weights))
        raise SettingsError(f"{source}: weights: {exc}; want policies ({', '.join(Policy)}) with numbers for {terms}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings. Durations are in seconds."""

    extender_address: Annotated[
        str, Row("host:port of the extender; a loopback address, or any address with mutual TLS; 0.0.0.0 is every address, IPv6 too")
    ] = "127.0.0.1:9410"
    webhook_address: Annotated[
        str, Row("host:port of the admission webhook; 0.0.0.0 is every address, IPv6 too; empty: no webhook in this process")
    ] = "0.0.0.0:9411"
    linger_seconds: Annotated[
        float, Row("how long the webhook keeps serving after SIGTERM, for clients that have not noticed yet", 0, 60, advanced=True)
    ] = 3.0
    metrics_address: Annotated[
        str, Row("host:port of /metrics, /healthz and /readyz; 0.0.0.0 is every address, IPv6 too; port 0 chooses a free one")
    ] = "0.0.0.0:9412"
    dashboard_address: Annotated[
        str, Row("host:port of the read-only dashboard, without authentication; 0.0.0.0 is every address, IPv6 too; empty: no dashboard")
    ] = ""
    prometheus_url: Annotated[
        str, Row("Prometheus from which the dashboard reads history, such as http://HOST:9090; empty: no history")
    ] = ""
    explain_pages: Annotated[bool, Row("serve at metricsAddress why pods wait, and snapshots to replay decisions")] = True
    tls_cert_file: Annotated[str, Row("certificate file of webhook and extender; read again when it changes")] = ""
    tls_key_file: Annotated[str, Row("key file of the certificate")] = ""
    webhook_certificate_secret: Annotated[
        str, Row("Secret in which the replicas create and renew the webhook's certificate; empty: use tlsCertFile and tlsKeyFile")
    ] = ""
    client_ca_file: Annotated[str, Row("CA file for the extender's clients (mutual TLS); required if extenderAddress is not loopback")] = ""
    policy: Annotated[Policy, Row("placement policy of pods without the annotation aliquot.dev/placement")] = Policy.FRAG
    answer: Annotated[
        Answer,
        Row(
            "nodes that filter returns: only the best one where pod, bound pods and nodes state no preference, or all that fit, for a "
            "kube-scheduler with score plugins of your own",
            advanced=True,
        ),
    ] = Answer.ONE
    soft_seconds: Annotated[
        float,
        Row(
            "how long a reservation lasts without a binding; 600 more while the pod's volumes or claims are created",
            0.1,
            600,
            advanced=True,
        ),
    ] = 10.0
    gang_seconds: Annotated[float, Row("how long a gang may hold room without starting, and how long it pauses afterwards", 1, 3600)] = 60.0
    gpu_preemption: Annotated[
        bool, Row("evict less important pods for a pod that lacks only the right GPU, which kube-scheduler's own preemption cannot see")
    ] = True
    consolidation: Annotated[
        Consolidation,
        Row(
            "move pods that allow it for a pod that waits and fits nowhere: not at all, only plan the moves, or make them; needs the "
            "feature gate Consolidation"
        ),
    ] = Consolidation.OFF
    gangs_from_owners: Annotated[
        GangsFromOwners,
        Row(
            "pods in the gangs that their owners state, such as a JobSet: those with the label aliquot.dev/gang-from-owner, or all; needs "
            "the feature gate GangsFromOwners"
        ),
    ] = GangsFromOwners.LABELLED
    feature_gates: Annotated[
        str, Row(f"alpha features to turn on, such as {Gate.CONSOLIDATION}=true,{Gate.ADMISSION_CHECK}=true; comma-separated")
    ] = ""
    max_body_mib: Annotated[
        int, Row("largest request body; a client that is not nodeCacheCapable sends whole nodes", 1, 1024, advanced=True)
    ] = 128
    adopt_nvidia_gpu: Annotated[bool, Row("also manage pods that request plain nvidia.com/gpu, as whole GPUs")] = False
    count_whole_gpus: Annotated[
        bool,
        Row(
            "write the memory of whole GPUs into pods, for quotas; only if all GPUs, or all of each queue, have the same size, also in "
            "pools without nodes"
        ),
    ] = False
    replaced_schedulers: Annotated[
        str, Row("schedulerName of GPU pods that our scheduler takes over, as a comma list; other names are kept, with a warning")
    ] = "default-scheduler,hami-scheduler,kai-scheduler,runai-scheduler,volcano,vgpu-scheduler"
    hami_resources: Annotated[
        str,
        Row(
            "names of HAMi's resources where they differ from its defaults, such as count=nvidia.com/vgpu; also memory, percent, cores and "
            "priority. A name that the webhook's matchConditions do not have must be added there",
            advanced=True,
        ),
    ] = ""
    mig_profiles: Annotated[
        str,
        Row(
            "MIG profiles of nodes that are to be added, each with the MiB of an instance, such as 1g.10gb=9728, 3g.40gb=40192; a pod that "
            "states MiB in HAMi's mode mig gets one of them while no node offers instances",
            advanced=True,
        ),
    ] = ""
    scheduling_groups: Annotated[
        bool,
        Row(
            "admit pods with spec.schedulingGroup: only if the gates GenericWorkload and GangScheduling of the kube-scheduler next to this "
            "process are open",
            advanced=True,
        ),
    ] = False
    tolerate_gpu_taint: Annotated[
        bool, Row("add a toleration for the taint nvidia.com/gpu:NoSchedule to GPU pods; clouds set it on GPU nodes")
    ] = True
    translate_to_claims: Annotated[
        bool,
        Row(
            "turn the vGPUs that pods request into ResourceClaims, for nodes with allocation dra; the label aliquot.dev/allocation of a "
            "pod or namespace overrides it; needs the feature gate DynamicResourceAllocation"
        ),
    ] = False
    lease_name: Annotated[str, Row("lease with which the replicas elect a leader; empty: there is only this replica")] = ""
    scheduler_lease: Annotated[
        str,
        Row(
            "lease of the kube-scheduler next to this process, if several replicas run; empty: it is the only one and always leads",
            advanced=True,
        ),
    ] = ""
    lease_namespace: Annotated[str, Row("namespace of both leases, and of the webhook and its certificate")] = "aliquot-system"
    kube_api_url: Annotated[str, Row("Kubernetes API server (default: the in-cluster service)", advanced=True)] = ""
    kube_token_file: Annotated[str, Row("bearer token for the API (default: the in-cluster service account's)", advanced=True)] = ""
    kube_ca_file: Annotated[str, Row("CA bundle of the API (default: the in-cluster service account's)", advanced=True)] = ""
    scheduler_name: Annotated[str, Row("schedulerName that the webhook sets on GPU pods")] = contract.SCHEDULER_NAME
    log_level: Annotated[LogLevel, Row("lowest severity that is logged")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Row("format of the log lines")] = LogFormat.JSON
    classes: Annotated[Mapping[str, Profile], FileOnly(_classes)] = dataclasses.field(default_factory=lambda: dict(DEFAULT_CLASSES))
    weights: Annotated[Mapping[Policy, Weights], FileOnly(_weights)] = dataclasses.field(default_factory=lambda: dict(DEFAULT_WEIGHTS))

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> "Settings":
        """Read flags, environment and file. Raises SettingsError with one sentence, or SystemExit(0) after the help."""
        values = TABLE.read(argv, environ)
        settings = cls(**{**values, "feature_gates": with_components(values.get("feature_gates", ""), environ)})
        settings._check()
        return settings

    def _check(self) -> None:
        """Raises: SettingsError: settings that do not go together. A misspelt gate first, because it can be the reason for the others."""
        self._check_gates()
        split_address("metricsAddress", self.metrics_address)
        self._check_extender()
        self._check_webhook()
        self._check_dashboard()
        self.hami_names()
        self.expected_profiles()

    def taken_schedulers(self) -> tuple[str, ...]:
        """Return the names in replacedSchedulers."""
        return tuple(filter(None, (name.strip() for name in self.replaced_schedulers.split(","))))

    def hami_names(self) -> dict[str, str]:
        """Return the names in hamiResources by HAMI_KEYS. Raises SettingsError."""
        stated: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in self.hami_resources.split(","))):
            key, _, name = part.partition("=")
            if key not in HAMI_KEYS or "/" not in name:
                raise SettingsError(f"hamiResources {part}: want KEY=RESOURCE with a key of {', '.join(HAMI_KEYS)}")
            if key != "count" and name.startswith(contract.RESOURCE_VGPU):
                raise SettingsError(f"hamiResources {part}: {name} counts a container's total here; only the count may have our name")
            stated[key] = name
        return stated

    def expected_profiles(self) -> dict[str, int]:
        """Return the MiB of each profile in migProfiles. Raises SettingsError."""
        sizes: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in self.mig_profiles.split(","))):
            profile, _, mib = part.partition("=")
            try:
                mig.parse_profile(profile)
                sizes[profile] = units.bytes_to_mib(units.parse_memory_bytes(mib))
            except ContractError as exc:
                raise SettingsError(f"migProfiles {part}: want PROFILE=MIB such as 1g.10gb=9728: {exc}") from None
        return sizes

    @property
    def gates(self) -> FeatureGates:
        """The gates of ``feature_gates``. Raises SettingsError when the text is invalid."""
        try:
            return parse_gates(self.feature_gates)
        except ValueError as exc:
            raise SettingsError(f"{SETTING}: {exc}") from None

    def _check_gates(self) -> None:
        needed = (
            (self.consolidation is not Consolidation.OFF, "consolidation", Gate.CONSOLIDATION),
            (self.gangs_from_owners is GangsFromOwners.ALL, "gangsFromOwners: all", Gate.GANGS_FROM_OWNERS),
            (self.translate_to_claims, "translateToClaims", Gate.DYNAMIC_RESOURCE_ALLOCATION),
            (any(own.interference for own in self.weights.values()), "weights: interference", Gate.INTERFERENCE),
        )
        gates = self.gates
        for is_set, key, gate in needed:
            if is_set and (closed := gates.closed(gate, "scheduler")):
                raise SettingsError(f"{key} is set, but {closed}")

    def _check_extender(self) -> None:
        host, _ = split_address("extenderAddress", self.extender_address)
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            given, missing = ("tlsCertFile", "tlsKeyFile") if self.tls_cert_file else ("tlsKeyFile", "tlsCertFile")
            raise SettingsError(f"{given} is set without {missing}: set both or neither")
        if self.client_ca_file and not self.tls_cert_file:
            raise SettingsError("clientCaFile is set without a certificate of the extender: set tlsCertFile and tlsKeyFile for mutual TLS")
        if host not in ("127.0.0.1", "::1", "localhost") and not (self.tls_cert_file and self.client_ca_file):
            raise SettingsError(
                f"extenderAddress {self.extender_address} is not loopback, and each client that reaches it can bind pods: "
                "set tlsCertFile, tlsKeyFile and clientCaFile, or listen on 127.0.0.1"
            )

    def _check_webhook(self) -> None:
        if not self.webhook_address:
            return
        split_address("webhookAddress", self.webhook_address)
        if not self.tls_cert_file and not self.webhook_certificate_secret:
            raise SettingsError(
                "webhookAddress is set without a certificate, and the API server calls webhooks only over TLS: "
                "set webhookCertificateSecret, or tlsCertFile and tlsKeyFile, or an empty webhookAddress"
            )

    def _check_dashboard(self) -> None:
        if self.dashboard_address:
            split_address("dashboardAddress", self.dashboard_address)
        if self.prometheus_url and not self.prometheus_url.startswith(("http://", "https://")):
            raise SettingsError(f"prometheusUrl {self.prometheus_url}: want http://HOST:PORT or https://HOST, optionally with a path")


TABLE = Table(
    Settings,
    program="scheduler_plugin",
    purpose="Schedules pods on shares of GPUs as an extender of kube-scheduler, and validates their requests as a webhook.",
    config_env="ALIQUOT_SCHEDULER_CONFIG",
)
