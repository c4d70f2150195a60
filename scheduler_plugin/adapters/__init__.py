# SPDX-License-Identifier: Apache-2.0
"""Adapters to the outside: the Kubernetes API, HTTP servers, certificates and clocks. They translate types and errors, and decide
nothing."""
