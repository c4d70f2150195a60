# SPDX-License-Identifier: Apache-2.0
"""Builds everything that a release publishes: ``python -m release`` (``make release``). docs/development/release.md explains it.

Invariant: the files depend only on the source tree, on SOURCE_DATE_EPOCH and on the inputs below ``build/release-inputs``.
"""
