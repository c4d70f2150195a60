"""``aliquot why``, ``what-if`` and ``replay``: the scheduler's decisions explained, tried out and made again, by its own code."""
