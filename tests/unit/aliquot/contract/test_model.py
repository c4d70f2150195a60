# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from aliquot.contract.model import ContainerSpec, ContainerState, ContainerStatus, Pod, RestartPolicy

ALWAYS, ON_FAILURE, NEVER = RestartPolicy.ALWAYS, RestartPolicy.ON_FAILURE, RestartPolicy.NEVER
WAITING, RUNNING, COMPLETED, FAILED = ContainerState.WAITING, ContainerState.RUNNING, ContainerState.COMPLETED, ContainerState.FAILED
APP: dict[str, Any] = {}
INIT, SIDECAR = {"init": True}, {"init": True, "restartable": True}


def has_ended(kind: dict, policy: RestartPolicy, state: ContainerState) -> bool:
    spec = ContainerSpec("main", {}, restart_policy=policy, **kind)
    statuses = (ContainerStatus("main", state),)
    return Pod("default", "a", "uid", "node", "Running", {}, (spec,), statuses=statuses).has_ended("main")


@pytest.mark.parametrize(
    ("kind", "policy", "ends"),
    [
        pytest.param(APP, ALWAYS, set(), id="it restarts always"),
        pytest.param(APP, ON_FAILURE, {COMPLETED}, id="it restarts when it fails"),
        pytest.param(APP, NEVER, {COMPLETED, FAILED}, id="it never restarts"),
        pytest.param(INIT, ALWAYS, {COMPLETED}, id="an init container is tried until it completes"),
        pytest.param(INIT, NEVER, {COMPLETED, FAILED}, id="an init container is tried once"),
        pytest.param(SIDECAR, ALWAYS, set(), id="a sidecar restarts always"),
    ],
)
def test_container_has_ended_when_kubelet_will_not_restart_it(kind, policy, ends):
    assert {state for state in ContainerState if has_ended(kind, policy, state)} == ends


def test_container_missing_from_spec_is_unknown():
    gone = Pod("default", "a", "uid", "node", "Running", {}, (), statuses=(ContainerStatus("main", COMPLETED),))
    assert not gone.has_ended("main")
