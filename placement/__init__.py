"""The pure domain of one node: what a pod asks, what its devices have left, whether the two fit and which devices to take.

Values in, values out: no clock, environment, file or network. Agent and scheduler decide with the same code.
"""
