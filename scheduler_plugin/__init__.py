# SPDX-License-Identifier: Apache-2.0
"""The cluster side: an extender and an admission webhook beside a stock kube-scheduler.

``core`` decides (values in, values out), ``extender`` speaks kube-scheduler's verbs, ``webhook`` speaks AdmissionReview, ``services``
hold the loops, ``adapters`` touch the world. Never imports ``agent``.
"""
