# SPDX-License-Identifier: Apache-2.0
"""A whole node in one directory, without root: GPUs, Kubernetes API, kubelet, container runtime, and a real agent process.

``async with Node(SimulatedHardware("h200x8")) as node`` enters the block when the agent has registered. The end of the block ends every
process and removes the directory, also after an error. The demo and the integration tests use this class.
"""

import asyncio
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from aliquot import contract
from aliquot.contract.features import ALL_ALPHA
from aliquot.paths import built
from aliquot_lab.standin.agentprocess import AgentError, AgentProcess
from aliquot_lab.standin.apiserver import ApiServer, request_pod_deletion
from aliquot_lab.standin.cdi import encode_spec
from aliquot_lab.standin.cluster import Change, Cluster, Kind, Object
from aliquot_lab.standin.errors import NotFoundError
from aliquot_lab.standin.hardware import Hardware
from aliquot_lab.standin.inventory import Inventory
from aliquot_lab.standin.kubelet import Kubelet
from aliquot_lab.standin.plugins import Behaviour
from aliquot_lab.standin.pods import parse_amount
from aliquot_lab.standin.processes import ProcessTable
from aliquot_lab.standin.runtime import RunningContainer, Runtime

NODE_TOKEN = "stand-in"  # noqa: S105  for a server on loopback without secrets
READY_SECONDS = PATIENCE_SECONDS = 60.0
"""What comes at last takes longer on a busy machine."""
ALL_GATES = f"--feature-gates={ALL_ALPHA}=true"
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of a node."""

    name: str = "node-1"
    agent_flags: Sequence[str] = ()
    """Flags of the agent after those for this node's paths; the last of two equal flags wins."""
    behaviour: Behaviour = field(default_factory=lambda: Behaviour(retry_seconds=0.5, crash_backoff_seconds=0.5))
    """Behaviour of the kubelet. It retries faster than a real one, which retries a refused start after ten seconds."""
    start_agent: bool = True
    mps_control: Path | None = None
    """Program in place of nvidia-cuda-mps-control; None: the node runs no ``aliquot-mps``."""
    directory: Path | None = None
    """The node's directory, which is kept. None: a temporary one, removed at the end."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The node's directories below ``base``, with the names of a real node."""

    base: Path

    @property
    def plugin_dir(self) -> Path:
        """Directory of the sockets of kubelet and plugins."""
        return self.base / "device-plugins"

    @property
    def pod_resources_socket(self) -> Path:
        """Socket of the PodResources API."""
        return self.base / "pod-resources" / "kubelet.sock"

    @property
    def cdi_static(self) -> Path:
        """Directory of the host's CDI specs."""
        return self.base / "etc-cdi"

    @property
    def cdi_dynamic(self) -> Path:
        """Directory of the containers' CDI specs."""
        return self.base / "run-cdi"

    @property
    def state(self) -> Path:
        """Directory of the agent's ledger and secret."""
        return self.base / "state"

    @property
    def run(self) -> Path:
        """Directory of the agent's limits files and usage regions."""
        return self.base / "run"

    @property
    def containers(self) -> Path:
        """Directory of the containers' roots and logs."""
        return self.base / "containers"

    @property
    def proc(self) -> Path:
        """Stand-in for /proc, with containers in cgroups."""
        return self.base / "proc"

    @property
    def token(self) -> Path:
        """File with the agent's service account token."""
        return self.base / "token"

    @property
    def mps_log(self) -> Path:
        """Log of ``aliquot-mps``."""
        return self.base / "mps.log"

    @property
    def agent_log(self) -> Path:
        """Log of the agent."""
        return self.base / "agent.log"

    def make(self) -> None:
        """Create the directories that a real node has before the agent starts."""
        for directory in (self.cdi_static, self.cdi_dynamic, self.state, self.run, self.containers):
            directory.mkdir(parents=True, exist_ok=True)
        self.token.write_text(NODE_TOKEN)


class Node:
    """One running stand-in node."""

    layout: Layout
    inventory: Inventory
    cluster: Cluster
    api: ApiServer
    runtime: Runtime
    kubelet: Kubelet
    agent: AgentProcess
    mps: AgentProcess
    """``aliquot-mps``; it is started only with ``NodeOptions.mps_control``."""

    def __init__(self, hardware: Hardware, options: NodeOptions | None = None) -> None:
        self.hardware = hardware
        self.options = options or NodeOptions()
        self._cleanup = AsyncExitStack()

    async def __aenter__(self) -> "Node":
        async with AsyncExitStack() as stack:
            self.layout = Layout(self._base(stack))
            self.layout.make()
            self.inventory = await self._prepare()
            (self.layout.cdi_static / "nvidia.json").write_bytes(encode_spec(self.hardware.cdi_spec(self.inventory)))
            self.cluster = Cluster()
            self.api = ApiServer(self.cluster, token=NODE_TOKEN)
            self.api.start()
            stack.callback(self.api.stop)
            await self._start_kubelet(stack)
            self.mps = self._mps()
            stack.push_async_callback(self.mps.stop)
            if self.options.mps_control is not None:
                await self.mps.start()
            self.agent = self._agent()
            stack.push_async_callback(self.agent.stop)
            if self.options.start_agent:
                await self.agent.start()
                await self.wait_ready()
            self._cleanup = stack.pop_all()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        await self._cleanup.__aexit__(exc_type, exc, traceback)

    # --- pods ---

    def create_pod(self, manifest: Object) -> Object:
        """Create a pod bound to this node."""
        body = {**manifest, "spec": {**manifest["spec"], "nodeName": self.options.name}}
        return self.cluster.create(Kind.POD, body)

    def delete_pod(self, name: str, namespace: str = "default") -> None:
        """Request a pod's deletion; the kubelet stops its containers and removes it."""
        request_pod_deletion(self.cluster, namespace, name)

    def pod(self, name: str, namespace: str = "default") -> Object:
        """Return the current object of a pod."""
        return self.cluster.get(Kind.POD, namespace, name)

    def container(self, pod: str, container: str | None = None) -> RunningContainer:
        """Return the latest run of a pod's container. Raises NotFoundError when it has not started."""
        found = self.runtime.find(pod, container)
        if found is None:
            raise NotFoundError(f"no container of pod {pod} has started")
        return found

    async def wait_for_pod(
        self, name: str, condition: Callable[[Object], bool], *, timeout_seconds: float = PATIENCE_SECONDS, namespace: str = "default"
    ) -> Object:
        """Return the pod when ``condition`` is true for it. Raises TimeoutError with its last status."""

        def arrived() -> Object | None:
            pod = self.pod(name, namespace)
            return pod if condition(pod) else None

        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._until(arrived)
        except TimeoutError:
            status = self.pod(name, namespace).get("status")
            raise TimeoutError(f"pod {name} did not reach the expected state in {timeout_seconds:g} s; its status: {status}") from None

    async def wait_gone(self, name: str, *, timeout_seconds: float = PATIENCE_SECONDS, namespace: str = "default") -> None:
        """Return when the pod is no longer in the API. Raises TimeoutError."""

        def still_there() -> None:
            self.pod(name, namespace)

        try:
            async with asyncio.timeout(timeout_seconds):
                await self._until(still_there)
        except NotFoundError:
            return
        except TimeoutError:
            raise TimeoutError(f"pod {name} still exists {timeout_seconds:g} s after its deletion") from None

    async def _until(self, probe: Callable[[], Object | None]) -> Object:
        """Return the first result of ``probe``, which is called after every change in the cluster."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def notice(change: Change) -> None:
            del change
            loop.call_soon_threadsafe(changed.set)

        stop_listening = self.cluster.listen(notice)
        try:
            while (found := probe()) is None:
                await changed.wait()
                changed.clear()
            return found
        finally:
            stop_listening()

    def events(self, pod: str) -> list[Object]:
        """Return the events about a pod, oldest first."""
        return list(self.cluster.list(Kind.EVENT, lambda event: bool(event["involvedObject"].get("name") == pod))[1])

    # --- node and agent ---

    @property
    def status(self) -> Object:
        """Return the node object's status."""
        status: Object = self.cluster.get(Kind.NODE, "", self.options.name)["status"]
        return status

    def allocatable(self, resource: str) -> int:
        """Return the node's allocatable amount of a resource; 0 when it does not have it."""
        return parse_amount(self.status["allocatable"].get(resource, "0"))

    async def wait_ready(self, timeout_seconds: float = READY_SECONDS) -> None:
        """Return when the agent has registered every resource and is ready. Raises AgentError."""
        url = await self.agent.metrics_url(timeout_seconds)
        async with self.agent.deadline(timeout_seconds, f"register {contract.RESOURCE_VGPU} and become ready"):
            while not (self._registered() and await asyncio.to_thread(_answers, f"{url}/readyz")):
                self.agent.check()
                await asyncio.sleep(POLL_SECONDS)

    async def metrics(self) -> str:
        """Scrape the agent's metrics. Raises AgentError."""
        url = await self.agent.metrics_url(READY_SECONDS)
        try:
            return (await asyncio.to_thread(_fetch, f"{url}/metrics")).decode()
        except OSError as exc:
            self.agent.check()
            raise AgentError(f"{url}/metrics: {exc}\n{self.agent.log_tail()}") from exc

    # --- start ---

    def _registered(self) -> bool:
        wanted = {contract.RESOURCE_VGPU} if any(not gpu.mig_enabled for gpu in self.inventory.gpus) else set()
        return all(self.allocatable(resource) > 0 for resource in wanted)

    def _base(self, stack: AsyncExitStack) -> Path:
        if self.options.directory is not None:
            self.options.directory.mkdir(parents=True, exist_ok=True)
            return self.options.directory
        base = Path(tempfile.mkdtemp(prefix="aliquot-"))
        stack.callback(shutil.rmtree, base)
        return base

    async def _prepare(self) -> Inventory:
        """Prepare the hardware. A cancelled call waits for its thread, because it writes to the directory that is removed next."""
        preparing = asyncio.ensure_future(asyncio.to_thread(self.hardware.prepare, self.layout.base, self.options.name))
        try:
            return await asyncio.shield(preparing)
        except asyncio.CancelledError:
            await asyncio.gather(preparing, return_exceptions=True)
            raise

    async def _start_kubelet(self, stack: AsyncExitStack) -> None:
        directories = (self.layout.cdi_static, self.layout.cdi_dynamic)
        processes = ProcessTable(self.layout.proc)
        self.runtime = Runtime(self.layout.containers, directories, visibility=self.hardware.visibility, processes=processes)
        self.kubelet = Kubelet(
            self.cluster,
            self.runtime,
            self.options.name,
            plugin_dir=self.layout.plugin_dir,
            pod_resources_socket=self.layout.pod_resources_socket,
            behaviour=self.options.behaviour,
        )
        stack.push_async_callback(self.kubelet.shutdown)
        await self.kubelet.start()

    def _mps(self) -> AgentProcess:
        flags = [f"--runtime-dir={self.layout.run}", f"--mps-control={self.options.mps_control}", "--log-format=text"]
        no_address = self.layout.base / "mps-address"
        return AgentProcess(flags, {}, log_path=self.layout.mps_log, address_file=no_address, module="agent.mps.__main__")

    def _agent(self) -> AgentProcess:
        layout = self.layout
        flags = {
            "node-name": self.options.name,
            "kubelet-dir": layout.base,
            "cdi-dir": layout.cdi_dynamic,
            "cdi-static-dir": layout.cdi_static,
            "state-dir": layout.state,
            "runtime-dir": layout.run,
            "shim-dir": built(f"lib/shim/{contract.CUDA_SONAME}").parent,
            "metrics-address": "127.0.0.1:0",
            "kube-api-url": self.api.url,
            "kube-token-file": layout.token,
            "placement": "local",
            "proc-dir": layout.proc,
        }
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        return AgentProcess(
            [*arguments, ALL_GATES, *self.hardware.agent_flags(), *self.options.agent_flags],
            self.hardware.agent_environment(),
            log_path=layout.agent_log,
            address_file=layout.run / "metrics-address",
        )


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310  the address of this node's agent
        body: bytes = response.read()
        return body


def _answers(url: str) -> bool:
    try:
        _fetch(url)
    except OSError:
        return False
    return True
