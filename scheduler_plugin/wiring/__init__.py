# SPDX-License-Identifier: Apache-2.0
"""Constructs the parts of one scheduler from its settings, one module per subject. ``__main__`` joins them and runs their loops."""
