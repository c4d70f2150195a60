/* Latches: the locks of gates that are held while the driver is asked.
 *
 * The driver may call back into the program from there (tools subscribe to its calls), and what that calls must not wait for a gate: not
 * for the one its own thread holds, nor for another's, whose thread may be where this one is. A thread that is inside one enters none.
 *
 * The order of all locks of the shim. A thread waits only for a lock that stands below all that it holds, whoever called it, so that
 * no threads can wait for each other in a ring:
 *
 *   1  starting (shim.c): once, around the driver's cuInit; from inside it, calls go straight to the driver
 *   2  the gates of contexts (context.c): one per device, of which a thread holds one at most
 *   3  latches, of reservoirs, pacers and pending frees: a thread that holds one waits for no other
 *   4  what is never held across a call of CUDA, so that nothing is called back under it: measuring (module.c), opening (measure.c),
 *      adding (reservoir.c), gate (vmm.c), early (early.c), taking_part (shim.c), reaping (region.c), the stripes of maps
 *
 * Forks wait for `early` and `taking_part`; a child makes the others anew (shim.c).
 *
 * The first three are held across calls of CUDA. Who comes to 2 or 3 from a callback under one of those does without: aq_latch_is_inside
 * says so, and `enter` in context.c. Under those of 4 none is waited for, but `opening` under `measuring`, and `reaping` under
 * `taking_part`.
 *
 * A lock of somebody else's may still close a ring: a tool's, held when it calls CUDA and waited for in its callbacks. One such is kept
 * out, the loader's, which is held while a library's constructor calls CUDA: NVML is opened before a gate is entered. */
#ifndef AQ_INTERPOSE_LATCH_H
#define AQ_INTERPOSE_LATCH_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

struct aq_latch {
	pthread_mutex_t queue; /* who waits: pthread_mutex_trylock is too new for a glibc of 2.17, so that what is held is … */
	_Atomic bool taken;    /* … this, by one of the queue's or by one who did not wait */
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

#endif
