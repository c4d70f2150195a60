# SPDX-License-Identifier: Apache-2.0
"""The cluster's own certificate authority, and what it signs, made with openssl for each cluster."""

import subprocess
from pathlib import Path

_DAYS = "2"


def make_certificates(folder: Path, *, node_name: str, server_addresses: tuple[str, ...]) -> None:
    """Write ca, apiserver, apiserver-kubelet-client and kubelet certificates with keys, and the service-account key, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _openssl(folder, "req", "-x509", *_new_key("ca"), "-days", _DAYS, "-out", "ca.crt", "-subj", "/CN=aliquot-e2e-ca")
    names = "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:localhost"
    addresses = ",".join(f"IP:{address}" for address in server_addresses)
    _signed(folder, "apiserver", "/CN=kube-apiserver", f"{names},{addresses}")
    _signed(folder, "apiserver-kubelet-client", "/O=aliquot:e2e-kubelet-clients/CN=kube-apiserver-kubelet-client", "DNS:kube-apiserver")
    _signed(folder, "kubelet", f"/O=system:nodes/CN=system:node:{node_name}", f"DNS:{node_name},{addresses}")
    _openssl(folder, "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", "service-account.key")
    _openssl(folder, "pkey", "-in", "service-account.key", "-pubout", "-out", "service-account.pub")


def _signed(folder: Path, name: str, subject: str, alternative_names: str) -> None:
    """A key, and a certificate over it signed by the authority."""
    extensions = f"subjectAltName={alternative_names}", "extendedKeyUsage=serverAuth,clientAuth"
    added = [argument for extension in extensions for argument in ("-addext", extension)]
    authority = ["-CA", "ca.crt", "-CAkey", "ca.key"]
    _openssl(folder, "req", "-x509", *_new_key(name), "-days", _DAYS, "-out", f"{name}.crt", "-subj", subject, *added, *authority)


def _new_key(name: str) -> list[str]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key"]


def _openssl(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {' '.join(arguments)}: {done.stderr.strip()}")
