"""The main job shown and measured: pods share GPUs, each container is held to its slice, and nobody notices the others.

``command`` runs it, ``plan`` says which pods, ``story`` lets them run and watches, ``promises`` judges what was measured, ``screen``
shows it. ``smi`` runs inside the containers.
"""
