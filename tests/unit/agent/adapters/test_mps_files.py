import os
import stat

import pytest

from agent.adapters.mps_files import MpsDeskFiles, MpsWishFiles
from agent.core.mps_records import DaemonState, SupervisorState, Wish
from agent.errors import StorageError

GPU, OTHER = "GPU-0", "GPU-1"
ABOUT = SupervisorState(50, "/host/shm")


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "mps-daemons"


@pytest.fixture
def agent(directory):
    return MpsWishFiles(directory)


@pytest.fixture
def desk(directory):
    desk = MpsDeskFiles(directory)
    yield desk
    desk.close()


def test_a_supervisor_is_there_from_its_first_word_to_its_end(agent, desk):
    assert agent.supervisor() is None
    assert desk.take()
    assert agent.supervisor() is None
    desk.open(ABOUT)
    assert agent.supervisor() == ABOUT
    desk.close()
    assert agent.supervisor() is None


def test_where_nobody_wants_mps_there_is_no_directory(directory, agent):
    assert (agent.supervisor(), agent.load(), agent.wanted(), agent.state(GPU)) == (None, {}, frozenset(), None)
    agent.withdraw(GPU)
    assert not directory.exists()


def test_of_two_supervisors_the_second_waits_for_the_end_of_the_first(directory, desk, agent):
    second = MpsDeskFiles(directory)
    assert desk.take()
    desk.open(ABOUT)
    assert not second.take()
    assert agent.supervisor() == ABOUT
    desk.close()
    assert second.take()
    assert agent.supervisor() is None, "what there is to read is the first one's"
    second.close()


def test_a_supervisor_says_nothing_before_it_is_the_only_one(desk):
    with pytest.raises(StorageError, match="has to be taken"):
        desk.open(ABOUT)


def test_what_a_supervisor_says_that_cannot_be_read_is_refused(directory, agent, desk):
    desk.take()
    desk.open(ABOUT)
    (directory / "supervisor.json").write_text("{}")
    with pytest.raises(StorageError, match=r"supervisor\.json: not a state of aliquot-mps"):
        agent.supervisor()


def test_wishes_are_seen_until_they_are_withdrawn(agent, desk):
    agent.want(Wish(GPU, {"grant": "generation"}))
    agent.want(Wish(OTHER))
    assert desk.wanted().devices == agent.wanted() == {GPU, OTHER}
    assert agent.load()[GPU] == Wish(GPU, {"grant": "generation"})
    agent.withdraw(OTHER)
    assert desk.wanted().devices == agent.wanted() == {GPU}
    agent.withdraw(OTHER)


def test_states_are_heard_until_they_are_forgotten(agent, desk):
    assert agent.state(GPU) is None
    state = DaemonState(GPU, "generation", 41, 1.5)
    desk.tell(state)
    assert agent.state(GPU) == state
    desk.forget(GPU)
    assert agent.state(GPU) is None


def test_the_words_of_an_earlier_supervisor_about_its_daemons_are_taken_back(directory, agent, desk):
    desk.tell(DaemonState(GPU, "generation", 41, 1.5))
    agent.want(Wish(GPU))
    (directory / "state/notes.txt").write_text("an administrator's")
    desk.take()
    assert agent.state(GPU) is None
    assert desk.wanted().devices == {GPU}
    assert (directory / "state/notes.txt").exists()


def test_only_the_owner_may_read_anything(directory, agent, desk):
    agent.want(Wish(GPU))
    desk.take()
    desk.open(ABOUT)
    desk.tell(DaemonState(GPU))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.rglob("*"))}
    assert [path.name for path, mode in modes.items() if mode not in (0o600, 0o700)] == []
    assert len(modes) == 7


def make_a_pipe(directory):
    pipe = directory / f"wanted/{OTHER}.json"
    pipe.unlink()
    os.mkfifo(pipe)


def link(directory):
    path = directory / f"wanted/{OTHER}.json"
    path.unlink()
    path.symlink_to(directory / f"wanted/{GPU}.json")


def swap(directory):
    (directory / f"wanted/{OTHER}.json").write_bytes((directory / f"wanted/{GPU}.json").read_bytes())


def tear(directory):
    path = directory / f"wanted/{OTHER}.json"
    path.write_bytes(path.read_bytes()[:-9])


def swell(directory):
    (directory / f"wanted/{OTHER}.json").write_bytes(b" " * (2 << 20))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (make_a_pipe, "not a wish for an MPS daemon"),
        (link, "Too many levels of symbolic links"),
        (swap, f"want a file of the GPU it is named after, found one of '{GPU}'"),
        (tear, "not a wish for an MPS daemon"),
        (swell, "not a wish for an MPS daemon"),
    ],
)
def test_a_wish_that_cannot_be_read_is_told_by_its_name_once_and_left(directory, agent, desk, caplog, damage, words):
    agent.want(Wish(GPU))
    agent.want(Wish(OTHER))
    damage(directory)
    for _ in range(2):
        wanted = desk.wanted()
        assert wanted.devices == {GPU}
        assert list(wanted.unclear) == [OTHER]
        assert words in wanted.unclear[OTHER]
        assert f"wanted/{OTHER}.json" in wanted.unclear[OTHER]
    assert len(caplog.records) == 1
    assert agent.load().keys() == {GPU}
    assert os.path.lexists(directory / f"wanted/{OTHER}.json")
    agent.want(Wish(OTHER))
    assert desk.wanted().devices == {GPU, OTHER}


def test_a_file_of_nobody_is_refused_and_left(directory, agent, desk, caplog):
    stray = directory / "wanted/notes.txt"
    stray.write_text("{}")
    assert desk.wanted().devices == agent.wanted() == frozenset()
    assert desk.wanted().unclear == {}
    assert "notes.txt" in caplog.text
    assert stray.exists()


def test_a_state_of_another_gpu_is_refused(directory, agent, desk):
    desk.tell(DaemonState(GPU, "generation", 41, 1.5))
    (directory / f"state/{GPU}.json").rename(directory / f"state/{OTHER}.json")
    with pytest.raises(StorageError, match="found one of 'GPU-0'"):
        agent.state(OTHER)


def test_what_a_crash_left_half_written_is_no_wish(directory, agent, desk):
    left = directory / f"wanted/.{GPU}.json.1.2.aliquot-tmp"
    left.write_text("{")
    assert desk.wanted().devices == frozenset()
    assert desk.wanted().unclear == {}
    agent.load()
    assert not left.exists()
