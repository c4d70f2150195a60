# SPDX-License-Identifier: Apache-2.0
"""The script that measures what other systems' manifests become finds their pods, and tells right from wrong and from silence."""

from typing import Any

import pytest

from scheduler_plugin.webhook.normalise import Outcome
from tests.bench import peer_manifests
from tests.bench.peer_manifests import Found, Meaning, equal, lost_words, meanings, pods_in, verdict

POD = """
apiVersion: v1
kind: Pod
metadata: {name: p}
spec: {containers: [{name: main, resources: {limits: {nvidia.com/gpu: 2, nvidia.com/gpumem: 300}}}]}
"""
JOB = """
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: j}
spec:
  tasks:
    - template:
        metadata: {annotations: {volcano.sh/vgpu-mode: mig}}
        spec: {containers: [{name: main, resources: {limits: {volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 8000}}}]}
"""


def test_pods_are_found_in_files_blocks_and_command_lines(tmp_path):
    (tmp_path / "a.yaml").write_text(JOB)
    (tmp_path / "b.md").write_text(
        f"Run:\n\n```bash\nkubectl apply -f - <<EOF{POD}EOF\n```\n\n```yaml{POD}```\n\n```yaml\n{{{{ no }}}}\n```\n"
    )
    found = list(pods_in(tmp_path))
    assert [one.where for one in found] == ["a.yaml", "b.md#0", "b.md#1"]
    assert found[0].pod["metadata"]["ownerReferences"] == [{"kind": "Job", "name": "j", "controller": True}]
    assert [meanings(one.pod) for one in found] == [{"main": Meaning(1, profile_mib=8000)}, *[{"main": Meaning(2, 300)}] * 2]
    assert [verdict(one, sizes) for one in found for sizes in ((81920,), ())] == ["right"] * 6


@pytest.mark.parametrize(
    ("limits", "right"),
    [
        ({"nvidia.com/vgpu": "2", "nvidia.com/vgpu-memory": "600"}, True),
        ({"nvidia.com/vgpu": "1", "nvidia.com/vgpu-memory": "300"}, False),
        ({"nvidia.com/vgpu": "2", "nvidia.com/vgpu-memory": "600", "nvidia.com/vgpu-cores": "10"}, False),
        ({"nvidia.com/vgpu": "2"}, False),
    ],
)
def test_amounts_must_be_those_that_are_meant(limits, right):
    assert equal({"resources": {"limits": limits}}, Meaning(2, 300), (81920,)) == right


def test_word_without_a_row_or_a_warning_is_lost():
    pod: dict[str, Any] = {
        "metadata": {"annotations": {"hami.io/new-word": "x"}, "labels": {"kai.scheduler/queue": "q"}},
        "spec": {"containers": []},
    }
    assert list(lost_words(pod, Outcome())) == ["annotation hami.io/new-word", "label kai.scheduler/queue"]
    assert list(lost_words(pod, Outcome(warnings=("kai.scheduler/queue",)))) == ["annotation hami.io/new-word"]
    pod["metadata"] |= {"annotations": {}}
    pod["spec"]["containers"] = [{"name": "main", "resources": {"limits": {"nvidia.com/gpumem": 1}}}]
    assert verdict(Found("x", pod), (81920,)) == "right"


def test_exit_status_says_whether_a_pod_is_wrong(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(POD)
    assert peer_manifests.main([f"HAMi={tmp_path}"]) == 0
    assert "| HAMi | 1 | 1 | 0 | 0 | 0 | 1 | 1 |" in capsys.readouterr().out
    (tmp_path / "b.yaml").write_text(POD.replace("{name: p}", "{name: q, annotations: {hami.io/new-word: x}}"))
    assert peer_manifests.main([f"HAMi={tmp_path}"]) == 1
    assert peer_manifests.main([]) == 2


def test_whole_gpus_of_nvidia_are_ours_only_where_they_are_adopted(tmp_path, capsys):
    pod = POD.replace(", nvidia.com/gpumem: 300", "")
    (tmp_path / "a.yaml").write_text(pod)
    [found] = pods_in(tmp_path)
    assert meanings(found.pod) == {}
    assert meanings(found.pod, adopts=True) == {"main": Meaning(2)}
    assert {verdict(found, sizes, adopts=adopts) for sizes in ((81920,), ()) for adopts in (True, False)} == {"right"}
    assert peer_manifests.main(["--adopt-nvidia-gpu", f"HAMi={tmp_path}"]) == 0
    assert "| HAMi | 1 | 1 | 0 | 0 | 0 | 0 | 0 |" in capsys.readouterr().out
