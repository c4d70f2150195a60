# SPDX-License-Identifier: Apache-2.0
"""The agent's loops and RPC handlers: they ask ``core`` what to do and act through ``ports``."""
