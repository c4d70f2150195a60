# SPDX-License-Identifier: Apache-2.0
"""Access to the scheduler's read-only pages, through the API server's proxy of its pods or at an address.

Every replica knows the cluster. Only the replica that kube-scheduler calls has decisions, and knows for which nodes it was called.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import click

from aliquot_cli import live
from aliquot_cli.access import Target, connect, proxy_path
from aliquot_cli.errors import AccessError, NotFoundError
from aliquot_cli.source import SYSTEM_NAMESPACE

STATUS_PORT = 9412
LABEL = "app.kubernetes.io/name=aliquot-scheduler"
REQUEST_SECONDS = 60.0

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class SchedulerAccess:
    """Where the user finds the scheduler: ``url``, or the pods in ``namespace``."""

    target: Target
    url: str | None
    namespace: str

    def page(self, path: str, **query: str) -> str:
        """Return a page of the first replica that has it. Raises AccessError, or NotFoundError when no replica has it."""
        return next(self.pages(path, **query))

    def pages(self, path: str, **query: str) -> Iterator[str]:
        """Yield the page of each replica that has it, at least one. Raises AccessError, or NotFoundError when no replica has it."""
        full = path + (f"?{urlencode(query)}" if query else "")
        return iter([_at(self.url, full)]) if self.url else self._through_proxy(full)

    def _through_proxy(self, path: str) -> Iterator[str]:
        cluster = connect(self.target)
        pods = cluster.get(f"/api/v1/namespaces/{self.namespace}/pods", {"labelSelector": LABEL})["items"]
        running = [pod["metadata"]["name"] for pod in pods if pod.get("status", {}).get("phase") == "Running"]
        if not running:
            raise NotFoundError(f"no running pod with label {LABEL} in namespace {self.namespace}; give --scheduler-namespace or --url")
        answered, failures = False, []
        for name in running:
            try:
                text = cluster.text(proxy_path(self.namespace, name, STATUS_PORT, path))
            except (AccessError, NotFoundError) as exc:
                failures.append(exc)
                continue
            answered = True
            yield text
        if not answered:
            raise next((failure for failure in failures if isinstance(failure, AccessError)), failures[0])


def scheduler_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --kubeconfig, --context, --url and --scheduler-namespace; the command gets ``scheduler``."""

    @click.option(
        "--kubeconfig", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Kubeconfig file.  [default: as kubectl]"
    )
    @click.option("--context", metavar="NAME", shell_complete=live.contexts, help="Context of the kubeconfig to use.")
    @click.option("--url", metavar="URL", help="The scheduler's metrics address, such as http://10.0.0.7:9412, instead of the API server.")
    @click.option("--scheduler-namespace", metavar="NAME", default=SYSTEM_NAMESPACE, show_default=True, help="Namespace of the scheduler.")
    @wraps(command)
    def with_scheduler(
        *arguments: Any, kubeconfig: Path | None, context: str | None, url: str | None, scheduler_namespace: str, **options: Any
    ) -> None:
        command(*arguments, scheduler=SchedulerAccess(Target(kubeconfig, context), url, scheduler_namespace), **options)

    return with_scheduler


def _at(url: str, path: str) -> str:
    import urllib3

    try:
        answer = urllib3.request("GET", url.rstrip("/") + path, timeout=REQUEST_SECONDS, retries=False)
    except urllib3.exceptions.HTTPError as exc:
        raise AccessError(f"the scheduler at {url} cannot be reached: {exc}") from exc
    if answer.status == 200:
        return answer.data.decode()
    message = answer.data.decode(errors="replace").strip()
    raise (NotFoundError if answer.status == 404 else AccessError)(message or f"{url}{path}: {answer.status}")
