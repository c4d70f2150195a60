# SPDX-License-Identifier: Apache-2.0
"""kubectl, as the scenarios use it: every question goes through the public API, so any cluster will do.

Objects are made, read and deleted by requests of our own, because a process for each would take a third of a run's CPU time.
"""

import functools
import json
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from tests.e2e.api import Api, ApiError

Object = dict[str, Any]
DELETE_SECONDS = 120
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_QUERIES = {"--selector": "labelSelector", "--field-selector": "fieldSelector"}


class KubectlError(AssertionError):
    """kubectl or the API server refused; the message has the command and the answer."""


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
        """Create objects. kubectl itself updates those that are there.

        Raises: KubectlError: the API server refused one; those before it are made.
        """
        for one in objects:
            name, path = one["metadata"]["name"], self._path_of(one)
            if self._read(f"{path}/{name}") is None:
                self._create(one, path)
            else:
                self.run("apply", "--filename=-", stdin=yaml.safe_dump(one))

    def _create(self, one: Object, path: str) -> None:
        """Create an object with the annotation from which `kubectl apply` later finds what changed."""
        metadata = one["metadata"]
        annotations = {**metadata.get("annotations", {}), _APPLIED: json.dumps(one)}
        self._send("POST", f"{path}?fieldValidation=Strict", {**one, "metadata": {**metadata, "annotations": annotations}})

    def _path_of(self, one: Object) -> str:
        """Return the path of the objects of the kind and the namespace of this one."""
        try:
            return self.api.of(one).path(one["metadata"].get("namespace") or self.namespace or "default")
        except ApiError as refused:
            raise KubectlError(str(refused)) from refused

    def apply_kustomization(self, folder: Path) -> None:
        """Apply a folder of deploy/ as it is."""
        self.run("apply", f"--kustomize={folder}")

    @property
    def api(self) -> Api:
        """The API server, with the rights of this kubeconfig."""
        return _api(self.kubeconfig, self.kubeconfig.stat().st_mtime_ns)

    def delete(self, kind: str, *names: str, wait: bool = True) -> None:
        """Delete objects, or all of a kind in this namespace where a name is ``--all``. By default, wait until they are gone."""
        found = self.all(kind) if "--all" in names else [one for name in names if (one := self.find(kind, name))]
        left = {self._path(kind, one["metadata"]["name"]): one["metadata"]["uid"] for one in found}
        for path, uid in left.items():
            # with its own uid, a successor of the same name stays
            body = {"gracePeriodSeconds": 1, "propagationPolicy": "Background", "preconditions": {"uid": uid}}
            self._send("DELETE", path, body, unless=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT))

        def gone() -> bool:
            return all((self._read(path) or {}).get("metadata", {}).get("uid") != uid for path, uid in left.items())

        if wait:
            eventually(gone, f"{kind} {', '.join(names)} to be gone", seconds=DELETE_SECONDS, otherwise=lambda: str(self.all(kind))[-3000:])

    def get(self, kind: str, name: str) -> Object:
        """Return one object. Raises: KubectlError: it is not there."""
        return json.loads(self._send("GET", self._path(kind, name)))

    def find(self, kind: str, name: str) -> Object | None:
        """Return one object, or None where it is not there."""
        return self._read(self._path(kind, name))

    def all(self, kind: str, *arguments: str) -> list[Object]:
        """Return the objects of a kind in this namespace. Args: arguments: selectors or ``--all-namespaces``, as kubectl takes them."""
        query = {_QUERIES[name]: value for name, _, value in (one.partition("=") for one in arguments if one != "--all-namespaces")}
        path = self._path(kind, everywhere="--all-namespaces" in arguments)
        listed = json.loads(self._send("GET", f"{path}?{urlencode(query)}"))
        of_kind = {"apiVersion": listed["apiVersion"], "kind": listed["kind"].removesuffix("List")}
        return [of_kind | item for item in listed["items"]]

    def raw(self, path: str) -> str:
        """Return what the API server answers at a path, a proxied one too."""
        return self._send("GET", path).decode()

    def _path(self, kind: str, name: str = "", *, everywhere: bool = False) -> str:
        try:
            return self.api.kind(kind).path("" if everywhere else self.namespace or "default", name)
        except ApiError as refused:
            raise KubectlError(str(refused)) from refused

    def _read(self, path: str) -> Object | None:
        answer = self._send("GET", path, unless=(HTTPStatus.NOT_FOUND,))
        return json.loads(answer) if answer else None

    def _send(self, verb: str, path: str, body: object = None, *, unless: Collection[int] = ()) -> bytes:
        """Args: unless: statuses that are no failure. The answer is empty then."""
        try:
            return self.api.send(verb, path, body)
        except ApiError as refused:
            if refused.status in unless:
                return b""
            raise KubectlError(str(refused)) from refused

    def bind(self, pod: str, node: str) -> None:
        """Bind a pod to a node, as a scheduler does."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        self._send("POST", f"{self._path('pods', pod)}/binding", binding)

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

    def wait_for_phase(self, pod: str, *phases: str, seconds: float = 60) -> Object:
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


@functools.cache
def _api(kubeconfig: Path, changed: int) -> Api:
    """One client for each file. Args: changed: when, because a cluster that is made again has other keys."""
    del changed
    return Api(kubeconfig)


def eventually(ask: Callable[[], Any], what: str, *, seconds: float = 60, otherwise: Callable[[], str] = lambda: "") -> Any:
    """Ask until the answer is true.

    An object or a field that is missing is no answer yet: controllers write fields one after another, and replace objects meanwhile.

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
        answer, missing = _attempt(ask)
        if answer:
            return answer
        if time.monotonic() > deadline:
            seen, _ = _attempt(otherwise)
            raise AssertionError(f"waited {seconds:.0f} s for {what}\n{seen or f'last answer: {missing or answer!r}'}") from missing
        time.sleep(0.2)


def _attempt(ask: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Ask once. Returns: the answer, or what was missing."""
    try:
        return ask(), None
    except (KubectlError, ApiError, LookupError, StopIteration) as missing:
        return None, missing
