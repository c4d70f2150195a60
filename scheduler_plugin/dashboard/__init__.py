# SPDX-License-Identifier: Apache-2.0
"""The dashboard: a read-only view of the cluster in a browser, with the shares on each GPU, and the waiting pods with their reasons."""
