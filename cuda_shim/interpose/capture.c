/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/capture.h"

_Atomic int aq_captures_open;

/* Not below zero: a capture may have begun without the shim. */
static void count(int change)
{
	if (atomic_fetch_add(&aq_captures_open, change) + change < 0)
		atomic_store(&aq_captures_open, 0);
}

static CUresult begun(CUresult result)
{
	if (result == CUDA_SUCCESS)
		count(1);
	return result;
}

/* A capture that was invalid, or was never joined by a stream that it forked to, ends with an error. Other errors end no capture: the
 * stream was not captured, did not begin the capture, or belongs to another thread. */
static CUresult ended(CUresult result)
{
	if (result == CUDA_SUCCESS || result == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED || result == CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
		count(-1);
	return result;
}

#define BEGIN_HOOKS(suffix)                                                                                                        \
	CUresult cuStreamBeginCapture##suffix(CUstream stream)                                                                     \
	{                                                                                                                          \
		return begun(aq_cuda.cuStreamBeginCapture##suffix(stream));                                                        \
	}                                                                                                                          \
	CUresult cuStreamBeginCapture_v2##suffix(CUstream stream, CUstreamCaptureMode mode)                                        \
	{                                                                                                                          \
		return begun(aq_cuda.cuStreamBeginCapture_v2##suffix(stream, mode));                                               \
	}                                                                                                                          \
	CUresult cuStreamBeginCaptureToGraph##suffix(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,              \
						     const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode)          \
	{                                                                                                                          \
		return begun(aq_cuda.cuStreamBeginCaptureToGraph##suffix(stream, graph, dependencies, edges, count, mode));         \
	}                                                                                                                          \
	CUresult cuStreamBeginRecaptureToGraph##suffix(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,                   \
						       CUgraphRecaptureCallback callback, void *data)                              \
	{                                                                                                                          \
		return begun(aq_cuda.cuStreamBeginRecaptureToGraph##suffix(stream, mode, graph, callback, data));                  \
	}                                                                                                                          \
	CUresult cuStreamBeginCaptureToCig##suffix(CUstream stream, CUstreamCigCaptureParams *params)                              \
	{                                                                                                                          \
		return begun(aq_cuda.cuStreamBeginCaptureToCig##suffix(stream, params));                                           \
	}                                                                                                                          \
	CUresult cuStreamEndCaptureToCig##suffix(CUstream stream)                                                                  \
	{                                                                                                                          \
		return ended(aq_cuda.cuStreamEndCaptureToCig##suffix(stream));                                                     \
	}                                                                                                                          \
	CUresult cuStreamEndCapture##suffix(CUstream stream, CUgraph *graph)                                                       \
	{                                                                                                                          \
		return ended(aq_cuda.cuStreamEndCapture##suffix(stream, graph));                                                   \
	}

BEGIN_HOOKS()
BEGIN_HOOKS(_ptsz)

void aq_captures_forget(void)
{
	atomic_store(&aq_captures_open, 0);
}
