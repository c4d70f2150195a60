# SPDX-License-Identifier: Apache-2.0
"""What services need from the outside world, in our own types; one module per subject.

Each port has one adapter in ``adapters`` and fakes in the tests. Adapters raise from ``errors`` only. Synchronous ports are called in a
thread; asynchronous ones on the event loop.
"""
