"""The scheduler's configuration: each field of ``Settings`` is a setting with its default, meaning and bounds (``program.settings``).

Weights are a mapping and stand in the file only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from program.settings import FileOnly, LogFormat, LogLevel, Row, SettingsError, Table, split_address
from proto import contract
from proto.model import Policy
from scheduler_plugin.core.score import DEFAULT_WEIGHTS, Weights


def _weights(value: Any, source: str) -> Mapping[Policy, Weights]:
    """Overlay single weights of single policies, ``{frag: {host: 2.0}}``, on the defaults."""
    try:
        overlays = msgspec.convert(value, dict[Policy, dict[str, float]])
        return {policy: dataclasses.replace(weights, **overlays.get(policy, {})) for policy, weights in DEFAULT_WEIGHTS.items()}
    except (msgspec.ValidationError, TypeError) as exc:
        terms = ", ".join(field.name for field in dataclasses.fields(Weights))
        raise SettingsError(f"{source}: weights: {exc}; want policies ({', '.join(Policy)}) with numbers for {terms}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be configured. Durations are in seconds."""

    extender_address: Annotated[
        str, Row("host:port of the extender; loopback beside kube-scheduler, or any with TLS (0.0.0.0: every address)")
    ] = "127.0.0.1:9410"
    webhook_address: Annotated[str, Row("host:port of the admission webhook; 0.0.0.0 is every address, IPv6 too; empty: none here")] = (
        "0.0.0.0:9411"
    )
    linger_seconds: Annotated[
        float, Row("how long the webhook goes on answering after the process was told to end: some still call it here", 0, 60)
    ] = 3.0
    metrics_address: Annotated[
        str, Row("host:port of /metrics, /healthz and /readyz; 0.0.0.0 is every address, IPv6 too; port 0 chooses a free one")
    ] = "0.0.0.0:9412"
    dashboard_address: Annotated[
        str, Row("host:port of the read-only dashboard, which asks nobody who they are; 0.0.0.0 is every address, IPv6 too; empty: none")
    ] = ""
    prometheus_url: Annotated[str, Row("Prometheus that the dashboard asks for history, such as http://HOST:9090; empty: no history")] = ""
    explain_pages: Annotated[bool, Row("also tell there why pods wait, and hand out snapshots to replay")] = True
    tls_cert_file: Annotated[str, Row("certificate of webhook and extender; read again when it changes")] = ""
    tls_key_file: Annotated[str, Row("its key")] = ""
    webhook_certificate_secret: Annotated[
        str, Row("Secret in which the webhook's certificate is made and renewed, as its replicas agree; empty: it is in the files")
    ] = ""
    client_ca_file: Annotated[str, Row("CA of the extender's clients: mutual TLS; needed beyond loopback")] = ""
    policy: Annotated[Policy, Row("placement of pods that name none")] = Policy.FRAG
    soft_seconds: Annotated[
        float, Row("how long a pod is expected on a node without being bound; 600 more while its volumes or claims are made", 0.1, 600)
    ] = 10.0
    gang_seconds: Annotated[float, Row("how long a gang may hold room before it must have started, and then pauses", 1, 3600)] = 60.0
    gpu_preemption: Annotated[
        bool, Row("end less important pods for one that lacks only the right GPU, which kube-scheduler's own preemption cannot see")
    ] = True
    max_body_mib: Annotated[int, Row("largest request body; callers other than our kube-scheduler send whole nodes", 1, 1024)] = 128
    adopt_nvidia_gpu: Annotated[bool, Row("also take over pods that ask for plain nvidia.com/gpu, as whole GPUs")] = False
    count_whole_gpus: Annotated[
        bool,
        Row("write the memory of whole GPUs into pods, for quotas; only where all GPUs have one size, also those of empty pools"),
    ] = False
    tolerate_gpu_taint: Annotated[
        bool, Row("have the webhook let GPU pods onto nodes with the taint nvidia.com/gpu:NoSchedule, as clouds taint theirs")
    ] = True
    lease_name: Annotated[str, Row("lease by which replicas elect a leader; empty: this is the only replica")] = ""
    scheduler_lease: Annotated[
        str, Row("lease of the kube-scheduler beside this process, one of several; empty: it is the only one, and always leads")
    ] = ""
    lease_namespace: Annotated[str, Row("namespace of both leases, and of the webhook with its certificate")] = "aliquot-system"
    kube_api_url: Annotated[str, Row("Kubernetes API server (default: the in-cluster service)")] = ""
    kube_token_file: Annotated[str, Row("bearer token for the API (default: the in-cluster service account's)")] = ""
    kube_ca_file: Annotated[str, Row("CA bundle of the API (default: the in-cluster service account's)")] = ""
    scheduler_name: Annotated[str, Row("schedulerName that the webhook gives to GPU pods")] = contract.SCHEDULER_NAME
    log_level: Annotated[LogLevel, Row("least severity that is logged")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Row("form of the log lines")] = LogFormat.JSON
    weights: Annotated[Mapping[Policy, Weights], FileOnly(_weights)] = dataclasses.field(default_factory=lambda: dict(DEFAULT_WEIGHTS))

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> "Settings":
        """Read flags, environment and file. Raises SettingsError with one sentence; SystemExit(0) after printing help."""
        settings = cls(**TABLE.read(argv, environ))
        settings._check()
        return settings

    def _check(self) -> None:
        host, _ = split_address("extenderAddress", self.extender_address)
        split_address("metricsAddress", self.metrics_address)
        if self.dashboard_address:
            split_address("dashboardAddress", self.dashboard_address)
        if self.prometheus_url and not self.prometheus_url.startswith(("http://", "https://")):
            raise SettingsError(f"prometheusUrl {self.prometheus_url}: want http://HOST:PORT or https://HOST, with a path where it has one")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise SettingsError("tlsCertFile and tlsKeyFile belong together: set both or neither")
        if self.client_ca_file and not self.tls_cert_file:
            raise SettingsError(
                "clientCaFile is for mutual TLS, which needs a certificate of the extender too: set tlsCertFile and tlsKeyFile"
            )
        if host not in ("127.0.0.1", "::1", "localhost") and not (self.tls_cert_file and self.client_ca_file):
            raise SettingsError(
                f"extenderAddress {self.extender_address} is reachable from elsewhere, and whoever reaches it can bind pods: "
                "set tlsCertFile, tlsKeyFile and clientCaFile, or listen on 127.0.0.1"
            )
        if self.webhook_address:
            split_address("webhookAddress", self.webhook_address)
            if not self.tls_cert_file and not self.webhook_certificate_secret:
                raise SettingsError(
                    "the API server calls webhooks over TLS only: set webhookCertificateSecret to have a certificate made, "
                    "or tlsCertFile and tlsKeyFile, or webhookAddress to nothing"
                )


TABLE = Table(
    Settings,
    program="scheduler_plugin",
    purpose="Places pods on shares of GPUs, beside kube-scheduler, and admits what they ask for.",
    config_env="ALIQUOT_SCHEDULER_CONFIG",
)
