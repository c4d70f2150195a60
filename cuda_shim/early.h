/* SPDX-License-Identifier: Apache-2.0 */
/* The start-up lock: held while the shim finds the driver and opens the container's files. Another thread may fork at that moment, so forks
 * wait for this lock, from the time the library is loaded. That also keeps forks out of the loader's own lock, which is taken under this
 * one and which a child would never get. A fork that had started before that, or that runs no handlers, does not wait: the lock records the
 * process that holds it, and a child takes it over from its parent, because all work under it can be restarted at any point.
 *
 * Never held across a call of CUDA or NVML. A thread that has it is not cancelled. */
#ifndef AQ_EARLY_H
#define AQ_EARLY_H

void aq_early_enter(void);
void aq_early_leave(void);

#endif
