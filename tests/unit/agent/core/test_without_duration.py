# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.core.without_duration import without_duration


@pytest.mark.parametrize(
    ("sentence", "want"),
    [
        ("nvmlInit has not returned for 65.0 s", "nvmlInit has not returned"),
        ("nvmlInit has not returned for 5 s. It is tried again", "nvmlInit has not returned. It is tried again"),
        ("it did not appear within 5 s", "it did not appear within 5 s"),
        ("", ""),
    ],
)
def test_removes_only_the_seconds_of_a_hang(sentence, want):
    assert without_duration(sentence) == want
