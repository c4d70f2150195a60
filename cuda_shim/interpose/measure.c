#include "interpose/measure.h"

#include <pthread.h>
#include <unistd.h>

#include "interpose/driver_nvml.h"

#define PROCESSES_MAX 256

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

static uint64_t own_bytes(nvmlDevice_t device)
{
	nvmlProcessInfo_v2_t processes[PROCESSES_MAX];
	unsigned int count = PROCESSES_MAX;
	uint64_t bytes = 0;

	if (!nvml.processes || nvml.processes(device, &count, processes) != NVML_SUCCESS)
		return 0;
	for (unsigned int i = 0; i < count; i++)
		if (processes[i].pid == (unsigned int)getpid() && processes[i].usedGpuMemory != NVML_VALUE_NOT_AVAILABLE_ULL)
			bytes += processes[i].usedGpuMemory;
	return bytes;
}

struct aq_sample_bytes aq_measure(const char *uuid)
{
	struct aq_sample_bytes sample = { 0, 0 };
	nvmlDevice_t device;
	nvmlMemory_t memory;

	if (!ready() || nvml.by_uuid(uuid, &device) != NVML_SUCCESS)
		return sample;
	if (nvml.memory(device, &memory) == NVML_SUCCESS)
		sample.device_bytes = memory.used;
	sample.own_bytes = own_bytes(device);
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
