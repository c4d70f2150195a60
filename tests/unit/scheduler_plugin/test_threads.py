# SPDX-License-Identifier: Apache-2.0
"""The scheduler computes in one thread."""

import os
import subprocess
import sys

PROGRAM = """
import os
from scheduler_plugin.core.fit import columnar
import numpy
numpy.ones((2000, 500)) @ numpy.ones((500, 500))
print(len(os.listdir("/proc/self/task")))
"""


def test_products_of_numpy_start_no_threads():
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"
