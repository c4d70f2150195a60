/* Contexts. They cost device memory, and what was allocated in them dies with them.
 *
 * A context's cost is charged before the driver makes it when it is known (the agent's figure, or what an earlier process of the
 * container measured), and is else measured around the making. One gate per device keeps making, releasing and measuring apart: rare
 * calls that take the driver tens of milliseconds. */
#include "interpose/context.h"

#include <pthread.h>
#include <string.h>

#include "interpose/allocations.h"
#include "interpose/deferred.h"
#include "interpose/driver.h"
#include "interpose/latch.h"
#include "interpose/measure.h"
#include "interpose/module.h"
#include "interpose/pace.h"
#include "interpose/reservoir.h"
#include "shim.h"

#define PAGE_BYTES ((uint64_t)2 << 20) /* of device memory */
#define UNSURE_BYTES ((uint64_t)1 << 30) /* more than any context takes: what a device lost beyond it went to a neighbour */

static struct {
	pthread_mutex_t gate;
	_Atomic bool charged;    /* the primary context is alive and paid for */
	uint64_t context_bytes;
	uint64_t limit_bytes;    /* the part of it that its limits cost */
} primaries[AQ_MAX_ORDINALS] = { [0 ... AQ_MAX_ORDINALS - 1] = { .gate = PTHREAD_MUTEX_INITIALIZER } };

/* This thread holds a gate. The driver may call back into the program from where it is called with one (tools subscribe to its
 * calls): such a call waits for no gate, neither its own thread's nor that of another device, whose thread may wait for this one's
 * (latch.h). What it does to the same device counts as part of the call around it; a primary context that it makes on another is
 * charged when it is met next. */
static __thread bool is_inside;

/* False from inside a gate or a latch. */
static bool enter(CUdevice ordinal)
{
	if (is_inside || aq_latch_is_inside())
		return false;
	int device = aq_device_of(ordinal);
	if (device >= 0 && !aq_account_context_bytes(device))
		aq_measure_open(); /* it is to be measured what a context costs */
	pthread_mutex_lock(&primaries[ordinal].gate);
	is_inside = true;
	return true;
}

static void leave(CUdevice ordinal)
{
	is_inside = false;
	pthread_mutex_unlock(&primaries[ordinal].gate);
}

/* Contexts made by cuCtxCreate: key = context, bytes = its cost, owner = the part of it that its limits cost, device, kind = CUDA ordinal. */
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

/* Is every context on that device, which is granted, and its primary context paid for? One that is not may still be made past us, and has
 * to be met by looking. */
static bool is_place_of_all(const struct aq_place *place)
{
	return aq_device_is_only() && place->device >= 0 && primaries[place->ordinal].charged;
}

static __attribute__((noinline)) bool look_up(CUcontext context, bool is_current, uint64_t now, struct aq_place *place)
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
			return false;
		result = aq_cuda.cuCtxGetDevice(&ordinal);
		if (!is_current)
			aq_cuda.cuCtxPopCurrent_v2(&context);
		if (result != CUDA_SUCCESS)
			return false;
		*place = (struct aq_place){ .device = aq_device_of(ordinal), .ordinal = ordinal };
		is_settled = is_paid_for(ordinal);
	}
	if (is_current && is_settled) {
		seen.context = context;
		seen.epoch = now;
		seen.only_epoch = is_place_of_all(place) ? now : 0;
		seen.place = *place;
	}
	return true;
}

/* What the thread remembers of the context that was current when it last looked. */
static inline bool remembered(CUcontext context, uint64_t now, struct aq_place *place)
{
	if (__builtin_expect(context != seen.context || now != seen.epoch || seen.place.device < 0, 0))
		return false;
	*place = seen.place;
	return true;
}

bool aq_place_current(struct aq_place *place)
{
	CUcontext context = NULL;
	uint64_t now = atomic_load_explicit(&epoch, memory_order_acquire);

	if (aq_cuda.cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context)
		return false;
	return remembered(context, now, place) || look_up(context, true, now, place);
}

bool aq_place_of_stream(CUstream stream, struct aq_place *place)
{
	CUcontext context = NULL, current = NULL;
	uint64_t now = atomic_load_explicit(&epoch, memory_order_acquire);

	if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
		return aq_place_current(place);
	if (aq_cuda.cuStreamGetCtx(stream, &context) != CUDA_SUCCESS || !context)
		return aq_place_current(place);
	if (remembered(context, now, place))
		return true;
	bool is_current = aq_cuda.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context;
	return look_up(context, is_current, now, place);
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

	if (stream && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD && aq_cuda.cuStreamGetCtx(stream, &context) == CUDA_SUCCESS)
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

static CUdevice current_ordinal(void)
{
	struct aq_place place;

	return aq_place_current(&place) ? place.ordinal : 0;
}

CUresult aq_place_of_location(const CUmemLocation *location, CUmemAllocationType type, CUdevice *ordinal)
{
	switch (location->type) {
	case CU_MEM_LOCATION_TYPE_DEVICE:
		*ordinal = location->id;
		return CUDA_SUCCESS;
	case CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN:
		*ordinal = location->id & 0xff;
		return CUDA_SUCCESS;
	case CU_MEM_LOCATION_TYPE_INVALID:
		*ordinal = current_ordinal(); /* if the driver takes it at all */
		return CUDA_SUCCESS;
	case CU_MEM_LOCATION_TYPE_HOST:
	case CU_MEM_LOCATION_TYPE_HOST_NUMA:
	case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
		*ordinal = type == CU_MEM_ALLOCATION_TYPE_MANAGED ? current_ordinal() : AQ_NO_ORDINAL;
		return CUDA_SUCCESS;
	default:
		aq_log_warn("memory at a location of type %d is refused: it cannot be told which device it takes", (int)location->type);
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
	aq_modules_context_begun(device);
	atomic_fetch_add(&epoch, 1);
}

static void ended(const struct aq_place *place, uint64_t context_bytes)
{
	atomic_fetch_add(&epoch, 1);
	aq_allocations_drop(place->device, place->owner);
	aq_modules_context_ended(place->device, place->owner);
	aq_reservoirs_settle(place->device);
	aq_uncharge(place->device, AQ_CONTEXT, context_bytes);
	aq_account_contexts_add(place->device, -1);
}

/* Before and after the driver is asked to end a context. */
static void may_end(const struct aq_ending *ending)
{
	aq_pace_context_ending(ending);
	aq_deferred_context_ending(ending);
}

static void may_have_ended(const struct aq_ending *ending, bool has_ended)
{
	aq_pace_context_ended(ending, has_ended);
	aq_deferred_context_ended(ending, has_ended);
}

static void warn_of_unknown_cost(int device)
{
	aq_log_warn("cannot tell what a context on %s costs: NVML does not say, and the agent gave no figure", aq_device_uuid(device));
}

/* Make a context and charge it. `make` calls the driver; `unmake` takes the context back when its measured cost does not fit. */
static CUresult make_charged(CUdevice ordinal, uint64_t *cost, CUresult (*make)(void *), void (*unmake)(void *), void *call)
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
		warn_of_unknown_cost(device);
	if (!aq_charge(device, AQ_CONTEXT, *cost)) {
		unmake(call);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (is_own) /* later processes pay what this one learns: never a figure that a neighbour may have a part in */
		aq_account_learn_context_bytes(device, *cost);
	return CUDA_SUCCESS;
}

/* ---- primary contexts ------------------------------------------------------------------------------------------ */

/* What a context costs that is there already: where neither the agent nor another process told, what the driver counts for this one beyond
 * its charges. Its modules may be in that, so no later process learns it. */
static uint64_t cost_of_made(int device)
{
	uint64_t known = aq_account_context_bytes(device), before = aq_account_own_bytes(device);

	if (known)
		return known;
	uint64_t own = aq_measure(aq_account_region(), aq_device_uuid(device), device).own_bytes;
	uint64_t after = aq_account_own_bytes(device);
	/* What another thread takes or gives back meanwhile must not look like the context's: the larger charge counts. */
	uint64_t charged = before > after ? before : after;
	if (own <= charged) {
		warn_of_unknown_cost(device);
		return 0;
	}
	return own - charged < UNSURE_BYTES ? own - charged : UNSURE_BYTES;
}

/* Make the books say what the driver says. Old runtimes make and end primary contexts past us, through a private table of the driver's, and
 * one may be older than the limits of the process. What is there already is charged, past the limit if it must be; what is gone is
 * credited, with all that lived in it. True when there is one and it is paid for. With the gate held. */
static bool settle_primary(CUdevice ordinal)
{
	struct aq_place place = { .device = aq_device_of(ordinal), .ordinal = ordinal };
	bool charged = primaries[ordinal].charged;
	int active = charged;
	unsigned int flags;

	if (aq_cuda.cuDevicePrimaryCtxGetState(ordinal, &flags, &active) != CUDA_SUCCESS || !active == !charged || place.device < 0)
		return charged;
	if (active) {
		primaries[ordinal].context_bytes = cost_of_made(place.device);
		aq_charge_taken(place.device, AQ_CONTEXT, primaries[ordinal].context_bytes);
		primaries[ordinal].limit_bytes = 0;
		primaries[ordinal].charged = true;
		begun(place.device);
	} else {
		may_have_ended(&(struct aq_ending){ .device = place.device }, true); /* its events first: they went with it */
		ended(&place, primaries[ordinal].context_bytes);
		primaries[ordinal].charged = false; /* until here nobody who meets it waits for the gate, for he may hold what is settled there */
	}
	return active;
}

/* Charge the primary context when it is first met and was made past us. False when this thread is in the middle of making or ending one, or
 * inside a latch, where it must wait for nobody: then it is met again. */
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
static CUresult make_primary(CUdevice ordinal, CUresult (*make)(void *), void (*unmake)(void *), void *call)
{
	CUresult result;

	if (!enter(ordinal))
		return make(call);
	if (settle_primary(ordinal)) {
		result = make(call);
	} else {
		result = make_charged(ordinal, &primaries[ordinal].context_bytes, make, unmake, call);
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

static void unretain(void *call)
{
	const struct retain_call *retain_call = call;

	aq_cuda.cuDevicePrimaryCtxRelease_v2(retain_call->ordinal);
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

/* One that was made past us is charged before it may end, so that all that lived in it is credited. The result does not say whether it has
 * ended: it may also be the error of an earlier launch, which keeps no context alive. */
#define PRIMARY_HOOK(name)                                                       \
	CUresult name(CUdevice ordinal)                                          \
	{                                                                        \
		AQ_LIMITED_OR_RETURN(name(ordinal));                             \
		if (ordinal < 0 || ordinal >= AQ_MAX_ORDINALS || !enter(ordinal)) \
			return aq_cuda.name(ordinal);                            \
		struct aq_ending ending = { .device = aq_device_of(ordinal) };   \
		settle_primary(ordinal);                                         \
		may_end(&ending);                                                \
		CUresult result = aq_cuda.name(ordinal);                         \
		may_have_ended(&ending, !settle_primary(ordinal));               \
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

static void uncreate(void *call)
{
	aq_cuda.cuCtxDestroy_v2(((struct create_call *)call)->made);
}

static CUresult create_charged(CUcontext *context, struct create_call *call)
{
	CUdevice ordinal = call->ordinal;
	uint64_t cost;

	if (!context)
		return CUDA_ERROR_INVALID_VALUE; /* as from the driver */
	if (ordinal < 0 || ordinal >= AQ_MAX_ORDINALS) {
		CUresult result = create(call); /* the driver says what is wrong */
		if (result == CUDA_SUCCESS)
			*context = call->made;
		return result;
	}
	bool entered = enter(ordinal);
	CUresult result = make_charged(ordinal, &cost, create, uncreate, call);
	if (entered)
		leave(ordinal);
	if (result != CUDA_SUCCESS)
		return result;
	struct aq_entry made = { .key = (uintptr_t)call->made, .bytes = cost, .device = (uint32_t)aq_device_of(ordinal), .kind = (uint32_t)ordinal };
	if (!aq_map_put(&contexts, &made)) {
		uncreate(call);
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
	return create_charged(context, &(struct create_call){ .form = CREATE_V3, .affinity = affinity, .affinity_count = count,
							      .flags = flags, .ordinal = ordinal });
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

static bool is_alive(CUcontext context)
{
	unsigned int version;

	return aq_cuda.cuCtxGetApiVersion(context, &version) == CUDA_SUCCESS;
}

/* Who looked meanwhile took it for the primary one, and has to look again. */
static void lives_on(const struct aq_entry *made)
{
	aq_map_put(&contexts, made);
	atomic_fetch_add(&epoch, 1);
}

/* The context leaves the map before the driver may give its address to another one, and comes back when it lives on. An error does not say
 * that it does: it may be that of an earlier launch. */
#define DESTROY_HOOK(name, success_ends_it)                                                                      \
	CUresult name(CUcontext context)                                                                         \
	{                                                                                                        \
		struct aq_entry made;                                                                            \
		AQ_LIMITED_OR_RETURN(name(context));                                                             \
		if (!aq_map_take(&contexts, (uintptr_t)context, &made))                                          \
			return aq_cuda.name(context);                                                            \
		struct aq_ending ending = { .device = (int)made.device, .owner = made.key };                     \
		may_end(&ending);                                                                                \
		CUresult result = aq_cuda.name(context);                                                         \
		bool has_ended = (result == CUDA_SUCCESS && (success_ends_it)) || !is_alive(context);            \
		if (has_ended)                                                                                   \
			ended(&(struct aq_place){ .device = (int)made.device, .owner = made.key }, made.bytes);  \
		else                                                                                             \
			lives_on(&made);                                                                         \
		may_have_ended(&ending, has_ended);                                                              \
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

static void uncreate_green(void *call)
{
	aq_cuda.cuGreenCtxDestroy(((struct green_call *)call)->made);
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

/* Its device is not told by the handle: look at all whose primary context may have lived by it alone. */
CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
	AQ_LIMITED_OR_RETURN(cuGreenCtxDestroy(green));
	struct aq_ending primary[AQ_MAX_ORDINALS], itself = { .device = AQ_NO_DEVICE };
	bool marked[AQ_MAX_ORDINALS];

	aq_cuda.cuCtxFromGreenCtx(&itself.green, green);
	may_end(&itself);
	for (CUdevice ordinal = 0; ordinal < AQ_MAX_ORDINALS; ordinal++) {
		marked[ordinal] = false;
		if (!enter(ordinal))
			continue;
		marked[ordinal] = primaries[ordinal].charged;
		primary[ordinal] = (struct aq_ending){ .device = marked[ordinal] ? aq_device_of(ordinal) : AQ_NO_DEVICE };
		if (marked[ordinal])
			may_end(&primary[ordinal]);
		leave(ordinal);
	}
	CUresult result = aq_cuda.cuGreenCtxDestroy(green);
	atomic_fetch_add(&epoch, 1); /* its address may come back as one of another device, also while the primary context lives on */
	for (CUdevice ordinal = 0; ordinal < AQ_MAX_ORDINALS; ordinal++) {
		if (!enter(ordinal))
			continue;
		if (marked[ordinal])
			may_have_ended(&primary[ordinal], !settle_primary(ordinal));
		leave(ordinal);
	}
	may_have_ended(&itself, result == CUDA_SUCCESS || !is_alive(itself.green));
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

/* What the price of a context includes, by CUDA ordinal; 0 = not asked yet. With the device's gate held. */
static uint64_t included_bytes[AQ_MAX_ORDINALS][SIZED_LIMITS];

/* Before the first limit is set on a device. Print buffer and heap then are what contexts begin with, which may be more than is documented. Of
 * stacks that cannot be told: the driver raises them by itself, for the kernels that are launched. */
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

/* What the limits of the current context cost, `changed` being `value`. UINT64_MAX when no device has as much. */
static uint64_t cost_of_limits(CUdevice ordinal, CUlimit changed, uint64_t value)
{
	int threads = 0, multiprocessors = 0;
	uint64_t cost = 0;

	aq_cuda.cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, ordinal);
	aq_cuda.cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, ordinal);
	for (unsigned i = 0; i < SIZED_LIMITS; i++) {
		uint64_t copies = i == STACK ? (uint64_t)threads * (uint64_t)multiprocessors : 1, bytes;
		size_t now = value;

		if (sized_limits[i].limit != changed && aq_cuda.cuCtxGetLimit(&now, sized_limits[i].limit) != CUDA_SUCCESS)
			continue;
		uint64_t extra = now > included_bytes[ordinal][i] ? now - included_bytes[ordinal][i] : 0;
		if (__builtin_mul_overflow(extra, copies, &bytes) || __builtin_add_overflow(cost, bytes, &cost) || cost > UINT64_MAX - PAGE_BYTES)
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

/* What was asked for is reserved first; what is paid in the end is what the driver keeps, for it may round, clamp, or have raised a limit by
 * itself. So the record of what was paid is compared, never what the driver says now: more than that must not be given back. */
static CUresult set_limit_charged(const struct aq_place *place, CUlimit limit, size_t value)
{
	size_t now = 0;
	CUresult result = aq_cuda.cuCtxGetLimit(&now, limit);

	if (result != CUDA_SUCCESS)
		return aq_cuda.cuCtxSetLimit(limit, value); /* the driver says what is wrong */
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
		kept = wanted; /* nonsense */
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
	if (!sized || !aq_place_current(&place) || place.ordinal < 0 || place.ordinal >= AQ_MAX_ORDINALS)
		return aq_cuda.cuCtxSetLimit(limit, value);
	if (!enter(place.ordinal))
		return aq_cuda.cuCtxSetLimit(limit, value); /* from a callback: counted with the next limit that is set in the context */
	CUresult result = set_limit_charged(&place, limit, value);
	leave(place.ordinal);
	return result;
}

/* ---- checkpoints ----------------------------------------------------------------------------------------------- */

/* What a process held stays charged while it lies in host memory, so there is room for it when it comes back: on the device where it was.
 * On another device nothing was charged for it, nor need that one be granted to the container. */
CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *arguments)
{
	AQ_LIMITED_OR_RETURN(cuCheckpointProcessRestore(pid, arguments));
	for (unsigned int i = 0; arguments && arguments->gpuPairs && i < arguments->gpuPairsCount; i++)
		if (memcmp(&arguments->gpuPairs[i].oldUuid, &arguments->gpuPairs[i].newUuid, sizeof(CUuuid))) {
			aq_log_warn("process %d is not restored: its memory is charged to the device it was on, and may not move to another", pid);
			return CUDA_ERROR_NOT_PERMITTED;
		}
	return aq_cuda.cuCheckpointProcessRestore(pid, arguments);
}
