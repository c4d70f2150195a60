# SPDX-License-Identifier: Apache-2.0
"""Room held for the pod that waits longest, when it will be free, and which pods may use it until then."""
