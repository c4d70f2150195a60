# SPDX-License-Identifier: Apache-2.0
"""One outside thing per module (driver, kubelet, API server, files), with its types and errors translated into ours once."""
