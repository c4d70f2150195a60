"""The ``aliquot`` command: the demo now, and what operators type later. It drives the programs; none of them imports it."""
