/* Latches: the locks of gates that are held while the driver is asked.
 *
 * The driver may call back into the program from there (tools subscribe to its calls), and what that calls must not wait for a gate: not
 * for the one its own thread holds, nor for another's, whose thread may be where this one is. A thread that is inside one enters none. */
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
