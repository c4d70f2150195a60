/* SPDX-License-Identifier: Apache-2.0 */
/* Pacing: every launch pays its device time before the driver sees it.
 *
 * A container without ceiling, priority or pause pays almost nothing (unpaced.h). Otherwise a launch is charged what its function and grid
 * cost recently (limit/cost.h). The credit comes from the container's bucket (limit/bucket.h): each thread draws it in pieces (payer.h)
 * and waits when the bucket is empty (admission.h). Some launches are timed (sample.h), all that are not known among them, and settle what
 * they took (limit/settle.h).
 *
 * In a captured stream (capture.h) the shim charges and times nothing, and its queries invalidate no capture (relax.h). */
#ifndef AQ_INTERPOSE_PACE_H
#define AQ_INTERPOSE_PACE_H

#include "cuda_abi.h"
#include "interpose/sample.h"
#include "interpose/work.h"
#include "region/container.h"

/* Kept between the two halves of a launch; all zero when the second half has nothing to do. */
struct aq_ticket {
	struct aq_sample *sample;
	int device;
};

/* Before and after the driver's launch. When begin does not return CUDA_SUCCESS the launch must not be made. */
CUresult aq_pace_begin(struct aq_ticket *ticket, const struct aq_work *work);

static inline void aq_pace_end(const struct aq_ticket *ticket, const struct aq_work *work, CUresult launched)
{
	if (__builtin_expect(ticket->sample != NULL, 0))
		aq_sample_end(ticket->device, ticket->sample, work, launched);
}

/* The thread waited for the device: count the launches that passed freely until now, and settle those that were timed. */
void aq_pace_count(void);

/* The driver made an executable graph, perhaps with the handle of an earlier one: nothing is known of it. */
void aq_pace_new_graph(CUgraphExec made);

/* The process became limited. */
void aq_pace_open(struct aq_container *container);
/* In a forked child. */
void aq_pace_forget(void);

#endif
