# SPDX-License-Identifier: Apache-2.0
"""The Aliquot agent on the node: whether it runs and is ready, its damaged ledger rows, and whether only root can read its secret."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

from aliquot_cli.doctor.findings import Finding, error, info, ok, warning
from aliquot_cli.doctor.host import Host
from aliquot_cli.doctor.options import DoctorOptions

_SECONDS = 5
_DAMAGED = "damaged-grant"
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - the agent listens there, not this program
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without the proxies of the environment, which urllib would use: they do not reach pods."""


def check(host: Host, options: DoctorOptions) -> Iterator[Finding]:
    """Check the agent."""
    mode = host.mode(f"{options.state_dir}/secret")
    if mode is not None and mode & 0o077:
        yield error(
            "agent.secret",
            f"users other than root can read {options.state_dir}/secret (mode {mode:04o}) and name the devices of other pods with it",
            f"chmod 0600 {options.state_dir}/secret",
        )
    address = (host.text(f"{options.runtime_dir}/metrics-address") or "").strip()
    if not address:
        yield info("agent.ready", "no agent has run on this node since boot", "install it: kubectl apply -k deploy/daemonset")
        return
    listening, _, port = address.rpartition(":")
    reached = f"{_LOOPBACKS.get(listening, listening)}:{port}"
    yield _readiness(reached)
    yield from _damaged_grants(reached)


def _damaged_grants(address: str) -> Iterator[Finding]:
    """Yield the containers with a damaged ledger row, which close their GPUs; nothing if the agent does not reply."""
    try:
        with _DIRECT.open(f"http://{address}/drift", timeout=_SECONDS) as page:
            drifts = json.load(page)["drifts"]
        sentences = [f"{one['pod'] or 'a pod'}: {one['message']}" for one in drifts if one["kind"] == _DAMAGED]
    except (OSError, ValueError, TypeError, KeyError):  # agent.ready says why, or it is an agent of another version
        return
    for sentence in sentences:
        yield error("agent.ledger", sentence, "delete the pod, or drain the node; check the disk")


def _readiness(address: str) -> Finding:
    try:
        with _DIRECT.open(f"http://{address}/readyz", timeout=_SECONDS):
            return ok("agent.ready", f"the agent on {address} is ready")
    except urllib.error.HTTPError as exc:
        with exc:
            return error(
                "agent.ready",
                f"the agent is not ready: {exc.read().decode(errors='replace').strip()}",
                "see the other findings and the agent's log",
            )
    except OSError as exc:
        return warning("agent.ready", f"no agent answers on {address}: {exc}", "check the aliquot-agent pod of this node")
