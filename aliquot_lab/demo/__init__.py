# SPDX-License-Identifier: Apache-2.0
"""``aliquot demo``: pods share GPUs, each container stays within its share, and the demo measures that the others are not affected.

``command`` runs the demo, ``plan`` chooses the pods, ``scenario`` runs and measures them, ``checks`` evaluates the measurements, ``screen``
shows the result. ``aliquot_cli.smi`` runs in the containers.
"""
