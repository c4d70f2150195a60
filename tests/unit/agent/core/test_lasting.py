import pytest

from agent.core.lasting import lasting


@pytest.mark.parametrize(
    ("sentence", "want"),
    [
        ("nvmlInit has not returned for 65.0 s", "nvmlInit has not returned"),
        ("nvmlInit has not returned for 5 s. It is tried again", "nvmlInit has not returned. It is tried again"),
        ("it did not appear within 5 s", "it did not appear within 5 s"),
        ("", ""),
    ],
)
def test_the_seconds_of_a_hang_are_cut_and_nothing_else(sentence, want):
    assert lasting(sentence) == want
