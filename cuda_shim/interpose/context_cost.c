#include "interpose/context_cost.h"

#include <string.h>
#include <unistd.h>

#include "interpose/driver_nvml.h"
#include "log.h"

#define PROCESSES_MAX 256

static uint64_t own_bytes(const struct aq_driver_nvml *nvml, nvmlDevice_t device)
{
	nvmlProcessInfo_v2_t processes[PROCESSES_MAX];
	unsigned int count = PROCESSES_MAX;
	uint64_t bytes = 0;

	if (!nvml->processes || nvml->processes(device, &count, processes) != NVML_SUCCESS)
		return 0;
	for (unsigned int i = 0; i < count; i++)
		if (processes[i].pid == (unsigned int)getpid() && processes[i].usedGpuMemory != NVML_VALUE_NOT_AVAILABLE_ULL)
			bytes += processes[i].usedGpuMemory;
	return bytes;
}

void aq_cost_sample(const char *uuid, struct aq_cost_sample *sample)
{
	nvmlDevice_t device;
	nvmlMemory_t memory;
	struct aq_driver_nvml nvml;

	memset(sample, 0, sizeof(*sample));
	if (!aq_driver_nvml_load(&nvml) || nvml.init() != NVML_SUCCESS)
		return;
	if (nvml.by_uuid(uuid, &device) == NVML_SUCCESS && nvml.memory(device, &memory) == NVML_SUCCESS) {
		sample->device_bytes = memory.used;
		sample->own_bytes = own_bytes(&nvml, device);
	}
	nvml.shutdown();
}

uint64_t aq_cost_since(const char *uuid, const struct aq_cost_sample *before)
{
	struct aq_cost_sample after;

	aq_cost_sample(uuid, &after);
	uint64_t device_bytes = after.device_bytes > before->device_bytes ? after.device_bytes - before->device_bytes : 0;
	uint64_t bytes = after.own_bytes > before->own_bytes ? after.own_bytes - before->own_bytes : device_bytes;
	if (!bytes)
		aq_log_warn("cannot tell what a context on %s costs: NVML does not say, and the agent gave no figure", uuid);
	return bytes;
}
