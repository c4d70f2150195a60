/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_pool.c - stream-ordered allocation: memory pools.
 *
 * A pool takes memory from the device in pieces of 32 MiB (arena.c) and keeps freed memory up to its release threshold: the rest goes back
 * at the next synchronisation, and all of it when a request would otherwise be refused.
 *
 * A freed chunk can be handed out again at once, also while the stream has not come to the free: on the same stream order protects it,
 * another stream is made to wait for the free first (the driver's "internal dependencies"; one event per pool, behind which all frees lie).
 */
#include <stdlib.h>
#include <string.h>

#include "simulated_driver/cuda_internal.h"

/* ---- memory of a pool; the memory lock is held ----------------------------------------------------------------------- */

static bool frees_are_done(const struct CUmemPoolHandle_st *pool)
{
	return sim_event_finished(pool->freed) >= sim_event_recorded(pool->freed);
}

/* Give back what is free until at most `keep` bytes remain. True when something went. */
static bool release_down_to(CUmemoryPool pool, uint64_t keep, bool in_pieces)
{
	return pool->reserved > keep && frees_are_done(pool) && sim_arena_release(pool, keep, in_pieces);
}

bool sim_pools_release_all(struct sim_device *device)
{
	bool any = false;
	for (CUmemoryPool pool = device->pools; pool; pool = pool->next)
		any |= release_down_to(pool, 0, false);
	return any;
}

static void delete_pool(CUmemoryPool pool)
{
	for (CUmemoryPool *at = &pool->device->pools; *at; at = &(*at)->next)
		if (*at == pool) {
			*at = pool->next;
			break;
		}
	sim_arenas_delete(pool);
	sim_event_release(pool->freed);
	sim_object_delete(pool);
}

/* A pool that was destroyed ends with its last allocation. */
static void end_if_destroyed(CUmemoryPool pool)
{
	if (!pool->destroyed || pool->live)
		return;
	release_down_to(pool, 0, false);
	if (pool->reserved == 0)
		delete_pool(pool);
}

void sim_pools_settle(struct sim_device *device)
{
	if (!atomic_load_explicit(&device->pools_unsettled, memory_order_relaxed))
		return;
	bool unsettled = false;
	pthread_mutex_lock(&device->memory.lock);
	for (CUmemoryPool pool = device->pools, next; pool; pool = next) {
		next = pool->next;
		unsettled |= !frees_are_done(pool);
		release_down_to(pool, pool->release_threshold, true);
		end_if_destroyed(pool);
	}
	atomic_store_explicit(&device->pools_unsettled, unsettled, memory_order_relaxed);
	pthread_mutex_unlock(&device->memory.lock);
}

/* ---- allocation and free --------------------------------------------------------------------------------------------- */

static bool take_chunk(CUmemoryPool pool, uint64_t bytes, CUdeviceptr *out)
{
	uint32_t units = (uint32_t)((bytes + SIM_UNIT_BYTES - 1) / SIM_UNIT_BYTES);
	struct sim_unit *unit = sim_heap_take(&pool->heap, units);
	if (!unit) {
		unit = sim_arena_grow(pool, units);
		if (!unit)
			return false;
		sim_heap_take_from(&pool->heap, unit, units);
	}
	sim_arena_mark(unit, true);
	unit->bytes = bytes;
	unit->used.owner = NULL;
	unit->used.id = sim_next_id();
	pool->live++;
	pool->used += (uint64_t)unit->length * SIM_UNIT_BYTES;
	if (pool->used > pool->used_high)
		pool->used_high = pool->used;
	*out = sim_unit_address(unit);
	return true;
}

/* Let `stream` go on only behind what other streams have freed. */
static CUresult wait_for_frees(CUmemoryPool pool, CUstream stream)
{
	if (frees_are_done(pool) || atomic_load(&pool->freed_on) == stream->id)
		return CUDA_SUCCESS;
	atomic_fetch_add(&pool->freed->references, 1);
	return sim_engine_submit(stream, &(struct sim_work){ .kind = SIM_WORK_WAIT,
							     .foreign = atomic_load(&pool->freed->engine) != stream->engine,
							     .event = { pool->freed, sim_event_recorded(pool->freed) } });
}

static CUresult allocate(CUmemoryPool pool, size_t bytes, CUdeviceptr *out, CUstream stream)
{
	struct sim_device *device = pool->device;
	if (bytes > device->domain.capacity_bytes)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&device->memory.lock);
	bool taken = take_chunk(pool, bytes, out);
	bool hope = !taken && !frees_are_done(pool);
	pthread_mutex_unlock(&device->memory.lock);
	if (hope) {     /* memory that is on its way back */
		sim_engine_wait_event(pool->freed);
		pthread_mutex_lock(&device->memory.lock);
		taken = take_chunk(pool, bytes, out);
		pthread_mutex_unlock(&device->memory.lock);
	}
	return taken ? wait_for_frees(pool, stream) : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult allocate_async(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, bool pool_given, CUstream handle)
{
	CUstream stream;
	SIM_TRY(sim_stream_of(handle, &stream));
	SIM_REQUIRE(out && bytes);
	if (pool_given && (!sim_is(pool, SIM_KIND_POOL) || pool->destroyed))
		return CUDA_ERROR_INVALID_VALUE;
	if (!pool_given)
		pool = __atomic_load_n(&stream->context->device->current_pool, __ATOMIC_ACQUIRE);
	if (sim_capturing(stream))
		return sim_capture_allocate(stream, &pool->properties, bytes, out);
	return allocate(pool, bytes, out, stream);
}

CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream s)
{
	return allocate_async(out, bytes, NULL, false, s);
}
CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream s)
{
	return allocate_async(out, bytes, NULL, false, sim_own(s));
}
CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream s)
{
	return allocate_async(out, bytes, pool, true, s);
}
CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream s)
{
	return allocate_async(out, bytes, pool, true, sim_own(s));
}

/* Record the pool's event behind this free; a free on another stream that is still under way comes before it. */
static CUresult mark_free(CUmemoryPool pool, CUstream stream)
{
	SIM_TRY(wait_for_frees(pool, stream));
	SIM_TRY(sim_engine_record(stream, pool->freed));
	atomic_store(&pool->freed_on, stream->id);
	return CUDA_SUCCESS;
}

/* Serialises frees, so that the events of a pool lie one behind the other. Taken before engine and memory locks. */
static pthread_mutex_t free_lock = PTHREAD_MUTEX_INITIALIZER;

static CUmemoryPool pool_of(struct sim_device *device, CUdeviceptr address)
{
	pthread_mutex_lock(&device->memory.lock);
	struct sim_unit *unit = sim_memory_unit_at(device, address);
	CUmemoryPool pool = unit ? unit->segment->pool : NULL;
	pthread_mutex_unlock(&device->memory.lock);
	return pool;
}

CUresult sim_pool_free(CUdeviceptr address, CUstream stream)
{
	struct sim_device *device = sim_memory_device_of(address);
	CUmemoryPool pool = device ? pool_of(device, address) : NULL;
	if (!pool)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&free_lock);
	CUresult result = stream ? mark_free(pool, stream) : CUDA_SUCCESS;
	pthread_mutex_lock(&device->memory.lock);
	struct sim_unit *unit = sim_memory_unit_at(device, address);
	if (!unit)
		result = CUDA_ERROR_INVALID_VALUE;      /* freed twice at the same time */
	if (result == CUDA_SUCCESS) {
		pool->live--;
		pool->used -= (uint64_t)unit->length * SIM_UNIT_BYTES;
		unit->bytes = 0;
		sim_arena_mark(unit, false);
		sim_heap_give(&pool->heap, unit);
		atomic_store_explicit(&device->pools_unsettled, true, memory_order_relaxed);
		end_if_destroyed(pool);
	}
	pthread_mutex_unlock(&device->memory.lock);
	pthread_mutex_unlock(&free_lock);
	return result;
}

static CUresult free_async(CUdeviceptr address, CUstream handle)
{
	CUstream stream;
	SIM_TRY(sim_stream_of(handle, &stream));
	SIM_REQUIRE(address);
	if (sim_capturing(stream))
		return sim_capture_free(stream, address);
	struct sim_device *device = sim_memory_device_of(address);
	if (device && pool_of(device, address))
		return sim_pool_free(address, stream);
	sim_engine_wait_stream(stream); /* memory of cuMemAlloc or of a graph: no pool keeps it, so it ends when the stream gets here */
	return sim_memory_free(address);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream s)
{
	return free_async(address, s);
}
CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream s)
{
	return free_async(address, sim_own(s));
}

/* ---- pools ----------------------------------------------------------------------------------------------------------- */

static CUmemoryPool pool_new(struct sim_device *device, const CUmemPoolProps *properties)
{
	CUmemoryPool pool = sim_object_new(SIM_KIND_POOL, sizeof *pool);
	if (!pool)
		return NULL;
	pool->freed = sim_event_new(NULL, CU_EVENT_DISABLE_TIMING);
	if (!pool->freed) {
		sim_object_delete(pool);
		return NULL;
	}
	pool->device = device;
	pool->properties = *properties;
	pool->reuse_follow_event = pool->reuse_opportunistic = pool->reuse_internal = 1;
	pool->access[device->ordinal] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	pthread_mutex_lock(&device->memory.lock);
	pool->next = device->pools;
	device->pools = pool;
	pthread_mutex_unlock(&device->memory.lock);
	return pool;
}

bool sim_pool_init_default(struct sim_device *device)
{
	CUmemPoolProps properties = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
				      .location = { CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal } };
	device->default_pool = pool_new(device, &properties);
	device->current_pool = device->default_pool;
	if (device->default_pool)
		device->default_pool->is_default = true;
	return device->default_pool != NULL;
}

CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *properties)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && properties);
	if (properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUmemPoolProps pinned = *properties;
	if (properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED && properties->location.type == CU_MEM_LOCATION_TYPE_INVALID)
		pinned.location = (CUmemLocation){ CU_MEM_LOCATION_TYPE_DEVICE, 0 }; /* where a pool without a place is at first */
	else
		SIM_REQUIRE(properties->allocType == CU_MEM_ALLOCATION_TYPE_PINNED);
	CUresult why;
	struct sim_device *device = sim_device_at(&pinned.location, &why);
	if (!device)
		return why;
	pinned.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
	pinned.location = (CUmemLocation){ CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal };
	*out = pool_new(device, &pinned);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static bool usable(CUmemoryPool pool)
{
	return sim_is(pool, SIM_KIND_POOL) && !pool->destroyed;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(usable(pool) && !pool->is_default);
	struct sim_device *device = pool->device;
	pthread_mutex_lock(&device->memory.lock);
	if (device->current_pool == pool)
		__atomic_store_n(&device->current_pool, device->default_pool, __ATOMIC_RELEASE);
	pool->destroyed = true;
	atomic_store_explicit(&device->pools_unsettled, true, memory_order_relaxed); /* frees under way are not waited for */
	end_if_destroyed(pool);
	pthread_mutex_unlock(&device->memory.lock);
	return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(usable(pool));
	SIM_TRY(sim_capture_unsafe_call());
	pthread_mutex_lock(&pool->device->memory.lock);
	release_down_to(pool, keep, false);
	pthread_mutex_unlock(&pool->device->memory.lock);
	return CUDA_SUCCESS;
}

static CUresult set_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, const void *value)
{
	switch (attribute) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: pool->reuse_follow_event = *(const int *)value; return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: pool->reuse_opportunistic = *(const int *)value; return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: pool->reuse_internal = *(const int *)value; return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: pool->release_threshold = *(const cuuint64_t *)value; return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
		SIM_REQUIRE(*(const cuuint64_t *)value == 0);
		pool->reserved_high = pool->reserved;
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		SIM_REQUIRE(*(const cuuint64_t *)value == 0);
		pool->used_high = pool->used;
		return CUDA_SUCCESS;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
}

static CUresult get_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
	switch (attribute) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: *(int *)value = pool->reuse_follow_event; return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: *(int *)value = pool->reuse_opportunistic; return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: *(int *)value = pool->reuse_internal; return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *(cuuint64_t *)value = pool->release_threshold; return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)value = pool->reserved; return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: *(cuuint64_t *)value = pool->reserved_high; return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *(cuuint64_t *)value = pool->used; return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *(cuuint64_t *)value = pool->used_high; return CUDA_SUCCESS;
	}
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(usable(pool) && value);
	pthread_mutex_lock(&pool->device->memory.lock);
	CUresult result = set_attribute(pool, attribute, value);
	pthread_mutex_unlock(&pool->device->memory.lock);
	return result;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(usable(pool) && value);
	pthread_mutex_lock(&pool->device->memory.lock);
	CUresult result = get_attribute(pool, attribute, value);
	pthread_mutex_unlock(&pool->device->memory.lock);
	return result;
}

CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
	bool by_nvlink;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(usable(pool) && access && count);
	for (size_t i = 0; i < count; i++) {
		struct sim_device *device = sim_device_of(access[i].location.id);
		SIM_REQUIRE(access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE);
		if (!device)
			return CUDA_ERROR_INVALID_DEVICE;
		if (device == pool->device && access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
			return CUDA_ERROR_INVALID_VALUE;
		if (device != pool->device && !sim_devices_linked(pool->device, device, &by_nvlink))
			return CUDA_ERROR_INVALID_DEVICE;
		pool->access[device->ordinal] = access[i].flags;
	}
	return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(flags && usable(pool) && location && location->type == CU_MEM_LOCATION_TYPE_DEVICE && sim_device_of(location->id));
	*flags = pool->access[location->id];
	return CUDA_SUCCESS;
}

/* ---- which pool a device uses ---------------------------------------------------------------------------------------- */

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(pool);
	struct sim_device *device = sim_device_of(ordinal);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	*pool = device->default_pool;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice ordinal)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(pool);
	struct sim_device *device = sim_device_of(ordinal);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	*pool = __atomic_load_n(&device->current_pool, __ATOMIC_ACQUIRE);
	return CUDA_SUCCESS;
}

CUresult cuDeviceSetMemPool(CUdevice ordinal, CUmemoryPool pool)
{
	SIM_REQUIRE_READY();
	struct sim_device *device = sim_device_of(ordinal);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	SIM_REQUIRE(usable(pool) && pool->device == device);
	__atomic_store_n(&device->current_pool, pool, __ATOMIC_RELEASE);
	return CUDA_SUCCESS;
}

static CUresult device_of_location(const CUmemLocation *location, CUmemAllocationType type, CUdevice *ordinal)
{
	CUresult why;
	SIM_REQUIRE(location && type == CU_MEM_ALLOCATION_TYPE_PINNED);
	const struct sim_device *device = sim_device_at(location, &why);
	if (!device)
		return why;
	*ordinal = device->ordinal;
	return CUDA_SUCCESS;
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
	CUdevice ordinal = CU_DEVICE_INVALID;
	SIM_REQUIRE_READY();
	SIM_TRY(device_of_location(location, type, &ordinal));
	return cuDeviceGetDefaultMemPool(pool, ordinal);
}

CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
	CUdevice ordinal = CU_DEVICE_INVALID;
	SIM_REQUIRE_READY();
	SIM_TRY(device_of_location(location, type, &ordinal));
	return cuDeviceGetMemPool(pool, ordinal);
}

CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
	CUdevice ordinal = CU_DEVICE_INVALID;
	SIM_REQUIRE_READY();
	SIM_TRY(device_of_location(location, type, &ordinal));
	return cuDeviceSetMemPool(ordinal, pool);
}

/* ---- sharing pools, which is not supported by CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES ------------------------- */

CUresult cuMemPoolExportToShareableHandle(void *handle, CUmemoryPool pool, CUmemAllocationHandleType type, unsigned long long flags)
{
	(void)type;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(handle && usable(pool) && flags == 0);
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, CUmemAllocationHandleType type, unsigned long long flags)
{
	(void)handle, (void)type;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(pool && flags == 0);
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr address)
{
	(void)address;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(data);
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemPoolImportPointer(CUdeviceptr *address, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(address && usable(pool) && data);
	return CUDA_ERROR_NOT_SUPPORTED;
}
