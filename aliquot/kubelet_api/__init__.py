# SPDX-License-Identifier: Apache-2.0
"""Generated stubs of the kubelet's gRPC APIs: device plugin (v1beta1), PodResources (v1) and plugin registration (v1).

Sources are ``proto/kubelet/*.proto``. ``python proto/generate.py`` writes the modules here, and they are checked in, so that
running the agent needs no compiler. A test keeps sources and modules equal.
"""
