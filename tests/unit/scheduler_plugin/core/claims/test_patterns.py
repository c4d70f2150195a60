# SPDX-License-Identifier: Apache-2.0
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.contract.errors import ContractError
from scheduler_plugin.core.claims.patterns import MOST_CHARS, MOST_DEPTH, finds

MODEL = "NVIDIA H100 80GB HBM3"
LEAVES = st.sampled_from(["a", "B", "-", ".", "[ab]", "[^a]", "[a-c]", "^", "$", ""])
PATTERNS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda left, right: left + right, inner, inner),
        st.builds(lambda left, right: f"({left}|{right})", inner, inner),
        st.builds(lambda group, times: f"({group}){times}", inner, st.sampled_from(["", "*", "+"])),
    ),
    max_leaves=6,
)


@given(PATTERNS, st.booleans(), st.text("abB-", max_size=6))
def test_pattern_means_what_it_means_to_python(pattern: str, ignores_case: bool, text: str) -> None:
    pattern = f"(?i){pattern}" if ignores_case else pattern
    try:
        found = finds(pattern, text)
    except ContractError:
        assert pattern.count("(") > MOST_DEPTH
        return
    assert found is (re.search(pattern, text) is not None)


@pytest.mark.parametrize("pattern", ["(.*.*)*x", "(.*)*" * 40 + "x", "(N|N|.)(V|V|.)" * 20 + "x", "((((N*)*)*)*)*x", "[A-Z ]*" * 60 + "x"])
def test_pattern_with_many_ways_ends(pattern: str) -> None:
    """Python's own search would take years."""
    assert not finds(pattern, MODEL * 3)


@pytest.mark.parametrize(
    "pattern", ["(" * (MOST_DEPTH + 1) + ")" * (MOST_DEPTH + 1), "a" * (MOST_CHARS + 1), "(", ")", "*", "a**", "[", "[b-a]", "a{2}", "\\d"]
)
def test_other_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ContractError):
        finds(pattern, MODEL)


def test_text_beyond_ascii_is_refused() -> None:
    with pytest.raises(ContractError):
        finds("a", "\u212a")
