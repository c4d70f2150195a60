"""The node agent: takes inventory of the GPUs, offers them to the kubelet, and gives each container exactly what its pod was assigned.

``core`` decides and touches nothing; ``adapters`` touch one outside thing each and decide nothing; ``services`` join the two and
hold the loops; ``__main__`` is the only place that constructs adapters. ``ports`` says what services ask of adapters, ``errors``
what may go wrong.
"""
