# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from aliquot_lab.simulate.starts import StartsResult
from tests.bench import bench_starts


def result(pods: int, hit_percent: float) -> StartsResult:
    return StartsResult("list", 1, 0.9, True, 8, 80.0, pods, pods, hit_percent, hit_percent, 0.0, 0.5, {})


def test_large_replays_count_more():
    assert bench_starts.hits_percent([result(300, 90.0), result(100, 50.0)]) == 80.0


@pytest.mark.parametrize(
    ("hits", "flags", "status"),
    [
        ([75.0, 75.0], (), 0),
        ([85.0, 85.0], (), 0),
        ([74.0, 75.0], (), 1),
        ([85.0, 86.0], (), 1),
        ([60.0, 99.0], (), 0),
        ([50.0, 50.0], ("--drift",), 0),
    ],
)
def test_intervals_that_hit_too_seldom_or_too_often_fail(monkeypatch, hits: Sequence[float], flags: Sequence[str], status: int):
    replays = [bench_starts.Replay(str(number), number, 0.9) for number in range(len(hits))]
    monkeypatch.setattr(bench_starts, "REPLAYS", replays)
    monkeypatch.setattr(bench_starts, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(bench_starts, "rate", lambda _, one, drifts: result(100, hits[one.seed]))
    monkeypatch.setattr(bench_starts, "pod_lists", lambda _: {one.pods: None for one in replays})
    monkeypatch.setattr("sys.argv", ["bench_starts", "--trace", "nowhere", *flags])
    assert bench_starts.main() == status


def test_directory_without_trace_is_refused_with_names_of_lists(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["bench_starts", "--trace", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        bench_starts.main()
    assert ended.value.code == 2
    assert "expected the openb trace, found no pod list cpu100, cpu200" in capsys.readouterr().err
