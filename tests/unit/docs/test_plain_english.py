# SPDX-License-Identifier: Apache-2.0
"""The check for plain English finds the turns in its list in prose, and only there."""

import ast
import textwrap
from pathlib import Path

import pytest

from docs.development import plain_english

TURNS = plain_english.read_word_list(plain_english.WORD_LIST.read_text())

SAMPLE = """\
The plugin shows no GPU to a runtime that passes such names over. It cannot fail for want of a pod. Each pod gets what it
requests, and its limits are kept by the driver. The agent writes one file per container. Kubelet starts the container after
that. The scheduler filters nodes by free memory. It then ranks them by the policy of the pod. A pod that fits nowhere waits.
An event names the reason, at most once in ten minutes. Nobody answers on a node without an agent. The shim reads its limits
from a file that the container cannot change. A process that was killed leaves a slot behind. The next process reclaims the
slot. The metrics endpoint serves one sample per GPU and container. Prometheus scrapes it every 15 seconds. What was granted
stays granted until the pod ends. The claim has to be made anew after a reboot. Both programs log in JSON. The chart renders
the same manifests as the kustomization. An upgrade restarts the agent and no container.
"""
"""A frozen text in the manner of the pages before they were rewritten: 20 sentences, 4 of them stilted."""


def found(text: str) -> list[str]:
    count = plain_english.Count()
    plain_english.count_blocks("page.md", plain_english.markdown_blocks(text), TURNS, count)
    return [turn for hit in count.hits for turn, _ in hit.turns]


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        pytest.param("A call that nobody answers is repeated.", ["nobody"], id="nobody"),
        pytest.param("The list of pods has none with a GPU.", ["none"], id="none"),
        pytest.param("Of 8 GPUs none of these has room.", ["none", "none of"], id="none of"),
        pytest.param("It cannot fail for want of a pod.", ["for want of"], id="for want of"),
        pytest.param("A pod whose annotation is invalid is refused.", ["whose"], id="whose"),
        pytest.param("Two files, one of which is read.", ["of which"], id="of which"),
        pytest.param("The webhook keeps the port for whoever comes next.", ["whoever"], id="whoever"),
        pytest.param("It is made anew after a reboot.", ["anew"], id="anew"),
        pytest.param("The scheduler is told of the pod.", ["told"], id="told"),
        pytest.param("The driver is asked for its version.", ["is asked"], id="is asked"),
        pytest.param("A runtime passes such names over.", ["passes such names over"], id="passes over"),
        pytest.param("Kept true: one owner for each device.", ["Kept true"], id="kept true"),
        pytest.param("All nodes but for their links are equal.", ["but for"], id="but for"),
        pytest.param("The agent reads the desk of the call.", ["desk"], id="homely noun"),
        pytest.param("The agent checks again when kubelet retries.", [], id="plain sentence"),
        pytest.param("Nothing else changes in the cluster.", [], id="ordinary nothing"),
        pytest.param("A node with free memory but without cores is skipped.", [], id="ordinary but"),
        pytest.param("Save the file and restart the agent.", [], id="ordinary save"),
        pytest.param("The Dashboard opens in a browser.", [], id="board inside a word"),
        pytest.param("The function returns None when the pod has ended.", [], id="the value None"),
        pytest.param("Set 'none' to turn the metrics off.", [], id="quoted value"),
        pytest.param("Metric names of a second project (one of none, hami).", [], id="value in a list of choices"),
    ],
)
def test_sentence_is_counted_by_its_turns(text, turns):
    assert found(text) == turns


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Set `migStrategy: none` on nodes without MIG.", id="inline code"),
        pytest.param("Set ``migStrategy:\nnone`` on nodes without MIG.", id="inline code over two lines"),
        pytest.param("```\nnobody is told of the pod here\n```", id="code block"),
        pytest.param("1. Run it:\n\n   ```\n   nobody is told of the pod here\n   ```", id="indented code block"),
        pytest.param("~~~sh\n```\nnobody is told\n~~~", id="tilde fence"),
        pytest.param("See [the page about MIG](nobody-is-told.md#anew) for this.", id="target of a link"),
        pytest.param("See https://example.com/nobody/is/told/anew for all of this.", id="address"),
        pytest.param("<!-- nobody is told of\n this comment -->", id="comment"),
        pytest.param("| name | meaning |\n|---|---|\n| `none` | GPUs in MIG mode are not offered |", id="code in a table"),
        pytest.param("# None at all", id="fragment of less than four words"),
    ],
)
def test_code_links_and_fragments_are_not_counted(text):
    assert found(text) == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        pytest.param("First line here.\n\nThe second paragraph is\nlong. Nobody reads\nall of it.", [4], id="paragraph"),
        pytest.param("- one item of the list\n- an item that nobody reads", [2], id="list item"),
        pytest.param("| a | b |\n|---|---|\n| x | the row that nobody reads |", [3], id="table cell"),
        pytest.param("Some `code\nover lines` here. The page is\nmade anew now.", [2], id="after code over two lines"),
        pytest.param("```\n\n```\nA pod whose name is long.", [4], id="after a code block"),
    ],
)
def test_markdown_hit_names_its_line(text, lines):
    count = plain_english.Count()
    plain_english.count_blocks("page.md", plain_english.markdown_blocks(text), TURNS, count)
    assert [hit.line for hit in count.hits] == lines


def test_python_docstrings_and_messages_are_separate_groups():
    source = textwrap.dedent(
        '''
        """Module that nobody reads.

        A second paragraph, told here.
        """
        class Settings:
            """Fields with help texts for users."""
            period: int = Row("seconds until the driver is asked again")
            """Attribute whose docstring counts."""
            # a comment that nobody counts
            nobody = "none"
        def refuse(pod):
            """Refuse it without a reason."""
            log(f"{pod} and {pod}: no device for want of room")
            return dict(help="all devices that fit the pod")
        '''
    ).lstrip()
    counts = {group: plain_english.Count() for group in plain_english.LIMITS}
    plain_english.count_text("agent/settings.py", source, TURNS, counts)
    docstrings, messages = counts[plain_english.DOCSTRINGS], counts[plain_english.MESSAGES]
    assert (docstrings.sentences, [hit.line for hit in docstrings.hits]) == (5, [1, 3, 8])
    assert (messages.sentences, [hit.sentence for hit in messages.hits]) == (
        3,
        ["seconds until the driver is asked again", "X and X: no device for want of room"],
    )


def test_docstrings_below_tests_are_counted_without_messages():
    source = '"""Tests of a module that nobody reads."""\nREASON = "no device for want of room"\n'
    counts = {group: plain_english.Count() for group in plain_english.LIMITS}
    plain_english.count_text("tests/unit/test_it.py", source, TURNS, counts)
    assert {group: (count.sentences, len(count.hits)) for group, count in counts.items() if count.sentences} == {"tests": (1, 1)}


def test_c_comments_are_counted_without_code_and_strings():
    source = textwrap.dedent(
        """
        /* A slot whose owner has ended.
         *
         * The next process takes it. */
        const char *nobody = "nobody reads /* this here";
        char quote = '"';
        // two lines that are
        // told as one comment
        int none; /* `none` is a name in this line */
        """
    ).lstrip()
    counts = {group: plain_english.Count() for group in plain_english.LIMITS}
    plain_english.count_text("shim/slot.c", source, TURNS, counts)
    comments = counts[plain_english.C_COMMENTS]
    assert (comments.sentences, [hit.line for hit in comments.hits]) == (4, [1, 6])


def test_share_of_the_frozen_sample_matches_a_count_by_hand():
    count = plain_english.Count()
    plain_english.count_blocks("sample.md", plain_english.markdown_blocks(SAMPLE), TURNS, count)
    assert (count.sentences, len(count.hits), count.percent) == (20, 4, 20.0)


@pytest.mark.parametrize(("stilted", "status"), [pytest.param(2, 0, id="2 %"), pytest.param(3, 1, id="3 %")])
def test_page_at_the_limit_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str], stilted: int, status: int):
    (tmp_path / "docs").mkdir()
    lines = ["Nobody reads all of this."] * stilted + ["The agent reads this file."] * (100 - stilted)
    (tmp_path / "docs/page.md").write_text("\n\n".join(lines))
    assert plain_english.main(["--root", str(tmp_path), "--list"]) == status
    printed = capsys.readouterr().out
    assert "docs/page.md:1: Nobody reads all of this.\n    'Nobody': no pod, no process, no user: say who" in printed
    assert f"docs            {stilted} of    100 sentences   {stilted}.0 %  (limit 3 %)" in printed


def test_only_the_named_paths_are_counted(tmp_path: Path):
    for name in ("docs/page.md", "docs-old/page.md", "README.md", "build/page.md", ".cache/page.md", "tests/unit/test_it.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('"""Nobody reads all of this."""')
    assert plain_english.count_tree(tmp_path)["docs"].sentences == 3
    assert plain_english.count_tree(tmp_path, ["docs"])["docs"].sentences == 1
    assert plain_english.count_tree(tmp_path)["docstrings"].sentences == 0
    assert plain_english.count_tree(tmp_path)["tests"].sentences == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("anew again", "line 2: want an expression, a tab", id="no tab"),
        pytest.param("(anew\tagain", "line 2: missing \\)", id="broken expression"),
    ],
)
def test_word_list_line_without_meaning_is_an_error(line, message):
    with pytest.raises(ValueError, match=message):
        plain_english.read_word_list(f"# comment\n{line}\n")


def test_every_turn_of_the_list_has_a_plain_alternative():
    assert len(TURNS) > 40
    assert [turn.pattern.pattern for turn in TURNS if turn.pattern.search(turn.plain)] == []


def test_test_name_of_thirteen_words_is_too_long():
    source = "def test_a_b_c_d_e_f_g_h_i_j_k_l(): ...\nasync def test_a_b_c_d_e_f_g_h_i_j_k_l_m(): ...\n"
    assert list(plain_english.long_test_names(ast.parse(source))) == [(2, "test_a_b_c_d_e_f_g_h_i_j_k_l_m", 13)]


def test_tree_without_sentences_is_an_error_and_not_a_pass(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        plain_english.main(["--root", str(tmp_path)])
    assert ended.value.code == 2
    assert "no sentence found in any page or source" in capsys.readouterr().err
