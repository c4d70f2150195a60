# SPDX-License-Identifier: Apache-2.0
import inspect
import re
from types import ModuleType
from typing import Any

from agent import errors

NODE = re.compile(r"^(?P<lead>[ │├└─]*)(?P<name>[A-Z]\w+Error)\b")


def drawn_tree(module: ModuleType) -> dict[str, str]:
    """Return the parent of each error as the docstring of a module draws it."""
    parents: dict[Any, Any] = {}
    path: dict[Any, Any] = {}
    for line in inspect.getdoc(module).splitlines():
        if match := NODE.match(line):
            depth = len(match["lead"])
            path = {other: name for other, name in path.items() if other < depth}
            parents[match["name"]] = path[max(path)] if path else ""
            path[depth] = match["name"]
    return parents


def test_drawn_tree_equals_classes():
    classes = {name: one for name, one in vars(errors).items() if inspect.isclass(one)}
    assert drawn_tree(errors) == {name: "" if name == "AgentError" else one.__base__.__name__ for name, one in classes.items()}
