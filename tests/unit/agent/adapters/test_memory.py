# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

CHILD = """
import sys, threading
from pathlib import Path
from agent.adapters.memory import use_one_heap

if sys.argv[1] == "one":
    assert use_one_heap()

waiting, done = threading.Barrier(9), threading.Event()

def work():
    blocks = [b"x" * 60_000 for _ in range(20)]
    waiting.wait()  # all threads are there at once, so none can take the heap of another
    del blocks[::2]
    done.wait()

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
waiting.wait()
maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
heaps = sum(len(line) == 5 and line[1] == "rw-p" and int(line[0].partition("-")[0], 16) % (64 << 20) == 0 for line in maps)
done.set()
print(heaps)
"""


def heaps(mode: str) -> int:
    """Heaps of threads: each begins at a multiple of 64 MiB."""
    return int(subprocess.run([sys.executable, "-c", CHILD, mode], capture_output=True, text=True, check=True).stdout)


def test_threads_get_no_heaps_of_their_own():
    assert heaps("one") < heaps("many")
