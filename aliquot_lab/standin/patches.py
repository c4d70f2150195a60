# SPDX-License-Identifier: Apache-2.0
"""Applies JSON Patch (RFC 6902) in place, and merge patches into a new document.

The merge patches are JSON Merge Patch (RFC 7386) and Kubernetes' strategic merge patch, which merges lists of items with a key by item.
"""

import copy
from typing import Any

from aliquot_lab.standin.errors import InvalidError

_ITEM_KEYS = {"conditions": "type"}
"""The only list with a merge key that the agent writes."""


def apply_json_patch(document: dict[str, Any], operations: Any) -> None:
    """Apply every operation in order; the caller discards the document when one fails.

    Raises: InvalidError for a path that does not exist, a failed ``test`` or an operation we do not know.
    """
    if not isinstance(operations, list):
        raise InvalidError(f"a JSON patch is a list of operations, found {type(operations).__name__}")
    for operation in operations:
        _apply_operation(document, operation)


def merge_patch(target: Any, patch: Any) -> Any:
    """Return ``target`` with ``patch`` merged over it: null removes a key, objects merge, any other value replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def strategic_merge_patch(target: Any, patch: Any, item_key: str | None = None) -> Any:
    """Return ``target`` with ``patch`` merged over it as for Pods and Nodes: ``conditions`` by their type, other lists as a whole."""
    if isinstance(patch, list) and item_key is not None:
        merged_items = {item[item_key]: item for item in target or ()}
        for item in patch:
            merged_items[item[item_key]] = strategic_merge_patch(merged_items.get(item[item_key]), item)
        return list(merged_items.values())
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = strategic_merge_patch(merged.get(key), value, _ITEM_KEYS.get(key))
    return merged


def _apply_operation(document: dict[str, Any], operation: Any) -> None:
    try:
        name, path = operation["op"], operation["path"]
    except (TypeError, KeyError):
        raise InvalidError(f"a JSON patch operation has op and path, found {operation!r}") from None
    if not path.startswith("/"):
        raise InvalidError(f"a JSON patch path starts with /, found {path!r}")
    parent, key = _locate(document, path)
    match name:
        case "add":
            _add(parent, key, _value(operation), path)
        case "replace":
            _existing(parent, key, path)
            parent[_index(parent, key, path)] = copy.deepcopy(_value(operation))
        case "remove":
            _existing(parent, key, path)
            del parent[_index(parent, key, path)]
        case "test":
            if (found := _existing(parent, key, path)) != _value(operation):
                raise InvalidError(f"test of {path} failed: expected {_value(operation)!r}, found {found!r}")
        case _:
            raise InvalidError(f"JSON patch operation {name!r}: expected add, replace, remove or test")


def _value(operation: dict[str, Any]) -> Any:
    if "value" not in operation:
        raise InvalidError(f"JSON patch operation {operation['op']} of {operation['path']}: expected a value")
    return operation["value"]


def _locate(document: Any, path: str) -> tuple[Any, str]:
    keys = [key.replace("~1", "/").replace("~0", "~") for key in path.split("/")[1:]]
    parent = document
    for key in keys[:-1]:
        parent = _existing(parent, key, path)
    return parent, keys[-1]


def _existing(parent: Any, key: str, path: str) -> Any:
    try:
        return parent[_index(parent, key, path)]
    except (KeyError, IndexError, TypeError):
        raise InvalidError(f"JSON patch path {path}: nothing at {key!r}") from None


def _index(parent: Any, key: str, path: str) -> Any:
    if not isinstance(parent, list):
        return key
    if not key.isdigit():
        raise InvalidError(f"JSON patch path {path}: expected a position in a list, found {key!r}")
    return int(key)


def _add(parent: Any, key: str, value: Any, path: str) -> None:
    if isinstance(parent, dict):
        parent[key] = copy.deepcopy(value)
    elif isinstance(parent, list):
        parent.insert(len(parent) if key == "-" else _index(parent, key, path), copy.deepcopy(value))
    else:
        raise InvalidError(f"JSON patch path {path}: {key!r} is below neither an object nor a list")
