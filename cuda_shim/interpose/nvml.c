/* SPDX-License-Identifier: Apache-2.0 */
/* NVML as the container may see it: its share of memory, its own processes under the pids it knows them by, its own utilisation.
 *
 * Takes no slot and writes nothing: monitoring is not using. Devices are recognised by UUID. A device that is not granted (for example the
 * GPU above a granted MIG instance) shows its physical memory and no processes. */
#include "interpose/nvml.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "account/account.h"
#include "early.h"
#include "interpose/naming.h"
#include "limit/memory.h"
#include "region/container.h"

#define MIB ((uint64_t)1 << 20)
#define UTILIZATION_WINDOW_US 1000000ull /* "now", as the driver's own figure means it: up to a second */

static nvmlReturn_t missing(void)
{
	return NVML_ERROR_FUNCTION_NOT_FOUND;
}

#define HIDE(symbol)
#define DENY(symbol)
struct aq_nvml_driver aq_nvml = {
#define HOOK(symbol, arguments) .symbol = (nvmlReturn_t(*) arguments)(void *)missing,
#define USE(symbol, arguments) .symbol = (nvmlReturn_t(*) arguments)(void *)missing,
#include "interpose/nvml_hooks.def"
#include "interpose/nvml_calls.def"
#undef HOOK
#undef USE
};
#undef HIDE
#undef DENY

static struct {
	const char *name;
	void **real;
} const driver_calls[] = {
#define HOOK(symbol, arguments) { #symbol, (void **)(void *)&aq_nvml.symbol },
#define USE HOOK
#define HIDE(symbol)
#define DENY(symbol)
#include "interpose/nvml_hooks.def"
#include "interpose/nvml_calls.def"
#undef HOOK
#undef USE
#undef HIDE
#undef DENY
};

static _Atomic int mode_word;
static bool bound;
static struct aq_container container;

/* ---- start ----------------------------------------------------------------------------------------------------- */

static void bind_locked(const struct aq_object *object)
{
	for (size_t i = 0; i < sizeof(driver_calls) / sizeof(driver_calls[0]); i++) {
		void *address = aq_object_symbol(object, driver_calls[i].name);
		if (address)
			*driver_calls[i].real = address;
	}
	bound = true;
}

void aq_nvml_bind_to(const struct aq_object *object)
{
	aq_early_enter();
	if (!bound)
		bind_locked(object);
	aq_early_leave();
}

static enum aq_nvml_mode decide_locked(void)
{
	static bool reported;
	char library[PATH_MAX];
	struct aq_object object;
	struct aq_fault fault;
	bool may_pass;

	if (!bound && (aq_object_find(AQ_NVML_DRIVER_NAME, &object) || aq_object_find(AQ_NVML_SONAME, &object)))
		bind_locked(&object);
	aq_object_own_path(library, sizeof(library));
	if (!aq_container_open(&container, library, AQ_REGION_READ, &may_pass, &fault))
		return AQ_NVML_LIMITED;
	if (!reported)
		aq_log_error("NVML: %s; %s", fault.text,
			     may_pass ? "the container's policy allows this program to see the whole device" : "refusing NVML");
	reported = true;
	return may_pass ? AQ_NVML_PASSING : AQ_NVML_REFUSING;
}

enum aq_nvml_mode aq_nvml_decide(void)
{
	enum aq_nvml_mode mode = (enum aq_nvml_mode)atomic_load_explicit(&mode_word, memory_order_acquire);

	if (mode == AQ_NVML_LIMITED || mode == AQ_NVML_PASSING)
		return mode;
	aq_early_enter();
	mode = (enum aq_nvml_mode)atomic_load_explicit(&mode_word, memory_order_acquire);
	if (mode != AQ_NVML_LIMITED && mode != AQ_NVML_PASSING) {
		mode = decide_locked();
		atomic_store_explicit(&mode_word, mode, memory_order_release);
	}
	aq_early_leave();
	return mode;
}

nvmlReturn_t nvmlInit(void)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlInit());
	return aq_nvml.nvmlInit();
}

nvmlReturn_t nvmlInit_v2(void)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlInit_v2());
	return aq_nvml.nvmlInit_v2();
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlInitWithFlags(flags));
	return aq_nvml.nvmlInitWithFlags(flags);
}

/* ---- devices and memory ---------------------------------------------------------------------------------------- */

static int granted_as(nvmlDevice_t device)
{
	char text[NVML_DEVICE_UUID_V2_BUFFER_SIZE] = "";
	unsigned char uuid[16];

	if (aq_nvml.nvmlDeviceGetUUID(device, text, sizeof(text)) != NVML_SUCCESS || !aq_uuid_parse(text, uuid))
		return AQ_NO_DEVICE;
	return aq_limits_find(&container.limits, uuid);
}

/* A share of a GPU in MIG mode is granted as one of the GPU, and lies in an instance. */
static int device_of(nvmlDevice_t device)
{
	nvmlDevice_t gpu;
	int granted;

	if (aq_limits_changed(&container.limits))
		aq_limits_refresh(&container.limits);
	granted = granted_as(device);
	if (granted < 0 && aq_nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device, &gpu) == NVML_SUCCESS)
		granted = granted_as(gpu);
	return granted;
}

/* What a process holds of a device, virtual memory included. */
static uint64_t held_by(uint32_t slot, int device)
{
	return aq_slot_used_bytes(&aq_region_slot(&container.region, slot)->device[device]) +
	       aq_virtual_used_bytes(aq_region_virtual(&container.region, slot, (uint32_t)device));
}

static nvmlMemory_t share_of(int device, unsigned long long physical_total, unsigned long long physical_free)
{
	const struct aq_device_limit *limit = &container.limits.device[device];
	uint64_t used = 0, bytes = atomic_load_explicit(&limit->memory_bytes, memory_order_relaxed);
	uint64_t overhead = atomic_load_explicit(&limit->overhead_bytes, memory_order_relaxed);
	uint64_t burst = atomic_load_explicit(&limit->burst_bytes, memory_order_relaxed);

	if (burst && aq_region_virtual(&container.region, 0, (uint32_t)device)) {
		bytes = burst;
		physical_total = physical_free = UINT64_MAX; /* what does not fit the device lies in host memory */
	}
	/* living slots, not the line: that may still hold what a killed process held */
	for (uint32_t i = 0; i < container.region.slot_count; i++)
		if (aq_region_is_live(&container.region, i))
			used += held_by(i, device);
	return (nvmlMemory_t){
		.total = aq_limit_total(bytes == AQ_MEMORY_UNLIMITED ? bytes : bytes + overhead, physical_total),
		.free = aq_limit_free(bytes, used, physical_free),
		.used = used + overhead,
	};
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlDeviceGetMemoryInfo(device, memory));
	nvmlReturn_t result = aq_nvml.nvmlDeviceGetMemoryInfo(device, memory);
	int granted = device_of(device);

	if (result == NVML_SUCCESS && granted >= 0)
		*memory = share_of(granted, memory->total, memory->free);
	return result;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlDeviceGetMemoryInfo_v2(device, memory));
	nvmlReturn_t result = aq_nvml.nvmlDeviceGetMemoryInfo_v2(device, memory);
	int granted = device_of(device);

	if (result == NVML_SUCCESS && granted >= 0) {
		nvmlMemory_t share = share_of(granted, memory->total, memory->free);

		memory->total = share.total;
		memory->free = share.free;
		memory->used = share.used;
		memory->reserved = 0;
	}
	return result;
}

/* The kernel's limits are set for namespaces that the container need not know of; it is shown its own share. */
nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlDeviceGetMemoryLimits_v1(device, limits));
	nvmlReturn_t result = aq_nvml.nvmlDeviceGetMemoryLimits_v1(device, limits);
	int granted = device_of(device);

	if (result == NVML_SUCCESS && granted >= 0) {
		nvmlMemory_t share = share_of(granted, limits->hardLimit, limits->hardLimit);

		limits->hardLimit = share.total;
		limits->softLimit = limits->softLimit < share.total ? limits->softLimit : share.total;
		limits->currentUsed = share.used;
	}
	return result;
}

/* ---- processes ------------------------------------------------------------------------------------------------- */

/* What the driver lists of a device, and by which pids it does. More than a thread with a small stack has room for. */
struct view {
	struct aq_listed listed;
	struct aq_naming naming;
};

/* NULL when there is no memory. The caller frees it. */
static struct view *look(nvmlDevice_t device, int granted)
{
	struct view *view = malloc(sizeof(*view));

	if (!view)
		return NULL;
	aq_listed_query(&view->listed, device, aq_nvml.nvmlDeviceGetComputeRunningProcesses_v3,
			aq_nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3);
	aq_naming_learn(&view->naming, &container.region, (uint32_t)granted, &view->listed);
	return view;
}

/* Is a process of the container in a `wanted` list (enum aq_listed_as)? One that the driver does not name is in that of compute. */
static bool is_wanted(const struct aq_naming *naming, uint32_t at, unsigned int wanted)
{
	return (naming->living[at].as ? naming->living[at].as : AQ_LISTED_COMPUTE) & wanted;
}

/* Those of the container's processes with a context or memory on the device that the caller's pid namespace knows and the driver lists as
 * `wanted`, as the widest of the structs has them. Tells how many; fills at most `room`. */
static nvmlReturn_t list_processes(nvmlDevice_t device, unsigned int wanted, nvmlProcessDetail_v1_t *processes, unsigned int room,
				   unsigned int *found)
{
	unsigned int gpu_instance = NVML_NO_INSTANCE, compute_instance = NVML_NO_INSTANCE;
	int granted = device_of(device);

	*found = 0;
	if (granted < 0)
		return NVML_SUCCESS;
	/* other devices than MIG instances have none, and leave these as they are */
	aq_nvml.nvmlDeviceGetGpuInstanceId(device, &gpu_instance);
	aq_nvml.nvmlDeviceGetComputeInstanceId(device, &compute_instance);
	struct view *view = look(device, granted);
	if (!view)
		return NVML_ERROR_MEMORY;
	for (uint32_t i = 0; i < view->naming.count; i++) {
		uint32_t slot = view->naming.living[i].slot, pid = view->naming.living[i].pid;
		uint64_t used = held_by(slot, granted);

		if (!(used || atomic_load(&aq_region_slot(&container.region, slot)->device[granted].contexts)) || !pid ||
		    !is_wanted(&view->naming, i, wanted))
			continue;
		if (*found < room)
			processes[*found] = (nvmlProcessDetail_v1_t){
				.pid = pid, .usedGpuMemory = used, .gpuInstanceId = gpu_instance, .computeInstanceId = compute_instance
			};
		++*found;
	}
	free(view);
	return NVML_SUCCESS;
}

/* The way every list of NVML is handed out: with too little room, the number it takes and NVML_ERROR_INSUFFICIENT_SIZE. */
static nvmlReturn_t hand_out(nvmlDevice_t device, unsigned int wanted, unsigned int *count, void *processes, size_t stride,
			     bool with_instances)
{
	nvmlProcessDetail_v1_t *own = malloc(AQ_SLOT_COUNT * sizeof(*own));
	unsigned int found = 0, room = *count;
	nvmlReturn_t result = own ? list_processes(device, wanted, own, AQ_SLOT_COUNT, &found) : NVML_ERROR_MEMORY;

	if (result == NVML_SUCCESS)
		*count = found;
	if (result == NVML_SUCCESS && found > room)
		result = NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned int i = 0; result == NVML_SUCCESS && i < found; i++) {
		nvmlProcessInfo_v2_t *process = (void *)((char *)processes + i * stride);

		process->pid = own[i].pid;
		process->usedGpuMemory = own[i].usedGpuMemory;
		if (with_instances) {
			process->gpuInstanceId = own[i].gpuInstanceId;
			process->computeInstanceId = own[i].computeInstanceId;
		}
	}
	free(own);
	return result;
}

nvmlReturn_t aq_nvml_list(nvmlDevice_t device, enum aq_listed_as wanted, unsigned int *count, void *processes, size_t stride)
{
	return hand_out(device, wanted, count, processes, stride, true);
}

/* Let the library judge the arguments; how many processes it would list is not for the container to know. */
#define JUDGED(name)                                                                              \
	do {                                                                                      \
		unsigned int none_ = 0;                                                           \
		if (!count || (*count && !processes))                                             \
			return NVML_ERROR_INVALID_ARGUMENT;                                       \
		nvmlReturn_t result_ = aq_nvml.name(device, &none_, NULL);                        \
		if (result_ != NVML_SUCCESS && result_ != NVML_ERROR_INSUFFICIENT_SIZE)           \
			return result_;                                                           \
	} while (0)

#define PROCESS_LIST(name, wanted, type, with_instances)                                          \
	nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, type *processes)              \
	{                                                                                         \
		AQ_NVML_LIMITED_OR_RETURN(name(device, count, processes));                                \
		JUDGED(name);                                                                     \
		return hand_out(device, wanted, count, processes, sizeof(type), with_instances);  \
	}

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, AQ_LISTED_COMPUTE, nvmlProcessInfo_v1_t, false)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, AQ_LISTED_COMPUTE, nvmlProcessInfo_v2_t, true)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, AQ_LISTED_COMPUTE, nvmlProcessInfo_v3_t, true)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, AQ_LISTED_MPS, nvmlProcessInfo_v1_t, false)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, AQ_LISTED_MPS, nvmlProcessInfo_v2_t, true)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, AQ_LISTED_MPS, nvmlProcessInfo_v3_t, true)

/* Slots are taken by CUDA, so the lists of graphics have no process of the container to show. */
#define EMPTY_LIST(name, type)                                                                    \
	nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, type *processes)              \
	{                                                                                         \
		AQ_NVML_LIMITED_OR_RETURN(name(device, count, processes));                                \
		JUDGED(name);                                                                     \
		*count = 0;                                                                       \
		return NVML_SUCCESS;                                                              \
	}

EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_v3_t)

nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_v1_t *list)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlDeviceGetRunningProcessDetailList(device, list));
	if (!list)
		return aq_nvml.nvmlDeviceGetRunningProcessDetailList(device, list); /* the library reports the error */
	nvmlProcessDetailList_v1_t judged = { .version = list->version, .mode = list->mode };
	nvmlReturn_t result = aq_nvml.nvmlDeviceGetRunningProcessDetailList(device, &judged);

	if (result != NVML_SUCCESS && result != NVML_ERROR_INSUFFICIENT_SIZE)
		return result;
	static const unsigned int wanted[NVML_PROCESS_MODE_MAX] = {
		[NVML_PROCESS_MODE_COMPUTE] = AQ_LISTED_COMPUTE,
		[NVML_PROCESS_MODE_MPS] = AQ_LISTED_MPS,
		[NVML_PROCESS_MODE_ALL] = AQ_LISTED_COMPUTE | AQ_LISTED_MPS,
	};
	unsigned int found, room = list->procArray ? list->numProcArrayEntries : 0;

	result = list_processes(device, list->mode < NVML_PROCESS_MODE_MAX ? wanted[list->mode] : 0, list->procArray, room, &found);
	if (result != NVML_SUCCESS)
		return result;
	list->numProcArrayEntries = found;
	return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* ---- utilisation ----------------------------------------------------------------------------------------------- */

/* Does the container have all of the device that can be granted: its memory, less the driver's reserve in whole MiB, and no ceiling on its
 * compute? Then no other container is on it, and the driver's figures for the device are the container's. */
static bool is_whole(nvmlDevice_t device)
{
	nvmlMemory_v2_t memory = { .version = NVML_VERSION_WORD(nvmlMemory_v2_t, 2) };
	int granted = device_of(device);

	if (granted < 0)
		return false;
	const struct aq_device_limit *limit = &container.limits.device[granted];
	uint64_t bytes = atomic_load_explicit(&limit->memory_bytes, memory_order_relaxed);
	uint32_t percent = atomic_load_explicit(&limit->sm_percent, memory_order_relaxed);
	if (percent && percent < 100)
		return false;
	if (bytes == AQ_MEMORY_UNLIMITED)
		return true;
	bytes += atomic_load_explicit(&limit->overhead_bytes, memory_order_relaxed);
	if (aq_nvml.nvmlDeviceGetMemoryInfo_v2(device, &memory) != NVML_SUCCESS) {
		nvmlMemory_t older;

		if (aq_nvml.nvmlDeviceGetMemoryInfo(device, &older) != NVML_SUCCESS)
			return false;
		memory.total = older.total;
		memory.reserved = 0;
	}
	return bytes >= (memory.total - memory.reserved) / MIB * MIB;
}

/* Samples come in two forms, by two calls. For a count of 0 the driver reports how many there may be. */
struct sampling {
	nvmlReturn_t (*query)(nvmlDevice_t device, void *samples, unsigned int *count, unsigned long long since_us);
	size_t stride, pid_offset;
};

static nvmlReturn_t query_samples(nvmlDevice_t device, void *samples, unsigned int *count, unsigned long long since_us)
{
	return aq_nvml.nvmlDeviceGetProcessUtilization(device, samples, count, since_us);
}

static nvmlReturn_t query_infos(nvmlDevice_t device, void *infos, unsigned int *count, unsigned long long since_us)
{
	nvmlProcessesUtilizationInfo_v1_t info = {
		.version = NVML_VERSION_WORD(nvmlProcessesUtilizationInfo_v1_t, 1),
		.processSamplesCount = *count,
		.lastSeenTimeStamp = since_us,
		.procUtilArray = infos,
	};
	nvmlReturn_t result = aq_nvml.nvmlDeviceGetProcessesUtilizationInfo(device, &info);

	*count = info.processSamplesCount;
	return result;
}

static const struct sampling of_samples = {
	.query = query_samples,
	.stride = sizeof(nvmlProcessUtilizationSample_t),
	.pid_offset = offsetof(nvmlProcessUtilizationSample_t, pid),
};
static const struct sampling of_infos = {
	.query = query_infos,
	.stride = sizeof(nvmlProcessUtilizationInfo_v1_t),
	.pid_offset = offsetof(nvmlProcessUtilizationInfo_v1_t, pid),
};

static unsigned int *pid_at(const struct sampling *form, void *samples, unsigned int at)
{
	return (unsigned int *)(void *)((char *)samples + at * form->stride + form->pid_offset);
}

/* All samples of the device, in an array that the caller frees; NVML_SUCCESS and no array without samples. Never in the application's own
 * array: neighbours' samples would stay in it. */
static nvmlReturn_t all_samples(const struct sampling *form, nvmlDevice_t device, unsigned long long since_us, void **samples,
				unsigned int *count)
{
	nvmlReturn_t result;

	*samples = NULL;
	do { /* again when processes appeared between the two calls */
		free(*samples);
		*samples = NULL;
		*count = 0;
		result = form->query(device, NULL, count, since_us);
		if (result == NVML_ERROR_NOT_FOUND || (result == NVML_SUCCESS && !*count))
			return NVML_SUCCESS;
		if (result != NVML_ERROR_INSUFFICIENT_SIZE && result != NVML_SUCCESS)
			return result;
		*samples = calloc(*count + 1, form->stride);
		if (!*samples)
			return NVML_ERROR_MEMORY;
		result = form->query(device, *samples, count, since_us);
	} while (result == NVML_ERROR_INSUFFICIENT_SIZE);
	if (result == NVML_SUCCESS)
		return result;
	free(*samples);
	*samples = NULL;
	*count = 0;
	return result == NVML_ERROR_NOT_FOUND ? NVML_SUCCESS : result;
}

/* The container's own samples, with the process's slot for its pid: not every process of it need have a pid in the caller's namespace. */
static nvmlReturn_t own_samples(const struct sampling *form, nvmlDevice_t device, unsigned long long since_us, void **samples,
				unsigned int *count)
{
	nvmlReturn_t result = all_samples(form, device, since_us, samples, count);
	int granted = device_of(device);
	unsigned int kept = 0;

	if (result == NVML_SUCCESS && *count && granted >= 0) {
		struct view *view = look(device, granted);

		for (unsigned int i = 0; view && i < *count; i++) {
			int slot = aq_naming_slot(&view->naming, *pid_at(form, *samples, i));

			if (slot < 0)
				continue;
			memmove((char *)*samples + kept * form->stride, (char *)*samples + i * form->stride, form->stride);
			*pid_at(form, *samples, kept++) = (unsigned int)slot;
		}
		if (!view) {
			free(*samples);
			*samples = NULL;
			result = NVML_ERROR_MEMORY;
		}
		free(view);
	}
	*count = kept;
	return result;
}

/* The container's own samples, by the pids of the caller's namespace; what that does not know is left out. */
static nvmlReturn_t hand_out_samples(const struct sampling *form, nvmlDevice_t device, unsigned long long since_us, void *to,
				     unsigned int *count)
{
	unsigned int found, seen = 0, room = *count;
	void *own;
	nvmlReturn_t result = own_samples(form, device, since_us, &own, &found);

	for (unsigned int i = 0; result == NVML_SUCCESS && i < found; i++) {
		unsigned int pid = aq_region_pid(&container.region, *pid_at(form, own, i));

		if (!pid)
			continue;
		memmove((char *)own + seen * form->stride, (char *)own + i * form->stride, form->stride);
		*pid_at(form, own, seen++) = pid;
	}
	if (result == NVML_SUCCESS) {
		*count = seen;
		if (!seen)
			result = NVML_ERROR_NOT_FOUND;
		else if (!to || seen > room)
			result = NVML_ERROR_INSUFFICIENT_SIZE;
		else
			memcpy(to, own, seen * form->stride);
	}
	free(own);
	return result;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count,
					     unsigned long long since_us)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlDeviceGetProcessUtilization(device, samples, count, since_us));
	return count ? hand_out_samples(&of_samples, device, since_us, samples, count) : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *info)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlDeviceGetProcessesUtilizationInfo(device, info));
	/* The room needed is reported for the number of all processes; the container may know that much. */
	if (!info || !info->procUtilArray || !info->processSamplesCount)
		return aq_nvml.nvmlDeviceGetProcessesUtilizationInfo(device, info);
	if (info->version != NVML_VERSION_WORD(nvmlProcessesUtilizationInfo_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	return hand_out_samples(&of_infos, device, info->lastSeenTimeStamp, info->procUtilArray, &info->processSamplesCount);
}

static unsigned int at_most_100(unsigned int percent)
{
	return percent < 100 ? percent : 100;
}

/* Of several samples of a process, the newest counts. */
static bool is_newest(const nvmlProcessUtilizationSample_t *samples, unsigned int count, unsigned int at)
{
	for (unsigned int i = 0; i < count; i++)
		if (i != at && samples[i].pid == samples[at].pid &&
		    (samples[i].timeStamp > samples[at].timeStamp || (samples[i].timeStamp == samples[at].timeStamp && i < at)))
			return false;
	return true;
}

static unsigned long long wall_clock_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (unsigned long long)now.tv_sec * 1000000ull + (unsigned long long)now.tv_nsec / 1000;
}

/* The sum of the container's processes; without the driver's samples of processes, nothing: the figure of the whole card includes
 * neighbours. */
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
	nvmlUtilization_t sum = { 0 };
	unsigned int found;
	void *samples;

	AQ_NVML_LIMITED_OR_RETURN(nvmlDeviceGetUtilizationRates(device, utilization));
	nvmlReturn_t result = utilization ? aq_nvml.nvmlDeviceGetUtilizationRates(device, &sum) : NVML_ERROR_INVALID_ARGUMENT;
	if (result != NVML_SUCCESS)
		return result;
	if (own_samples(&of_samples, device, wall_clock_us() - UTILIZATION_WINDOW_US, &samples, &found) == NVML_SUCCESS) {
		const nvmlProcessUtilizationSample_t *own = samples;

		sum = (nvmlUtilization_t){ 0 };
		for (unsigned int i = 0; i < found; i++) {
			if (is_newest(own, found, i)) {
				sum.gpu = at_most_100(sum.gpu + own[i].smUtil);
				sum.memory = at_most_100(sum.memory + own[i].memUtil);
			}
		}
		free(samples);
	} else if (!is_whole(device)) {
		return NVML_ERROR_NOT_SUPPORTED;
	}
	*utilization = sum;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type, unsigned long long since_us, nvmlValueType_t *value_type,
				  unsigned int *count, nvmlSample_t *samples)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlDeviceGetSamples(device, type, since_us, value_type, count, samples));
	if ((type == NVML_GPU_UTILIZATION_SAMPLES || type == NVML_MEMORY_UTILIZATION_SAMPLES) && !is_whole(device))
		return NVML_ERROR_NOT_SUPPORTED; /* the whole card's; the container's own are in the process samples */
	return aq_nvml.nvmlDeviceGetSamples(device, type, since_us, value_type, count, samples);
}

/* Of all fields, one reports how busy the whole card is (nvml.h of 13.5). */
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlDeviceGetFieldValues(device, count, values));
	nvmlReturn_t result = aq_nvml.nvmlDeviceGetFieldValues(device, count, values);

	for (int i = 0; result == NVML_SUCCESS && i < count; i++)
		if (values[i].fieldId == NVML_FI_DEV_MMA_STALL_PERCENT && values[i].nvmlReturn == NVML_SUCCESS && !is_whole(device)) {
			values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
			values[i].value = (nvmlValue_t){ 0 };
		}
	return result;
}

nvmlReturn_t nvmlDeviceGetDynamicPstatesInfo(nvmlDevice_t device, nvmlGpuDynamicPstatesInfo_t *info)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlDeviceGetDynamicPstatesInfo(device, info));
	return is_whole(device) ? aq_nvml.nvmlDeviceGetDynamicPstatesInfo(device, info) : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDevicePerfMetricsGetSamples_v1(nvmlDevice_t device, nvmlPerfMetricsSamples_v1_t *samples)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlDevicePerfMetricsGetSamples_v1(device, samples));
	return is_whole(device) ? aq_nvml.nvmlDevicePerfMetricsGetSamples_v1(device, samples) : NVML_ERROR_NOT_SUPPORTED;
}

/* ---- performance monitoring: of a device or GPU instance, never of its processes --------------------------------- */

/* Has the container all of a GPU instance, by its id on the GPU; of any of them when `gpu_instance` is NVML_NO_INSTANCE? */
static bool has_whole_instance(nvmlDevice_t gpu, unsigned int gpu_instance)
{
	unsigned int count = 0, id = NVML_NO_INSTANCE;
	nvmlDevice_t instance;

	if (aq_nvml.nvmlDeviceGetMaxMigDeviceCount(gpu, &count) != NVML_SUCCESS)
		return false;
	for (unsigned int i = 0; i < count; i++)
		if (aq_nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, i, &instance) == NVML_SUCCESS &&
		    aq_nvml.nvmlDeviceGetGpuInstanceId(instance, &id) == NVML_SUCCESS &&
		    (gpu_instance == NVML_NO_INSTANCE || id == gpu_instance) && is_whole(instance))
			return true;
	return false;
}

/* Tools query this first, and do not show a device without support. */
nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlGpmQueryDeviceSupport(device, support));
	nvmlReturn_t result = aq_nvml.nvmlGpmQueryDeviceSupport(device, support);

	if (result == NVML_SUCCESS && support->isSupportedDevice && !is_whole(device) && !has_whole_instance(device, NVML_NO_INSTANCE))
		support->isSupportedDevice = 0;
	return result;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlGpmSampleGet(device, sample));
	return is_whole(device) ? aq_nvml.nvmlGpmSampleGet(device, sample) : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int gpu_instance_id, nvmlGpmSample_t sample)
{
	AQ_NVML_LIMITED_OR_RETURN(nvmlGpmMigSampleGet(device, gpu_instance_id, sample));
	return has_whole_instance(device, gpu_instance_id) ? aq_nvml.nvmlGpmMigSampleGet(device, gpu_instance_id, sample)
							   : NVML_ERROR_NOT_SUPPORTED;
}
