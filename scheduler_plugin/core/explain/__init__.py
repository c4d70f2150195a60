# SPDX-License-Identifier: Apache-2.0
"""Why a pod waits, what would make it fit, and the replay of decisions."""
