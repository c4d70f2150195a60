"""The operator's commands, as ``aliquot …`` and ``kubectl vgpu …``: what a cluster's GPUs are, who uses how much of them, and cordons.

Each command is a module of its own that is imported when it is called. Facts come from the API server: the GpuNode objects, the pods, and
the agents' own pages through its pod proxy, so that whoever may ask ``kubectl`` may ask this, and nothing listens for it.
"""
