/* SPDX-License-Identifier: Apache-2.0 */
/* nvml_memory.c - device memory as a whole, and the driver's own limits on it.
 *
 * "Used" is what processes hold, after dead ones were reaped. The older nvmlDeviceGetMemoryInfo counts the driver's reserve as used, _v2
 * reports it apart. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated_driver/nvml_prototypes.h"
#include "simulated_driver/nvml_internal.h"

#define MEMORY_LIMITS_DRIVER 615    /* first driver with nvmlDeviceSetMemoryLimits_v1 */

struct memory {
	uint64_t total, reserved, used;
};

static struct memory memory_of(const struct sim_target *t)
{
	sim_reap(t->state);
	if (t->mig_device != SIM_WHOLE_GPU) {
		uint32_t id = t->mig.devices[t->mig_device].gpu_instance_id;
		return (struct memory){ .total = t->mig.gpu_instances[id].memory_bytes,
					.used = atomic_load(&t->gpu->mig.gpu_instances[id].used_bytes) };
	}
	struct memory memory = { .total = t->hardware->memory_bytes,
				 .reserved = t->hardware->memory_reserved_bytes,
				 .used = atomic_load(&t->gpu->used_bytes) };
	for (uint32_t id = 0; id < SIM_MIG_MAX_GPU_INSTANCES; id++)
		if (atomic_load(&t->mig.gpu_instances[id].present))
			memory.used += atomic_load(&t->gpu->mig.gpu_instances[id].used_bytes);
	return memory;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	TARGET(sim_nvml_target, device);
	REQUIRE_ARGUMENT(memory);
	struct memory m = memory_of(&t);
	*memory = (nvmlMemory_t){ .total = m.total, .used = m.used + m.reserved, .free = m.total - m.used - m.reserved };
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	TARGET(sim_nvml_target, device);
	REQUIRE_ARGUMENT(memory);
	REQUIRE(memory->version == NVML_VERSION_WORD(nvmlMemory_v2_t, 2), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	struct memory m = memory_of(&t);
	memory->total = m.total;
	memory->reserved = m.reserved;
	memory->used = m.used;
	memory->free = m.total - m.used - m.reserved;
	return NVML_SUCCESS;
}

/* Contexts map a little of BAR1 each; the rest of the aperture is free. */
NVML_API nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
	enum { BASE_BYTES = 1 << 20, CONTEXT_BYTES = 2 << 20 };
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(memory);
	uint64_t used = BASE_BYTES + (uint64_t)CONTEXT_BYTES * sim_gpu_contexts(t.state, t.index, SIM_MIG_ANY_DEVICE);
	if (used > t.hardware->bar1_bytes)
		used = t.hardware->bar1_bytes;
	*memory = (nvmlBAR1Memory_t){ .bar1Total = t.hardware->bar1_bytes, .bar1Used = used, .bar1Free = t.hardware->bar1_bytes - used };
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetConfComputeMemSizeInfo(nvmlDevice_t device, nvmlConfComputeMemSizeInfo_t *info)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(info);
	*info = (nvmlConfComputeMemSizeInfo_t){ .unprotectedMemSizeKib = t.hardware->memory_bytes / 1024 };
	return NVML_SUCCESS;
}

/* ---- limits of a cgroup (R615 and newer) ---- */

static nvmlReturn_t open_cgroup(const char *name, FILE **procs)
{
	REQUIRE_ARGUMENT(name && *name && strlen(name) < SIM_NAMESPACE_LEN);
	*procs = sim_cgroup_open(name);
	return *procs ? NVML_SUCCESS : NVML_ERROR_OPERATING_SYSTEM;
}

/* The entry of this name; with NULL, a free one. The caller holds the mutex. */
static struct sim_memory_limit *find_limit(struct sim_gpu_settings *settings, const char *name)
{
	for (uint32_t i = 0; i < SIM_MAX_MEMORY_LIMITS; i++)
		if (strcmp(settings->memory_limits[i].name, name ? name : "") == 0)
			return &settings->memory_limits[i];
	return NULL;
}

static nvmlReturn_t store_limit_locked(struct sim_gpu_settings *settings, const nvmlSetMemoryLimits_v1_t *limits)
{
	struct sim_memory_limit *limit = find_limit(settings, limits->nameSpace);
	if (limits->softLimit == 0 && limits->hardLimit == NVML_DEVICE_MEMORY_LIMIT_MAX) {
		if (limit)
			memset(limit, 0, sizeof *limit);
		return NVML_SUCCESS;
	}
	if (!limit)
		limit = find_limit(settings, NULL);
	REQUIRE(limit, NVML_ERROR_INSUFFICIENT_RESOURCES);
	snprintf(limit->name, sizeof limit->name, "%s", limits->nameSpace);
	limit->soft_bytes = limits->softLimit;
	limit->hard_bytes = limits->hardLimit;
	atomic_store_explicit(&settings->has_memory_limits, 1, memory_order_release);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits)
{
	FILE *procs;
	TARGET(sim_nvml_gpu, device);
	REQUIRE(sim_topology_driver_major(&t.state->topology) >= MEMORY_LIMITS_DRIVER, NVML_ERROR_FUNCTION_NOT_FOUND);
	REQUIRE_ARGUMENT(limits && limits->softLimit <= limits->hardLimit);
	REQUIRE_ARGUMENT(limits->hardLimit == NVML_DEVICE_MEMORY_LIMIT_MAX || limits->hardLimit <= t.hardware->memory_bytes);
	REQUIRE(!atomic_load(&t.mig.enabled), NVML_ERROR_NOT_SUPPORTED);
	REQUIRE(sim_nvml_require_admin() == NVML_SUCCESS, NVML_ERROR_NO_PERMISSION);
	nvmlReturn_t status = open_cgroup(limits->nameSpace, &procs);
	REQUIRE(status == NVML_SUCCESS, status);
	fclose(procs);
	sim_lock(t.state);
	status = store_limit_locked(t.settings, limits);
	sim_unlock(t.state);
	return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits)
{
	FILE *procs;
	TARGET(sim_nvml_gpu, device);
	REQUIRE(sim_topology_driver_major(&t.state->topology) >= MEMORY_LIMITS_DRIVER, NVML_ERROR_FUNCTION_NOT_FOUND);
	REQUIRE_ARGUMENT(limits);
	nvmlReturn_t status = open_cgroup(limits->nameSpace, &procs);
	REQUIRE(status == NVML_SUCCESS, status);
	sim_lock(t.state);
	const struct sim_memory_limit *limit = find_limit(t.settings, limits->nameSpace);
	if (limit) {
		limits->softLimit = limit->soft_bytes;
		limits->hardLimit = limit->hard_bytes;
	}
	sim_unlock(t.state);
	bool has_caller;
	if (limit)
		limits->currentUsed = sim_cgroup_used_bytes(t.state, t.index, procs, &has_caller);
	fclose(procs);
	return limit ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}
