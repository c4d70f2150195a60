"""``aliquot simulate``: replays a trace of pods on a cluster, through the code by which the extender decides and through others'.

The extender's own code rates the nodes (scheduler_plugin.core.shapes), breaks ties, plans the devices on the node and keeps the state; only
the wire format is left out. The other policies are re-implementations from their papers, on arrays, for comparison in one harness.
"""
