/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts. They cost device memory, and what was allocated in them dies with them.
 *
 * A context's cost is charged before the driver makes it when it is known (the agent's figure, or what an earlier process of the
 * container measured), and is else measured around the making. One gate per device keeps making, releasing and measuring apart: rare
 * calls that take the driver tens of milliseconds. */
#include "interpose/context.h"

#include <pthread.h>
#include <string.h>

#include "account/map.h"
#include "interpose/driver.h"
#include "interpose/latch.h"
#include "interpose/life_cycle.h"
#include "interpose/measure.h"
#include "interpose/relax.h"
#include "limit/memory.h"
#include "log.h"
#include "shim.h"

#define PAGE_BYTES ((uint64_t)2 << 20) /* of device memory */
#define STACK_UNIT_BYTES 16u /* the driver rounds a stack to it */
#define UNSURE_BYTES ((uint64_t)1 << 30) /* more than any context takes: what a device lost beyond it went to a neighbour */

static struct {
	pthread_mutex_t gate;
	_Atomic bool charged;    /* the primary context is alive and paid for */
	uint64_t context_bytes;
	uint64_t limit_bytes;    /* the part of it that its limits cost */
} primaries[AQ_MAX_ORDINALS] = { [0 ... AQ_MAX_ORDINALS - 1] = { .gate = PTHREAD_MUTEX_INITIALIZER } };

/* This thread holds a gate. The driver may call back into the program during a call under it (tools subscribe to its calls). Such a call
 * waits for no gate: neither its own thread's nor that of another device, because that device's thread may wait for this one's (latch.h).
 * What it does to the same device counts as part of the call around it; a primary context that it creates on another device is charged at
 * the next call that finds it. */
static __thread bool is_inside;

/* False from inside a gate or a latch. */
static bool enter(CUdevice ordinal)
{
	if (is_inside || aq_latch_is_inside())
		return false;
	int device = aq_device_of(ordinal);
	if (device >= 0 && !aq_account_context_bytes(device))
		aq_measure_open(); /* what a context costs must be measured */
	pthread_mutex_lock(&primaries[ordinal].gate);
	is_inside = true;
	return true;
}

static void leave(CUdevice ordinal)
{
	is_inside = false;
	pthread_mutex_unlock(&primaries[ordinal].gate);
}

/* Contexts made by cuCtxCreate: key = context, bytes = its cost, owner = the part of it that its limits cost, device, kind = CUDA
 * ordinal. */
static struct aq_map contexts;

/* Changes whenever a context begins or ends, so that no thread trusts what it remembers of an address that was used again. */
static _Atomic uint64_t epoch = 1;

static __thread struct {
	CUcontext context;
	uint64_t epoch;
	uint64_t only_epoch; /* the same if every context of the process has this device; else 0 */
	struct aq_place place;
} seen;

/* ---- places ---------------------------------------------------------------------------------------------------- */

static bool is_paid_for(CUdevice ordinal);

/* Is every context on that device, which is granted, and is its primary context charged? An uncharged one may still be created without the
 * shim, and is found only by looking. */
static bool is_place_of_all(const struct aq_place *place)
{
	return aq_device_is_only() && place->device >= 0 && primaries[place->ordinal].charged;
}

static __attribute__((noinline)) CUresult look_up(CUcontext context, bool is_current, uint64_t now, struct aq_place *place)
{
	bool is_settled = true;
	struct aq_entry made;
	CUdevice ordinal;

	if (aq_map_get(&contexts, (uintptr_t)context, &made)) {
		*place = (struct aq_place){ .device = (int)made.device, .ordinal = (CUdevice)made.kind, .owner = made.key };
	} else {
		CUresult result = CUDA_SUCCESS;

		if (!is_current)
			result = aq_cuda.cuCtxPushCurrent_v2(context);
		if (result != CUDA_SUCCESS)
			return result;
		result = aq_cuda.cuCtxGetDevice(&ordinal);
		if (!is_current)
			aq_cuda.cuCtxPopCurrent_v2(&context);
		if (result != CUDA_SUCCESS)
			return result;
		*place = (struct aq_place){ .device = aq_device_of(ordinal), .ordinal = ordinal };
		is_settled = is_paid_for(ordinal);
	}
	if (is_current && is_settled) {
		seen.context = context;
		seen.epoch = now;
		seen.only_epoch = is_place_of_all(place) ? now : 0;
		seen.place = *place;
	}
	return CUDA_SUCCESS;
}

/* What the thread remembers of the context that was current when it last looked. */
static inline bool remembered(CUcontext context, uint64_t now, struct aq_place *place)
{
	if (__builtin_expect(context != seen.context || now != seen.epoch || seen.place.device < 0, 0))
		return false;
	*place = seen.place;
	return true;
}

CUresult aq_find_place(struct aq_place *place)
{
	CUcontext context = NULL;
	uint64_t now = atomic_load_explicit(&epoch, memory_order_acquire);
	CUresult result = aq_cuda.cuCtxGetCurrent(&context);

	if (__builtin_expect(result != CUDA_SUCCESS, 0))
		return result;
	if (__builtin_expect(!context, 0))
		return CUDA_ERROR_INVALID_CONTEXT;
	return remembered(context, now, place) ? CUDA_SUCCESS : look_up(context, true, now, place);
}

CUresult aq_find_place_of_stream(CUstream stream, struct aq_place *place)
{
	CUcontext context = NULL, current = NULL;
	uint64_t now = atomic_load_explicit(&epoch, memory_order_acquire);

	if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
		return aq_find_place(place);
	CUresult result = aq_cuda.cuStreamGetCtx(stream, &context);
	if (result != CUDA_SUCCESS)
		return result;
	if (!context)
		return aq_find_place(place);
	if (remembered(context, now, place))
		return CUDA_SUCCESS;
	bool is_current = aq_cuda.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context;
	return look_up(context, is_current, now, place);
}

bool aq_place_current(struct aq_place *place)
{
	return aq_find_place(place) == CUDA_SUCCESS;
}

bool aq_place_of_stream(CUstream stream, struct aq_place *place)
{
	return aq_find_place_of_stream(stream, place) == CUDA_SUCCESS || aq_place_current(place);
}

static __attribute__((noinline)) int look_up_device(CUstream stream)
{
	struct aq_place place;

	return aq_place_of_stream(stream, &place) ? place.device : AQ_NO_DEVICE;
}

int aq_device_of_stream(CUstream stream)
{
	bool is_known = seen.only_epoch == atomic_load_explicit(&epoch, memory_order_acquire);

	return __builtin_expect(is_known, 1) ? seen.place.device : look_up_device(stream);
}

CUcontext aq_context_of_stream(CUstream stream)
{
	CUcontext context = NULL;

	if (stream && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD &&
	    aq_cuda.cuStreamGetCtx(stream, &context) == CUDA_SUCCESS)
		return context;
	return aq_cuda.cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : NULL;
}

bool aq_context_enter(CUcontext context, bool *pushed)
{
	CUcontext current = NULL;

	*pushed = aq_cuda.cuCtxGetCurrent(&current) != CUDA_SUCCESS || current != context;
	return !*pushed || aq_cuda.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
}

void aq_context_leave(bool pushed)
{
	CUcontext context;

	if (pushed)
		aq_cuda.cuCtxPopCurrent_v2(&context);
}

bool aq_context_is_absent(void)
{
	CUcontext context = NULL;

	return aq_cuda.cuCtxGetCurrent(&context) == CUDA_SUCCESS && !context;
}

bool aq_context_is_alive(CUcontext context)
{
	unsigned int version;

	if (aq_cuda.cuCtxGetApiVersion(context, &version) == CUDA_SUCCESS)
		return true;
	bool pushed = aq_cuda.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
	aq_context_leave(pushed);
	return pushed;
}

static CUresult find_current_ordinal(CUdevice *ordinal)
{
	struct aq_place place = { .ordinal = 0 };
	CUcontext context = NULL;
	CUresult result = aq_cuda.cuCtxGetCurrent(&context);

	if (result == CUDA_SUCCESS && context)
		result = aq_find_place(&place);
	*ordinal = place.ordinal;
	return result;
}

CUresult aq_place_of_location(const CUmemLocation *location, CUmemAllocationType type, CUdevice *ordinal)
{
	switch (location->type) {
	case CU_MEM_LOCATION_TYPE_DEVICE: *ordinal = location->id; return CUDA_SUCCESS;
	case CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN: *ordinal = location->id & 0xff; return CUDA_SUCCESS;
	case CU_MEM_LOCATION_TYPE_INVALID: return find_current_ordinal(ordinal); /* if the driver takes it at all */
	case CU_MEM_LOCATION_TYPE_HOST:
	case CU_MEM_LOCATION_TYPE_HOST_NUMA:
	case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
		if (type == CU_MEM_ALLOCATION_TYPE_MANAGED)
			return find_current_ordinal(ordinal);
		*ordinal = AQ_NO_ORDINAL;
		return CUDA_SUCCESS;
	default:
		aq_log_warn("memory at a location of type %d is refused: this shim does not know which device pays for it",
			    (int)location->type);
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

void aq_contexts_forget(void)
{
	for (int i = 0; i < AQ_MAX_ORDINALS; i++) {
		pthread_mutex_init(&primaries[i].gate, NULL);
		primaries[i].charged = false;
	}
	is_inside = false;
	aq_map_forget(&contexts);
	seen.context = NULL;
	atomic_fetch_add(&epoch, 1);
}

/* ---- paying ---------------------------------------------------------------------------------------------------- */

static void begun(int device)
{
	aq_account_contexts_add(device, 1);
	aq_parts_context_begun(device);
	atomic_fetch_add(&epoch, 1);
}

static void ended(const struct aq_place *place, uint64_t context_bytes)
{
	atomic_fetch_add(&epoch, 1);
	aq_parts_context_gone(place->device, place->owner);
	aq_uncharge(place->device, AQ_CONTEXT, context_bytes);
	aq_account_contexts_add(place->device, -1);
}

/* What a context may cost at most, where NVML does not report it and the limits file does not state it: what the device lacks and the
 * container was not charged. A neighbour's memory may be part of that. */
static uint64_t most_of_cost(int device, CUcontext context)
{
	size_t free_bytes = 0, total_bytes = 0;
	bool pushed;

	aq_log_warn("the cost of a context on %s is unknown: NVML does not report it, and the limits file does not state it",
		    aq_device_uuid(device));
	if (!context || !aq_context_enter(context, &pushed))
		return UNSURE_BYTES;
	CUstreamCaptureMode mode = aq_relax();
	CUresult result = aq_cuda.cuMemGetInfo_v2(&free_bytes, &total_bytes);
	aq_restrict(mode);
	aq_context_leave(pushed);
	uint64_t used = total_bytes - free_bytes, charged = aq_account_container_bytes(device);
	if (result != CUDA_SUCCESS || free_bytes > total_bytes)
		return UNSURE_BYTES;
	return aq_min_bytes(used > charged ? used - charged : 0, UNSURE_BYTES);
}

/* It is alive, so this neither makes it nor ends it. */
static uint64_t most_of_primary(int device, CUdevice ordinal)
{
	CUcontext context = NULL;
	CUresult result = aq_cuda.cuDevicePrimaryCtxRetain(&context, ordinal);
	uint64_t bytes = most_of_cost(device, result == CUDA_SUCCESS ? context : NULL);

	if (result == CUDA_SUCCESS)
		aq_cuda.cuDevicePrimaryCtxRelease_v2(ordinal);
	return bytes;
}

/* Make a context and charge it. `make` calls the driver; `unmake` takes the context back when its measured cost does not fit. `made`: where
 * it is then, NULL for the primary context. */
static CUresult make_charged(CUdevice ordinal, uint64_t *cost, CUresult (*make)(void *), CUresult (*unmake)(void *), void *call,
			     const CUcontext *made)
{
	int device = aq_device_of(ordinal);
	struct aq_sample_bytes before, after;

	*cost = aq_account_context_bytes(device);
	if (device == AQ_NO_DEVICE || *cost) {
		if (!aq_charge(device, AQ_CONTEXT, *cost))
			return CUDA_ERROR_OUT_OF_MEMORY;
		CUresult result = make(call);
		if (result != CUDA_SUCCESS)
			aq_uncharge(device, AQ_CONTEXT, *cost);
		return result;
	}
	before = aq_measure(aq_account_region(), aq_device_uuid(device), device);
	CUresult result = make(call);
	if (result != CUDA_SUCCESS)
		return result;
	after = aq_measure(aq_account_region(), aq_device_uuid(device), device);
	bool is_own;
	*cost = aq_measured_growth(&before, &after, &is_own);
	if (!is_own && *cost > UNSURE_BYTES)
		*cost = UNSURE_BYTES;
	if (!*cost)
		*cost = made ? most_of_cost(device, *made) : most_of_primary(device, ordinal);
	if (!aq_charge(device, AQ_CONTEXT, *cost)) {
		if (unmake(call) != CUDA_SUCCESS)
			aq_charge_taken(device, AQ_CONTEXT, *cost); /* it stays, until the process ends */
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (is_own) /* later processes pay what this one learns: never a figure that a neighbour may have a part in */
		aq_account_learn_context_bytes(device, *cost);
	return CUDA_SUCCESS;
}

/* ---- primary contexts ------------------------------------------------------------------------------------------ */

/* The cost of a context that already exists. Where neither the agent nor another process provided a figure, it is what the driver counts
 * for this process beyond its charges. Modules may be part of that, so later processes do not learn it. */
static uint64_t cost_of_made(int device, CUdevice ordinal)
{
	uint64_t known = aq_account_context_bytes(device), before = aq_account_own_bytes(device);

	if (known)
		return known;
	uint64_t own = aq_measure(aq_account_region(), aq_device_uuid(device), device).own_bytes;
	uint64_t after = aq_account_own_bytes(device);
	/* What another thread takes or gives back meanwhile must not look like the context's: the larger charge counts. */
	uint64_t charged = before > after ? before : after;
	if (own <= charged)
		return most_of_primary(device, ordinal);
	return own - charged < UNSURE_BYTES ? own - charged : UNSURE_BYTES;
}

/* Adjust the charges to the driver's state. Old runtimes create and end primary contexts without the shim, through a private table of the
 * driver, and a primary context may be older than the limits of the process. An existing one is charged, past the limit if necessary; an
 * ended one is uncharged, with all that was in it. True when it exists and is charged. With the gate held. */
static bool settle_primary(CUdevice ordinal)
{
	struct aq_place place = { .device = aq_device_of(ordinal), .ordinal = ordinal };
	bool charged = primaries[ordinal].charged;
	int active = charged;
	unsigned int flags;

	if (aq_cuda.cuDevicePrimaryCtxGetState(ordinal, &flags, &active) != CUDA_SUCCESS || !active == !charged || place.device < 0)
		return charged;
	if (active) {
		primaries[ordinal].context_bytes = cost_of_made(place.device, ordinal);
		aq_charge_taken(place.device, AQ_CONTEXT, primaries[ordinal].context_bytes);
		primaries[ordinal].limit_bytes = 0;
		primaries[ordinal].charged = true;
		begun(place.device);
	} else {
		aq_parts_context_ended(&(struct aq_ending){ .device = place.device }, true); /* its events first: they went with it */
		ended(&place, primaries[ordinal].context_bytes);
		/* until here no thread that finds it waits for the gate, because it may hold what is settled there */
		primaries[ordinal].charged = false;
	}
	return active;
}

/* Charge the primary context when it is first found and was created without the shim. False when this thread is inside a call that makes or
 * ends one, or inside a latch, where it must not wait: then a later call finds it. */
static bool is_paid_for(CUdevice ordinal)
{
	if (ordinal < 0 || ordinal >= AQ_MAX_ORDINALS || primaries[ordinal].charged)
		return true;
	if (!enter(ordinal))
		return false;
	settle_primary(ordinal);
	leave(ordinal);
	return true;
}

/* A call that makes the primary context, unless it is there already. */
static CUresult make_primary(CUdevice ordinal, CUresult (*make)(void *), CUresult (*unmake)(void *), void *call)
{
	CUresult result;

	if (!enter(ordinal))
		return make(call);
	if (settle_primary(ordinal)) {
		result = make(call);
	} else {
		result = make_charged(ordinal, &primaries[ordinal].context_bytes, make, unmake, call, NULL);
		if (result == CUDA_SUCCESS) {
			primaries[ordinal].charged = true;
			primaries[ordinal].limit_bytes = 0;
			begun(aq_device_of(ordinal));
		}
	}
	leave(ordinal);
	return result;
}

struct retain_call {
	CUcontext made;
	CUdevice ordinal;
};

static CUresult retain(void *call)
{
	struct retain_call *retain_call = call;

	return aq_cuda.cuDevicePrimaryCtxRetain(&retain_call->made, retain_call->ordinal);
}

static CUresult unretain(void *call)
{
	const struct retain_call *retain_call = call;

	return aq_cuda.cuDevicePrimaryCtxRelease_v2(retain_call->ordinal);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal)
{
	struct retain_call call = { .ordinal = ordinal };

	AQ_LIMITED_OR_RETURN(cuDevicePrimaryCtxRetain(context, ordinal));
	if (!context)
		return CUDA_ERROR_INVALID_VALUE; /* as from the driver */
	if (ordinal < 0 || ordinal >= AQ_MAX_ORDINALS)
		return aq_cuda.cuDevicePrimaryCtxRetain(context, ordinal);
	CUresult result = make_primary(ordinal, retain, unretain, &call);
	if (result == CUDA_SUCCESS)
		*context = call.made;
	return result;
}

/* A primary context created without the shim is charged before it may end, so that everything in it is uncharged. The result does not say
 * whether it ended: it may be the error of an earlier launch, which keeps no context alive. */
#define PRIMARY_HOOK(name)                                                       \
	CUresult name(CUdevice ordinal)                                          \
	{                                                                        \
		AQ_LIMITED_OR_RETURN(name(ordinal));                             \
		if (ordinal < 0 || ordinal >= AQ_MAX_ORDINALS || !enter(ordinal)) \
			return aq_cuda.name(ordinal);                            \
		struct aq_ending ending = { .device = aq_device_of(ordinal) };   \
		settle_primary(ordinal);                                         \
		aq_parts_context_ending(&ending);                                                \
		CUresult result = aq_cuda.name(ordinal);                         \
		aq_parts_context_ended(&ending, !settle_primary(ordinal));               \
		leave(ordinal);                                                  \
		return result;                                                   \
	}

PRIMARY_HOOK(cuDevicePrimaryCtxRelease)
PRIMARY_HOOK(cuDevicePrimaryCtxRelease_v2)
PRIMARY_HOOK(cuDevicePrimaryCtxReset)
PRIMARY_HOOK(cuDevicePrimaryCtxReset_v2)

/* ---- other contexts -------------------------------------------------------------------------------------------- */

enum create_form { CREATE_V1, CREATE_V2, CREATE_V3, CREATE_V4, CREATE_GL, CREATE_GL_V2, CREATE_VDPAU, CREATE_VDPAU_V2 };

struct create_call {
	enum create_form form;
	CUcontext made;
	CUexecAffinityParam *affinity;
	int affinity_count;
	CUctxCreateParams *params;
	unsigned int vdpau_device;
	void *vdpau_lookup;
	unsigned int flags;
	CUdevice ordinal;
};

static CUresult create(void *call)
{
	struct create_call *c = call;

	switch (c->form) {
	case CREATE_V1: return aq_cuda.cuCtxCreate(&c->made, c->flags, c->ordinal);
	case CREATE_V2: return aq_cuda.cuCtxCreate_v2(&c->made, c->flags, c->ordinal);
	case CREATE_V3: return aq_cuda.cuCtxCreate_v3(&c->made, c->affinity, c->affinity_count, c->flags, c->ordinal);
	case CREATE_GL: return aq_cuda.cuGLCtxCreate(&c->made, c->flags, c->ordinal);
	case CREATE_GL_V2: return aq_cuda.cuGLCtxCreate_v2(&c->made, c->flags, c->ordinal);
	case CREATE_VDPAU: return aq_cuda.cuVDPAUCtxCreate(&c->made, c->flags, c->ordinal, c->vdpau_device, c->vdpau_lookup);
	case CREATE_VDPAU_V2: return aq_cuda.cuVDPAUCtxCreate_v2(&c->made, c->flags, c->ordinal, c->vdpau_device, c->vdpau_lookup);
	default: return aq_cuda.cuCtxCreate_v4(&c->made, c->params, c->flags, c->ordinal);
	}
}

static CUresult uncreate(void *call)
{
	return aq_cuda.cuCtxDestroy_v2(((struct create_call *)call)->made);
}

static CUresult create_charged(CUcontext *context, struct create_call *call)
{
	CUdevice ordinal = call->ordinal;
	uint64_t cost;

	if (!context)
		return CUDA_ERROR_INVALID_VALUE; /* as from the driver */
	if (ordinal < 0 || ordinal >= AQ_MAX_ORDINALS) {
		CUresult result = create(call); /* the driver reports the error */
		if (result == CUDA_SUCCESS)
			*context = call->made;
		return result;
	}
	bool entered = enter(ordinal);
	CUresult result = make_charged(ordinal, &cost, create, uncreate, call, &call->made);
	if (entered)
		leave(ordinal);
	if (result != CUDA_SUCCESS)
		return result;
	struct aq_entry made = {
		.key = (uintptr_t)call->made, .bytes = cost, .device = (uint32_t)aq_device_of(ordinal), .kind = (uint32_t)ordinal
	};
	if (!aq_map_put(&contexts, &made)) {
		if (uncreate(call) == CUDA_SUCCESS)
			aq_uncharge(aq_device_of(ordinal), AQ_CONTEXT, cost);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	begun(aq_device_of(ordinal));
	*context = call->made;
	return CUDA_SUCCESS;
}

CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice ordinal)
{
	AQ_LIMITED_OR_RETURN(cuCtxCreate(context, flags, ordinal));
	return create_charged(context, &(struct create_call){ .form = CREATE_V1, .flags = flags, .ordinal = ordinal });
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice ordinal)
{
	AQ_LIMITED_OR_RETURN(cuCtxCreate_v2(context, flags, ordinal));
	return create_charged(context, &(struct create_call){ .form = CREATE_V2, .flags = flags, .ordinal = ordinal });
}

CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice ordinal)
{
	AQ_LIMITED_OR_RETURN(cuCtxCreate_v3(context, affinity, count, flags, ordinal));
	return create_charged(context,
			      &(struct create_call){
				  .form = CREATE_V3, .affinity = affinity, .affinity_count = count, .flags = flags, .ordinal = ordinal });
}

CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned int flags, CUdevice ordinal)
{
	AQ_LIMITED_OR_RETURN(cuCtxCreate_v4(context, params, flags, ordinal));
	return create_charged(context, &(struct create_call){ .form = CREATE_V4, .params = params, .flags = flags, .ordinal = ordinal });
}

#define GL_HOOK(name, form_)                                                                                              \
	CUresult name(CUcontext *context, unsigned int flags, CUdevice ordinal)                                          \
	{                                                                                                                \
		AQ_LIMITED_OR_RETURN(name(context, flags, ordinal));                                                     \
		return create_charged(context, &(struct create_call){ .form = form_, .flags = flags, .ordinal = ordinal }); \
	}

#define VDPAU_HOOK(name, form_)                                                                                           \
	CUresult name(CUcontext *context, unsigned int flags, CUdevice ordinal, unsigned int device, void *lookup)       \
	{                                                                                                                \
		AQ_LIMITED_OR_RETURN(name(context, flags, ordinal, device, lookup));                                     \
		return create_charged(context, &(struct create_call){ .form = form_, .flags = flags, .ordinal = ordinal, \
								      .vdpau_device = device, .vdpau_lookup = lookup }); \
	}

GL_HOOK(cuGLCtxCreate, CREATE_GL)
GL_HOOK(cuGLCtxCreate_v2, CREATE_GL_V2)
VDPAU_HOOK(cuVDPAUCtxCreate, CREATE_VDPAU)
VDPAU_HOOK(cuVDPAUCtxCreate_v2, CREATE_VDPAU_V2)

/* A thread that looked meanwhile took it for the primary context, and has to look again. */
static void lives_on(const struct aq_entry *made)
{
	aq_map_put(&contexts, made);
	atomic_fetch_add(&epoch, 1);
}

/* The context leaves the map before the driver may give its address to another one, and returns if it lives on. An error does not mean that
 * it does: it may be that of an earlier launch. */
#define DESTROY_HOOK(name, success_ends_it)                                                                      \
	CUresult name(CUcontext context)                                                                         \
	{                                                                                                        \
		struct aq_entry made;                                                                            \
		AQ_LIMITED_OR_RETURN(name(context));                                                             \
		if (!aq_map_take(&contexts, (uintptr_t)context, &made))                                          \
			return aq_cuda.name(context);                                                            \
		struct aq_ending ending = { .device = (int)made.device, .owner = made.key };                     \
		aq_parts_context_ending(&ending);                                                                                \
		CUresult result = aq_cuda.name(context);                                                         \
		bool has_ended = (result == CUDA_SUCCESS && (success_ends_it)) || !aq_context_is_alive(context);            \
		if (has_ended)                                                                                   \
			ended(&(struct aq_place){ .device = (int)made.device, .owner = made.key }, made.bytes);  \
		else                                                                                             \
			lives_on(&made);                                                                         \
		aq_parts_context_ended(&ending, has_ended);                                                              \
		return result;                                                                                   \
	}

DESTROY_HOOK(cuCtxDestroy, true)
DESTROY_HOOK(cuCtxDestroy_v2, true)
/* Counts down what cuCtxAttach counted up; the last one ends the context. */
DESTROY_HOOK(cuCtxDetach, false)

/* ---- green contexts: parts of the primary one, which they keep alive --------------------------------------------- */

struct green_call {
	CUgreenCtx made;
	CUdevResourceDesc resources;
	CUdevice ordinal;
	unsigned int flags;
};

static CUresult create_green(void *call)
{
	struct green_call *c = call;

	return aq_cuda.cuGreenCtxCreate(&c->made, c->resources, c->ordinal, c->flags);
}

static CUresult uncreate_green(void *call)
{
	return aq_cuda.cuGreenCtxDestroy(((struct green_call *)call)->made);
}

CUresult cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc resources, CUdevice ordinal, unsigned int flags)
{
	struct green_call call = { .resources = resources, .ordinal = ordinal, .flags = flags };

	AQ_LIMITED_OR_RETURN(cuGreenCtxCreate(green, resources, ordinal, flags));
	if (!green)
		return CUDA_ERROR_INVALID_VALUE; /* as from the driver */
	if (ordinal < 0 || ordinal >= AQ_MAX_ORDINALS)
		return aq_cuda.cuGreenCtxCreate(green, resources, ordinal, flags);
	CUresult result = make_primary(ordinal, create_green, uncreate_green, &call);
	atomic_fetch_add(&epoch, 1);
	if (result == CUDA_SUCCESS)
		*green = call.made;
	return result;
}

/* The handle does not say which device it is on: look at all devices where the primary context may have lived through it alone. */
CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
	AQ_LIMITED_OR_RETURN(cuGreenCtxDestroy(green));
	struct aq_ending primary[AQ_MAX_ORDINALS], itself = { .device = AQ_NO_DEVICE };
	bool marked[AQ_MAX_ORDINALS];

	aq_cuda.cuCtxFromGreenCtx(&itself.green, green);
	aq_parts_context_ending(&itself);
	for (CUdevice ordinal = 0; ordinal < AQ_MAX_ORDINALS; ordinal++) {
		marked[ordinal] = false;
		if (!enter(ordinal))
			continue;
		marked[ordinal] = primaries[ordinal].charged;
		primary[ordinal] = (struct aq_ending){ .device = marked[ordinal] ? aq_device_of(ordinal) : AQ_NO_DEVICE };
		if (marked[ordinal])
			aq_parts_context_ending(&primary[ordinal]);
		leave(ordinal);
	}
	CUresult result = aq_cuda.cuGreenCtxDestroy(green);
	atomic_fetch_add(&epoch, 1); /* its address may come back as one of another device, also while the primary context lives on */
	for (CUdevice ordinal = 0; ordinal < AQ_MAX_ORDINALS; ordinal++) {
		if (!enter(ordinal))
			continue;
		if (marked[ordinal])
			aq_parts_context_ended(&primary[ordinal], !settle_primary(ordinal));
		leave(ordinal);
	}
	aq_parts_context_ended(&itself, result == CUDA_SUCCESS || !aq_context_is_alive(itself.green));
	return result;
}

/* ---- limits of a context: stacks, device heap and print buffer are device memory --------------------------------- */

enum { STACK, FIFO, HEAP, SIZED_LIMITS };

static const struct {
	CUlimit limit;
	uint64_t default_bytes; /* as documented */
} sized_limits[SIZED_LIMITS] = {
	[STACK] = { CU_LIMIT_STACK_SIZE, 1024 },
	[FIFO] = { CU_LIMIT_PRINTF_FIFO_SIZE, 1 << 20 },
	[HEAP] = { CU_LIMIT_MALLOC_HEAP_SIZE, 8 << 20 },
};

/* What the cost of a context includes, by CUDA ordinal; 0 = not queried yet. With the device's gate held. */
static uint64_t included_bytes[AQ_MAX_ORDINALS][SIZED_LIMITS];
/* What the driver may raise the stack size to, whatever limit the program sets: what the functions need that were given out. With the
 * device's gate held. */
static uint64_t least_stack_bytes[AQ_MAX_ORDINALS];

/* Called before the first limit is set on a device. Print buffer and heap are then what contexts start with, which may be more than
 * documented. Stack sizes cannot be learned this way: the driver raises them for the kernels that are launched. */
static void learn_included(CUdevice ordinal)
{
	for (unsigned i = 0; i < SIZED_LIMITS; i++) {
		size_t now = 0;

		if (included_bytes[ordinal][i])
			continue;
		included_bytes[ordinal][i] = sized_limits[i].default_bytes;
		if (i != STACK && aq_cuda.cuCtxGetLimit(&now, sized_limits[i].limit) == CUDA_SUCCESS && now > sized_limits[i].default_bytes)
			included_bytes[ordinal][i] = now;
	}
}

/* What the limits of the current context cost, `changed` being `value`. UINT64_MAX when no device has as much, or the driver does not
 * report what the cost depends on. */
static uint64_t cost_of_limits(CUdevice ordinal, CUlimit changed, uint64_t value)
{
	int threads = 0, multiprocessors = 0;
	uint64_t cost = 0;

	if (aq_cuda.cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, ordinal) != CUDA_SUCCESS ||
	    aq_cuda.cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, ordinal) != CUDA_SUCCESS)
		return UINT64_MAX;
	for (unsigned i = 0; i < SIZED_LIMITS; i++) {
		uint64_t copies = i == STACK ? (uint64_t)threads * (uint64_t)multiprocessors : 1, bytes;
		size_t now = value;

		if (sized_limits[i].limit != changed && aq_cuda.cuCtxGetLimit(&now, sized_limits[i].limit) != CUDA_SUCCESS)
			return UINT64_MAX;
		if (i == STACK && now < least_stack_bytes[ordinal])
			now = least_stack_bytes[ordinal];
		uint64_t extra = now > included_bytes[ordinal][i] ? now - included_bytes[ordinal][i] : 0;
		if (__builtin_mul_overflow(extra, copies, &bytes) || __builtin_add_overflow(cost, bytes, &cost) ||
		    cost > UINT64_MAX - PAGE_BYTES)
			return UINT64_MAX;
	}
	return (cost + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static uint64_t charged_for_limits(const struct aq_place *place)
{
	struct aq_entry made;

	if (!place->owner)
		return primaries[place->ordinal].limit_bytes;
	return aq_map_get(&contexts, place->owner, &made) ? made.owner : 0;
}

/* The context's charge grows or shrinks with its limits, and is given back with it. */
static void note_charged_for_limits(const struct aq_place *place, uint64_t bytes)
{
	struct aq_entry made;

	if (!place->owner) {
		primaries[place->ordinal].context_bytes += bytes - primaries[place->ordinal].limit_bytes;
		primaries[place->ordinal].limit_bytes = bytes;
	} else if (aq_map_get(&contexts, place->owner, &made)) {
		made.bytes += bytes - made.owner;
		made.owner = bytes;
		aq_map_put(&contexts, &made); /* replaces its own entry: needs no room */
	}
}

/* The request is reserved first; the final charge is what the driver keeps, because it may round, clamp, or have raised a limit itself. So
 * the code compares with the record of what was charged, never with what the driver reports now: it must not give back more than was
 * charged. */
static CUresult set_limit_charged(const struct aq_place *place, CUlimit limit, size_t value)
{
	size_t now = 0;
	CUresult result = aq_cuda.cuCtxGetLimit(&now, limit);

	if (result != CUDA_SUCCESS)
		return result;
	learn_included(place->ordinal);
	uint64_t charged = charged_for_limits(place), wanted = cost_of_limits(place->ordinal, limit, value);
	uint64_t reserved = wanted > charged ? wanted - charged : 0;
	if (reserved && !aq_charge(place->device, AQ_CONTEXT, reserved))
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = aq_cuda.cuCtxSetLimit(limit, value);
	if (result != CUDA_SUCCESS) {
		aq_uncharge(place->device, AQ_CONTEXT, reserved);
		return result;
	}
	if (aq_cuda.cuCtxGetLimit(&now, limit) != CUDA_SUCCESS)
		now = value;
	uint64_t kept = cost_of_limits(place->ordinal, limit, now);
	if (kept == UINT64_MAX)
		kept = charged + reserved; /* an invalid value, or no reply */
	if (kept > charged + reserved)
		aq_charge_taken(place->device, AQ_CONTEXT, kept - charged - reserved);
	else
		aq_uncharge(place->device, AQ_CONTEXT, charged + reserved - kept);
	note_charged_for_limits(place, kept);
	return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
	struct aq_place place;

	AQ_LIMITED_OR_RETURN(cuCtxSetLimit(limit, value));
	bool sized = limit == CU_LIMIT_STACK_SIZE || limit == CU_LIMIT_PRINTF_FIFO_SIZE || limit == CU_LIMIT_MALLOC_HEAP_SIZE;
	CUresult result = sized ? aq_find_place(&place) : CUDA_SUCCESS;
	if (result != CUDA_SUCCESS)
		return result;
	if (!sized || place.ordinal < 0 || place.ordinal >= AQ_MAX_ORDINALS)
		return aq_cuda.cuCtxSetLimit(limit, value);
	if (!enter(place.ordinal))
		return aq_cuda.cuCtxSetLimit(limit, value); /* from a callback: counted with the next limit that is set in the context */
	result = set_limit_charged(&place, limit, value);
	leave(place.ordinal);
	return result;
}

/* With the gate held. */
static CUresult charge_stack(const struct aq_place *place, uint64_t local_bytes)
{
	uint64_t before = least_stack_bytes[place->ordinal], charged = charged_for_limits(place);
	size_t now = 0;
	CUresult result = aq_cuda.cuCtxGetLimit(&now, CU_LIMIT_STACK_SIZE);

	if (result != CUDA_SUCCESS)
		return result;
	learn_included(place->ordinal);
	least_stack_bytes[place->ordinal] = local_bytes > before ? local_bytes : before;
	uint64_t wanted = cost_of_limits(place->ordinal, CU_LIMIT_STACK_SIZE, now);
	if (wanted <= charged)
		return CUDA_SUCCESS;
	if (!aq_charge(place->device, AQ_CONTEXT, wanted - charged)) {
		least_stack_bytes[place->ordinal] = before;
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	note_charged_for_limits(place, wanted);
	return CUDA_SUCCESS;
}

CUresult aq_context_reserve_stack(const struct aq_place *place, uint64_t local_bytes)
{
	if (__builtin_expect(local_bytes <= sized_limits[STACK].default_bytes, 1) || place->device < 0 || place->ordinal < 0 ||
	    place->ordinal >= AQ_MAX_ORDINALS)
		return CUDA_SUCCESS;
	if (!enter(place->ordinal))
		return CUDA_SUCCESS; /* from a callback: counted with the next function or limit */
	CUresult result = charge_stack(place, (local_bytes + STACK_UNIT_BYTES - 1) / STACK_UNIT_BYTES * STACK_UNIT_BYTES);
	leave(place->ordinal);
	return result;
}

/* ---- checkpoints ----------------------------------------------------------------------------------------------- */

/* The memory of a process stays charged while it is in host memory, so there is room for it when it returns: on the device where it was. On
 * another device it has no charge, and the container may not have a grant of that device. */
CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *arguments)
{
	AQ_LIMITED_OR_RETURN(cuCheckpointProcessRestore(pid, arguments));
	for (unsigned int i = 0; arguments && arguments->gpuPairs && i < arguments->gpuPairsCount; i++)
		if (memcmp(&arguments->gpuPairs[i].oldUuid, &arguments->gpuPairs[i].newUuid, sizeof(CUuuid))) {
			aq_log_warn("process %d is not restored: its memory is charged to its first device and cannot move to another one",
				    pid);
			return CUDA_ERROR_NOT_PERMITTED;
		}
	return aq_cuda.cuCheckpointProcessRestore(pid, arguments);
}
