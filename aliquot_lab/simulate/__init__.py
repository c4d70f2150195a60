# SPDX-License-Identifier: Apache-2.0
"""``aliquot simulate``: replays a trace of pods on a cluster, with the extender's policies and with published ones.

The extender's own code rates the nodes (scheduler_plugin.core.fit.shapes), breaks ties, plans the devices on the node and keeps the state.
Only the wire format is left out. The other policies are re-implementations of their papers on arrays, for comparison in one program.
"""
