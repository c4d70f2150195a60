# SPDX-License-Identifier: Apache-2.0
"""The cluster side: an extender and an admission webhook beside a stock kube-scheduler.

``core`` decides (values in, values out), ``extender`` speaks kube-scheduler's verbs, ``webhook`` speaks AdmissionReview, ``services``
hold the loops, ``adapters`` touch the world. Never imports ``agent``.
"""

import os

# Before numpy is imported. Its BLAS starts a thread for each core and lets them spin: a product of a thousand rows took 8 ms of CPU time
# on two busy cores, and takes 0.1 ms in one thread.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
