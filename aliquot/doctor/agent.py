"""Our own agent on the node: whether it runs and is ready, and whether its secret is kept."""

import urllib.error
import urllib.request
from collections.abc import Iterator

from aliquot.doctor.findings import Finding, error, info, ok, warning
from aliquot.doctor.host import Host
from aliquot.doctor.options import DoctorOptions

_SECONDS = 5
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - what it listens on, not we
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the environment, which urllib would ask, does not lead to pods."""


def check(host: Host, options: DoctorOptions) -> Iterator[Finding]:
    """Examine the agent."""
    mode = host.mode(f"{options.state_dir}/secret")
    if mode is not None and mode & 0o077:
        yield error(
            "agent.secret",
            f"{options.state_dir}/secret may be read by others (mode {mode:04o}): who knows it can name other pods' devices",
            f"chmod 0600 {options.state_dir}/secret",
        )
    address = (host.text(f"{options.runtime_dir}/metrics-address") or "").strip()
    if not address:
        yield info("agent.ready", "no agent has run on this node since it was booted", "install it: kubectl apply -k deploy/daemonset")
        return
    listening, _, port = address.rpartition(":")
    yield _readiness(f"{_LOOPBACKS.get(listening, listening)}:{port}")


def _readiness(address: str) -> Finding:
    try:
        with _DIRECT.open(f"http://{address}/readyz", timeout=_SECONDS):
            return ok("agent.ready", f"the agent on {address} is ready")
    except urllib.error.HTTPError as exc:
        with exc:
            return error(
                "agent.ready",
                f"the agent is not ready: {exc.read().decode(errors='replace').strip()}",
                "see the other findings, and its log",
            )
    except OSError as exc:
        return warning("agent.ready", f"no agent answers on {address}: {exc}", "look at the aliquot-agent pod of this node")
