# SPDX-License-Identifier: Apache-2.0
"""The profiles of classes, and the setting that changes them."""

from typing import Any

import pytest
import yaml

from aliquot import contract
from scheduler_plugin.core.classes import ANNOTATIONS, DEFAULT_CLASSES, ClassError, parse_classes
from tests.rendering import DAEMONSET


def test_stated_fields_replace_those_of_a_class_and_leave_the_rest() -> None:
    found = parse_classes({"training": {"priorityClass": "batch"}})
    assert found["training"].priority_class == "batch"
    assert found["training"].annotations == DEFAULT_CLASSES["training"].annotations
    assert {name: found[name] for name in ("inference", "interactive")} == {
        name: DEFAULT_CLASSES[name] for name in ("inference", "interactive")
    }


def test_a_new_class_starts_empty() -> None:
    found = parse_classes({"render": {"cores": 50, "kueuePriorityClass": "low"}})["render"]
    assert (found.priority_class, found.kueue_priority_class, found.annotations, found.memory_percent, found.cores) == (
        "",
        "low",
        {},
        0,
        50,
    )


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([], "want names of classes, each with some of priorityClass, kueuePriorityClass, annotations, memoryPercent, cores"),
        ({"training": {"priority": "high"}}, "unknown field `priority`"),
        ({"training": {"cores": 101}}, "class training: cores: expected 0 to 100 percent of a GPU, found 101"),
        ({"training": {"memoryPercent": -1}}, "class training: memoryPercent: expected 0 to 100 percent"),
        ({"a": {"annotations": {contract.ANNOTATION_GANG: "g"}}}, f"annotation '{contract.ANNOTATION_GANG}' cannot be set by a class"),
        ({"a": {"annotations": {contract.ANNOTATION_PRIORITY: "HIGH"}}}, f"class a: annotation {contract.ANNOTATION_PRIORITY}: expected"),
        ({"a": {"annotations": {contract.ANNOTATION_MIN_RUNTIME: "soon"}}}, f"class a: {contract.ANNOTATION_MIN_RUNTIME}: expected"),
        ({"a": {"idleEndAfter": "1 h"}}, "class a: idleEndAfter: expected a time such as 30m, 12h or 2d, found '1 h'"),
        ({"a": {"idleYieldAfter": "0s"}}, "class a: idleYieldAfter: expected a time"),
        ({"a": {"annotations": {contract.ANNOTATION_MOVABLE: "no"}}}, f"class a: {contract.ANNOTATION_MOVABLE}: expected"),
    ],
)
def test_a_wrong_profile_is_refused_with_a_sentence(value: Any, sentence: str) -> None:
    with pytest.raises(ClassError) as said:
        parse_classes(value)
    assert sentence in str(said.value)


def test_a_class_sets_only_annotations_of_the_contract() -> None:
    known = {value for name, value in vars(contract).items() if name.startswith("ANNOTATION_")}
    assert set(ANNOTATIONS) <= known
    assert {name for profile in DEFAULT_CLASSES.values() for name in profile.annotations} <= set(ANNOTATIONS)


def test_the_installation_has_the_priority_classes_in_their_order() -> None:
    documents = yaml.safe_load_all((DAEMONSET / "scheduler/priority-classes.yaml").read_text())
    values = {one["metadata"]["name"]: one["value"] for one in documents}
    training, interactive, inference = (values[DEFAULT_CLASSES[name].priority_class] for name in ("training", "interactive", "inference"))
    assert -10 <= training < 0 < interactive < inference, "cluster-autoscaler adds no node for a priority below -10"
