/* SPDX-License-Identifier: Apache-2.0 */
/* Latches: locks that are held across calls to the driver.
 *
 * The driver may call back into the program there (tools subscribe to its calls). A call from such a callback must not wait for a gate:
 * neither for one that its own thread holds, nor for another thread's, because that thread may be in the same situation. A thread inside a
 * latch enters no other.
 *
 * The order of all locks of the shim. A thread waits only for a lock below all locks that it holds, even in a callback, so no circle of
 * waiting threads can form:
 *
 *   1  starting (shim.c): once, around the driver's cuInit; calls from inside it go straight to the driver
 *   2  the gates of contexts (context.c): one per device; a thread holds at most one
 *   3  latches of reservoirs, timed launches and pending frees: a thread that holds one waits for no other lock
 *   4  locks never held across a CUDA call, so no callback runs under them: measuring (module.c), opening (measure.c),
 *      adding (reservoir.c), gate (vmm.c), early (early.c), taking_part (shim.c), reaping (region.c), the stripes of maps
 *
 * Forks wait for `early` and `taking_part`; a forked child initialises the others again (shim.c).
 *
 * The first three are held across CUDA calls. A callback under one of them that reaches 2 or 3 does without the lock: see
 * aq_latch_is_inside, and `enter` in context.c. Under a lock of 4 the shim waits for no other, except `opening` under `measuring`, and
 * `reaping` under `taking_part`.
 *
 * A lock that is not the shim's may still close a circle: for example a tool's lock that is held during a CUDA call and wanted in a
 * callback. The loader's lock is one that the shim avoids: it is held while a library's constructor calls CUDA, so NVML is opened before a
 * gate is entered. */
#ifndef AQ_INTERPOSE_LATCH_H
#define AQ_INTERPOSE_LATCH_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

struct aq_latch {
	pthread_mutex_t queue; /* the waiting threads: pthread_mutex_trylock needs a newer glibc than 2.17, so what is held is … */
	_Atomic bool taken;    /* … this, by a thread of the queue or by one that did not wait */
	bool is_queued;        /* the holder's */
};

#define AQ_LATCH_INITIALIZER { .queue = PTHREAD_MUTEX_INITIALIZER }

/* How many latches this thread holds. */
extern __thread unsigned aq_latches_held;

static inline bool aq_latch_is_inside(void)
{
	return aq_latches_held != 0;
}

void aq_latch_init(struct aq_latch *latch);
void aq_latch_enter(struct aq_latch *latch);
/* Without waiting. False = another thread is inside. */
bool aq_latch_enter_at_once(struct aq_latch *latch);
void aq_latch_leave(struct aq_latch *latch);

/* In a forked child: its thread holds no latch. */
void aq_latches_forget(void);

#endif
