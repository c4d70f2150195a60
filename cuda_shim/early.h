/* The lock of what happens first in a process: finding the driver, opening the container's files. It may fork at that moment, in another
 * thread; so forks wait for it, from before it is taken for the first time. That also keeps them out of the loader's own lock, which is
 * taken under this one, and which a child would never get. A fork that had begun by then waits for nothing: the lock names the process that
 * has it, and a child takes it from its parent, for what is done under it can be begun anew at any point.
 *
 * Never held across a call of CUDA or NVML. A thread that has it is not cancelled. */
#ifndef AQ_EARLY_H
#define AQ_EARLY_H

void aq_early_enter(void);
void aq_early_leave(void);

#endif
