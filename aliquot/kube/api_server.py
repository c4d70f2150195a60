# SPDX-License-Identifier: Apache-2.0
"""Address and credentials of the Kubernetes API: from the settings, completed by what Kubernetes gives every pod."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aliquot.file_cache import FileCache
from aliquot.kube.errors import KubeApiError
from aliquot.process.settings import SettingsError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """One API server and how to authenticate to it."""

    url: str
    """Without a slash at its end."""
    token_file: Path | None
    ca_file: Path | None
    """PEM certificates to verify the server by; None means those of the system."""
    _tokens: FileCache[str] = field(default_factory=lambda: FileCache(_read_token), init=False, repr=False, compare=False)

    def credentials(self) -> dict[str, str]:
        """Return the headers that authenticate a request. Raises KubeApiError: the token file cannot be read.

        Each request takes the current token, because kubelet rotates it.
        """
        if self.token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self._tokens.read(str(self.token_file))}"}
        except OSError as exc:
            raise KubeApiError(f"the API token {self.token_file}: {exc.strerror}") from exc


def find_api_server(
    url: str, token_file: str, ca_file: str, environ: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT
) -> ApiServer:
    """Complete the settings from the pod's environment and service account.

    Raises: SettingsError: no URL is set and the process is not in a pod, or the URL is invalid.
    """
    url = url or _url_in_pod(environ)
    if not re.match(r"https?://[^/]", url):
        raise SettingsError(f"kubeApiUrl {url!r}: want http:// or https:// and a host")
    token = _file(token_file, service_account / "token")
    ca = _file(ca_file, service_account / "ca.crt") if url.startswith("https:") else None
    return ApiServer(url.rstrip("/"), token, ca)


def _url_in_pod(environ: Mapping[str, str]) -> str:
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if host is None or port is None:
        raise SettingsError("no Kubernetes API: this process is not in a pod, so set kubeApiUrl")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _read_token(path: str) -> str:
    return Path(path).read_text().strip()


def _file(name: str, default: Path) -> Path | None:
    """Return the file of the settings, whether or not it exists, or else the default if that exists."""
    if name:
        return Path(name)
    return default if default.exists() else None
