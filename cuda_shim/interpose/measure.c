#include "interpose/measure.h"

#include <pthread.h>

#include "interpose/driver_nvml.h"
#include "interpose/naming.h"

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static struct aq_driver_nvml nvml;
static enum { UNTRIED, READY, ABSENT } state; /* under `opening` */

static bool ready(void)
{
	pthread_mutex_lock(&opening);
	if (state == UNTRIED)
		state = aq_driver_nvml_load(&nvml) && nvml.init() == NVML_SUCCESS ? READY : ABSENT;
	bool is_ready = state == READY;
	pthread_mutex_unlock(&opening);
	return is_ready;
}

static uint64_t own_bytes(const struct aq_region *region, uint32_t device, nvmlDevice_t handle)
{
	struct aq_listed listed = { .count = AQ_LISTED_MAX };
	uint64_t bytes = 0;

	listed.known = nvml.processes && nvml.processes(handle, &listed.count, listed.process) == NVML_SUCCESS;
	struct aq_naming naming = aq_naming_of(region, device, &listed);
	for (unsigned int i = 0; listed.known && i < listed.count; i++)
		if (listed.process[i].usedGpuMemory != NVML_VALUE_NOT_AVAILABLE_ULL &&
		    aq_naming_slot(&naming, listed.process[i].pid) == region->slot_index)
			bytes += listed.process[i].usedGpuMemory;
	return bytes;
}

struct aq_sample_bytes aq_measure(const struct aq_region *region, const char *uuid, int device)
{
	struct aq_sample_bytes sample = { 0, 0 };
	nvmlDevice_t handle;
	nvmlMemory_t memory;

	if (!ready() || nvml.by_uuid(uuid, &handle) != NVML_SUCCESS)
		return sample;
	if (nvml.memory(handle, &memory) == NVML_SUCCESS)
		sample.device_bytes = memory.used;
	sample.own_bytes = own_bytes(region, (uint32_t)device, handle);
	return sample;
}

uint64_t aq_measured_growth(const struct aq_sample_bytes *before, const struct aq_sample_bytes *after, bool *is_own)
{
	*is_own = after->own_bytes > before->own_bytes;
	if (*is_own)
		return after->own_bytes - before->own_bytes;
	return after->device_bytes > before->device_bytes ? after->device_bytes - before->device_bytes : 0;
}

void aq_measure_forget(void)
{
	pthread_mutex_init(&opening, NULL);
	state = UNTRIED;
}
