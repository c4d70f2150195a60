# SPDX-License-Identifier: Apache-2.0
"""Each step of the list-watch; tests/property/test_kube_watch.py plays whole histories."""

import json

import msgspec
import pytest

from aliquot.contract.errors import ContractError
from aliquot.kube.errors import KubeApiError, KubeBehindError, KubeExpiredError, KubeNotFoundError
from aliquot.kube.watch import Changed, Current, Deleted, Listed, ListWatch, Read, Rules, Unreadable, Wait, Watch

RULES = Rules(
    watch_seconds=100,
    first_backoff_seconds=1.0,
    last_backoff_seconds=8.0,
    expired_spread_seconds=5.0,
    absent_seconds=60.0,
    list_seconds=30.0,
)


def read_name(raw: msgspec.Raw) -> str | None:
    """Decode a test object into its name; the name chooses what goes wrong."""
    name: str = json.loads(bytes(raw))["name"]
    if name == "invalid":
        raise ContractError("an invalid object")
    return None if name == "foreign" else name


def page(*names: str, version: str = "5", token: str = "") -> bytes:
    return json.dumps({"metadata": {"resourceVersion": version, "continue": token}, "items": [{"name": name} for name in names]}).encode()


def line(kind: str, name: str = "", version: str = "6") -> bytes:
    return json.dumps({"type": kind, "object": {"name": name, "metadata": {"resourceVersion": version}}}).encode() + b"\n"


class Machine(ListWatch[str]):
    def __init__(self, **rules) -> None:
        super().__init__("/things", read_name, msgspec.structs.replace(RULES, **rules))

    def step(self, now: float = 0.0, chance: float = 0.0):
        return self.next_step(now, chance)

    def watching(self) -> "Machine":
        """Return it with a watch open, after an empty list of version 5."""
        self.step()
        list(self.replied(page()))
        self.step()
        self.opened(0.0)
        return self


class TestList:
    def test_first_step_lists_everything(self):
        machine = Machine()
        assert machine.step() == Read("/things", 30.0, starts_list=True)
        assert list(machine.replied(page("a", "b", "foreign"))) == [Listed(["a", "b"])]
        assert machine.step() == Watch("/things?watch=1&allowWatchBookmarks=true&resourceVersion=5&timeoutSeconds=100", 110.0)

    def test_pages_are_read_in_order_and_delivered_once(self):
        machine = Machine(page_size=2)
        assert machine.step() == Read("/things?limit=2", 30.0, starts_list=True)
        assert list(machine.replied(page("a", "b", token="x+y"))) == []
        assert machine.step() == Read("/things?limit=2&continue=x%2By", 30.0, starts_list=False)
        assert list(machine.replied(page("c"))) == [Listed(["a", "b", "c"])]

    def test_failed_page_starts_the_list_again(self):
        machine = Machine(page_size=2)
        machine.step()
        list(machine.replied(page("a", "b", token="x")))
        machine.step()
        machine.failed(KubeExpiredError("the token is too old"))
        assert isinstance(machine.step(), Wait)
        assert machine.step() == Read("/things?limit=2", 30.0, starts_list=True)
        assert list(machine.replied(page("c"))) == [Listed(["c"])]

    def test_list_is_not_older_than_version_of_cheap_list(self):
        machine = Machine(version_path="/cheap")
        assert machine.step() == Read("/cheap", 30.0, starts_list=True)
        assert list(machine.replied(page(version="9"))) == []
        assert machine.step() == Read("/things?resourceVersion=9&resourceVersionMatch=NotOlderThan", 30.0, starts_list=False)

    def test_server_behind_that_version_lists_from_etcd_at_once(self):
        machine = Machine(version_path="/cheap")
        machine.step()
        list(machine.replied(page(version="9")))
        machine.step()
        assert not machine.failed(KubeBehindError("too large resource version"))
        assert machine.step() == Read("/things", 30.0, starts_list=False)

    @pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"\xff", b'{"metadata":{},"items":5}'])
    def test_reply_that_is_no_list_is_an_error(self, body):
        machine = Machine()
        machine.step()
        with pytest.raises(KubeApiError, match="cannot be read"):
            list(machine.replied(body))

    def test_unreadable_object_fails_the_list(self):
        machine = Machine()
        machine.step()
        with pytest.raises(KubeApiError, match="an invalid object"):
            list(machine.replied(page("invalid", "a")))

    def test_unreadable_object_is_left_out_by_rule(self):
        machine = Machine(skips_unreadable=True)
        machine.step()
        unreadable, listed = machine.replied(page("invalid", "a"))
        assert (type(unreadable), listed) == (Unreadable, Listed(["a"]))


class TestWatch:
    def test_changes_are_delivered_and_move_the_version(self):
        machine = Machine().watching()
        chunk = line("ADDED", "a") + line("MODIFIED", "a") + line("DELETED", "a") + line("ADDED", "foreign", "9")
        assert list(machine.received(chunk)) == [Changed("a"), Changed("a"), Deleted("a"), Current(bookmark=False)]
        machine.ended()
        machine.step()
        assert "resourceVersion=9&" in machine.step().path

    def test_bookmark_moves_the_version_and_delivers_no_object(self):
        machine = Machine().watching()
        assert list(machine.received(line("BOOKMARK", version="9"))) == [Current(bookmark=True)]
        machine.ended()
        machine.step()
        assert "resourceVersion=9&" in machine.step().path

    def test_line_may_be_cut_anywhere(self):
        machine = Machine().watching()
        text = line("ADDED", "a") + b"\n" + line("ADDED", "b")
        events = [event for byte in text for event in machine.received(bytes([byte]))]
        assert [event for event in events if not isinstance(event, Current)] == [Changed("a"), Changed("b")]

    def test_part_of_a_line_is_dropped_with_its_connection(self):
        machine = Machine().watching()
        list(machine.received(line("ADDED", "a")[:10]))
        machine.ended()
        machine.step()
        machine.step()
        assert list(machine.received(line("ADDED", "a"))) == [Changed("a"), Current(bookmark=False)]

    def test_event_that_the_listener_did_not_take_is_requested_again(self):
        machine = Machine().watching()
        next(machine.received(line("ADDED", "a", "6") + line("ADDED", "b", "7")))
        machine.failed(KubeApiError("the listener failed"))
        machine.step()
        assert "resourceVersion=5&" in machine.step().path

    def test_error_event_of_lost_history_is_an_expiry(self):
        machine = Machine().watching()
        with pytest.raises(KubeExpiredError, match="too old"):
            list(machine.received(b'{"type":"ERROR","object":{"code":410,"message":"too old"}}\n'))

    @pytest.mark.parametrize("text", [b"{}\n", b"<html>\n", b'{"type":"ADDED","object":{"name":"a"}}\n', b'{"type":"ERROR","object":5}\n'])
    def test_line_that_is_no_event_is_an_error(self, text):
        with pytest.raises(KubeApiError, match="cannot be read"):
            list(Machine().watching().received(text))

    def test_deletion_of_unreadable_object_needs_a_list(self):
        with pytest.raises(KubeExpiredError, match="an invalid object"):
            list(Machine(skips_unreadable=True).watching().received(line("DELETED", "invalid")))

    def test_change_of_unreadable_object_is_left_out(self):
        unreadable, current = Machine(skips_unreadable=True).watching().received(line("MODIFIED", "invalid"))
        assert (type(unreadable), current) == (Unreadable, Current(bookmark=False))

    @pytest.mark.parametrize(("chance", "seconds"), [(0.0, 100), (1.0, 125)])
    def test_chance_spreads_how_long_a_watch_lasts(self, chance, seconds):
        machine = Machine(silence_seconds=90.0)
        machine.step()
        list(machine.replied(page()))
        watch = machine.step(chance=chance)
        assert watch.path.endswith(f"timeoutSeconds={seconds}")
        assert watch.silence_seconds == 90.0


class TestWaits:
    @pytest.mark.parametrize(("chance", "share"), [(0.0, 0.5), (1.0, 1.0)])
    def test_backoff_doubles_to_its_limit_and_chance_takes_up_to_half(self, chance, share):
        machine = Machine()
        waits = []
        for _ in range(5):
            machine.step()
            assert machine.failed(KubeApiError("HTTP 503"))
            waits.append(machine.step(chance=chance).seconds)
        assert waits == [share * seconds for seconds in (1, 2, 4, 8, 8)]

    def test_watch_that_was_open_for_a_while_resets_the_backoff(self):
        machine = Machine()
        for _ in range(3):
            machine.step()
            machine.failed(KubeApiError("HTTP 503"))
            machine.step()
        machine.watching().ended()
        assert machine.step(now=5.0, chance=1.0) == Wait(1.0)

    @pytest.mark.parametrize(
        ("error", "chance", "seconds"),
        [
            pytest.param(KubeApiError("HTTP 429", 7.0), 1.0, 8.0, id="retry-after"),
            pytest.param(KubeExpiredError("HTTP 410"), 0.0, 0.5, id="expired, least"),
            pytest.param(KubeExpiredError("HTTP 410"), 1.0, 6.0, id="expired, most"),
            pytest.param(KubeNotFoundError("HTTP 404"), 1.0, 61.0, id="absent"),
        ],
    )
    def test_error_chooses_the_wait(self, error, chance, seconds):
        machine = Machine().watching()
        machine.failed(error)
        assert machine.step(chance=chance) == Wait(seconds)

    @pytest.mark.parametrize(("error", "step"), [(KubeApiError("x"), Watch), (KubeExpiredError("x"), Read), (KubeNotFoundError("x"), Read)])
    def test_error_chooses_whether_to_list_again(self, error, step):
        machine = Machine().watching()
        machine.failed(error)
        machine.step()
        assert isinstance(machine.step(), step)


class TestRelist:
    def test_relist_lists_at_once(self):
        machine = Machine().watching()
        machine.relist()
        assert machine.relist_wanted
        assert machine.step() == Read("/things", 30.0, starts_list=True)
        assert not machine.relist_wanted

    def test_relist_by_a_listener_outlasts_the_event_it_took(self):
        machine = Machine().watching()
        for _ in machine.received(line("ADDED", "a")):
            machine.relist()
        assert isinstance(machine.step(), Read)

    def test_relist_drops_pages_already_read(self):
        machine = Machine(page_size=1)
        machine.step()
        list(machine.replied(page("a", token="x")))
        machine.relist()
        machine.step()
        assert list(machine.replied(page("b"))) == [Listed(["b"])]
