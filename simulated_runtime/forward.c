/* SPDX-License-Identifier: Apache-2.0 */
/* forward.c - the table of calls that the driver does as they are, expanded. */
#include "simulated_runtime/runtime.h"
#include "simulated_runtime/streams.h"

#define FORWARD(name, symbol, parameters, ...)                                          \
	EXPORT cudaError_t name parameters                                              \
	{                                                                               \
		cudaError_t error = rt_context();                                       \
		if (error == cudaSuccess)                                               \
			error = RT_CALL(symbol __VA_OPT__(, ) __VA_ARGS__);             \
		return rt_return(error);                                                \
	}

#define FORWARD_STREAM(name, symbol, parameters, ...)                                   \
	FORWARD(name, symbol, parameters, __VA_ARGS__)                                  \
	EXPORT cudaError_t name##_ptsz parameters                                       \
	{                                                                               \
		cudaError_t error = rt_context();                                       \
		stream = RT_PER_THREAD(stream);                                         \
		if (error == cudaSuccess)                                               \
			error = RT_CALL(symbol, __VA_ARGS__);                           \
		return rt_return(error);                                                \
	}

#if RUNTIME_MAJOR == 12
#define FORWARD_12 FORWARD
#define FORWARD_STREAM_12 FORWARD_STREAM
#define FORWARD_13(...)
#define FORWARD_STREAM_13(...)
#else
#define FORWARD_12(...)
#define FORWARD_STREAM_12(...)
#define FORWARD_13 FORWARD
#define FORWARD_STREAM_13 FORWARD_STREAM
#endif

#include "simulated_runtime/forward.def"
