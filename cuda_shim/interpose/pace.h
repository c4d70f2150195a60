/* Pacing: every launch pays its device time before the driver sees it.
 *
 * A container without ceiling, priority or pause pays nothing but one comparison and a number that goes down: `aq_pace_free` holds until the agent
 * changes the limits, and for some launches of a thread at a time, which are counted together, on the device of the one that follows. Else a launch is charged what its function and grid cost the last times (limit/cost.h), out of credit that each thread draws from the
 * container's bucket (limit/bucket.h) in pieces, and waits when the bucket is empty. Some launches are timed with the driver's own events; the
 * same events tell how much is still in flight, which is bounded so that a pause or a lower limit acts soon.
 *
 * Nothing is paid or timed in a stream that is captured (capture.h), and what is asked meanwhile invalidates no capture (relax.h). Every
 * wait has an end, whatever the region or the device say. */
#ifndef AQ_INTERPOSE_PACE_H
#define AQ_INTERPOSE_PACE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "interpose/context.h"
#include "region/container.h"
#include "region/limits.h"
#include "region/region.h"

/* One launch: what runs, how big it is, where. A graph is its executable handle with no blocks. */
struct aq_work {
	const void *function;
	uint64_t blocks;
	uint32_t threads;
	CUstream stream;
	bool per_thread; /* the default stream is the calling thread's */
};

/* Kept between the two halves of a launch; all zero when there is nothing to do in the second. */
struct aq_ticket {
	struct aq_sample *sample;
	int device;
};

/* While the watched word has the value seen, launches pass freely. */
extern const _Atomic uint64_t *_Atomic aq_pace_watched;
extern _Atomic uint64_t aq_pace_seen;
/* How many of this thread's pass before it has to come by, to count them. */
extern __thread int64_t aq_pace_free_left;

static inline bool aq_pace_free(void)
{
	const _Atomic uint64_t *watched = atomic_load_explicit(&aq_pace_watched, memory_order_relaxed);

	return __builtin_expect(atomic_load_explicit(watched, memory_order_relaxed) ==
				atomic_load_explicit(&aq_pace_seen, memory_order_relaxed), 1) &&
	       __builtin_expect(--aq_pace_free_left >= 0, 1);
}

/* Before and after the driver's launch. When begin does not answer CUDA_SUCCESS the launch must not be made. */
CUresult aq_pace_begin(struct aq_ticket *ticket, const struct aq_work *work);
void aq_pace_end_sample(const struct aq_ticket *ticket, const struct aq_work *work, CUresult launched);

static inline void aq_pace_end(const struct aq_ticket *ticket, const struct aq_work *work, CUresult launched)
{
	if (__builtin_expect(ticket->sample != NULL, 0))
		aq_pace_end_sample(ticket, work, launched);
}

/* The thread waited for the device: count the launches that passed freely until now. */
void aq_pace_count(void);

/* The process became limited, or is let run without limits. */
void aq_pace_open(struct aq_limits *limits, const struct aq_region *region, struct aq_node_pages *node);
void aq_pace_pass(void);
/* Around a call that may end a context: its events are let be, and with it they are gone. */
void aq_pace_context_ending(const struct aq_ending *ending);
void aq_pace_context_ended(const struct aq_ending *ending, bool has_ended);
/* In a forked child. */
void aq_pace_forget(void);

#endif
