/* SPDX-License-Identifier: Apache-2.0 */
/* nvml_gpm.c - GPU performance monitoring of Hopper and newer: two samples taken apart in time give the utilisation between them, under MIG
 * too. */
#include <stdlib.h>

#include "simulated_driver/nvml_prototypes.h"
#include "simulated_driver/nvml_internal.h"

/* A sample is a moment, and how long the SMs of the sampled device had been busy when it came. */
struct nvmlGpmSample_st {
	uint64_t time_ns;
	uint64_t busy_ns;
	uint32_t gpu;
	int mig_device;
};

static bool supported(const struct sim_target *t)
{
	return t->hardware->architecture >= NVML_DEVICE_ARCH_HOPPER;
}

/* Counts from the start of each live process; a process that ended meanwhile takes its part with it, which shows as less, never as more. */
static uint64_t busy_total_ns(const struct sim_target *t, int mig_device)
{
	uint64_t total_ns = 0;
	int cursor = 0;
	struct sim_process process;
	while (sim_next_process(t->state, &cursor, &process)) {
		const struct sim_slot_gpu *held = &t->state->slots[process.slot].gpus[t->index];
		if (mig_device == SIM_MIG_ANY_DEVICE || atomic_load(&held->mig_device) == mig_device)
			total_ns += atomic_load(&held->busy_total_ns);
	}
	return total_ns;
}

NVML_API nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(support);
	REQUIRE(support->version == NVML_GPM_SUPPORT_VERSION, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	support->isSupportedDevice = supported(&t);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
	REQUIRE_ARGUMENT(sample);
	*sample = calloc(1, sizeof **sample);
	return *sample ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

NVML_API nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
	REQUIRE_ARGUMENT(sample);
	free(sample);
	return NVML_SUCCESS;
}

static nvmlReturn_t take_sample(const struct sim_target *t, int mig_device, nvmlGpmSample_t sample)
{
	REQUIRE_ARGUMENT(sample);
	REQUIRE(supported(t), NVML_ERROR_NOT_SUPPORTED);
	*sample = (struct nvmlGpmSample_st){ sim_now_ns(), busy_total_ns(t, mig_device), t->index, mig_device };
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
	TARGET(sim_nvml_gpu, device);
	return take_sample(&t, SIM_MIG_ANY_DEVICE, sample);
}

NVML_API nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int gpu_instance_id, nvmlGpmSample_t sample)
{
	TARGET(sim_nvml_gpu, device);
	for (uint32_t i = 0; i < SIM_MIG_MAX_DEVICES; i++) {
		const struct sim_compute_instance *ci = &t.mig.devices[i];
		if (atomic_load(&ci->present) && ci->gpu_instance_id == gpu_instance_id)
			return take_sample(&t, (int)i, sample);
	}
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
	struct sim_state *state;
	nvmlReturn_t status = sim_nvml_enter(&state);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(get && get->sample1 && get->sample2);
	REQUIRE(get->version == NVML_GPM_METRICS_GET_VERSION, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	const struct nvmlGpmSample_st *first = get->sample1, *second = get->sample2;
	REQUIRE_ARGUMENT(first->gpu == second->gpu && first->mig_device == second->mig_device && second->time_ns > first->time_ns);
	double busy_ns = second->busy_ns > first->busy_ns ? (double)(second->busy_ns - first->busy_ns) : 0;
	double percent = 100 * busy_ns / (double)(second->time_ns - first->time_ns);
	for (unsigned int i = 0; i < get->numMetrics; i++) {
		nvmlGpmMetric_t *metric = &get->metrics[i];
		bool known = metric->metricId == NVML_GPM_METRIC_GRAPHICS_UTIL || metric->metricId == NVML_GPM_METRIC_SM_UTIL;
		metric->nvmlReturn = known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
		metric->value = known ? (percent < 100 ? percent : 100) : 0;
	}
	return NVML_SUCCESS;
}
