/* SPDX-License-Identifier: Apache-2.0 */
/* Stream-ordered memory and its pools. The charge is what the driver has reserved for a pool, not what the program requested. */
#include "interpose/allocations.h"
#include "interpose/capture.h"
#include "interpose/deferred.h"
#include "interpose/driver.h"
#include "interpose/reservoir.h"
#include "interpose/spread.h"
#include "shim.h"

/* ---- allocating ------------------------------------------------------------------------------------------------ */

struct async_call {
	CUdeviceptr made;
	size_t bytes;
	CUmemoryPool pool; /* NULL: the current pool of the stream's device */
	CUstream stream;
	bool per_thread;
};

static CUresult allocate(struct async_call *call)
{
	if (call->pool)
		return call->per_thread ? aq_cuda.cuMemAllocFromPoolAsync_ptsz(&call->made, call->bytes, call->pool, call->stream)
					: aq_cuda.cuMemAllocFromPoolAsync(&call->made, call->bytes, call->pool, call->stream);
	return call->per_thread ? aq_cuda.cuMemAllocAsync_ptsz(&call->made, call->bytes, call->stream)
				: aq_cuda.cuMemAllocAsync(&call->made, call->bytes, call->stream);
}

static void take_back(const struct async_call *call)
{
	if (call->per_thread)
		aq_cuda.cuMemFreeAsync_ptsz(call->made, call->stream);
	else
		aq_cuda.cuMemFreeAsync(call->made, call->stream);
}

static bool remember(const struct async_call *call, struct aq_reservoir *reservoir)
{
	struct aq_place place = { .device = reservoir->device, .owner = (uintptr_t)reservoir };

	return aq_record(&aq_pointers, call->made, 0, AQ_POOL, &place);
}

/* The call, with its pool's charge settled. The pool's idle memory may be in pieces, and then the driver takes new memory: that is given
 * back, together with the idle pieces, and what the limit leaves now decides. */
static CUresult allocate_charged(struct async_call *call, struct aq_reservoir *reservoir)
{
	static const enum aq_growth_hope hopes[] = { AQ_FROM_IDLE, AQ_FROM_DEVICE };
	struct aq_growth growth;

	for (unsigned i = 0; i < 2 && aq_growth_begin(&growth, reservoir, call->bytes, hopes[i]); i++) {
		CUresult result = allocate(call);
		growth.failed = result != CUDA_SUCCESS;
		bool fits = aq_growth_end(&growth);

		if (fits && result == CUDA_SUCCESS && !remember(call, reservoir)) {
			take_back(call);
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
		if (fits)
			return result;
		if (result == CUDA_SUCCESS)
			take_back(call);
		aq_growth_undone(&growth, call->stream, call->per_thread);
	}
	aq_refused(reservoir->device, call->bytes);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/* The reservoir that the call takes of; NULL where this process does not pay. A captured stream builds a graph; its memory is taken when
 * the graph is launched (launch.c). An error means that the call must not be made, because its memory could not be charged. */
static CUresult find_reservoir(const struct async_call *call, struct aq_reservoir **reservoir)
{
	CUmemoryPool pool = call->pool;
	struct aq_place place;
	bool captured;
	CUresult result = aq_capture_query(call->stream, call->per_thread, &captured);

	*reservoir = NULL;
	if (result != CUDA_SUCCESS || captured)
		return result;
	if (!pool) {
		result = aq_find_place_of_stream(call->stream, &place);
		if (result == CUDA_SUCCESS)
			result = aq_cuda.cuDeviceGetMemPool(&pool, place.ordinal);
	}
	if (result == CUDA_SUCCESS)
		result = aq_reservoir_find_of_pool(pool, reservoir);
	if (result == CUDA_SUCCESS && aq_reservoir_is_ending(pool))
		return CUDA_ERROR_INVALID_VALUE; /* the current pool, destroyed a moment ago */
	return result;
}

static CUresult allocate_async(CUdeviceptr *address, struct async_call *call)
{
	struct aq_reservoir *reservoir;

	if (!address)
		return CUDA_ERROR_INVALID_VALUE; /* as from the driver */
	if (aq_reservoir_is_ending(call->pool))
		return CUDA_ERROR_INVALID_VALUE; /* as from the driver, which has not destroyed it yet */
	CUresult result = find_reservoir(call, &reservoir);
	if (result == CUDA_SUCCESS)
		result = reservoir ? allocate_charged(call, reservoir) : allocate(call);
	if (result == CUDA_SUCCESS)
		*address = call->made;
	return result;
}

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream)
{
	AQ_LIMITED_OR_RETURN(cuMemAllocAsync(address, bytes, stream));
	return allocate_async(address, &(struct async_call){ .bytes = bytes, .stream = stream });
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *address, size_t bytes, CUstream stream)
{
	AQ_LIMITED_OR_RETURN(cuMemAllocAsync_ptsz(address, bytes, stream));
	return allocate_async(address, &(struct async_call){ .bytes = bytes, .stream = stream, .per_thread = true });
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)
{
	AQ_LIMITED_OR_RETURN(cuMemAllocFromPoolAsync(address, bytes, pool, stream));
	if (!pool)
		return aq_cuda.cuMemAllocFromPoolAsync(address, bytes, pool, stream);
	return allocate_async(address, &(struct async_call){ .bytes = bytes, .pool = pool, .stream = stream });
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)
{
	AQ_LIMITED_OR_RETURN(cuMemAllocFromPoolAsync_ptsz(address, bytes, pool, stream));
	if (!pool)
		return aq_cuda.cuMemAllocFromPoolAsync_ptsz(address, bytes, pool, stream);
	return allocate_async(address, &(struct async_call){ .bytes = bytes, .pool = pool, .stream = stream, .per_thread = true });
}

/* ---- freeing --------------------------------------------------------------------------------------------------- */

/* It cannot be observed when the stream reaches the free. It has when the driver returns the address again, or the context ends. */
static void keep_charged(const struct aq_entry *held)
{
	struct aq_entry next;

	if (aq_map_get(&aq_pointers, held->key, &next) || !aq_map_put(&aq_pointers, held))
		aq_uncharge((int)held->device, (enum aq_kind)held->kind, held->bytes);
}

static CUresult free_async(CUdeviceptr address, CUstream stream, bool per_thread)
{
	struct aq_entry held;
	bool known = aq_map_take(&aq_pointers, address, &held);
	struct aq_spread *spread = aq_spread_of(address);
	CUresult result = per_thread ? aq_cuda.cuMemFreeAsync_ptsz(address, stream) : aq_cuda.cuMemFreeAsync(address, stream);

	aq_deferred_settle();
	aq_reservoirs_return_overdrawn();
	aq_spread_ended_in_stream(spread, result == CUDA_SUCCESS, stream, per_thread);
	if (!known)
		return result;
	if (held.kind == AQ_POOL || result != CUDA_SUCCESS) /* for example in a capture, which frees only what was allocated in one */
		aq_freed(&aq_pointers, result, &held);
	else if (!aq_deferred_add(&held, stream, per_thread))
		keep_charged(&held);
	return result;
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
	AQ_LIMITED_OR_RETURN(cuMemFreeAsync(address, stream));
	return free_async(address, stream, false);
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream)
{
	AQ_LIMITED_OR_RETURN(cuMemFreeAsync_ptsz(address, stream));
	return free_async(address, stream, true);
}

/* ---- pools ----------------------------------------------------------------------------------------------------- */

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
	CUdevice ordinal;

	AQ_LIMITED_OR_RETURN(cuMemPoolCreate(pool, props));
	if (!pool || !props)
		return aq_cuda.cuMemPoolCreate(pool, props);
	CUmemoryPool was = *pool;
	CUresult result = aq_place_of_location(&props->location, props->allocType, &ordinal);
	if (result == CUDA_SUCCESS)
		result = aq_cuda.cuMemPoolCreate(pool, props);
	if (result == CUDA_SUCCESS && ordinal != AQ_NO_ORDINAL && !aq_reservoir_add_pool(*pool, ordinal)) {
		aq_cuda.cuMemPoolDestroy(*pool); /* an uncounted pool must not exist */
		*pool = was;
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	return result;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
	AQ_LIMITED_OR_RETURN(cuMemPoolDestroy(pool));
	struct aq_reservoir *reservoir = NULL;
	CUmemoryPool standard = NULL;
	CUresult result = aq_reservoir_find_of_pool(pool, &reservoir);

	if (result == CUDA_SUCCESS && reservoir)
		result = aq_cuda.cuDeviceGetDefaultMemPool(&standard, reservoir->ordinal);
	if (result != CUDA_SUCCESS)
		return result;
	if (!reservoir || standard == pool)
		return aq_cuda.cuMemPoolDestroy(pool); /* not ours to count, or not to be destroyed at all */
	return aq_reservoir_is_ending(pool) ? CUDA_ERROR_INVALID_VALUE : aq_reservoir_destroy(reservoir);
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep_bytes)
{
	AQ_LIMITED_OR_RETURN(cuMemPoolTrimTo(pool, keep_bytes));
	CUresult result = aq_cuda.cuMemPoolTrimTo(pool, keep_bytes);
	struct aq_reservoir *reservoir = NULL;

	if (result == CUDA_SUCCESS && aq_reservoir_find_of_pool(pool, &reservoir) == CUDA_SUCCESS && reservoir)
		aq_reservoirs_settle(reservoir->device);
	return result;
}

/* A pool may be found here first: the pools of managed memory have no other way to be found. */
static CUresult learn(CUresult (*query)(CUmemoryPool *, CUmemLocation *, CUmemAllocationType), CUmemoryPool *pool, CUmemLocation *location,
		      CUmemAllocationType type)
{
	CUdevice ordinal;

	if (!pool || !location)
		return query(pool, location, type);
	CUmemoryPool was = *pool;
	CUresult result = aq_place_of_location(location, type, &ordinal);
	if (result == CUDA_SUCCESS)
		result = query(pool, location, type);
	if (result == CUDA_SUCCESS && ordinal != AQ_NO_ORDINAL && !aq_reservoir_add_pool(*pool, ordinal)) {
		*pool = was;
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	return result;
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
	AQ_LIMITED_OR_RETURN(cuMemGetDefaultMemPool(pool, location, type));
	return learn(aq_cuda.cuMemGetDefaultMemPool, pool, location, type);
}

CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
	AQ_LIMITED_OR_RETURN(cuMemGetMemPool(pool, location, type));
	return learn(aq_cuda.cuMemGetMemPool, pool, location, type);
}
