# SPDX-License-Identifier: Apache-2.0
"""The table of features, and the feature gates of the alpha ones."""

import pytest

from aliquot.contract.features import ALL_OPEN, FEATURES, FeatureGates, Gate, Maturity, parse_gates


def test_alpha_features_have_a_gate_each_and_others_have_none() -> None:
    assert [feature.gate for feature in FEATURES if feature.maturity is Maturity.ALPHA] == list(Gate)
    assert {feature.gate for feature in FEATURES if feature.maturity is not Maturity.ALPHA} == {None}


@pytest.mark.parametrize(
    ("text", "opened"),
    [
        pytest.param("", set(), id="all closed by default"),
        pytest.param("Pausing=true", {Gate.PAUSING}, id="one"),
        pytest.param(" Pausing=true , MpsIsolation=true,", {Gate.PAUSING, Gate.MPS_ISOLATION}, id="spaces and a comma at the end"),
        pytest.param("AllAlpha=true", set(Gate), id="all"),
        pytest.param("Pausing=false,AllAlpha=true", set(Gate) - {Gate.PAUSING}, id="all but one"),
        pytest.param("AllAlpha=false,DynamicMig=true", {Gate.DYNAMIC_MIG}, id="none but one"),
    ],
)
def test_gates_open_as_the_setting_says(text: str, opened: set[Gate]) -> None:
    assert parse_gates(text) == FeatureGates(frozenset(opened))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Mps=true", f"'Mps' is not a feature gate; known gates: {', '.join(Gate)}, AllAlpha"),
        ("Pausing", "'Pausing' does not say whether the gate is open; write Pausing=true or Pausing=false"),
        ("Pausing=yes", "'Pausing=yes' does not say whether the gate is open; write Pausing=true or Pausing=false"),
    ],
)
def test_invalid_gates_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_gates(text)


def test_closed_gate_says_what_opens_it() -> None:
    assert FeatureGates().closed(Gate.PAUSING) == (
        "the alpha feature Pausing is off: set featureGates: Pausing=true for the agent to use it"
    )
    assert [ALL_OPEN.closed(gate) for gate in Gate] == [""] * len(Gate)
