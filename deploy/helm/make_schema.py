# SPDX-License-Identifier: Apache-2.0
"""Writes the chart's values.schema.json from the overlays, the components and the programs' settings.

Run it after you add one of these: ``.venv/bin/python deploy/helm/make_schema.py``. tests/unit/deploy/test_chart.py compares the file.
"""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import agent.mps.settings
import agent.settings
import scheduler_plugin.settings
from aliquot.process.settings import Setting, Table

CHART = Path(__file__).parent / "aliquot"
TARGET = CHART / "values.schema.json"
POD_FIELDS = {
    "affinity": "object",
    "dnsPolicy": "string",
    "hostNetwork": "boolean",
    "nodeSelector": "object",
    "priorityClassName": "string",
    "runtimeClassName": "string",
    "terminationGracePeriodSeconds": "integer",
    "tolerations": "array",
    "topologySpreadConstraints": "array",
}
"""Fields of a pod that users can set, with their types. The API server checks their content."""

NOT_IN_THE_CHART = {
    "agent": {
        "node_name": "the manifest takes it from the pod",
        "pod_ip": "the manifest takes it from the pod",
        "placement": "set by the variant",
        "publish_node_capacity": "kube-scheduler's configuration would need another list of resources",
        "metrics_address": "the pod's port, which `kubectl vgpu` uses",
        "proc_dir": "a mount",
        "host_dir": "a mount of the component driver-limits",
        "cgroup_dir": "a mount of the component driver-limits",
    },
    "mps": {
        "runtime_dir": "the agent's",
        "mps_shared_memory": "a mount of the component mps",
    },
    "scheduler": {
        "extender_address": "kube-scheduler's configuration",
        "client_ca_file": "kube-scheduler's configuration",
        "metrics_address": "the pod's port, which `kubectl vgpu` uses",
        "lease_name": "kube-scheduler elects the leader; and a right to the lease",
        "scheduler_lease": "kube-scheduler's configuration, and a right to the lease",
        "lease_namespace": "the release's",
    },
}
"""Settings that must agree with another part of the manifests, which a value would not change. The chart's README names them too."""
BOUNDS: Mapping[str, Mapping[str, Any]] = {
    "webhook_address": {"pattern": r"^(0\.0\.0\.0|\[::\]):[1-9][0-9]*$"},
    "scheduler_name": {"minLength": 1, "not": {"enum": ["default-scheduler"]}},
}
"""Bounds from the manifests: the API server calls the webhook at the pod's address, and the cluster has a default scheduler."""

Schema = dict[str, Any]
_STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def schema() -> Schema:
    """Return the schema."""
    image = _mapping({"repository": {"type": "string"}, "tag": {"type": "string"}})
    pull_policy = {"enum": ["Always", "IfNotPresent", "Never"]}
    target = _mapping({"kind": {"type": "string"}, "name": {"type": "string"}}, required=["kind", "name"])
    images = {
        "registry": {"type": "string", "description": "Prefix of all three names."},
        **dict.fromkeys(("agent", "scheduler", "kubeScheduler"), image),
        "pullPolicy": pull_policy,
        "pullSecrets": _list(_mapping({"name": {"type": "string"}}, required=["name"])),
    }
    of_mps = _workload("mps", agent.mps.settings.TABLE)
    values: dict[str, Schema] = {
        "global": {"type": "object", "description": "Helm passes it to every chart."},
        "variant": {"enum": ["default", *_folders("overlays")]},
        "components": {**_list({"enum": _folders("components")}), "uniqueItems": True},
        "images": _mapping(images),
        "agent": _mapping({**_workload("agent", agent.settings.TABLE), "updateStrategy": _update_strategy()}),
        "mps": _mapping({key: of_mps[key] for key in ("settings", "resources")}),
        "scheduler": _mapping(
            {
                "replicas": {"type": "integer", "minimum": 1},
                **_workload("scheduler", scheduler_plugin.settings.TABLE, classes={"type": "object"}, weights={"type": "object"}),
            }
        ),
        "monitoring": _mapping({**{key: {"type": "boolean"} for key in ("serviceMonitors", "alerts", "dashboards")}, "labels": _STRINGS}),
        "patches": _list(_mapping({"target": target, "patch": {"type": "string"}}, required=["target", "patch"])),
    }
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart aliquot", **_mapping(values)}


def to_json(content: Schema) -> str:
    """Return the file's text."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _workload(part: str, table: Table, **file_only: Schema) -> Mapping[str, Schema]:
    settings = {setting.key: _setting(setting) for setting in table.settings if setting.name not in NOT_IN_THE_CHART[part]}
    amounts = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
    return {
        "settings": _mapping(settings | file_only),
        "resources": _mapping({"requests": amounts, "limits": amounts}),
        "pod": _mapping({name: {"type": kind} for name, kind in POD_FIELDS.items()}),
        "annotations": _STRINGS,
    }


def _update_strategy() -> Schema:
    """Return the schema of the agent's update strategy. No surge: two agents on one node would both register the resources."""
    amount = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^([1-9][0-9]?|100)%$"}]}
    return _mapping({"type": {"enum": ["RollingUpdate", "OnDelete"]}, "rollingUpdate": _mapping({"maxUnavailable": amount})})


def _setting(setting: Setting) -> Schema:
    described = {"description": setting.row.meaning, **BOUNDS.get(setting.name, {})}
    if issubclass(setting.type, StrEnum):
        members = list(setting.type)
        unquoted = [False, True] if {"on", "off"} <= set(members) else []  # YAML reads on and off as booleans
        return {**described, "enum": [*members, *unquoted]}
    if setting.type is bool:
        return {**described, "type": "boolean"}
    if setting.type is str:
        return {**described, "type": "string", **({"pattern": "^/"} if setting.row.absolute else {})}
    bounds = {"minimum": setting.row.least, "maximum": setting.row.most}
    return {
        **described,
        "type": "integer" if setting.type is int else "number",
        **{key: at for key, at in bounds.items() if at is not None},
    }


def _folders(kind: str) -> list[str]:
    return sorted(path.parent.name for path in (CHART.parents[1] / "daemonset" / kind).glob("*/kustomization.yaml"))


def _mapping(properties: Mapping[str, Schema], required: Sequence[str] = ()) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": dict(properties),
        **({"required": list(required)} if required else {}),
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


if __name__ == "__main__":
    TARGET.write_text(to_json(schema()))
