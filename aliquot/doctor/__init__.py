"""``aliquot doctor``: looks at a node and says what stands between it and shared GPUs, each finding with its cure.

Reads only: files below a root, sockets that answer, the NVML library and rpm's database in processes of their own. Each module examines
one thing and yields findings; ``command`` runs them all and prints.
"""
