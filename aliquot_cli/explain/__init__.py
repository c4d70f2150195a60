# SPDX-License-Identifier: Apache-2.0
"""``aliquot why``, ``what-if`` and ``replay``: the scheduler's decisions explained, tried out and made again, by its own code."""
