# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot_lab.standin.errors import InvalidError
from aliquot_lab.standin.patches import apply_json_patch, merge_patch, strategic_merge_patch


def patched(document, *operations):
    apply_json_patch(document, list(operations))
    return document


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        pytest.param({"op": "add", "path": "/a/x~1y", "value": 1}, {"a": {"x/y": 1, "b": 0}, "l": [1]}, id="slash in a key"),
        pytest.param({"op": "add", "path": "/a/x~0y", "value": 1}, {"a": {"x~y": 1, "b": 0}, "l": [1]}, id="tilde in a key"),
        pytest.param({"op": "replace", "path": "/a/b", "value": 5}, {"a": {"b": 5}, "l": [1]}, id="replace"),
        pytest.param({"op": "remove", "path": "/a/b"}, {"a": {}, "l": [1]}, id="remove"),
        pytest.param({"op": "add", "path": "/l/-", "value": 2}, {"a": {"b": 0}, "l": [1, 2]}, id="append"),
        pytest.param({"op": "add", "path": "/l/0", "value": 0}, {"a": {"b": 0}, "l": [0, 1]}, id="insert"),
        pytest.param({"op": "test", "path": "/l/0", "value": 1}, {"a": {"b": 0}, "l": [1]}, id="test that holds"),
    ],
)
def test_json_patch_operations(operation, expected):
    assert patched({"a": {"b": 0}, "l": [1]}, operation) == expected


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param({"op": "replace", "path": "/a/none", "value": 1}, id="replace nothing"),
        pytest.param({"op": "remove", "path": "/none"}, id="remove nothing"),
        pytest.param({"op": "add", "path": "/none/x", "value": 1}, id="no parent"),
        pytest.param({"op": "test", "path": "/a/b", "value": 1}, id="test that fails"),
        pytest.param({"op": "move", "path": "/a", "from": "/l"}, id="unknown operation"),
        pytest.param({"op": "add", "path": "/a/x"}, id="no value"),
        pytest.param({"op": "add", "path": "a", "value": 1}, id="no leading slash"),
        pytest.param({"op": "remove", "path": "/l/x"}, id="no position"),
        pytest.param({"path": "/a"}, id="no op"),
    ],
)
def test_a_json_patch_that_does_not_fit_is_refused(operation):
    with pytest.raises(InvalidError):
        patched({"a": {"b": 0}, "l": [1]}, operation)


def test_a_json_patch_is_a_list():
    with pytest.raises(InvalidError, match="list"):
        apply_json_patch({}, {"op": "add"})


def test_a_merge_patch_merges_objects_replaces_the_rest_and_removes_null():
    target = {"a": {"b": 1, "c": 2}, "l": [1, 2], "gone": 1}
    assert merge_patch(target, {"a": {"b": 3, "d": {"e": None}}, "l": [9], "gone": None}) == {"a": {"b": 3, "c": 2, "d": {}}, "l": [9]}
    assert target["a"] == {"b": 1, "c": 2}


def test_a_strategic_patch_merges_conditions_by_their_type_and_replaces_other_lists():
    conditions = [{"type": "Ready", "status": "True"}, {"type": "Ours", "status": "True", "since": 1}]
    target = {"status": {"conditions": conditions, "images": [1]}}
    patch = {"status": {"conditions": [{"type": "Ours", "status": "False"}, {"type": "New", "status": "True"}], "images": [2]}}
    assert strategic_merge_patch(target, patch)["status"] == {
        "conditions": [
            {"type": "Ready", "status": "True"},
            {"type": "Ours", "status": "False", "since": 1},
            {"type": "New", "status": "True"},
        ],
        "images": [2],
    }
    assert strategic_merge_patch({"a": 1}, {"a": None, "conditions": [{"type": "First"}]}) == {"conditions": [{"type": "First"}]}
