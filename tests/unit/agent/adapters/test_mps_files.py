# SPDX-License-Identifier: Apache-2.0
import os
import stat

import pytest

from agent.adapters.mps_files import MpsDaemonFiles, MpsRequestFiles
from agent.core.mps_records import DaemonRequest, DaemonState, SupervisorState
from agent.errors import StorageError

GPU, OTHER = "GPU-0", "GPU-1"
ABOUT = SupervisorState(50, "/host/shm")


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "mps-daemons"


@pytest.fixture
def agent(directory):
    return MpsDaemonFiles(directory)


@pytest.fixture
def requests(directory):
    requests = MpsRequestFiles(directory)
    yield requests
    requests.close()


def test_a_supervisor_is_there_from_its_first_word_to_its_end(agent, requests):
    assert agent.supervisor() is None
    assert requests.take()
    assert agent.supervisor() is None
    requests.open(ABOUT)
    assert agent.supervisor() == ABOUT
    requests.close()
    assert agent.supervisor() is None


def test_without_mps_clients_no_directory_exists(directory, agent):
    assert (agent.supervisor(), agent.load(), agent.wanted(), agent.state(GPU)) == (None, {}, frozenset(), None)
    agent.withdraw(GPU)
    assert not directory.exists()


def test_of_two_supervisors_the_second_waits_for_the_end_of_the_first(directory, requests, agent):
    second = MpsRequestFiles(directory)
    assert requests.take()
    requests.open(ABOUT)
    assert not second.take()
    assert agent.supervisor() == ABOUT
    requests.close()
    assert second.take()
    assert agent.supervisor() is None, "what there is to read is the first one's"
    second.close()


def test_a_supervisor_says_nothing_before_it_is_the_only_one(requests):
    with pytest.raises(StorageError, match="must be taken"):
        requests.open(ABOUT)


def test_what_a_supervisor_says_that_cannot_be_read_is_refused(directory, agent, requests):
    requests.take()
    requests.open(ABOUT)
    (directory / "supervisor.json").write_text("{}")
    with pytest.raises(StorageError, match=r"supervisor\.json: not a state of aliquot-mps"):
        agent.supervisor()


def test_requests_are_visible_until_withdrawn(agent, requests):
    agent.want(DaemonRequest(GPU, {"grant": "generation"}))
    agent.want(DaemonRequest(OTHER))
    assert requests.wanted().devices == agent.wanted() == {GPU, OTHER}
    assert agent.load()[GPU] == DaemonRequest(GPU, {"grant": "generation"})
    agent.withdraw(OTHER)
    assert requests.wanted().devices == agent.wanted() == {GPU}
    agent.withdraw(OTHER)


def test_states_are_heard_until_they_are_forgotten(agent, requests):
    assert agent.state(GPU) is None
    state = DaemonState(GPU, "generation", 41, 1.5)
    requests.report(state)
    assert agent.state(GPU) == state
    requests.forget(GPU)
    assert agent.state(GPU) is None


def test_the_words_of_an_earlier_supervisor_about_its_daemons_are_taken_back(directory, agent, requests):
    requests.report(DaemonState(GPU, "generation", 41, 1.5))
    agent.want(DaemonRequest(GPU))
    (directory / "state/notes.txt").write_text("an administrator's")
    requests.take()
    assert agent.state(GPU) is None
    assert requests.wanted().devices == {GPU}
    assert (directory / "state/notes.txt").exists()


def test_only_the_owner_may_read_anything(directory, agent, requests):
    agent.want(DaemonRequest(GPU))
    requests.take()
    requests.open(ABOUT)
    requests.report(DaemonState(GPU))
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
        (make_a_pipe, "found a pipe"),
        (link, "found a symbolic link"),
        (swap, f"want the GPU in the file's name, found '{GPU}'"),
        (tear, "not a request for an MPS daemon"),
        (swell, "found 2097152"),
    ],
)
def test_unreadable_request_is_reported_by_name_once_and_left(directory, agent, requests, caplog, damage, words):
    agent.want(DaemonRequest(GPU))
    agent.want(DaemonRequest(OTHER))
    damage(directory)
    for _ in range(2):
        wanted = requests.wanted()
        assert wanted.devices == {GPU}
        assert list(wanted.unclear) == [OTHER]
        assert words in wanted.unclear[OTHER]
        assert f"wanted/{OTHER}.json" in wanted.unclear[OTHER]
    assert len(caplog.records) == 1
    assert agent.load().keys() == {GPU}
    assert os.path.lexists(directory / f"wanted/{OTHER}.json")
    agent.want(DaemonRequest(OTHER))
    assert requests.wanted().devices == {GPU, OTHER}


def test_file_without_owner_is_refused_and_kept(directory, agent, requests, caplog):
    stray = directory / "wanted/notes.txt"
    stray.write_text("{}")
    assert requests.wanted().devices == agent.wanted() == frozenset()
    assert requests.wanted().unclear == {}
    assert "notes.txt" in caplog.text
    assert stray.exists()


def test_a_state_of_another_gpu_is_refused(directory, agent, requests):
    requests.report(DaemonState(GPU, "generation", 41, 1.5))
    (directory / f"state/{GPU}.json").rename(directory / f"state/{OTHER}.json")
    with pytest.raises(StorageError, match="found 'GPU-0'"):
        agent.state(OTHER)


def test_file_half_written_by_crash_is_no_request(directory, agent, requests):
    left = directory / f"wanted/.{GPU}.json.1.2.aliquot-tmp"
    left.write_text("{")
    assert requests.wanted().devices == frozenset()
    assert requests.wanted().unclear == {}
    agent.load()
    assert not left.exists()
