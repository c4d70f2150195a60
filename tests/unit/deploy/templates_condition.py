# SPDX-License-Identifier: Apache-2.0
"""The condition by which the API server sends objects with pod templates, made from that for pods and from the table of kinds."""

from scheduler_plugin.webhook.templates import EACH, KINDS

_OF_POD = {
    "object.spec.containers": "t.?spec.?containers.orValue([])",
    "object.spec.?initContainers": "t.?spec.?initContainers",
    "object.metadata.?annotations": "t.?metadata.?annotations",
    "object.metadata.?labels": "t.?metadata.?labels",
    "object.spec.?schedulerName": "t.?spec.?schedulerName",
}


def templates_condition(of_pods: str) -> str:
    """Return the condition for templates in CEL, with single spaces: one exists() over the optional templates of all kinds."""
    plain = list(dict.fromkeys(path for kind in KINDS for path in kind.paths if EACH not in path))
    listed = list(dict.fromkeys((path, kind.group == "kubeflow.org") for kind in KINDS for path in kind.paths if EACH in path))
    bare = list(dict.fromkeys(path for kind in KINDS for path in kind.resources))
    parts = [f"[{', '.join(_field('object', path) for path in plain)}]", *(_entries(path, keyed) for path, keyed in listed)]
    parts += [
        f"[optional.of(dyn({{'spec': {{'containers': [{{'resources': {_field('object', path)}.orValue({{}})}}]}}}}))]" for path in bare
    ]
    condition = " ".join(of_pods.split())
    for pod, template in _OF_POD.items():
        condition = condition.replace(pod, template)
    return f"({' + '.join(parts)}).exists(t, {condition})"


def _field(value: str, path: str) -> str:
    return ".?".join([value, *path.split("/")])


def _entries(path: str, keyed: bool) -> str:
    before, after = path.split(f"/{EACH}/")
    held = _field("object", before)
    if keyed:
        return f"{held}.orValue({{}}).map(k, {_field(held, '[k]').replace('.?[k]', '[?k]')}.?{after})"
    return f"{held}.orValue([]).map(i, {_field('i', after)})"
