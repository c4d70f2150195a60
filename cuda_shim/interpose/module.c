/* Modules by measurement.
 *
 * Around a load the device's free memory is compared: what it lost is the module's, another allocation's, or a neighbour's. Where the
 * driver lists this process (NVML), its figure less all that is charged, compared with the same difference before its first load, tells
 * them apart. Where it does not list it, or the process is now charged for more than it holds (managed memory that is not on the device), what the
 * container was charged meanwhile is taken off, and of the rest no more is believed than the image is large: so modules are charged at
 * once, as the limit wants it, and however often neighbours grow meanwhile, the sum is no more than what was loaded. What an image does not
 * show (variables, code that is compressed or compiled) the agent's overhead figure has.
 *
 * NVML costs the driver up to milliseconds, so it is asked only when the device's free memory shrank at all. What is loaded later, when a
 * function is first used, shows in the agent's overhead figure. */
#include "interpose/module.h"

#include <pthread.h>
#include <string.h>

#include "account/account.h"
#include "account/map.h"
#include "interpose/context.h"
#include "interpose/driver.h"
#include "interpose/image.h"
#include "interpose/measure.h"
#include "interpose/outputs.h"
#include "interpose/relax.h"
#include "shim.h"

#define PAGE_BYTES ((uint64_t)2 << 20)    /* of device memory */
#define UNSURE_BYTES ((uint64_t)64 << 20) /* an image may hold code for many kinds of devices, of which one is loaded */

/* Modules and libraries that were charged, by handle. */
static struct aq_map modules;

/* Held while NVML is asked and growth is charged, so that no two threads charge the same bytes; never across a call of CUDA (latch.h), so
 * never while room is made. */
static pthread_mutex_t measuring = PTHREAD_MUTEX_INITIALIZER;

/* The driver's count of this process less what is charged, before the first load since its newest context. */
static struct {
	bool known;
	int64_t uncharged_bytes;
} baselines[AQ_MAX_DEVICES];

/* Of the loads that were charged by what is likely, since the newest context: the images, and what was charged for them. Under the gate. */
static struct {
	uint64_t image_bytes;
	uint64_t charged_bytes;
} believed[AQ_MAX_DEVICES];

enum load_form { MODULE_FILE, MODULE_DATA, MODULE_DATA_EX, MODULE_FAT_BINARY, LIBRARY_DATA, LIBRARY_FILE };

struct load_call {
	enum load_form form;
	void *made; /* CUmodule or CUlibrary */
	const void *image; /* or the path */
	CUjit_option *jit_options;
	void **jit_values;
	unsigned int jit_count;
	CUlibraryOption *options;
	void **values;
	unsigned int count;
};

/* ---- measuring ------------------------------------------------------------------------------------------------- */

static uint64_t least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

struct moment {
	uint64_t free_bytes;      /* of the device, for everyone */
	uint64_t container_bytes; /* charged to the container */
};

static bool look(int device, struct moment *moment)
{
	size_t free_bytes = 0, total_bytes;

	moment->container_bytes = aq_account_container_bytes(device);
	CUstreamCaptureMode mode = aq_relax();
	CUresult result = aq_cuda.cuMemGetInfo_v2(&free_bytes, &total_bytes);
	aq_restrict(mode);
	moment->free_bytes = free_bytes;
	return result == CUDA_SUCCESS;
}

/* What the driver counts for this process beyond its charges. False when the driver does not list the process. With the gate held. */
static bool uncharged_bytes(int device, int64_t *bytes)
{
	/* Memory that another thread takes or gives back meanwhile must not look like growth: the larger charge counts. */
	uint64_t before = aq_account_own_bytes(device);
	uint64_t own = aq_measure(aq_account_region(), aq_device_uuid(device), device).own_bytes;
	uint64_t after = aq_account_own_bytes(device);

	*bytes = (int64_t)(own - (before > after ? before : after));
	return own != 0;
}

static void learn_baseline(int device)
{
	aq_measure_open();
	pthread_mutex_lock(&measuring);
	if (!baselines[device].known)
		baselines[device].known = uncharged_bytes(device, &baselines[device].uncharged_bytes);
	pthread_mutex_unlock(&measuring);
}

static uint64_t whole_pages(uint64_t bytes)
{
	return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

/* What a load may have taken by the size of its image, small ones sharing pages. With the gate held, once for a load. */
static uint64_t expected_bytes(const struct load_call *call, int device)
{
	bool is_file = call->form == MODULE_FILE || call->form == LIBRARY_FILE;
	uint64_t bytes = least(is_file ? aq_image_file_bytes(call->image) : aq_image_bytes(call->image), UNSURE_BYTES);

	believed[device].image_bytes += bytes;
	return least(whole_pages(bytes), whole_pages(believed[device].image_bytes) - believed[device].charged_bytes);
}

/* What may be believed of the device's loss when nobody tells whose it is. */
static uint64_t likely_ours(const struct load_call *call, int device, uint64_t lost, const struct moment *before)
{
	uint64_t now = aq_account_container_bytes(device); /* with what another load was charged a moment ago */
	uint64_t charged = now > before->container_bytes ? now - before->container_bytes : 0;
	uint64_t likely = least(lost > charged ? lost - charged : 0, expected_bytes(call, device));

	believed[device].charged_bytes += likely;
	return likely;
}

/* Of what the device lost since `before`: what this process took for this load, and was not charged for. With the gate held. */
static uint64_t growth_of(const struct load_call *call, int device, uint64_t lost, const struct moment *before)
{
	int64_t uncharged;

	if (!baselines[device].known || !uncharged_bytes(device, &uncharged))
		return likely_ours(call, device, lost, before);
	int64_t own = uncharged - baselines[device].uncharged_bytes;
	/* Less than is uncharged may have been lost around this call: the rest is another thread's, which is about to look. */
	return own >= 0 ? least(lost, (uint64_t)own) : likely_ours(call, device, lost, before);
}

static void set_baseline_unknown(int device)
{
	if (device < 0)
		return;
	pthread_mutex_lock(&measuring);
	baselines[device].known = false;
	believed[device].image_bytes = believed[device].charged_bytes = 0;
	pthread_mutex_unlock(&measuring);
}

void aq_modules_context_begun(int device)
{
	set_baseline_unknown(device);
}

/* ---- loading --------------------------------------------------------------------------------------------------- */

static CUresult load(struct load_call *c)
{
	CUmodule *module = (CUmodule *)(void *)&c->made;
	CUlibrary *library = (CUlibrary *)(void *)&c->made;

	switch (c->form) {
	case MODULE_FILE: return aq_cuda.cuModuleLoad(module, c->image);
	case MODULE_DATA: return aq_cuda.cuModuleLoadData(module, c->image);
	case MODULE_DATA_EX: return aq_cuda.cuModuleLoadDataEx(module, c->image, c->jit_count, c->jit_options, c->jit_values);
	case MODULE_FAT_BINARY: return aq_cuda.cuModuleLoadFatBinary(module, c->image);
	case LIBRARY_DATA: return aq_cuda.cuLibraryLoadData(library, c->image, c->jit_options, c->jit_values, c->jit_count, c->options,
							    c->values, c->count);
	default: return aq_cuda.cuLibraryLoadFromFile(library, c->image, c->jit_options, c->jit_values, c->jit_count, c->options, c->values,
						      c->count);
	}
}

static void unload(const struct load_call *c)
{
	CUstreamCaptureMode mode = aq_relax();

	if (c->form == LIBRARY_DATA || c->form == LIBRARY_FILE)
		aq_cuda.cuLibraryUnload(c->made);
	else
		aq_cuda.cuModuleUnload(c->made);
	aq_restrict(mode);
}

/* Charge what was taken, past the limit if it must be, for another thread that measures must not find it uncharged. True when it fits. */
static bool charge_measured(const struct load_call *call, int device, uint64_t lost, const struct moment *before, uint64_t *bytes)
{
	pthread_mutex_lock(&measuring);
	*bytes = growth_of(call, device, lost, before);
	bool fits = aq_charge_quick(device, AQ_MODULE, *bytes);
	if (!fits)
		aq_charge_taken(device, AQ_MODULE, *bytes);
	pthread_mutex_unlock(&measuring);
	return fits;
}

/* May what was charged past the limit stay, after memory was taken back? */
static bool charge_again(int device, uint64_t bytes)
{
	aq_reclaim(device);
	pthread_mutex_lock(&measuring);
	aq_uncharge(device, AQ_MODULE, bytes);
	bool fits = aq_charge_quick(device, AQ_MODULE, bytes);
	pthread_mutex_unlock(&measuring);
	if (!fits)
		aq_refused(device, bytes);
	return fits;
}

/* Charge what a load took, and remember it. False when it does not fit. */
static bool charge_growth(const struct load_call *call, const struct aq_place *place, const struct moment *before)
{
	struct moment now;
	uint64_t bytes;

	if (!look(place->device, &now) || now.free_bytes >= before->free_bytes)
		return true;
	if (!charge_measured(call, place->device, before->free_bytes - now.free_bytes, before, &bytes) && !charge_again(place->device, bytes))
		return false;
	if (!bytes)
		return true;
	struct aq_entry made = { .key = (uintptr_t)call->made, .bytes = bytes, .owner = place->owner, .device = (uint32_t)place->device,
				 .kind = AQ_MODULE };
	if (aq_map_put(&modules, &made))
		return true;
	aq_uncharge(place->device, AQ_MODULE, bytes);
	return false;
}

/* Is there no room for even the smallest module? */
static bool is_full(int device)
{
	if (!aq_account_full(device))
		return false;
	aq_reclaim(device);
	return aq_account_full(device);
}

/* The values of a compiler's options that it writes, and the logs they point to. False when there is no memory to keep them. */
static bool keep_jit_outputs(struct aq_outputs *outputs, const struct load_call *call)
{
	void *logs[2] = { NULL };
	size_t bytes[2] = { 0 };

	if (!call->jit_options || !call->jit_values)
		return true;
	for (unsigned int i = 0; i < call->jit_count; i++) {
		switch ((int)call->jit_options[i]) {
		case CU_JIT_INFO_LOG_BUFFER: logs[0] = call->jit_values[i]; break;
		case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: bytes[0] = (uint32_t)(uintptr_t)call->jit_values[i]; break;
		case CU_JIT_ERROR_LOG_BUFFER: logs[1] = call->jit_values[i]; break;
		case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: bytes[1] = (uint32_t)(uintptr_t)call->jit_values[i]; break;
		default: break;
		}
	}
	return aq_outputs_keep(outputs, call->jit_values, call->jit_count * sizeof(*call->jit_values)) &&
	       aq_outputs_keep(outputs, logs[0], bytes[0]) && aq_outputs_keep(outputs, logs[1], bytes[1]);
}

/* Load, when there may be room: what the module takes shows only then. */
static CUresult load_and_measure(struct load_call *call, const struct aq_place *place, const struct moment *before)
{
	struct aq_outputs outputs = { 0 };
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

	learn_baseline(place->device);
	if (keep_jit_outputs(&outputs, call))
		result = load(call);
	if (result == CUDA_SUCCESS && !charge_growth(call, place, before)) {
		unload(call);
		aq_outputs_put_back(&outputs);
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	aq_outputs_forget(&outputs);
	return result;
}

static CUresult load_charged(void **handle, struct load_call *call)
{
	struct aq_place place;
	struct moment before;

	if (!handle)
		return CUDA_ERROR_INVALID_VALUE; /* as from the driver */
	if (!aq_place_current(&place) || place.device < 0 || !look(place.device, &before)) {
		CUresult result = load(call); /* a library may be loaded before there is a context, and takes nothing yet */
		if (result == CUDA_SUCCESS)
			*handle = call->made;
		return result;
	}
	if (is_full(place.device)) {
		aq_refused(place.device, 0);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	CUresult result = load_and_measure(call, &place, &before);
	if (result == CUDA_SUCCESS)
		*handle = call->made;
	return result;
}

CUresult cuModuleLoad(CUmodule *module, const char *path)
{
	AQ_LIMITED_OR_RETURN(cuModuleLoad(module, path));
	return load_charged((void **)module, &(struct load_call){ .form = MODULE_FILE, .image = path });
}

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
	AQ_LIMITED_OR_RETURN(cuModuleLoadData(module, image));
	return load_charged((void **)module, &(struct load_call){ .form = MODULE_DATA, .image = image });
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values)
{
	AQ_LIMITED_OR_RETURN(cuModuleLoadDataEx(module, image, count, options, values));
	return load_charged((void **)module, &(struct load_call){ .form = MODULE_DATA_EX, .image = image, .jit_count = count,
								  .jit_options = options, .jit_values = values });
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
	AQ_LIMITED_OR_RETURN(cuModuleLoadFatBinary(module, image));
	return load_charged((void **)module, &(struct load_call){ .form = MODULE_FAT_BINARY, .image = image });
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit_options, void **jit_values, unsigned int jit_count,
			   CUlibraryOption *options, void **values, unsigned int count)
{
	AQ_LIMITED_OR_RETURN(cuLibraryLoadData(library, code, jit_options, jit_values, jit_count, options, values, count));
	return load_charged((void **)library, &(struct load_call){ .form = LIBRARY_DATA, .image = code, .jit_options = jit_options,
								   .jit_values = jit_values, .jit_count = jit_count, .options = options,
								   .values = values, .count = count });
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *jit_options, void **jit_values, unsigned int jit_count,
			       CUlibraryOption *options, void **values, unsigned int count)
{
	AQ_LIMITED_OR_RETURN(cuLibraryLoadFromFile(library, path, jit_options, jit_values, jit_count, options, values, count));
	return load_charged((void **)library, &(struct load_call){ .form = LIBRARY_FILE, .image = path, .jit_options = jit_options,
								   .jit_values = jit_values, .jit_count = jit_count, .options = options,
								   .values = values, .count = count });
}

/* ---- unloading ------------------------------------------------------------------------------------------------- */

static void credit(const struct aq_entry *entry, void *context)
{
	(void)context;
	aq_uncharge((int)entry->device, AQ_MODULE, entry->bytes);
}

/* The handle leaves the map before the driver may give it out again, and comes back when the driver refuses. */
#define UNLOAD_HOOK(name, handle_type)                                                  \
	CUresult name(handle_type handle)                                               \
	{                                                                               \
		struct aq_entry held;                                                   \
		AQ_LIMITED_OR_RETURN(name(handle));                                     \
		bool known = aq_map_take(&modules, (uintptr_t)handle, &held);           \
		CUresult result = aq_cuda.name(handle);                                 \
		if (known && result == CUDA_SUCCESS)                                    \
			credit(&held, NULL);                                            \
		else if (known)                                                         \
			aq_map_put(&modules, &held);                                    \
		return result;                                                          \
	}

UNLOAD_HOOK(cuModuleUnload, CUmodule)
UNLOAD_HOOK(cuLibraryUnload, CUlibrary)

struct owner {
	int device;
	uint64_t owner;
};

static bool belongs_to(const struct aq_entry *entry, void *context)
{
	const struct owner *owner = context;

	return (int)entry->device == owner->device && entry->owner == owner->owner;
}

void aq_modules_context_ended(int device, uint64_t owner)
{
	struct owner gone = { device, owner };

	aq_map_drain(&modules, belongs_to, credit, &gone);
	set_baseline_unknown(device);
}

void aq_modules_forget(void)
{
	pthread_mutex_init(&measuring, NULL);
	aq_map_forget(&modules);
	for (int device = 0; device < AQ_MAX_DEVICES; device++)
		baselines[device].known = false;
	memset(believed, 0, sizeof(believed));
}
