/* SPDX-License-Identifier: Apache-2.0 */
/* Captures: what is submitted to a stream in one is not work yet, but becomes part of a graph.
 *
 * Only the driver knows whether a stream is captured, because a capture also ends with its stream or that stream's context. The shim counts
 * the captures that may be open, so that launches need not query the driver when there is no capture. A capture that ends with its stream
 * leaves the count too high: each launch then makes one query, and nothing else depends on it. */
#ifndef AQ_INTERPOSE_CAPTURE_H
#define AQ_INTERPOSE_CAPTURE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "interpose/driver.h"

/* How many have begun in this process and were not seen to end. */
extern _Atomic int aq_captures_open;

/* Ask the driver. An error says nothing about the stream: a caller that takes memory has to refuse. */
static inline CUresult aq_capture_query(CUstream stream, bool per_thread, bool *captured)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult result = per_thread ? aq_cuda.cuStreamIsCapturing_ptsz(stream, &status) : aq_cuda.cuStreamIsCapturing(stream, &status);

	*captured = result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
	return result;
}

/* For work. CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: the legacy stream while another stream is captured; the driver refuses the call. After any
 * other error the work pays as outside a capture. */
static inline bool aq_is_captured(CUstream stream, bool per_thread)
{
	bool captured;

	return __builtin_expect(atomic_load_explicit(&aq_captures_open, memory_order_relaxed) != 0, 0) &&
	       (aq_capture_query(stream, per_thread, &captured) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || captured);
}

/* In a forked child. */
void aq_captures_forget(void);

#endif
