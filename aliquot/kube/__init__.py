# SPDX-License-Identifier: Apache-2.0
"""The client side of the Kubernetes API that all programs share.

Pure, without I/O: ``watch`` (list-watch as a state machine), ``requests`` (paths and bodies), ``errors``, ``backoff``.
With I/O: ``api_server`` (address and credentials), ``urllib3_transport`` (for threads: the agent and the command line), ``http_reads``
(for reads that a container waits for) and ``watch_thread``. The scheduler's transport, for asyncio, is
``scheduler_plugin.adapters.aiohttp_transport``.
"""
