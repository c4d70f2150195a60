"""Where the Kubernetes API is and as whom to ask it: from the settings, completed by what a pod is given."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from program.settings import SettingsError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API is, and as whom to ask."""

    url: str
    token_file: Path | None
    """Read again for every request: the kubelet rotates it."""
    ca_file: Path | None


def find_api_server(
    url: str, token_file: str, ca_file: str, environ: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT
) -> ApiServer:
    """Complete the settings from what a pod is given.

    Raises: SettingsError when there is neither a URL nor a cluster around us.
    """
    if not url:
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if host is None or port is None:
            raise SettingsError("no Kubernetes API: this process is not in a pod, so set kubeApiUrl")
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    if not re.match(r"https?://[^/]", url):
        raise SettingsError(f"kubeApiUrl {url!r}: want http:// or https:// and a host")
    token = Path(token_file) if token_file else service_account / "token"
    ca = Path(ca_file) if ca_file else service_account / "ca.crt"
    return ApiServer(
        url.rstrip("/"),
        token if token_file or token.exists() else None,
        ca if (ca_file or ca.exists()) and url.startswith("https:") else None,
    )
