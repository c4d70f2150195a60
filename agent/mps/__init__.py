# SPDX-License-Identifier: Apache-2.0
"""``aliquot-mps`` runs the MPS daemons of a node. It is a separate program, so that an update of the agent ends no MPS client."""
