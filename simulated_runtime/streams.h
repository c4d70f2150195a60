/* SPDX-License-Identifier: Apache-2.0 */
/*
 * streams.h - calls with a stream, and their twins.
 *
 * Programs compiled with --default-stream per-thread call NAME_ptsz (or NAME_ptds, where there is no stream to give): the default stream is
 * the thread's own. The handle of that stream is public, so a twin is the same function with the stream replaced.
 */
#ifndef ALIQUOT_SIMULATED_RUNTIME_STREAMS_H
#define ALIQUOT_SIMULATED_RUNTIME_STREAMS_H

#include "simulated_runtime/runtime.h"

#define RT_PER_THREAD(stream) ((stream) ? (stream) : CU_STREAM_PER_THREAD)

/* An exported function and its twin. One of the parameters is `stream`; `call` returns the error. */
#define STREAM_CALL(name, parameters, call)                \
	EXPORT cudaError_t name parameters                 \
	{                                                  \
		return rt_return(call);                    \
	}                                                  \
	EXPORT cudaError_t name##_ptsz parameters          \
	{                                                  \
		stream = RT_PER_THREAD(stream);            \
		return rt_return(call);                    \
	}

#endif
