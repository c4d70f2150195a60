# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot_lab.standin.cluster import ChangeType, Cluster, Kind
from aliquot_lab.standin.errors import AlreadyExistsError, ConflictError, GoneError, InvalidError, NotFoundError

POD = {"metadata": {"name": "p"}, "spec": {}}


@pytest.fixture
def cluster():
    return Cluster()


def test_every_change_has_the_next_version(cluster):
    created = cluster.create(Kind.POD, POD)
    updated = cluster.update(Kind.POD, "default", "p", lambda item: item["spec"].update(x=1))
    assert int(updated["metadata"]["resourceVersion"]) == int(created["metadata"]["resourceVersion"]) + 1


def test_a_snapshot_does_not_follow_later_changes(cluster):
    before = cluster.create(Kind.POD, POD)
    cluster.update(Kind.POD, "default", "p", lambda item: item["spec"].update(x=1))
    assert before["spec"] == {}


def test_an_update_that_changes_nothing_is_no_change(cluster):
    cluster.create(Kind.POD, POD)
    version = cluster.version
    cluster.update(Kind.POD, "default", "p", lambda _: None)
    assert cluster.version == version


def test_a_failed_update_leaves_the_object(cluster):
    def fail(item):
        item["spec"]["x"] = 1
        raise RuntimeError("changed my mind")

    cluster.create(Kind.POD, POD)
    with pytest.raises(RuntimeError, match="mind"):
        cluster.update(Kind.POD, "default", "p", fail)
    assert cluster.get(Kind.POD, "default", "p")["spec"] == {}


def test_object_of_same_name_with_other_uid_is_conflict(cluster):
    cluster.create(Kind.POD, POD)
    with pytest.raises(ConflictError):
        cluster.delete(Kind.POD, "default", "p", uid="another")


@pytest.mark.parametrize("field", ["name", "uid"])
def test_identity_cannot_be_changed(cluster, field):
    cluster.create(Kind.POD, POD)
    with pytest.raises(InvalidError, match=field):
        cluster.update(Kind.POD, "default", "p", lambda item: item["metadata"].update({field: "other"}))


def test_names_are_unique_and_required(cluster):
    cluster.create(Kind.POD, POD)
    with pytest.raises(AlreadyExistsError):
        cluster.create(Kind.POD, POD)
    with pytest.raises(InvalidError):
        cluster.create(Kind.POD, {"metadata": {}})
    with pytest.raises(NotFoundError):
        cluster.get(Kind.POD, "other", "p")


def test_a_new_pod_is_pending(cluster):
    assert cluster.create(Kind.POD, POD)["status"] == {"phase": "Pending"}


def test_listeners_get_every_change_until_they_stop(cluster):
    heard = []
    stop = cluster.listen(lambda change: heard.append(change.type))
    cluster.create(Kind.POD, POD)
    cluster.delete(Kind.POD, "default", "p")
    stop()
    cluster.create(Kind.POD, POD)
    assert heard == [ChangeType.ADDED, ChangeType.DELETED]


def test_the_history_reaches_back_only_so_far(cluster, monkeypatch):
    monkeypatch.setattr("aliquot_lab.standin.cluster.HISTORY_LENGTH", 3)
    short, start = Cluster(), 1
    for number in range(5):
        short.create(Kind.POD, {"metadata": {"name": f"p{number}"}})
    with pytest.raises(GoneError):
        short.changes_after(start, Kind.POD, 0)
    version, changes = short.changes_after(short.version - 3, Kind.POD, 0)
    assert (version, len(changes)) == (short.version, 3)
