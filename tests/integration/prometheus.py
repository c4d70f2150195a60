# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus (Debian: ``prometheus``) over pages that a test serves or names, with the rules of deploy/monitoring."""

import asyncio
import json
import shutil
import socket
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

PROGRAM = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    PROGRAM is None, reason="needs Prometheus, which is not installed (Debian: apt-get install prometheus)"
)
SCRAPE_SECONDS = 1
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """A page to scrape."""

    job: str
    address: str
    """host:port; the page is /metrics."""
    labels: Mapping[str, str]


class Prometheus:
    """One running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of its API. Raises AssertionError with its error."""

        def get() -> dict[str, Any]:
            query = urllib.parse.urlencode(parameters)
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as refused:
                with refused:
                    return json.load(refused)

        answer = await asyncio.to_thread(get)
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]

    async def query(self, query: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        return (await self.ask("query", query=query))["result"]

    async def firing(self) -> dict[str, dict[str, Any]]:
        """Return the alerts that fire, by name."""
        alerts = (await self.ask("alerts"))["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in alerts if alert["state"] == "firing"}

    async def until(self, met: Callable[[], Any], what: str) -> None:
        """Query repeatedly. Raises AssertionError when it stays unmet."""
        for _ in range(int(PATIENCE_SECONDS / 0.5)):
            if await met():
                return
            await asyncio.sleep(0.5)
        raise AssertionError(f"waited {PATIENCE_SECONDS:.0f} s for {what}")

    async def until_it_is(self, wanted: Any, ask: Callable[[], Awaitable[Any]]) -> None:
        """Query repeatedly until that is the reply. Raises AssertionError with the last one."""
        for _ in range(int(PATIENCE_SECONDS / 0.5)):
            answer = await ask()
            if answer == wanted:
                return
            await asyncio.sleep(0.5)
        raise AssertionError(f"waited {PATIENCE_SECONDS:.0f} s for {wanted}, found {answer}")


def rule_groups(rules: str) -> list[dict[str, Any]]:
    """Return the groups of PrometheusRule objects, as a file of rules has them."""
    return [group for rule in yaml.safe_load_all(rules) for group in rule["spec"]["groups"]]


@asynccontextmanager
async def running_prometheus(directory: Path, targets: Sequence[Target], rules: str) -> AsyncIterator[Prometheus]:
    """Run a server for the time of a block.

    Args: rules: PrometheusRule objects as YAML; their alerts fire at once, without their ``for``.
    """
    groups = rule_groups(rules)
    for group in groups:
        for alert in group["rules"]:
            alert.pop("for", None)
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": f"{number}",
                "honor_labels": True,
                "static_configs": [{"targets": [target.address], "labels": {"job": target.job, **target.labels}}],
            }
            for number, target in enumerate(targets)
        ],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    address = _free_address()
    log = (directory / "prometheus.log").open("wb")
    flags = [f"--config.file={directory}/prometheus.yaml", f"--storage.tsdb.path={directory}/data", f"--web.listen-address={address}"]
    process = await asyncio.create_subprocess_exec(str(PROGRAM), *flags, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://{address}")
        await server.until(lambda: _is_ready(server, process), "Prometheus to be ready")
        yield server
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        log.close()


async def _is_ready(server: Prometheus, process: asyncio.subprocess.Process) -> bool:
    assert process.returncode is None, "Prometheus ended: see prometheus.log"

    def ask() -> bool:
        try:
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    return await asyncio.to_thread(ask)


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"127.0.0.1:{listening.getsockname()[1]}"
