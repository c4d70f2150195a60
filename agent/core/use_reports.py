# SPDX-License-Identifier: Apache-2.0
"""What pods use of their GPUs, for the scheduler: means over the last minutes, one report for each template of pods.

A sample counts from when the driver lists a process of the pod or the shim counts for it; a pod that loads its image is not idle, it has
not begun. Of pods with equal requests in one namespace only one is named, with the mean of all of them. A report stays as it is until the
mean differs by CHANGE_PERCENT, so that the node's object is not written for noise.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Final, NamedTuple

from agent.core.holdings import Holdings
from agent.core.inventory import InventoryDevice
from agent.core.ledger import Grant
from aliquot.contract.gpunode import MAX_UTILIZATIONS, PodUtilization
from aliquot.contract.model import Pod, Utilization

WINDOW_SAMPLES: Final = 20
LEAST_SAMPLES: Final = 4
"""Samples of a pod that a report needs."""
CHANGE_PERCENT: Final = 10
_STEP_PERCENT: Final = 5
_WHOLE: Final = 100

Key = tuple[str, str]
"""Grant id and GPU UUID."""


class UseSample(NamedTuple):
    """What a pod used of one GPU in the mean of its GPUs, as fractions of the time."""

    sm_ratio: float
    dram_ratio: float


def sample_of(
    grants: Iterable[Grant], devices: Iterable[InventoryDevice], sm_ratios: Mapping[Key, float], holdings: Holdings
) -> Mapping[str, UseSample]:
    """Return what each pod uses now, by its UID. Pods with an unknown or no process, and those with claims, are missing.

    Where the driver does not say what a container uses of the memory's bandwidth, it counts as the part of the GPU's whole use that is its
    part of the multiprocessors' use.

    Args: sm_ratios: how busy each container keeps each GPU; unknown ones are missing.
    """
    whole = {entry.device.uuid: entry for entry in devices if not entry.device.mig_enabled}
    by_pod = _keys_by_pod(grants, whole)
    totals = _totals(chain.from_iterable(by_pod.values()), sm_ratios)
    begun = {uid: keys for uid, keys in by_pod.items() if any(_has_begun(key, sm_ratios, holdings) for key in keys)}
    samples = {
        uid: _mean_of_devices({key: _sample(key, sm_ratios, holdings, whole[key[1]], totals[key[1]]) for key in keys})
        for uid, keys in begun.items()
    }
    return {uid: sample for uid, sample in samples.items() if sample is not None}


def _totals(keys: Iterable[Key], sm_ratios: Mapping[Key, float]) -> Mapping[str, float]:
    """Return how busy all containers keep each GPU."""
    totals: defaultdict[str, float] = defaultdict(float)
    for key in keys:
        totals[key[1]] += sm_ratios.get(key, 0.0)
    return totals


def _has_begun(key: Key, sm_ratios: Mapping[Key, float], holdings: Holdings) -> bool:
    """Whether a container has a process that the driver lists, or for which the shim counts."""
    return key in holdings.listed or sm_ratios.get(key, 0.0) > 0


def _keys_by_pod(grants: Iterable[Grant], whole: Collection[str]) -> Mapping[str, Sequence[Key]]:
    """Return the containers of each pod with the GPUs that they use. Args: whole: UUIDs of the GPUs that count."""
    by_pod: defaultdict[str, list[Key]] = defaultdict(list)
    for grant in grants:
        keys = [(grant.grant_id, share.device_uuid) for share in grant.shares if share.device_uuid in whole]
        if keys and grant.claim is None:
            by_pod[grant.pod_uid] += keys
    return by_pod


def _sample(key: Key, sm_ratios: Mapping[Key, float], holdings: Holdings, device: InventoryDevice, total: float) -> UseSample | None:
    """Return what a container uses of a GPU; None if that is unknown. Args: total: how busy all containers keep the GPU."""
    sm = sm_ratios.get(key)
    if sm is None:
        return None
    dram = holdings.memory_ratio(*key) if key in holdings.listed else None
    if dram is None:
        dram = (device.sensors.memory_utilization_ratio or 0.0) * sm / max(total, 1.0 / _WHOLE)
    return UseSample(sm, dram)


def _mean_of_devices(samples: Mapping[Key, UseSample | None]) -> UseSample | None:
    """Add up the containers on each GPU and return the mean over the GPUs; None if a container is unknown."""
    on_device: defaultdict[str, list[UseSample]] = defaultdict(list)
    for (_, device_uuid), sample in samples.items():
        if sample is None:
            return None
        on_device[device_uuid].append(sample)
    sums = [[min(1.0, sum(ratios)) for ratios in zip(*found, strict=True)] for found in on_device.values()]
    return UseSample(*(fmean(ratios) for ratios in zip(*sums, strict=True)))


class UseHistory:
    """The samples of the last minutes, by pod UID."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[UseSample]] = {}

    def add(self, samples: Mapping[str, UseSample], present: Collection[str]) -> None:
        """Add a look at the node. Args: present: UIDs of its pods; the others are forgotten."""
        self._samples = {uid: kept for uid, kept in self._samples.items() if uid in present}
        for uid, sample in samples.items():
            self._samples.setdefault(uid, deque(maxlen=WINDOW_SAMPLES)).append(sample)

    def means(self) -> Mapping[str, UseSample]:
        """Return the mean of each pod with enough samples."""
        enough = {uid: kept for uid, kept in self._samples.items() if len(kept) >= LEAST_SAMPLES}
        return {uid: UseSample(*map(fmean, zip(*kept, strict=True))) for uid, kept in enough.items()}


def next_reports(latest: Sequence[PodUtilization], means: Mapping[str, UseSample], pods: Mapping[str, Pod]) -> tuple[PodUtilization, ...]:
    """Return what to report now.

    Args: latest: the latest reports. means: by pod UID. pods: the node's pods by UID; of others nothing is reported.
    """
    named = {_template(pods[entry.pod_uid]): entry for entry in latest if entry.pod_uid in pods}
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for uid in sorted(means.keys() & pods.keys()):
        groups[_template(pods[uid])].append(uid)
    reports = {template: _report(named.get(template), [means[uid] for uid in uids], uids[0]) for template, uids in groups.items()}
    # Reports that are there come first: with too many templates, others must not push them out in turn.
    ordered = sorted({**named, **reports}.items(), key=lambda item: (item[0] not in named, item[1].pod_uid))
    return tuple(sorted((entry for _, entry in ordered[:MAX_UTILIZATIONS]), key=lambda entry: entry.pod_uid))


def _template(pod: Pod) -> object:
    return pod.namespace, tuple((spec.name, tuple(sorted(spec.limits.items()))) for spec in pod.containers)


def _report(before: PodUtilization | None, samples: Sequence[UseSample], pod_uid: str) -> PodUtilization:
    percents = [_WHOLE * fmean(ratios) for ratios in zip(*samples, strict=True)]
    if before is not None:
        if all(abs(now - was) < CHANGE_PERCENT for now, was in zip(percents, before.used, strict=True)):
            return before
        pod_uid = before.pod_uid
    return PodUtilization(pod_uid, Utilization(*(min(_WHOLE, round(percent / _STEP_PERCENT) * _STEP_PERCENT) for percent in percents)))
