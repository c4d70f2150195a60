# SPDX-License-Identifier: Apache-2.0
"""The pattern of a model's name, which kube-scheduler matches, means what the rule of placement means."""

import re

from hypothesis import assume, example, given
from hypothesis import strategies as st

from aliquot.placement.model_name import is_name, matches, pattern

WORDS = ("h20", "H200", "a10", "A100", "l40s", "nvidia", " ", "-", "_", "80GB")
NAMES = st.lists(st.sampled_from((*WORDS, "*", "*", "=")), min_size=1, max_size=6).map("".join)
MODELS = st.lists(st.sampled_from(WORDS), max_size=7).map("".join)


@given(NAMES, MODELS)
@example("a * b", "a b")
@example("a * b", "a--b")
@example("a*", "aa")
@example("*a*", "b-a")
@example("* a", "a")
@example("=a", "-a-")
@example("* *", "a b")
@example("a *", "a")
def test_pattern_finds_same_models_as_rule(name: str, model: str) -> None:
    assume(is_name(name) and is_name(model))
    assert bool(re.search(f"(?i){pattern(name)}", model)) == matches(name, model)
    assert "\\" not in pattern(name)
