"""The contract every part of Aliquot shares: names, units, value types, codecs and the kubelet's wire messages.

Pure: nothing here reads a clock, the environment, a file or a socket. The package is called ``proto``, the same
top-level name that Google's proto-plus installs: never put both into one environment.
"""
