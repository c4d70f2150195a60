/* SPDX-License-Identifier: Apache-2.0 */
/* nvml_process.c - the processes on a device, how much memory each holds, and how busy each keeps the SMs.
 *
 * Processes are the live CUDA processes of the node that the caller's pid namespace can see. Busy time is kept by libcuda in buckets of 100
 * ms; only finished buckets are read, so a figure is at most one bucket old and never a guess about the running one. */
#include <string.h>

#include "simulated_driver/nvml_prototypes.h"
#include "simulated_driver/nvml_internal.h"

#define USUAL_WINDOW_NS (5 * SIM_BUCKET_NS)                         /* what "now" means for utilisation */
/* two less than kept: the running one, and one that may begin meanwhile */
#define LONGEST_WINDOW_NS ((SIM_BUSY_BUCKETS - 2) * SIM_BUCKET_NS)
#define DEFAULT_SAMPLE_WINDOW_NS (10 * SIM_BUCKET_NS)               /* of a process sample when the caller has seen no sample yet */

/* ---- buckets ---- */

uint64_t sim_nvml_last_bucket_end_ns(void)
{
	return sim_now_ns() / SIM_BUCKET_NS * SIM_BUCKET_NS;
}

/* Buckets are addressed by an instant inside the last one. */
static uint64_t inside_last_bucket(uint64_t end_ns)
{
	return end_ns - 1;
}

static unsigned percent(uint64_t part, uint64_t whole)
{
	uint64_t value = whole ? (part * 100 + whole / 2) / whole : 0;
	return value < 100 ? (unsigned)value : 100;
}

unsigned sim_nvml_utilization_percent(const struct sim_target *t, int mig_device, uint64_t end_ns, uint64_t window_ns)
{
	return percent(sim_gpu_busy_ns(t->state, t->index, mig_device, inside_last_bucket(end_ns), window_ns), window_ns);
}

unsigned sim_nvml_gpu_percent(const struct sim_target *t)
{
	return sim_nvml_utilization_percent(t, SIM_MIG_ANY_DEVICE, sim_nvml_last_bucket_end_ns(), USUAL_WINDOW_NS);
}

/* The model of the simulation: a kernel keeps the memory bus busy half of the time it keeps the SMs busy. */
unsigned sim_nvml_memory_percent(unsigned gpu_percent)
{
	return gpu_percent / 2;
}

static bool mig_enabled(const struct sim_target *t)
{
	return atomic_load(&t->mig.enabled);
}

NVML_API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(utilization);
	REQUIRE(!mig_enabled(&t), NVML_ERROR_NOT_SUPPORTED);
	utilization->gpu = sim_nvml_gpu_percent(&t);
	utilization->memory = sim_nvml_memory_percent(utilization->gpu);
	return NVML_SUCCESS;
}

/* The same figures by domain; the simulation has no video and no bus. Thresholds are the GPU's own business. */
NVML_API nvmlReturn_t nvmlDeviceGetDynamicPstatesInfo(nvmlDevice_t device, nvmlGpuDynamicPstatesInfo_t *info)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(info);
	REQUIRE(!mig_enabled(&t), NVML_ERROR_NOT_SUPPORTED);
	unsigned busy = sim_nvml_gpu_percent(&t);
	*info = (nvmlGpuDynamicPstatesInfo_t){ 0 };
	info->utilization[NVML_GPU_UTILIZATION_DOMAIN_GPU].bIsPresent = 1;
	info->utilization[NVML_GPU_UTILIZATION_DOMAIN_GPU].percentage = busy;
	info->utilization[NVML_GPU_UTILIZATION_DOMAIN_FB].bIsPresent = 1;
	info->utilization[NVML_GPU_UTILIZATION_DOMAIN_FB].percentage = sim_nvml_memory_percent(busy);
	return NVML_SUCCESS;
}

/* Of power and clock controllers, which the simulation does not have. */
NVML_API nvmlReturn_t nvmlDevicePerfMetricsGetSamples_v1(nvmlDevice_t device, nvmlPerfMetricsSamples_v1_t *samples)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(samples);
	samples->numSamples = 0;
	return NVML_SUCCESS;
}

/* Video engines exist and are idle: the simulation runs compute only. */
static nvmlReturn_t idle_engine(nvmlDevice_t device, unsigned int *utilization, unsigned int *period_us)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(utilization && period_us);
	REQUIRE(!mig_enabled(&t), NVML_ERROR_NOT_SUPPORTED);
	*utilization = 0;
	*period_us = USUAL_WINDOW_NS / 1000;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned int *utilization, unsigned int *period_us)
{
	return idle_engine(device, utilization, period_us);
}

NVML_API nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned int *utilization, unsigned int *period_us)
{
	return idle_engine(device, utilization, period_us);
}

NVML_API nvmlReturn_t nvmlDeviceGetJpgUtilization(nvmlDevice_t device, unsigned int *utilization, unsigned int *period_us)
{
	return idle_engine(device, utilization, period_us);
}

NVML_API nvmlReturn_t nvmlDeviceGetOfaUtilization(nvmlDevice_t device, unsigned int *utilization, unsigned int *period_us)
{
	return idle_engine(device, utilization, period_us);
}

/* ---- process lists ---- */

/* One process on the queried device. */
struct holding {
	uint32_t pid;
	int slot;
	uint64_t used_bytes;
	uint32_t gpu_instance, compute_instance;
};

static bool holding_of(const struct sim_target *t, const struct sim_process *process, struct holding *out)
{
	const struct sim_slot_gpu *held = &t->state->slots[process->slot].gpus[t->index];
	int mig_device = atomic_load(&held->mig_device);
	if (process->pid == 0 || atomic_load(&held->contexts) == 0)
		return false;
	if (t->mig_device != SIM_WHOLE_GPU && mig_device != t->mig_device)
		return false;
	*out = (struct holding){ .pid = (uint32_t)process->pid,
				 .slot = process->slot,
				 .gpu_instance = NVML_NO_INSTANCE,
				 .compute_instance = NVML_NO_INSTANCE,
				 .used_bytes = sim_slot_used_bytes(t->state, process->slot, t->index) };
	if (mig_device != SIM_WHOLE_GPU) {
		out->gpu_instance = t->mig.devices[mig_device].gpu_instance_id;
		out->compute_instance = t->mig.devices[mig_device].id;
	}
	return true;
}

static bool is_mps_client(const struct sim_target *t, const struct sim_process *process)
{
	return atomic_load(&t->state->slots[process->slot].mps_client);
}

enum list { LIST_COMPUTE, LIST_MPS };   /* that of compute has the clients of MPS, too, as they have contexts */

static unsigned list_holdings(const struct sim_target *t, enum list list, struct holding out[SIM_MAX_SLOTS])
{
	unsigned count = 0;
	int cursor = 0;
	struct sim_process process;
	while (count < SIM_MAX_SLOTS && sim_next_process(t->state, &cursor, &process))
		if (list == LIST_COMPUTE || is_mps_client(t, &process))
			count += holding_of(t, &process, &out[count]);
	return count;
}

/* The size protocol of all process lists: with too little room, the number of entries and INSUFFICIENT_SIZE. */
static nvmlReturn_t begin_list(nvmlDevice_t device, enum list list, unsigned int *count, const void *infos,
			       struct holding holdings[SIM_MAX_SLOTS], unsigned *found)
{
	TARGET(sim_nvml_target, device);
	REQUIRE_ARGUMENT(count && (infos || *count == 0));
	unsigned room = *count;
	*count = *found = list_holdings(&t, list, holdings);
	return *found <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

static nvmlReturn_t fill_v2(nvmlDevice_t device, enum list list, unsigned int *count, nvmlProcessInfo_v2_t *infos)
{
	struct holding holdings[SIM_MAX_SLOTS];
	unsigned found;
	nvmlReturn_t status = begin_list(device, list, count, infos, holdings, &found);
	for (unsigned i = 0; status == NVML_SUCCESS && i < found; i++)
		infos[i] = (nvmlProcessInfo_v2_t){ .pid = holdings[i].pid,
						   .usedGpuMemory = holdings[i].used_bytes,
						   .gpuInstanceId = holdings[i].gpu_instance,
						   .computeInstanceId = holdings[i].compute_instance };
	return status;
}

static nvmlReturn_t fill_v1(nvmlDevice_t device, enum list list, unsigned int *count, nvmlProcessInfo_v1_t *infos)
{
	struct holding holdings[SIM_MAX_SLOTS];
	unsigned found;
	nvmlReturn_t status = begin_list(device, list, count, infos, holdings, &found);
	for (unsigned i = 0; status == NVML_SUCCESS && i < found; i++)
		infos[i] = (nvmlProcessInfo_v1_t){ .pid = holdings[i].pid, .usedGpuMemory = holdings[i].used_bytes };
	return status;
}

#define PROCESS_LIST(function, fill, list, type)                                              \
	NVML_API nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, type *infos) \
	{                                                                                     \
		return fill(device, list, count, infos);                                      \
	}

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, fill_v1, LIST_COMPUTE, nvmlProcessInfo_v1_t)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, fill_v2, LIST_COMPUTE, nvmlProcessInfo_v2_t)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, fill_v2, LIST_COMPUTE, nvmlProcessInfo_v3_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, fill_v1, LIST_MPS, nvmlProcessInfo_v1_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, fill_v2, LIST_MPS, nvmlProcessInfo_v2_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, fill_v2, LIST_MPS, nvmlProcessInfo_v3_t)

/* No process draws on a simulated node. */
static nvmlReturn_t no_processes(nvmlDevice_t device, unsigned int *count)
{
	TARGET(sim_nvml_target, device);
	REQUIRE_ARGUMENT(count);
	*count = 0;
	return NVML_SUCCESS;
}

#define EMPTY_LIST(function, type)                                                            \
	NVML_API nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, type *infos) \
	{                                                                                     \
		(void)infos;                                                                  \
		return no_processes(device, count);                                           \
	}

EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_v3_t)

NVML_API nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_v1_t *list)
{
	struct holding holdings[SIM_MAX_SLOTS];
	unsigned found;
	REQUIRE_ARGUMENT(list);
	REQUIRE(list->version == NVML_VERSION_WORD(nvmlProcessDetailList_v1_t, 1), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	REQUIRE_ARGUMENT(list->mode < NVML_PROCESS_MODE_MAX);
	if (list->mode == NVML_PROCESS_MODE_GRAPHICS)
		return no_processes(device, &list->numProcArrayEntries);
	enum list wanted = list->mode == NVML_PROCESS_MODE_MPS ? LIST_MPS : LIST_COMPUTE;
	nvmlReturn_t status = begin_list(device, wanted, &list->numProcArrayEntries, list->procArray, holdings, &found);
	for (unsigned i = 0; status == NVML_SUCCESS && i < found; i++)
		list->procArray[i] = (nvmlProcessDetail_v1_t){ .pid = holdings[i].pid,
							       .usedGpuMemory = holdings[i].used_bytes,
							       .gpuInstanceId = holdings[i].gpu_instance,
							       .computeInstanceId = holdings[i].compute_instance };
	return status;
}

/* ---- utilisation of processes ---- */

/* The span of finished buckets that are new to a caller who has seen everything up to `last_seen_us`. Empty: length 0. */
struct span {
	uint64_t end_ns, length_ns;
};

static struct span unseen_span(unsigned long long last_seen_us, uint64_t unless_seen_ns)
{
	struct span span = { .end_ns = sim_nvml_last_bucket_end_ns(), .length_ns = unless_seen_ns };
	unsigned long long end_us = sim_nvml_realtime_us(span.end_ns);
	if (last_seen_us >= end_us)
		span.length_ns = 0;
	else if (last_seen_us)
		span.length_ns = (end_us - last_seen_us) * 1000;
	if (span.length_ns > LONGEST_WINDOW_NS)
		span.length_ns = LONGEST_WINDOW_NS;
	/* the two clocks are read one after the other */
	span.length_ns = (span.length_ns + SIM_BUCKET_NS / 2) / SIM_BUCKET_NS * SIM_BUCKET_NS;
	return span;
}

/* The sample of a process that used the GPU in that time. */
static bool sample_process(const struct sim_target *t, const struct span *span, const struct sim_process *process,
			   nvmlProcessUtilizationInfo_v1_t *out)
{
	uint64_t busy_ns = sim_slot_busy_ns(&t->state->slots[process->slot], t->index, inside_last_bucket(span->end_ns), span->length_ns);
	unsigned sm = percent(busy_ns, span->length_ns);
	*out = (nvmlProcessUtilizationInfo_v1_t){ .timeStamp = sim_nvml_realtime_us(span->end_ns),
						  .pid = (uint32_t)process->pid,
						  .smUtil = sm,
						  .memUtil = sim_nvml_memory_percent(sm) };
	return busy_ns != 0;
}

/* Samples name also processes that have ended: the real driver keeps them in a ring for about ten seconds, with a reference to the pid
 * (NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2 in NVIDIA's open kernel modules). */
static unsigned collect_process_samples(const struct sim_target *t, unsigned long long last_seen_us,
					nvmlProcessUtilizationInfo_v1_t out[SIM_MAX_SLOTS])
{
	struct span span = unseen_span(last_seen_us, DEFAULT_SAMPLE_WINDOW_NS);
	struct sim_process process;
	struct holding holding;
	unsigned count = 0;
	int cursor = 0;
	if (!span.length_ns)
		return 0;
	while (count < SIM_MAX_SLOTS && sim_next_process(t->state, &cursor, &process))
		if (holding_of(t, &process, &holding))
			count += sample_process(t, &span, &process, &out[count]);
	cursor = 0;
	while (count < SIM_MAX_SLOTS && !atomic_load(&t->state->settings.living_samples) && sim_next_ended(t->state, &cursor, &process))
		count += sample_process(t, &span, &process, &out[count]);
	return count;
}

/* Asked for the size, the driver answers that of its buffer, whether or not there is a sample; NOT_FOUND comes with the second call. */
static nvmlReturn_t process_samples(nvmlDevice_t device, unsigned long long last_seen_us, bool ask_size, unsigned int *count,
				    nvmlProcessUtilizationInfo_v1_t samples[SIM_MAX_SLOTS])
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE(!mig_enabled(&t), NVML_ERROR_NOT_SUPPORTED);
	unsigned room = *count;
	if (ask_size) {
		*count = SIM_MAX_SLOTS;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	*count = collect_process_samples(&t, last_seen_us, samples);
	REQUIRE(*count, NVML_ERROR_NOT_FOUND);
	return *count <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

NVML_API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *utilization, unsigned int *count,
						      unsigned long long last_seen_us)
{
	nvmlProcessUtilizationInfo_v1_t samples[SIM_MAX_SLOTS];
	REQUIRE_ARGUMENT(count);
	nvmlReturn_t status = process_samples(device, last_seen_us, !utilization || *count == 0, count, samples);
	for (unsigned i = 0; status == NVML_SUCCESS && i < *count; i++)
		utilization[i] = (nvmlProcessUtilizationSample_t){
			.pid = samples[i].pid, .timeStamp = samples[i].timeStamp, .smUtil = samples[i].smUtil, .memUtil = samples[i].memUtil
		};
	return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *info)
{
	nvmlProcessUtilizationInfo_v1_t samples[SIM_MAX_SLOTS];
	REQUIRE_ARGUMENT(info);
	REQUIRE(info->version == NVML_VERSION_WORD(nvmlProcessesUtilizationInfo_v1_t, 1), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	bool ask_size = !info->procUtilArray || info->processSamplesCount == 0;
	nvmlReturn_t status = process_samples(device, info->lastSeenTimeStamp, ask_size, &info->processSamplesCount, samples);
	if (status == NVML_SUCCESS)
		memcpy(info->procUtilArray, samples, info->processSamplesCount * sizeof *samples);
	return status;
}

/* ---- samples of the device ---- */

static bool sample_value(const struct sim_target *t, nvmlSamplingType_t type, uint64_t end_ns, unsigned int *value)
{
	unsigned gpu = sim_nvml_utilization_percent(t, SIM_MIG_ANY_DEVICE, end_ns, SIM_BUCKET_NS);
	switch (type) {
	case NVML_GPU_UTILIZATION_SAMPLES: *value = gpu; return true;
	case NVML_MEMORY_UTILIZATION_SAMPLES: *value = sim_nvml_memory_percent(gpu); return true;
	case NVML_ENC_UTILIZATION_SAMPLES:
	case NVML_DEC_UTILIZATION_SAMPLES:
	case NVML_JPG_UTILIZATION_SAMPLES:
	case NVML_OFA_UTILIZATION_SAMPLES: *value = 0; return true;
	case NVML_TOTAL_POWER_SAMPLES:
		*value = t->hardware->power_idle_mw +
			 (unsigned)((uint64_t)(sim_nvml_power_limit_mw(t) - t->hardware->power_idle_mw) * gpu / 100);
		return true;
	case NVML_PROCESSOR_CLK_SAMPLES: *value = gpu ? t->hardware->graphics_clock_mhz : t->hardware->idle_graphics_clock_mhz; return true;
	case NVML_MEMORY_CLK_SAMPLES: *value = gpu ? t->hardware->memory_clock_mhz : t->hardware->idle_memory_clock_mhz; return true;
	case NVML_MODULE_POWER_SAMPLES: break;
	}
	return false;
}

NVML_API nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type, unsigned long long last_seen_us,
					   nvmlValueType_t *value_type, unsigned int *count, nvmlSample_t *samples)
{
	unsigned int value;
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(value_type && count);
	REQUIRE(!mig_enabled(&t), NVML_ERROR_NOT_SUPPORTED);
	struct span span = unseen_span(last_seen_us, LONGEST_WINDOW_NS);
	REQUIRE(sample_value(&t, type, span.end_ns, &value), NVML_ERROR_NOT_SUPPORTED);
	REQUIRE(span.length_ns, NVML_ERROR_NOT_FOUND);
	*value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
	unsigned buckets = (unsigned)(span.length_ns / SIM_BUCKET_NS), room = *count;
	if (!samples) {
		*count = buckets;
		return NVML_SUCCESS;
	}
	if (buckets > room)
		buckets = room;     /* the newest ones; the caller queries again for the rest */
	*count = buckets;
	for (unsigned i = 0; i < buckets; i++) {
		uint64_t end_ns = span.end_ns - (buckets - 1 - i) * SIM_BUCKET_NS;
		sample_value(&t, type, end_ns, &value);
		samples[i] = (nvmlSample_t){ .timeStamp = sim_nvml_realtime_us(end_ns), .sampleValue.uiVal = value };
	}
	return NVML_SUCCESS;
}

/* ---- accounting: always off, as on a node without configuration ---- */

NVML_API nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(mode);
	*mode = NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingBufferSize(nvmlDevice_t device, unsigned int *size)
{
	enum { DRIVER_BUFFER = 4000 };
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(size);
	*size = DRIVER_BUFFER;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count, unsigned int *pids)
{
	(void)pids;
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(count);
	*count = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *stats)
{
	(void)pid;
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(stats);
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingStats_v2(nvmlDevice_t device, nvmlAccountingStats_v2_t *stats)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(stats);
	return NVML_ERROR_NOT_FOUND;
}
