# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest

from aliquot.contract import PARAMETERS_API_VERSION, PARAMETERS_KIND
from aliquot.contract.errors import ContractError
from aliquot.contract.model import CoresMode, Isolation, Preferences, Priority
from aliquot.contract.parameters import preferences_of


def stated(**fields: object) -> bytes:
    return msgspec.json.encode({"apiVersion": PARAMETERS_API_VERSION, "kind": PARAMETERS_KIND, **fields})


def test_no_parameters_are_no_preferences():
    assert preferences_of([]) == Preferences()


def test_every_field_is_read():
    found = preferences_of([stated(isolation="shim", priority="low", coresMode="weight", memoryBurst="1.5")])
    assert found == Preferences(isolation=Isolation.SHIM, priority=Priority.LOW, cores_mode=CoresMode.WEIGHT, memory_burst=1.5)


def test_later_parameters_replace_only_fields_they_state():
    found = preferences_of([stated(priority="low", coresMode="weight"), stated(priority="high", memoryBurst=2)])
    assert (found.priority, found.cores_mode, found.memory_burst) == (Priority.HIGH, CoresMode.WEIGHT, 2.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"null", "has the fields"),
        (b"{", "has the fields"),
        (b"[]", "has the fields"),
        (stated(kind="GpuConfig"), "found aliquot.dev/v1alpha1 GpuConfig"),
        (b"{}", "found no apiVersion without a kind"),
        (stated(more=1), "unknown field `more`"),
        (stated(priority="urgent"), "urgent"),
        (stated(isolation="driver"), "isolation driver is not available to claims"),
        (stated(memoryBurst="much"), "expected a ratio"),
        (stated(memoryBurst=11), "from 1 to 10"),
        (stated(memoryBurst="nan"), "from 1 to 10"),
    ],
)
def test_wrong_parameters_are_refused_with_what_is_allowed(text, sentence):
    with pytest.raises(ContractError, match=sentence):
        preferences_of([text])
