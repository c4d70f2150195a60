# SPDX-License-Identifier: Apache-2.0
"""One worker for each admitted pod: starts its containers in order, restarts them by the pod's rules and writes the pod's status.

Before every start of a container, the kubelet calls PreStartContainer of each device plugin that requires it. The replies of Allocate are
those that the kubelet stored. A failed start becomes a waiting reason and an event, and is retried.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from aliquot import contract
from aliquot_lab.standin.cluster import Cluster, Kind, timestamp
from aliquot_lab.standin.errors import ConflictError, NotFoundError
from aliquot_lab.standin.plugins import Behaviour, DeviceManager, InterruptedCallError, PreStartError
from aliquot_lab.standin.pods import Container, PodSpec, Role
from aliquot_lab.standin.runtime import ContainerConfig, RunningContainer, Runtime, RuntimeRefusalError


@dataclass
class ContainerStatus:
    """The mutable state of one container, with the fields of ``containerStatuses``."""

    container: Container
    state: dict[str, Any]
    last_state: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    container_id: str = ""

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        """Return its exit code; None while it has not ended."""
        return self.state["terminated"]["exitCode"] if "terminated" in self.state else None

    def as_json(self) -> dict[str, Any]:
        """Return the entry of ``containerStatuses``."""
        return {
            "name": self.container.name,
            "state": self.state,
            "lastState": self.last_state,
            "ready": self.running,
            "started": self.running,
            "restartCount": self.restarts,
            "containerID": self.container_id,
        }


class WorkerKubelet(Protocol):
    """The parts of the kubelet that a worker uses."""

    cluster: Cluster
    runtime: Runtime
    devices: DeviceManager
    behaviour: Behaviour
    up: asyncio.Event

    def record_event(self, involved: Mapping[str, Any], event_type: str, reason: str, message: str) -> None:
        """Post an event about a pod."""
        ...


class PodWorker:
    """Runs one pod from admission to its end."""

    def __init__(self, kubelet: WorkerKubelet, spec: PodSpec) -> None:
        self.spec = spec
        self.task: asyncio.Task[None] | None = None
        self.ending = False
        """Set when its deletion has started."""
        self._kubelet = kubelet
        initializing = any(container.role is not Role.APP for container in spec.containers)
        waiting = "PodInitializing" if initializing else "ContainerCreating"
        self._statuses = {item.name: ContainerStatus(item, {"waiting": {"reason": waiting}}) for item in spec.containers}
        self._starting = asyncio.Lock()
        self._phase = "Pending"
        self._stopping = False

    def mirrored_by(self, api_uid: str) -> None:
        """Use another mirror for a static pod."""
        self.spec = replace(self.spec, api_uid=api_uid)
        self._publish()

    @property
    def active(self) -> bool:
        """Whether it runs or will run, and so holds its devices."""
        return self._phase not in ("Succeeded", "Failed")

    def is_running(self, container: str) -> bool:
        """Whether a container's process runs."""
        return self._statuses[container].running

    def admit(self) -> None:
        """Start to run it."""
        self._publish()
        self.task = asyncio.create_task(self._run(), name=f"pod {self.spec.full_name}")

    def reject(self) -> None:
        """Mark it as failed; the kubelet writes the reason."""
        self._phase = "Failed"
        if self.task is not None:
            self.task.cancel()

    async def terminate(self, grace_seconds: float) -> None:
        """Stop every container: SIGTERM, then SIGKILL after the grace time."""
        self._stopping = True
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self._kubelet.runtime.stop_pod(self.spec.uid, grace_seconds)
        if self.active:
            self._phase = "Failed" if any(status.exit_code for status in self._statuses.values()) else "Succeeded"

    # --- the pod's life ---

    async def _run(self) -> None:
        sidecars: list[asyncio.Task[int]] = []
        try:
            if not await self._run_before_work(sidecars):
                self._phase = "Failed"
                return
            work = [container for container in self.spec.containers if container.role is Role.APP]
            codes = await asyncio.gather(*(self._start_and_supervise(container) for container in work))
            self._phase = "Failed" if any(codes) else "Succeeded"
        finally:
            for sidecar in sidecars:
                sidecar.cancel()
            await asyncio.gather(*sidecars, return_exceptions=True)
            if not self._stopping and not self.active:
                await self._kubelet.runtime.stop_pod(self.spec.uid, self.spec.grace_seconds)
                self._publish()

    async def _run_before_work(self, sidecars: list[asyncio.Task[int]]) -> bool:
        """Start sidecars and run init containers, in the order of the spec; False when an init container failed.

        Args: sidecars: gets the task of each started sidecar.
        """
        for container in self.spec.containers:
            if container.role is Role.SIDECAR:
                handle = await self._start(container)
                sidecars.append(asyncio.create_task(self._supervise(container, handle)))
            elif container.role is Role.INIT and await self._start_and_supervise(container) != 0:
                return False
        return True

    async def _start_and_supervise(self, container: Container) -> int:
        return await self._supervise(container, await self._start(container))

    async def _supervise(self, container: Container, handle: RunningContainer) -> int:
        """Follow a container over its restarts; return the exit code of the last run."""
        status = self._statuses[container.name]
        behaviour = self._kubelet.behaviour
        backoff_seconds = behaviour.crash_backoff_seconds
        while True:
            code = await handle.wait()
            reason = "Completed" if code == 0 else "Error"
            terminated = {"exitCode": code, "reason": reason, "finishedAt": timestamp(), "containerID": status.container_id}
            status.state = {"terminated": terminated}
            if not self._restarts(container, code):
                self._publish()
                return code
            status.last_state = status.state
            message = f"back-off {backoff_seconds:g}s restarting failed container={container.name} pod={self.spec.name}"
            self._set_waiting(status, "CrashLoopBackOff", message)
            await asyncio.sleep(backoff_seconds)
            backoff_seconds = min(2 * backoff_seconds, behaviour.crash_backoff_limit_seconds)
            status.restarts += 1
            handle = await self._start(container)

    def _restarts(self, container: Container, code: int) -> bool:
        match container.role, self.spec.restart_policy:
            case Role.SIDECAR, _:
                return True
            case Role.INIT, policy:
                return code != 0 and policy != "Never"
            case _, "Always":
                return True
            case _, "OnFailure":
                return code != 0
            case _:
                return False

    # --- one start ---

    async def _start(self, container: Container) -> RunningContainer:
        """Start a container, and retry until it runs. Containers of one pod start one after another."""
        while True:
            async with self._starting:
                await self._kubelet.up.wait()
                if (handle := await self._try_start(container)) is not None:
                    return handle
            await asyncio.sleep(self._kubelet.behaviour.retry_seconds)

    async def _try_start(self, container: Container) -> RunningContainer | None:
        status = self._statuses[container.name]
        try:
            await self._kubelet.devices.prestart(self.spec.uid, container.name, container.limits)
            handle = await self._kubelet.runtime.start(self._config(container, status.restarts))
        except PreStartError as exc:
            self._start_failed(status, "CreateContainerConfigError", str(exc))
        except RuntimeRefusalError as exc:
            self._start_failed(status, exc.reason, str(exc))
        except InterruptedCallError:
            return None
        else:
            status.container_id = f"standin://{handle.id}"
            status.state = {"running": {"startedAt": timestamp()}}
            self._publish()
            self._event("Normal", "Started", f"Started container {container.name}")
            return handle
        return None

    def _config(self, container: Container, attempt: int) -> ContainerConfig:
        options = self._kubelet.devices.options(self.spec.uid, container.name)
        env = (*self._kubelet.behaviour.image_env, *options.env, *container.env)
        return ContainerConfig(
            namespace=self.spec.namespace,
            pod=self.spec.name,
            pod_uid=self.spec.uid,
            container=container.name,
            attempt=attempt,
            argv=container.argv,
            env=env,
            mounts=options.mounts,
            device_paths=options.device_paths,
            cdi_devices=options.cdi_devices if self._kubelet.behaviour.cdi else _of_environment(env),
        )

    def _start_failed(self, status: ContainerStatus, reason: str, message: str) -> None:
        self._set_waiting(status, reason, message)
        self._event("Warning", "Failed", f"Error: {message}")

    def _set_waiting(self, status: ContainerStatus, reason: str, message: str) -> None:
        status.state = {"waiting": {"reason": reason, "message": message}}
        self._publish()

    # --- status ---

    def _event(self, event_type: str, reason: str, message: str) -> None:
        involved = {"namespace": self.spec.namespace, "name": self.spec.name, "uid": self.spec.api_uid}
        self._kubelet.record_event(involved, event_type, reason, message)

    def _observed_phase(self) -> str:
        """Return the phase: Pending until every app container has started, then Running until the end."""
        if not self.active or self._phase == "Running":
            return self._phase
        work = [status for status in self._statuses.values() if status.container.role is Role.APP]
        if all(status.container_id for status in work):
            self._phase = "Running"
        return self._phase

    def _publish(self) -> None:
        phase = self._observed_phase()
        work = [status.as_json() for status in self._statuses.values() if status.container.role is Role.APP]
        before = [status.as_json() for status in self._statuses.values() if status.container.role is not Role.APP]

        def change(pod: dict[str, Any]) -> None:
            status = pod.setdefault("status", {})
            status["phase"] = phase
            status.setdefault("startTime", timestamp())
            status["containerStatuses"] = work
            if before:
                status["initContainerStatuses"] = before
            ready = phase == "Running" and all(item["ready"] for item in work)
            status["conditions"] = [{"type": "Ready", "status": str(ready)}]

        with suppress(NotFoundError, ConflictError):
            self._kubelet.cluster.update(Kind.POD, self.spec.namespace, self.spec.name, change, uid=self.spec.api_uid)


def _of_environment(env: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the devices that NVIDIA's runtime adds for a container, as names in the host's CDI spec."""
    visible = dict(env).get(contract.ENV_NVIDIA_VISIBLE_DEVICES, "")
    return tuple(
        f"{contract.NVIDIA_CDI_KIND}={uuid}" for uuid in visible.split(",") if uuid not in ("", contract.NO_VISIBLE_DEVICES, "none")
    )
