# SPDX-License-Identifier: Apache-2.0
"""What runs without a cluster: the demo, stand-ins for kubelet, runtime and API server, and simulations. Not in production images."""
