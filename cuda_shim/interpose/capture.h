/* Captures: what is submitted to a stream in one is not work yet, but becomes part of a graph.
 *
 * Only the driver knows whether a stream is captured, for a capture also ends with its stream, or with the context of that. That one may be
 * under way is counted, so that who launches need not ask while there is none. One that ends in those other ways leaves the count high:
 * that costs each launch a question, and nothing else hangs on it. */
#ifndef AQ_INTERPOSE_CAPTURE_H
#define AQ_INTERPOSE_CAPTURE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "interpose/driver.h"

/* How many have begun in this process and were not seen to end. */
extern _Atomic int aq_captures_open;

/* Ask the driver. */
static inline bool aq_capture_holds(CUstream stream, bool per_thread)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult result = per_thread ? aq_cuda.cuStreamIsCapturing_ptsz(stream, &status) : aq_cuda.cuStreamIsCapturing(stream, &status);

	/* CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: the legacy stream while another is captured; the driver refuses the call by itself. */
	return result != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

static inline bool aq_is_captured(CUstream stream, bool per_thread)
{
	return __builtin_expect(atomic_load_explicit(&aq_captures_open, memory_order_relaxed) != 0, 0) && aq_capture_holds(stream, per_thread);
}

/* In a forked child. */
void aq_captures_forget(void);

#endif
