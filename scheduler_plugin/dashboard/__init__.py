"""A read-only picture of the cluster in a browser: what each GPU is filled with, what waits and why. Nothing here changes anything."""
