# SPDX-License-Identifier: Apache-2.0
"""kubectl, as the scenarios use it: every question goes through the public API, so any cluster will do."""

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]


class KubectlError(AssertionError):
    """kubectl said no; the message carries the command and its answer."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """One program, one kubeconfig, and at most one namespace to speak of."""

    program: str
    kubeconfig: Path
    namespace: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def within(self, namespace: str) -> "Kubectl":
        """The same, speaking of another namespace by default."""
        return Kubectl(self.program, self.kubeconfig, namespace, self.environment)

    def run(self, *arguments: str, stdin: str | None = None, timeout_seconds: float = 60) -> str:
        """Run one command.

        Returns: its standard output.
        Raises:  KubectlError: it exited with another status than 0.
        """
        within = [f"--namespace={self.namespace}"] if self.namespace else []
        command = [self.program, f"--kubeconfig={self.kubeconfig}", *within, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_seconds, check=False)
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def apply(self, *objects: Object) -> None:
        """Create or update objects."""
        self.run("apply", "--filename=-", stdin=yaml.safe_dump_all(objects))

    def apply_kustomization(self, folder: Path) -> None:
        """Apply a folder of deploy/ as it is."""
        self.run("apply", f"--kustomize={folder}")

    def delete(self, kind: str, *names: str, wait: bool = True) -> None:
        """Delete objects. By default, wait until they are gone."""
        self.run("delete", kind, *names, "--ignore-not-found", "--now", f"--wait={str(wait).lower()}", timeout_seconds=120)

    def get(self, kind: str, name: str) -> Object:
        """One object."""
        return json.loads(self.run("get", kind, name, "--output=json"))

    def all(self, kind: str, *arguments: str) -> list[Object]:
        """The objects of a kind in this namespace."""
        return json.loads(self.run("get", kind, *arguments, "--output=json"))["items"]

    def bind(self, pod: str, node: str) -> None:
        """Bind a pod to a node, as a scheduler does."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        self.run("create", f"--raw=/api/v1/namespaces/{self.namespace}/pods/{pod}/binding", "--filename=-", stdin=json.dumps(binding))

    def logs(self, pod: str, *arguments: str) -> str:
        """What a pod printed."""
        return self.run("logs", pod, *arguments)

    def exec(self, pod: str, *command: str, container: str | None = None) -> str:
        """Run a command in a pod."""
        chosen = [f"--container={container}"] if container else []
        return self.run("exec", pod, *chosen, "--", *command)

    def events(self, name: str) -> list[str]:
        """Reason and message of every event about an object, oldest first."""
        events = self.all("events", f"--field-selector=involvedObject.name={name}")
        events.sort(key=lambda event: event["metadata"]["creationTimestamp"])
        return [f"{event['reason']}: {event['message']}" for event in events]

    def wait_for_phase(self, pod: str, *phases: str, seconds: float = 30) -> Object:
        """Wait until a pod is in one of the phases.

        Raises: AssertionError: it was not in time; says what it was instead and what its events say.
        """

        __tracebackhide__ = True

        def in_phase() -> Object | None:
            found = self.get("pod", pod)
            return found if found["status"].get("phase") in phases else None

        return eventually(in_phase, f"pod {pod} to be {' or '.join(phases)}", seconds=seconds, otherwise=lambda: self.explain(pod))

    def wait_until_served(self, *definitions: str, seconds: float = 60) -> None:
        """Wait until the API server serves the kinds of CustomResourceDefinitions; `kubectl wait` fails on one that has no status yet.

        Raises: AssertionError: one was not in time; says what its status was instead.
        """
        for name in definitions:

            def served(name: str = name) -> bool:
                conditions = self.get("crd", name).get("status", {}).get("conditions") or []
                return any(condition["type"] == "Established" and condition["status"] == "True" for condition in conditions)

            def explained(name: str = name) -> str:
                return json.dumps(self.get("crd", name).get("status"))

            eventually(served, f"the API server to serve {name}", seconds=seconds, otherwise=explained)

    def explain(self, pod: str) -> str:
        """Why a pod is where it is, in few lines."""
        try:
            status = self.get("pod", pod)["status"]
            lines = [f"phase {status.get('phase')}"]
            containers = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
            lines += [f"container {container['name']}: {json.dumps(container['state'])}" for container in containers]
            lines += [f"event {event}" for event in self.events(pod)[-6:]]
        except KubectlError as refused:
            return str(refused)
        return "\n".join(lines)


def eventually(ask: Callable[[], Any], what: str, *, seconds: float = 30, otherwise: Callable[[], str] = lambda: "") -> Any:
    """Ask until the answer is true.

    Args:
        ask: called again and again.
        what: ends the sentence "waited for ...".
        seconds: how long to keep asking.
        otherwise: called when time is up; says what was seen instead.
    Returns: the first true answer.
    Raises:  AssertionError: no answer was true in time.
    """
    __tracebackhide__ = True
    deadline = time.monotonic() + seconds
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() > deadline:
            seen = otherwise() or f"last answer: {answer!r}"
            raise AssertionError(f"waited {seconds:.0f} s for {what}\n{seen}")
        time.sleep(0.2)
