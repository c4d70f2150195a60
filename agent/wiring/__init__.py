# SPDX-License-Identifier: Apache-2.0
"""Builds the agent from its parts, one module per subject. Only ``agent.__main__`` starts what is built here.

Each module has one frozen group and the function that builds it. ``parts`` has the order: ``setup``, ``cluster``, ``storage``, ``kubelet``,
``driver``, ``grants``, ``plugins``; then ``watchers``, which look at all of them.
"""
