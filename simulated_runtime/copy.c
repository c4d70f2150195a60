/* SPDX-License-Identifier: Apache-2.0 */
/* copy.c - copies. The direction chooses the driver's function; without one, the driver finds it out from the pointers. */
#include "simulated_runtime/runtime.h"
#include "simulated_runtime/streams.h"

#define DEVICE(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

static cudaError_t copy(void *to, const void *from, size_t bytes, int kind)
{
	RT_TRY(rt_context());
	if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault)
		return cudaErrorInvalidMemcpyDirection;
	if (!bytes)
		return cudaSuccess;
	switch (kind) {
	case cudaMemcpyHostToDevice: return RT_CALL(cuMemcpyHtoD_v2, DEVICE(to), from, bytes);
	case cudaMemcpyDeviceToHost: return RT_CALL(cuMemcpyDtoH_v2, to, DEVICE(from), bytes);
	case cudaMemcpyDeviceToDevice: return RT_CALL(cuMemcpyDtoD_v2, DEVICE(to), DEVICE(from), bytes);
	default: return RT_CALL(cuMemcpy, DEVICE(to), DEVICE(from), bytes);
	}
}

static cudaError_t copy_async(void *to, const void *from, size_t bytes, int kind, cudaStream_t stream)
{
	RT_TRY(rt_context());
	if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault)
		return cudaErrorInvalidMemcpyDirection;
	if (!bytes)
		return cudaSuccess;
	switch (kind) {
	case cudaMemcpyHostToDevice: return RT_CALL(cuMemcpyHtoDAsync_v2, DEVICE(to), from, bytes, stream);
	case cudaMemcpyDeviceToHost: return RT_CALL(cuMemcpyDtoHAsync_v2, to, DEVICE(from), bytes, stream);
	case cudaMemcpyDeviceToDevice: return RT_CALL(cuMemcpyDtoDAsync_v2, DEVICE(to), DEVICE(from), bytes, stream);
	default: return RT_CALL(cuMemcpyAsync, DEVICE(to), DEVICE(from), bytes, stream);
	}
}

/* The synchronous copies of the thread's own default stream. */
static cudaError_t copy_and_wait(void *to, const void *from, size_t bytes, int kind)
{
	RT_TRY(copy_async(to, from, bytes, kind, CU_STREAM_PER_THREAD));
	return RT_CALL(cuStreamSynchronize, CU_STREAM_PER_THREAD);
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, int kind)
{
	return rt_return(copy(to, from, bytes, kind));
}

EXPORT cudaError_t cudaMemcpy_ptds(void *to, const void *from, size_t bytes, int kind)
{
	return rt_return(copy_and_wait(to, from, bytes, kind));
}

STREAM_CALL(cudaMemcpyAsync, (void *to, const void *from, size_t bytes, int kind, cudaStream_t stream),
	    copy_async(to, from, bytes, kind, stream))

/* ---- to variables ---------------------------------------------------------------------------------------------------- */

static cudaError_t place_in_symbol(const void *symbol, size_t bytes, size_t offset, int kind, void **place)
{
	CUdeviceptr address;
	size_t size;
	if (kind != cudaMemcpyHostToDevice && kind != cudaMemcpyDeviceToDevice && kind != cudaMemcpyDefault)
		return cudaErrorInvalidMemcpyDirection;
	RT_TRY(rt_context());
	RT_TRY(rt_symbol(symbol, &address, &size));
	if (offset > size || bytes > size - offset)
		return cudaErrorInvalidValue;
	*place = (void *)(uintptr_t)(address + offset);
	return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, int kind)
{
	void *place;
	cudaError_t error = place_in_symbol(symbol, bytes, offset, kind, &place);
	return rt_return(error == cudaSuccess ? copy(place, from, bytes, kind) : error);
}

EXPORT cudaError_t cudaMemcpyToSymbol_ptds(const void *symbol, const void *from, size_t bytes, size_t offset, int kind)
{
	void *place;
	cudaError_t error = place_in_symbol(symbol, bytes, offset, kind, &place);
	return rt_return(error == cudaSuccess ? copy_and_wait(place, from, bytes, kind) : error);
}

/* ---- of rows, and between devices ------------------------------------------------------------------------------------ */

CUmemorytype rt_memory_type(int kind, bool source)
{
	if (kind == cudaMemcpyDefault)
		return CU_MEMORYTYPE_UNIFIED;
	if (kind == cudaMemcpyHostToHost || kind == (source ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost))
		return CU_MEMORYTYPE_HOST;
	return CU_MEMORYTYPE_DEVICE;
}

static cudaError_t copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind,
			     cudaStream_t stream)
{
	RT_TRY(rt_context());
	if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault)
		return cudaErrorInvalidMemcpyDirection;
	if (width > to_pitch || width > from_pitch)
		return cudaErrorInvalidPitchValue;
	if (!width || !height)
		return cudaSuccess;
	CUDA_MEMCPY2D rows = {
		.srcMemoryType = rt_memory_type(kind, true),
		.srcHost = from,
		.srcDevice = DEVICE(from),
		.srcPitch = from_pitch,
		.dstMemoryType = rt_memory_type(kind, false),
		.dstHost = to,
		.dstDevice = DEVICE(to),
		.dstPitch = to_pitch,
		.WidthInBytes = width,
		.Height = height,
	};
	return RT_CALL(cuMemcpy2DAsync_v2, &rows, stream);
}

STREAM_CALL(cudaMemcpy2DAsync,
	    (void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, cudaStream_t stream),
	    copy_rows(to, to_pitch, from, from_pitch, width, height, kind, stream))

static cudaError_t copy_peer(void *to, int to_device, const void *from, int from_device, size_t bytes, cudaStream_t stream)
{
	CUcontext to_context, from_context;
	RT_TRY(rt_context());
	RT_TRY(rt_primary(to_device, &to_context));
	RT_TRY(rt_primary(from_device, &from_context));
	return bytes ? RT_CALL(cuMemcpyPeerAsync, DEVICE(to), to_context, DEVICE(from), from_context, bytes, stream) : cudaSuccess;
}

STREAM_CALL(cudaMemcpyPeerAsync, (void *to, int to_device, const void *from, int from_device, size_t bytes, cudaStream_t stream),
	    copy_peer(to, to_device, from, from_device, bytes, stream))
