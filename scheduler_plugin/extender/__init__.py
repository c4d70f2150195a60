# SPDX-License-Identifier: Apache-2.0
"""kube-scheduler's extender protocol. ``wire`` has its JSON, ``context`` what the verbs share, and each verb has its own module."""
