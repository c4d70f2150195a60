# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.core.registration import STREAM_GRACE_SECONDS, FileIdentity, PluginState, SocketsSeen, Step, next_step

OWN, KUBELET, NEW_KUBELET = FileIdentity(1, 10, 1), FileIdentity(1, 20, 1), FileIdentity(1, 20, 2)
WELL = PluginState(own_socket=OWN, registered_with=KUBELET)
SEEN = SocketsSeen(OWN, KUBELET)


@pytest.mark.parametrize(
    ("state", "seen", "step"),
    [
        pytest.param(WELL, SEEN, Step.NOTHING, id="all is well"),
        pytest.param(PluginState(), SocketsSeen(None, KUBELET), Step.SERVE, id="not serving yet"),
        pytest.param(WELL, SocketsSeen(None, KUBELET), Step.SERVE, id="own socket removed"),
        pytest.param(WELL, SocketsSeen(FileIdentity(1, 11, 1), KUBELET), Step.SERVE, id="own socket replaced"),
        pytest.param(WELL, SocketsSeen(OWN, NEW_KUBELET), Step.REGISTER, id="kubelet restarted, its socket has the same inode number"),
        pytest.param(replace(WELL, registered_with=None), SEEN, Step.REGISTER, id="not registered yet"),
        pytest.param(WELL, SocketsSeen(OWN, None), Step.NOTHING, id="kubelet is away"),
        pytest.param(replace(WELL, stream_lost_at=100.0), SEEN, Step.REGISTER, id="the stream did not come back"),
        pytest.param(
            replace(WELL, stream_lost_at=101.0 + STREAM_GRACE_SECONDS / 2), SEEN, Step.NOTHING, id="the stream may still come back"
        ),
        pytest.param(replace(WELL, forgotten=True), SEEN, Step.REGISTER, id="the node's status denies us"),
    ],
)
def test_the_next_step_follows_from_what_is_seen(state, seen, step):
    assert next_step(state, seen, now=100.0 + STREAM_GRACE_SECONDS) is step
