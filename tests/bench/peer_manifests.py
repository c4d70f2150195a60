# SPDX-License-Identifier: Apache-2.0
"""What the manifests of other systems become: whether each pod keeps the meaning that its author gave it, and whether any word is lost.

    python -m tests.bench.peer_manifests HAMi=DIR KAI=DIR …        DIR: a checkout of the system, or any directory with manifests
    python -m tests.bench.peer_manifests --list HAMi=DIR           also names each pod that is not right
    python -m tests.bench.peer_manifests --adopt-nvidia-gpu …      with that setting: whole nvidia.com/gpu become ours too

It reads every pod in the YAML files and in the fenced blocks of the Markdown files, and sends it to admission as the API server would. It
compares the result with what the system's documents say the words mean (``Meaning``, written without the webhook's code), in three
clusters: GPUs of one size, of two sizes, and no GPU yet (there the setting migProfiles names what new nodes will offer). The exit status
is 1 if a word is lost in silence, or a pod becomes something else than it says.

A pod that asks only in words that stay with their owner, such as plain nvidia.com/gpu, is right if it is left alone. Fields of other
systems' own kinds, such as the minAvailable of Volcano's Job, are not looked at: admission sees pods. A word in the metadata of an object
that owns pods gets a warning when that object is created (tests/unit/scheduler_plugin/webhook/test_templates.py).
"""

import copy
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import yaml

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import ContractError
from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser, Outcome
from scheduler_plugin.webhook.words import WORDS

Json = dict[str, Any]
CLUSTERS: Final[Mapping[str, tuple[int, ...]]] = {"one size": (81920,), "two sizes": (46068, 143771), "no GPU yet": ()}
PROFILES: Final = {"1g.10gb": 9728, "1g.20gb": 19968, "2g.20gb": 19968, "3g.40gb": 40192, "7g.80gb": 80896}
"""MiB of the instances of a GPU with 80 GiB, for pods that choose MIG instances by memory."""
PER_GPU: Final = (
    ("nvidia.com/vgpu-number", "nvidia.com/vgpu-memory", "", "nvidia.com/vgpu-cores"),
    ("volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", "volcano.sh/vgpu-memory-percentage", "volcano.sh/vgpu-cores"),
    ("volcano.sh/gpu-number", "volcano.sh/gpu-memory", "", ""),
    ("nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores"),
)
"""Count, MiB, percentage and cores per GPU of each system."""
PREFIXES: Final = re.compile(
    r"(hami\.io|kai\.scheduler|runai|run\.ai|volcano\.sh|scheduling\.volcano\.sh|vgpu-manager\.io|nvidia\.com)/|gpu-"
)
OF_OTHER_DEVICES: Final = re.compile(r"ascend|dcu|mlu|gcu|xpu|metax|iluvatar|kunlun|neuron|amd|biren|vastai|mthreads", re.IGNORECASE)
WRITTEN_BY_SYSTEMS: Final = re.compile(
    r"hami\.io/(vgpu-|bind-|.*allocat)|volcano\.sh/(job-|task-|queue-name|vgpu-(node|time|ids))|nvidia\.com/container\..*(gpus\.devices|portion)"
)
"""Words that a system writes for itself: they request no device."""
FENCE: Final = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
HERE_DOCUMENT: Final = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)
"""The text that a command line in a document passes to kubectl."""


@dataclass(frozen=True)
class Found:
    """A pod and where it stands."""

    where: str
    pod: Json


@dataclass(frozen=True)
class Meaning:
    """What one container asks for, per GPU, as its system documents it. None: no amount."""

    gpus: int
    mib: int | None = None
    part: Fraction | None = None
    cores: int | None = None
    profile_mib: int | None = None
    """It chooses MIG instances by this memory."""

    @property
    def is_share(self) -> bool:
        """Whether it asks for less than whole GPUs."""
        return (self.mib or self.part or self.cores or self.profile_mib) is not None


# --- finding pods --------------------------------------------------------------------------------------------------------


def pods_in(directory: Path) -> Iterator[Found]:
    """Yield the pods of all manifests below a directory; a text that is no YAML of Kubernetes is skipped."""
    for path in sorted(path for path in directory.rglob("*") if path.suffix in (".yaml", ".yml", ".md") and path.is_file()):
        text = path.read_text(errors="replace")
        for number, part in enumerate(blocks(text) if path.suffix == ".md" else [text]):
            where = f"{path.relative_to(directory)}" + (f"#{number}" if path.suffix == ".md" else "")
            yield from (Found(where, pod) for document in documents(part) for pod in pods_of(document))


def blocks(text: str) -> list[str]:
    """Return the fenced blocks of a Markdown text, without their common indent; of a command line, what it passes on."""
    fenced = [textwrap.dedent(block) for block in FENCE.findall(text)]
    return [passed for block in fenced for passed in ([found for _, found in HERE_DOCUMENT.findall(block)] or [block])]


def documents(text: str) -> list[Any]:
    """Parse a YAML stream; empty if it cannot be parsed, such as a template of Helm."""
    try:
        return [document for document in yaml.safe_load_all(text) if isinstance(document, dict)]
    except (yaml.YAMLError, ValueError):
        return []


def pods_of(value: Any, kind: str = "", name: str = "", metadata: Any = None) -> Iterator[Json]:
    """Yield every pod and pod template inside an object, with the object as its controller."""
    if isinstance(value, list):
        for item in value:
            yield from pods_of(item, kind, name)
        return
    if not isinstance(value, dict):
        return
    if "kind" in value and isinstance(value.get("metadata"), dict):
        kind, name = str(value["kind"]), str(value["metadata"].get("name") or "x")
    metadata, spec = value.get("metadata") or metadata, value.get("spec")
    if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
        yield as_pod(metadata if isinstance(metadata, dict) else {}, spec, kind, name)
        return
    for item in value.values():
        yield from pods_of(item, kind, name)


def as_pod(metadata: Json, spec: Json, kind: str, name: str) -> Json:
    """Make the pod that a template's controller would create."""
    texts = {key: {str(k): "" if v is None else str(v) for k, v in (metadata.get(key) or {}).items()} for key in ("annotations", "labels")}
    owners = [] if kind == "Pod" else [{"kind": kind, "name": name, "controller": True}]
    return {"metadata": {"name": name, **texts, "ownerReferences": owners}, "spec": json.loads(json.dumps(spec, default=str))}


# --- what a pod means -----------------------------------------------------------------------------------------------------


def meanings(pod: Json, *, adopts: bool = False) -> dict[str, Meaning]:
    """Return what each container asks of NVIDIA GPUs in words that are translated; without those that stay with their owner.

    Args: adopts: whether plain nvidia.com/gpu is translated too.
    """
    annotations, spec = pod["metadata"]["annotations"], pod["spec"]
    containers = [one for group in ("initContainers", "containers") for one in spec.get(group) or () if isinstance(one, dict)]
    by_mig = "mig" in (annotations.get("nvidia.com/vgpu-mode"), annotations.get("volcano.sh/vgpu-mode"))
    found = {str(one.get("name", "")): meaning for one in containers if (meaning := per_gpu(one, by_mig, adopts=adopts)) is not None}
    if {"gpu-fraction", "gpu-memory"} & annotations.keys() and containers:
        first = str(spec["containers"][0].get("name", "")) if spec["containers"] else ""
        count = int(annotations.get("gpu-fraction-num-devices", "1"))
        part = Fraction(annotations["gpu-fraction"]) if "gpu-fraction" in annotations else None
        mib = int(annotations["gpu-memory"]) if "gpu-memory" in annotations else None
        found[annotations.get("gpu-fraction-container-name", first)] = Meaning(count, mib, part)
    for name, text in annotations.items():
        if match := re.fullmatch(r"nvidia\.com/container\.(.+)\.gpu-memory\.(?:request|limit)", name):
            request = annotations.get(f"nvidia.com/container.{match[1]}.gpu-memory.request", text)
            found[match[1]] = Meaning(1, int(-(-units.parse_quantity(request) // units.MIB)))
    return found


def per_gpu(container: Json, by_mig: bool, *, adopts: bool = False) -> Meaning | None:
    """Read the resources of a system with amounts per GPU; None for a container that asks in no such words."""
    resources = container.get("resources") or {}
    limits = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    for count, memory, percent, cores in PER_GPU:
        amounts = {key: number(limits[name]) for key, name in (("mib", memory), ("percent", percent), ("cores", cores)) if name in limits}
        if count == "nvidia.com/vgpu-number" and count not in limits:
            continue
        if not amounts and (count not in limits or (count == "nvidia.com/gpu" and not adopts)):
            continue
        if number(limits.get(count, 1)) == 0:
            return None
        part = Fraction(amounts["percent"], 100) if 0 < amounts.get("percent", 0) < 100 else None
        mib, each = amounts.get("mib") or None, amounts.get("cores") or None
        gpus = number(limits.get(count, 1))
        return Meaning(gpus, profile_mib=mib) if by_mig and mib else Meaning(gpus, mib, part, each)
    return None


def number(text: Any) -> int:
    """Read a whole amount, MiB for one of memory with a unit."""
    value = units.parse_quantity(str(text))
    return int(value // units.MIB) if str(text).endswith("i") else int(value)


def asks_nvidia(pod: Json) -> bool:
    """Whether a pod asks for NVIDIA GPUs at all, also in words that stay with their owner."""
    names = {
        name
        for group in ("initContainers", "containers")
        for one in pod["spec"].get(group) or ()
        if isinstance(one, dict)
        for amounts in (one.get("resources") or {}).values()
        if isinstance(amounts, dict)
        for name in amounts
    }
    return bool(meanings(pod)) or any(re.match(r"nvidia\.com/(gpu|mig-|vgpu)|volcano\.sh/v?gpu", str(name)) for name in names)


# --- comparing -------------------------------------------------------------------------------------------------------------


def verdict(found: Found, sizes: tuple[int, ...], *, adopts: bool = False) -> str:
    """Return ``right``, or what is wrong: ``refused: …``, ``wrong: …`` or ``silent: …``. Args: adopts: see ``meanings``."""
    wanted = meanings(found.pod, adopts=adopts)
    outcome = Normaliser(Options(lambda _: sizes, adopts, mig_profiles=lambda _: PROFILES)).admit(found.pod)
    if outcome.refusal:
        return f"refused: {outcome.refusal}"
    if not wanted:
        return "right" if not outcome.is_gpu_pod or asks_mig(found.pod) else f"wrong: it is not ours, and became {outcome.patch}"
    if lost := list(lost_words(found.pod, outcome)):
        return f"silent: {', '.join(lost)}"
    pod = copy.deepcopy(found.pod)
    apply_json_patch(pod, json.loads(json.dumps(outcome.patch)))
    if pod["spec"].get("schedulerName") != contract.SCHEDULER_NAME:
        return f"wrong: schedulerName {pod['spec'].get('schedulerName')}"
    containers = {one["name"]: one for group in ("initContainers", "containers") for one in pod["spec"].get(group) or ()}
    differing = [
        f"{name} wants {meaning}, has {limits_of(containers[name])}"
        for name, meaning in wanted.items()
        if not equal(containers[name], meaning, sizes)
    ]
    return f"wrong: {'; '.join(differing)}" if differing else "right"


def asks_mig(pod: Json) -> bool:
    """Whether a pod asks for MIG instances by their resource, which is the same word here."""
    return any(contract.RESOURCE_MIG_PREFIX in json.dumps(one.get("resources")) for one in pod["spec"]["containers"])


def limits_of(container: Json) -> dict[str, int]:
    """Return the limits of ours."""
    limits = container.get("resources", {}).get("limits", {})
    return {
        name: number(amount)
        for name, amount in limits.items()
        if name in contract.RESOURCES_OF_VGPUS or name.startswith(contract.RESOURCE_MIG_PREFIX)
    }


def equal(container: Json, meaning: Meaning, sizes: tuple[int, ...]) -> bool:
    """Whether a container asks for what is meant, on each GPU that it can get."""
    limits = limits_of(container)
    if meaning.profile_mib is not None:
        fitting = {name: mib for name, mib in PROFILES.items() if mib >= meaning.profile_mib}
        names = [f"{contract.RESOURCE_MIG_PREFIX}{name}" for name, mib in fitting.items() if mib == min(fitting.values())]
        return any(limits == {name: meaning.gpus} for name in names)
    memory = limits.get(contract.RESOURCE_VGPU_MEMORY)
    percent = limits.get(contract.RESOURCE_VGPU_MEMORY_PERCENT)
    if meaning.part is not None:
        by_mib = memory is not None and {memory} == {meaning.gpus * int(size * meaning.part) for size in sizes}
        right = by_mib or percent == meaning.gpus * max(1, int(meaning.part * 100))
    else:
        right = percent is None and memory == (None if meaning.mib is None else meaning.gpus * meaning.mib)
    cores = None if meaning.cores is None else meaning.gpus * meaning.cores
    return right and limits.get(contract.RESOURCE_VGPU) == meaning.gpus and limits.get(contract.RESOURCE_VGPU_CORES) == cores


def lost_words(pod: Json, outcome: Outcome) -> Iterator[str]:
    """Yield the words of other systems that neither the table has nor a warning names, where they should."""
    heard = " ".join(outcome.warnings)
    rows = {(word.kind, word.name): word for word in WORDS}
    for kind, names in (("annotation", pod["metadata"]["annotations"]), ("label", pod["metadata"]["labels"])):
        for name, text in names.items():
            if (
                not PREFIXES.match(name)
                or WRITTEN_BY_SYSTEMS.match(name)
                or OF_OTHER_DEVICES.search(name)
                or name.startswith("nvidia.com/container.")
            ):
                continue
            word = next((row for (of, of_name), row in rows.items() if of == kind and of_name == name), None)
            if word is None or (word.fate != "translated" and name not in heard and text not in word.harmless):
                yield f"{kind} {name}"
    for word in WORDS:
        if (
            word.kind == "variable"
            and word.fate != "translated"
            and f'"name": "{word.name}"' in json.dumps(pod["spec"])
            and word.name not in heard
        ):
            yield f"variable {word.name}"


# --- the program -----------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Print a table for each cluster; return the exit status."""
    named = [argument.partition("=")[::2] for argument in arguments if "=" in argument]
    if not named:
        print(__doc__, file=sys.stderr)
        return 2
    adopts = "--adopt-nvidia-gpu" in arguments
    systems = {
        name: [found for found in pods_in(Path(directory)) if readable(found, adopts=adopts) and asks_nvidia(found.pod)]
        for name, directory in named
    }
    failed = False
    for cluster, sizes in CLUSTERS.items():
        print(f"\n### {cluster}\n")
        print("| system | pods | right | refused | wrong | lost in silence | shares | right |\n|---|---|---|---|---|---|---|---|")
        total: Counter[str] = Counter()
        for name, pods in systems.items():
            verdicts = [(found, verdict(found, sizes, adopts=adopts)) for found in pods]
            counts = counted(verdicts)
            total.update(counts)
            print(row(name, counts))
            if "--list" in arguments:
                print("\n".join(f"    {found.where}: {text}" for found, text in verdicts if text != "right"), file=sys.stderr)
        print(row("**sum**", total))
        failed |= bool(total["wrong"] or total["silent"])
    return int(failed)


def readable(found: Found, *, adopts: bool = False) -> bool:
    """Whether the pod's amounts are numbers; documents also show placeholders."""
    try:
        meanings(found.pod, adopts=adopts)
    except (ContractError, ValueError):
        return False
    return True


def counted(verdicts: list[tuple[Found, str]]) -> Counter[str]:
    """Count the verdicts of pods, and of those that ask for a share."""
    counts = Counter(text.partition(":")[0] for _, text in verdicts)
    shares = [text for found, text in verdicts if any(meaning.is_share for meaning in meanings(found.pod).values())]
    counts.update({"pods": len(verdicts), "shares": len(shares), "right shares": shares.count("right")})
    return counts


def row(name: str, counts: Counter[str]) -> str:
    """Return a line of the table."""
    columns = ("pods", "right", "refused", "wrong", "silent", "shares", "right shares")
    return f"| {name} | {' | '.join(str(counts[column]) for column in columns)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
