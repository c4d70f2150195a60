/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_context.c - contexts: primary and created ones, the calling thread's stack of them, their cost, limits, and what faults do to them.
 *
 * A context costs the device memory that the topology states (`context_bytes`), from creation to destruction. Destroyed contexts keep their
 * object for a while, so that a thread that still has one current gets CUDA_ERROR_CONTEXT_IS_DESTROYED.
 *
 * Faults (state.h): a GPU that fell off the bus, or had an uncorrectable memory error, ends the contexts of that moment permanently: every
 * call returns 719 (launch failed) when work was under way, 999 (unknown) when not; 214 after a memory error; also the call that destroys
 * the context, which does so all the same. A new context on a lost GPU is refused with 46 (device unavailable), as is one that the compute
 * mode does not allow. A hang makes each call on the GPU take that much longer.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "simulated_driver/cuda_internal.h"

#define QUARANTINE 1024     /* destroyed contexts that are kept recognisable */

pthread_mutex_t sim_context_lock = PTHREAD_MUTEX_INITIALIZER;

static struct {
	CUcontext first, last;
	unsigned count;
} destroyed;

/* ---- the thread's stack ---------------------------------------------------------------------------------------------- */

static pthread_key_t stack_key;
static pthread_once_t stack_once = PTHREAD_ONCE_INIT;

static void free_stack(void *stack)
{
	free(stack);
}
static void make_stack_key(void)
{
	pthread_key_create(&stack_key, free_stack);
}

static bool push(CUcontext context)
{
	struct sim_thread *thread = &sim_thread;
	if (thread->depth == thread->capacity) {
		uint32_t capacity = thread->capacity ? thread->capacity * 2 : 8;
		CUcontext *stack = realloc(thread->stack, capacity * sizeof *stack);
		if (!stack)
			return false;
		pthread_once(&stack_once, make_stack_key);
		pthread_setspecific(stack_key, stack);
		thread->stack = stack;
		thread->capacity = capacity;
	}
	thread->stack[thread->depth++] = thread->current;
	thread->current = context;
	return true;
}

static CUcontext pop(void)
{
	struct sim_thread *thread = &sim_thread;
	CUcontext context = thread->current;
	thread->current = thread->depth ? thread->stack[--thread->depth] : NULL;
	return context;
}

/* ---- faults ---------------------------------------------------------------------------------------------------------- */

static void sleep_ms(uint32_t ms)
{
	struct timespec left = { .tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000 };
	while (nanosleep(&left, &left) != 0)
		;
}

/* A hang lasts until it is cleared or its time has passed; look again every few milliseconds so that clearing it ends the waits. */
static void suffer_hang(const struct sim_gpu_state *gpu)
{
	uint64_t begin = sim_now_ns();
	for (;;) {
		uint32_t hang_ms = atomic_load(&gpu->hang_ms);
		uint64_t passed_ms = (sim_now_ns() - begin) / 1000000u;
		if (passed_ms >= hang_ms)
			return;
		uint64_t left = hang_ms - passed_ms;
		sleep_ms(left < 5 ? (uint32_t)left : 5);
	}
}

static void set_sticky(CUcontext context, CUresult result)
{
	uint32_t none = 0;
	atomic_compare_exchange_strong(&context->sticky, &none, (uint32_t)result);
}

CUresult sim_context_check_slow(CUcontext context)
{
	const struct sim_gpu_state *gpu = context->device->shared;
	if (atomic_load(&context->destroyed))
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	uint32_t epoch = atomic_load(&gpu->fault_epoch);
	suffer_hang(gpu);
	if (atomic_load(&gpu->lost_incidents) != context->lost_incidents)
		set_sticky(context, sim_engine_abort(&context->device->engine) ? CUDA_ERROR_LAUNCH_FAILED : CUDA_ERROR_UNKNOWN);
	if (atomic_load(&gpu->ecc_incidents) != context->ecc_incidents) {
		sim_engine_abort(&context->device->engine);
		set_sticky(context, CUDA_ERROR_ECC_UNCORRECTABLE);
	}
	if (atomic_load(&gpu->hang_ms) == 0)
		atomic_store(&context->fault_epoch, epoch);
	return (CUresult)atomic_load(&context->sticky);
}

/* ---- making and ending ----------------------------------------------------------------------------------------------- */

#define STACK_UNIT_BYTES 16     /* the driver rounds the request */

static const size_t default_limits[8] = {
	[CU_LIMIT_STACK_SIZE] = SIM_STACK_BYTES,
	[CU_LIMIT_PRINTF_FIFO_SIZE] = 4 << 20,  /* 1 MiB is documented, and drivers may start with more */
	[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20,
	[CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = 2,
	[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048,
	[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64,
	[CU_LIMIT_PERSISTING_L2_CACHE_SIZE] = 0,
};

static uint64_t round_to_granule(uint64_t bytes)
{
	return (bytes + SIM_GRANULE_BYTES - 1) / SIM_GRANULE_BYTES * SIM_GRANULE_BYTES;
}

static bool charge(struct sim_device *device, uint64_t bytes)
{
	pthread_mutex_lock(&device->memory.lock);
	bool taken = sim_memory_charge(device, bytes);
	if (!taken && sim_pools_release_all(device))
		taken = sim_memory_charge(device, bytes);
	pthread_mutex_unlock(&device->memory.lock);
	return taken;
}

static void uncharge(struct sim_device *device, uint64_t bytes)
{
	pthread_mutex_lock(&device->memory.lock);
	sim_memory_uncharge(device, bytes);
	pthread_mutex_unlock(&device->memory.lock);
}

static void count_contexts(struct sim_device *device, int change)
{
	device->contexts += (uint32_t)change;
	atomic_store(&sim_cuda.state->slots[atomic_load(&sim_cuda.slot)].gpus[device->gpu].contexts, device->contexts);
	if (change > 0)
		atomic_fetch_add(&device->shared->contexts_created, 1);
}

/* Put a destroyed context where it stays recognisable; the oldest one there is reused. sim_context_lock is held. */
static void quarantine(CUcontext context)
{
	context->next_destroyed = NULL;
	if (destroyed.count)
		destroyed.last->next_destroyed = context;
	else
		destroyed.first = context;
	destroyed.last = context;
	if (++destroyed.count <= QUARANTINE)
		return;
	CUcontext oldest = destroyed.first;
	destroyed.first = oldest->next_destroyed;
	destroyed.count--;
	sim_object_delete(oldest);
}

/* An administrator may close a GPU to CUDA, or give it to one process at a time. */
static bool mode_allows(const struct sim_device *device)
{
	switch (atomic_load(&sim_cuda.state->settings.gpus[device->gpu].compute_mode)) {
	case CU_COMPUTEMODE_PROHIBITED: return false;
	case CU_COMPUTEMODE_EXCLUSIVE_PROCESS:
		return sim_gpu_contexts(sim_cuda.state, device->gpu, device->domain.mig_device) == device->contexts;
	default: return true;
	}
}

/* sim_context_lock is held. */
static CUresult create(struct sim_device *device, unsigned flags, unsigned api_version, CUcontext *out)
{
	static uint64_t last_id;
	suffer_hang(device->shared);
	if (atomic_load(&device->shared->lost) || !mode_allows(device))
		return CUDA_ERROR_DEVICE_UNAVAILABLE;
	if (!charge(device, device->hardware->context_bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUcontext context = sim_engine_start(&device->engine) ? sim_object_new(SIM_KIND_CONTEXT, sizeof *context) : NULL;
	if (!context) {
		uncharge(device, device->hardware->context_bytes);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	context->device = device;
	context->id = ++last_id;
	context->flags = flags;
	context->api_version = api_version;
	context->attachments = 1;
	context->lost_incidents = atomic_load(&device->shared->lost_incidents);
	context->ecc_incidents = atomic_load(&device->shared->ecc_incidents);
	atomic_store(&context->fault_epoch, atomic_load(&device->shared->fault_epoch));
	memcpy(context->limits, default_limits, sizeof context->limits);
	context->limits[CU_LIMIT_PERSISTING_L2_CACHE_SIZE] = 0;
	sim_stream_init_legacy(context);
	count_contexts(device, 1);
	*out = context;
	return CUDA_SUCCESS;
}

static void delete_modules(CUcontext context)
{
	while (context->modules) {
		CUmodule module = context->modules;
		context->modules = module->next;
		sim_module_delete(module);
	}
	sim_libraries_leave(context);
}

/* The result is that of any call in the context, for example a fault of earlier work; it ends all the same. sim_context_lock is held. */
static CUresult destroy(CUcontext context)
{
	struct sim_device *device = context->device;
	CUresult result = sim_context_check(context);
	sim_engine_wait_context(context);
	atomic_store(&context->destroyed, true);
	sim_streams_delete(context);
	delete_modules(context);
	sim_memory_free_owned(device, context);
	sim_host_free_owned(context);
	uncharge(device, device->hardware->context_bytes + context->limit_bytes);
	count_contexts(device, -1);
	quarantine(context);
	return result;
}

/* A context handle that may be used; destroyed ones have their own answer. */
static CUresult check_handle(CUcontext context)
{
	if (!sim_is(context, SIM_KIND_CONTEXT))
		return CUDA_ERROR_INVALID_CONTEXT;
	return atomic_load(&context->destroyed) ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

/* ---- created contexts ------------------------------------------------------------------------------------------------ */

static CUresult create_and_push(CUcontext *out, unsigned flags, unsigned api_version, CUdevice ordinal)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out && !(flags & ~(unsigned)CU_CTX_FLAGS_MASK));
	struct sim_device *device = sim_device_of(ordinal);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&sim_context_lock);
	CUresult result = create(device, flags, api_version, out);
	pthread_mutex_unlock(&sim_context_lock);
	if (result == CUDA_SUCCESS && !push(*out))
		return CUDA_ERROR_OUT_OF_MEMORY;
	return result;
}

CUresult cuCtxCreate(CUcontext *out, unsigned int flags, CUdevice ordinal)
{
	return create_and_push(out, flags, 3010, ordinal);
}
CUresult cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice ordinal)
{
	return create_and_push(out, flags, 3020, ordinal);
}

/* There is no graphics library behind these: they make contexts, which is all that a program without a display needs. */
CUresult cuGLCtxCreate(CUcontext *out, unsigned int flags, CUdevice ordinal)
{
	return create_and_push(out, flags, 3010, ordinal);
}
CUresult cuGLCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice ordinal)
{
	return create_and_push(out, flags, 3020, ordinal);
}

CUresult cuVDPAUCtxCreate(CUcontext *out, unsigned int flags, CUdevice ordinal, unsigned int device, void *lookup)
{
	(void)device, (void)lookup;
	return create_and_push(out, flags, 3010, ordinal);
}

CUresult cuVDPAUCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice ordinal, unsigned int device, void *lookup)
{
	(void)device, (void)lookup;
	return create_and_push(out, flags, 3020, ordinal);
}

CUresult cuCtxCreate_v3(CUcontext *out, CUexecAffinityParam *affinity, int n_affinity, unsigned int flags, CUdevice ordinal)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(n_affinity == 0 || affinity);
	if (n_affinity)
		return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
	return create_and_push(out, flags, 11040, ordinal);
}

CUresult cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *parameters, unsigned int flags, CUdevice ordinal)
{
	SIM_REQUIRE_READY();
	if (parameters && parameters->numExecAffinityParams)
		return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
	if (parameters && parameters->cigParams)
		return CUDA_ERROR_NOT_SUPPORTED;
	return create_and_push(out, flags, 12050, ordinal);
}

CUresult cuCtxDestroy_v2(CUcontext context)
{
	SIM_REQUIRE_READY();
	SIM_TRY(check_handle(context));
	if (context->primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&sim_context_lock);
	CUresult result = check_handle(context);
	bool ends = result == CUDA_SUCCESS;
	if (ends)
		result = destroy(context);
	pthread_mutex_unlock(&sim_context_lock);
	if (ends && sim_thread.current == context)
		pop();
	return result;
}

CUresult cuCtxDestroy(CUcontext context)
{
	return cuCtxDestroy_v2(context);
}

CUresult cuCtxAttach(CUcontext *out, unsigned int flags)
{
	CUcontext context;
	SIM_REQUIRE(out && flags == 0);
	SIM_TRY(sim_current(&context));
	__atomic_fetch_add(&context->attachments, 1, __ATOMIC_RELAXED);
	*out = context;
	return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext context)
{
	SIM_REQUIRE_READY();
	SIM_TRY(check_handle(context));
	if (context->primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	return __atomic_sub_fetch(&context->attachments, 1, __ATOMIC_ACQ_REL) == 0 ? cuCtxDestroy_v2(context) : CUDA_SUCCESS;
}

/* ---- primary contexts ------------------------------------------------------------------------------------------------ */

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice ordinal)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out);
	struct sim_device *device = sim_device_of(ordinal);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	CUresult result = CUDA_SUCCESS;
	pthread_mutex_lock(&sim_context_lock);
	if (!device->primary && (result = create(device, device->primary_flags, 3020, &device->primary)) == CUDA_SUCCESS)
		device->primary->primary = true;
	if (result == CUDA_SUCCESS) {
		device->primary_references++;
		*out = device->primary;
	}
	pthread_mutex_unlock(&sim_context_lock);
	return result;
}

/* sim_context_lock is held. */
static CUresult end_primary(struct sim_device *device)
{
	CUresult result = device->primary ? destroy(device->primary) : CUDA_SUCCESS;
	device->primary_references = 0;
	device->primary = NULL;
	return result;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal)
{
	SIM_REQUIRE_READY();
	struct sim_device *device = sim_device_of(ordinal);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&sim_context_lock);
	CUresult result = device->primary_references ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
	if (result == CUDA_SUCCESS && --device->primary_references == 0)
		result = end_primary(device);
	pthread_mutex_unlock(&sim_context_lock);
	return result;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice ordinal)
{
	return cuDevicePrimaryCtxRelease_v2(ordinal);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice ordinal)
{
	SIM_REQUIRE_READY();
	struct sim_device *device = sim_device_of(ordinal);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&sim_context_lock);
	CUresult result = end_primary(device);
	pthread_mutex_unlock(&sim_context_lock);
	return result;
}

CUresult cuDevicePrimaryCtxReset(CUdevice ordinal)
{
	return cuDevicePrimaryCtxReset_v2(ordinal);
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned int flags)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(!(flags & ~(unsigned)CU_CTX_FLAGS_MASK));
	struct sim_device *device = sim_device_of(ordinal);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&sim_context_lock);
	device->primary_flags = flags;
	if (device->primary)
		device->primary->flags = flags;
	pthread_mutex_unlock(&sim_context_lock);
	return CUDA_SUCCESS;
}

/* The old form could not change an active context. */
CUresult cuDevicePrimaryCtxSetFlags(CUdevice ordinal, unsigned int flags)
{
	SIM_REQUIRE_READY();
	struct sim_device *device = sim_device_of(ordinal);
	if (device && device->primary)
		return CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE;
	return cuDevicePrimaryCtxSetFlags_v2(ordinal, flags);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned int *flags, int *active)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(flags && active);
	struct sim_device *device = sim_device_of(ordinal);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&sim_context_lock);
	*flags = device->primary_flags;
	*active = device->primary != NULL;
	pthread_mutex_unlock(&sim_context_lock);
	return CUDA_SUCCESS;
}

/* ---- which one is current -------------------------------------------------------------------------------------------- */

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
	SIM_REQUIRE_READY();
	SIM_TRY(check_handle(context));
	return push(context) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuCtxPushCurrent(CUcontext context)
{
	return cuCtxPushCurrent_v2(context);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
	SIM_REQUIRE_READY();
	if (!sim_thread.current)
		return CUDA_ERROR_INVALID_CONTEXT;
	CUcontext popped = pop();
	if (context)
		*context = popped;
	return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context)
{
	return cuCtxPopCurrent_v2(context);
}

CUresult cuCtxSetCurrent(CUcontext context)
{
	SIM_REQUIRE_READY();
	if (!context) {
		if (sim_thread.current)
			pop();
		return CUDA_SUCCESS;
	}
	SIM_TRY(check_handle(context));
	sim_thread.current = context;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(context);
	*context = sim_thread.current;
	return CUDA_SUCCESS;
}

/* The context behind an argument that may be NULL for the current one. */
static CUresult given_or_current(CUcontext given, CUcontext *context)
{
	if (!given)
		return sim_current(context);
	SIM_REQUIRE_READY();
	SIM_TRY(check_handle(given));
	*context = given;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext given)
{
	CUcontext context;
	SIM_REQUIRE(device);
	SIM_TRY(given_or_current(given, &context));
	*device = context->device->ordinal;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
	return cuCtxGetDevice_v2(device, NULL);
}

CUresult cuCtxGetFlags(unsigned int *flags)
{
	CUcontext context;
	SIM_REQUIRE(flags);
	SIM_TRY(sim_current(&context));
	*flags = context->flags;
	return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned int flags)
{
	CUcontext context;
	SIM_REQUIRE(!(flags & ~(unsigned)CU_CTX_FLAGS_MASK));
	SIM_TRY(sim_current(&context));
	context->flags = flags;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext given, unsigned long long *id)
{
	CUcontext context;
	SIM_REQUIRE(id);
	SIM_TRY(given_or_current(given, &context));
	*id = context->id;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext given, unsigned int *version)
{
	CUcontext context;
	SIM_REQUIRE(version);
	SIM_TRY(given_or_current(given, &context));
	*version = context->api_version;
	return CUDA_SUCCESS;
}

/* ---- synchronisation ------------------------------------------------------------------------------------------------- */

CUresult cuCtxSynchronize_v2(CUcontext given)
{
	CUcontext context;
	SIM_TRY(given_or_current(given, &context));
	SIM_TRY(sim_capture_unsafe_call());
	sim_engine_wait_context(context);
	sim_pools_settle(context->device);
	return sim_context_check(context);
}

CUresult cuCtxSynchronize(void)
{
	return cuCtxSynchronize_v2(NULL);
}

/* ---- limits and settings --------------------------------------------------------------------------------------------- */

/* Of the heap or the print buffer: all of it once code that uses it is loaded. Before that, what is beyond the default, at once. (A real
 * driver may take that later too.) */
static uint64_t cost_of_room(bool is_there, size_t bytes, size_t default_bytes)
{
	if (is_there)
		return bytes;
	return bytes > default_bytes ? bytes - default_bytes : 0;
}

/* Device memory that a context's limits cost beyond its price: heap, print buffer, and stacks for every thread that can be resident. */
static uint64_t cost_of_limits(CUcontext context, const size_t *limits)
{
	const struct sim_device *device = context->device;
	uint64_t bytes = cost_of_room(context->has_print_buffer, limits[CU_LIMIT_PRINTF_FIFO_SIZE],
				      default_limits[CU_LIMIT_PRINTF_FIFO_SIZE]) +
			 cost_of_room(context->has_heap, limits[CU_LIMIT_MALLOC_HEAP_SIZE], default_limits[CU_LIMIT_MALLOC_HEAP_SIZE]);
	if (limits[CU_LIMIT_STACK_SIZE] > default_limits[CU_LIMIT_STACK_SIZE])
		bytes += (limits[CU_LIMIT_STACK_SIZE] - default_limits[CU_LIMIT_STACK_SIZE]) * device->threads_per_sm * device->sm_count;
	return round_to_granule(bytes);
}

/* Pay for these limits. */
static CUresult pay_for(CUcontext context, const size_t *limits)
{
	uint64_t cost = cost_of_limits(context, limits);
	if (cost > context->device->domain.capacity_bytes)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (cost > context->limit_bytes && !charge(context->device, cost - context->limit_bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (cost < context->limit_bytes)
		uncharge(context->device, context->limit_bytes - cost);
	context->limit_bytes = cost;
	return CUDA_SUCCESS;
}

static CUresult set_limit(CUcontext context, CUlimit limit, size_t value)
{
	size_t limits[8];
	bool is_in_use = (limit == CU_LIMIT_MALLOC_HEAP_SIZE && context->has_heap) ||
			 (limit == CU_LIMIT_PRINTF_FIFO_SIZE && context->has_print_buffer);
	if (is_in_use)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(limits, context->limits, sizeof limits);
	if (limit == CU_LIMIT_STACK_SIZE)
		value = (value + STACK_UNIT_BYTES - 1) / STACK_UNIT_BYTES * STACK_UNIT_BYTES;
	limits[limit] = value;
	SIM_TRY(pay_for(context, limits));
	context->limits[limit] = value;
	return CUDA_SUCCESS;
}

/* sim_context_lock is held. */
static CUresult provide(CUcontext context, const struct sim_image *image)
{
	bool had_heap = context->has_heap, had_print_buffer = context->has_print_buffer;
	context->has_heap |= image->calls_malloc;
	context->has_print_buffer |= image->calls_printf;
	if (pay_for(context, context->limits) == CUDA_SUCCESS)
		return CUDA_SUCCESS;
	context->has_heap = had_heap;
	context->has_print_buffer = had_print_buffer;
	return CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
}

CUresult sim_context_provide(CUcontext context, const struct sim_image *image)
{
	if (!image->calls_malloc && !image->calls_printf)
		return CUDA_SUCCESS;
	pthread_mutex_lock(&sim_context_lock);
	CUresult result = provide(context, image);
	pthread_mutex_unlock(&sim_context_lock);
	return result;
}

CUresult sim_context_raise_stack(CUcontext context, size_t bytes)
{
	pthread_mutex_lock(&sim_context_lock);
	CUresult result = bytes > context->limits[CU_LIMIT_STACK_SIZE] ? set_limit(context, CU_LIMIT_STACK_SIZE, bytes) : CUDA_SUCCESS;
	pthread_mutex_unlock(&sim_context_lock);
	return result;
}

static bool limit_known(CUlimit limit)
{
	return (int)limit >= CU_LIMIT_STACK_SIZE && limit <= CU_LIMIT_PERSISTING_L2_CACHE_SIZE;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(limit_known(limit));
	if (limit == CU_LIMIT_STACK_SIZE && value > 512 * 1024)
		return CUDA_ERROR_INVALID_VALUE;    /* a thread's local memory is 512 KiB */
	if (limit == CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH && context->device->hardware->compute_major >= 9)
		return CUDA_ERROR_UNSUPPORTED_LIMIT;
	pthread_mutex_lock(&sim_context_lock);
	CUresult result = set_limit(context, limit, value);
	pthread_mutex_unlock(&sim_context_lock);
	return result;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit)
{
	CUcontext context;
	SIM_REQUIRE(value && limit_known(limit));
	SIM_TRY(sim_current(&context));
	if (limit == CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH && context->device->hardware->compute_major >= 9)
		return CUDA_ERROR_UNSUPPORTED_LIMIT;
	pthread_mutex_lock(&sim_context_lock);
	*value = context->limits[limit];
	pthread_mutex_unlock(&sim_context_lock);
	return CUDA_SUCCESS;
}

CUresult cuCtxGetCacheConfig(CUfunc_cache *config)
{
	CUcontext context;
	SIM_REQUIRE(config);
	SIM_TRY(sim_current(&context));
	*config = context->cache_config;
	return CUDA_SUCCESS;
}

CUresult cuCtxSetCacheConfig(CUfunc_cache config)
{
	CUcontext context;
	SIM_REQUIRE((int)config >= CU_FUNC_CACHE_PREFER_NONE && config <= CU_FUNC_CACHE_PREFER_EQUAL);
	SIM_TRY(sim_current(&context));
	context->cache_config = config;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetSharedMemConfig(CUsharedconfig *config)
{
	CUcontext context;
	SIM_REQUIRE(config);
	SIM_TRY(sim_current(&context));
	*config = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
	return CUDA_SUCCESS;
}

CUresult cuCtxSetSharedMemConfig(CUsharedconfig config)
{
	CUcontext context;
	SIM_REQUIRE((int)config >= CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE && config <= CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE);
	return sim_current(&context);   /* banks have had one size since Maxwell: accepted without effect */
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return CUDA_SUCCESS;
}

CUresult cuCtxResetPersistingL2Cache(void)
{
	CUcontext context;
	return sim_current(&context);
}

CUresult cuCtxGetExecAffinity(CUexecAffinityParam *affinity, CUexecAffinityType type)
{
	CUcontext context;
	SIM_REQUIRE(affinity);
	SIM_TRY(sim_current(&context));
	if (type != CU_EXEC_AFFINITY_TYPE_SM_COUNT)
		return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
	affinity->type = type;
	affinity->param.smCount.val = context->device->sm_count;
	return CUDA_SUCCESS;
}

/* ---- peers ----------------------------------------------------------------------------------------------------------- */

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
	CUcontext context;
	bool by_nvlink;
	SIM_REQUIRE(flags == 0);
	SIM_TRY(sim_current(&context));
	SIM_TRY(check_handle(peer));
	if (peer == context)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!sim_devices_linked(context->device, peer->device, &by_nvlink))
		return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
	if (context->peers[peer->device->ordinal])
		return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
	context->peers[peer->device->ordinal] = true;
	return CUDA_SUCCESS;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_TRY(check_handle(peer));
	if (!context->peers[peer->device->ordinal])
		return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
	context->peers[peer->device->ordinal] = false;
	return CUDA_SUCCESS;
}
