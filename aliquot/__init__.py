# SPDX-License-Identifier: Apache-2.0
"""The ground floor: every program imports it, and it imports no program.

contract       names, units, value types and codecs that all parts share (pure)
placement      which devices of one node fit and which are best (pure)
process        settings, log lines and listening addresses of a program
kubelet_api    generated stubs of the kubelet's gRPC APIs (from ``proto/``)
paths          where a source tree and its build directory are
"""
