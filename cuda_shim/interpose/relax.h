/* SPDX-License-Identifier: Apache-2.0 */
/* The shim's own queries to the driver, and calls that undo something: they are not part of the application's work.
 *
 * The driver considers some of them unsafe while a stream is captured (querying events, trimming pools, freeing). In a relaxed thread they
 * invalidate no capture: neither the thread's own nor, in global mode, another thread's. */
#ifndef AQ_INTERPOSE_RELAX_H
#define AQ_INTERPOSE_RELAX_H

#include "interpose/driver.h"

/* The calling thread's capture mode, to be given back to aq_restrict. Relaxed with drivers that have no modes: they have no captures
 * either. */
static inline CUstreamCaptureMode aq_relax(void)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

	aq_cuda.cuThreadExchangeStreamCaptureMode(&mode);
	return mode;
}

static inline void aq_restrict(CUstreamCaptureMode mode)
{
	aq_cuda.cuThreadExchangeStreamCaptureMode(&mode);
}

enum aq_event_look { AQ_EVENT_AHEAD, AQ_EVENT_PASSED, AQ_EVENT_GONE };

/* Has the stream passed the event? No, unless the driver reports success. AQ_EVENT_GONE: the event no longer exists, nor its context. In a
 * relaxed thread. */
static inline enum aq_event_look aq_event_look(CUevent event)
{
	switch (aq_cuda.cuEventQuery(event)) {
	case CUDA_SUCCESS: return AQ_EVENT_PASSED;
	case CUDA_ERROR_INVALID_HANDLE:
	case CUDA_ERROR_INVALID_CONTEXT:
	case CUDA_ERROR_CONTEXT_IS_DESTROYED: return AQ_EVENT_GONE;
	default: return AQ_EVENT_AHEAD;
	}
}

#endif
