/* SPDX-License-Identifier: Apache-2.0 */
/* nvml_sensors.c - clocks, power, energy, temperature, and field values.
 *
 * All of these follow utilisation: an idle GPU shows the topology's idle figures, a fully busy one its limits, and in between it is a
 * straight line. */
#include <string.h>

#include "simulated_driver/nvml_prototypes.h"
#include "simulated_driver/nvml_internal.h"

/* ---- the model ---- */

static unsigned between(unsigned idle, unsigned busy, unsigned percent)
{
	return idle + (unsigned)((int64_t)((int64_t)busy - idle) * percent / 100);
}

unsigned sim_nvml_power_limit_mw(const struct sim_target *t)
{
	uint32_t limit_mw = atomic_load(&t->settings->power_limit_mw);
	return limit_mw ? limit_mw : t->hardware->power_limit_mw;
}

unsigned sim_nvml_power_mw(const struct sim_target *t)
{
	return between(t->hardware->power_idle_mw, sim_nvml_power_limit_mw(t), sim_nvml_gpu_percent(t));
}

unsigned sim_nvml_temperature_c(const struct sim_target *t)
{
	return between(t->hardware->temperature_idle_c, t->hardware->temperature_busy_c, sim_nvml_gpu_percent(t));
}

unsigned sim_nvml_clock_mhz(const struct sim_target *t, nvmlClockType_t type, bool maximum)
{
	bool fast = maximum || sim_nvml_gpu_percent(t) > 0;
	switch (type) {
	case NVML_CLOCK_GRAPHICS:
	case NVML_CLOCK_SM: return fast ? t->hardware->graphics_clock_mhz : t->hardware->idle_graphics_clock_mhz;
	case NVML_CLOCK_MEM: return fast ? t->hardware->memory_clock_mhz : t->hardware->idle_memory_clock_mhz;
	case NVML_CLOCK_VIDEO: return t->hardware->video_clock_mhz;
	case NVML_CLOCK_COUNT: break;
	}
	return 0;
}

/* The meter integrates when it is read: idle power since boot, plus the busy part of the time since the last reading as far as the buckets
 * reach. So it never runs backwards, also when the processes that were busy are gone. */
unsigned long long sim_nvml_energy_mj(const struct sim_target *t)
{
	sim_lock(t->state);
	uint64_t end_ns = sim_nvml_last_bucket_end_ns(), from_ns = t->settings->energy_counted_ns;
	uint64_t longest_ns = (SIM_BUSY_BUCKETS - 2) * SIM_BUCKET_NS;
	if (from_ns == 0 || end_ns - from_ns > longest_ns)
		from_ns = end_ns > longest_ns ? end_ns - longest_ns : 0;
	if (end_ns > from_ns)
		t->settings->energy_busy_ns += sim_gpu_busy_ns(t->state, t->index, SIM_MIG_ANY_DEVICE, end_ns - 1, end_ns - from_ns);
	t->settings->energy_counted_ns = end_ns;
	uint64_t busy_ms = t->settings->energy_busy_ns / 1000000;
	sim_unlock(t->state);
	uint64_t uptime_ms = sim_nvml_now_us() / 1000 - t->state->boot_time_ns / 1000000;
	return (t->hardware->power_idle_mw * uptime_ms + (uint64_t)(t->hardware->power_limit_mw - t->hardware->power_idle_mw) * busy_ms) /
	       1000;
}

/* ---- clocks ---- */

static nvmlReturn_t answer_clock(nvmlDevice_t device, nvmlClockType_t type, bool maximum, unsigned int *mhz)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(mhz && type < NVML_CLOCK_COUNT);
	*mhz = sim_nvml_clock_mhz(&t, type, maximum);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
	return answer_clock(device, type, false, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
	return answer_clock(device, type, true, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
	return answer_clock(device, type, true, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
	return answer_clock(device, type, true, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
	return answer_clock(device, type, true, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t id, unsigned int *mhz)
{
	REQUIRE_ARGUMENT(id <= NVML_CLOCK_ID_CUSTOMER_BOOST_MAX);
	return answer_clock(device, type, id != NVML_CLOCK_ID_CURRENT, mhz);
}

/* One memory clock, and graphics clocks in the driver's steps of 15 MHz. */
NVML_API nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned int *count, unsigned int *clocks_mhz)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(count);
	bool room = *count >= 1 && clocks_mhz;
	*count = 1;
	REQUIRE(room, NVML_ERROR_INSUFFICIENT_SIZE);
	clocks_mhz[0] = t.hardware->memory_clock_mhz;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned int memory_mhz, unsigned int *count,
							   unsigned int *clocks_mhz)
{
	enum { STEP_MHZ = 15 };
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(count);
	REQUIRE(memory_mhz == t.hardware->memory_clock_mhz, NVML_ERROR_NOT_FOUND);
	unsigned int room = *count, top = t.hardware->graphics_clock_mhz;
	*count = (top - t.hardware->idle_graphics_clock_mhz) / STEP_MHZ + 1;
	REQUIRE(clocks_mhz && *count <= room, NVML_ERROR_INSUFFICIENT_SIZE);
	for (unsigned int i = 0; i < *count; i++)
		clocks_mhz[i] = top - i * STEP_MHZ;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(reasons);
	unsigned percent = sim_nvml_gpu_percent(&t);
	*reasons = percent == 0 ? nvmlClocksEventReasonGpuIdle : 0;
	if (percent == 100 && sim_nvml_power_limit_mw(&t) < t.hardware->power_limit_mw)
		*reasons |= nvmlClocksEventReasonSwPowerCap;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
	return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(reasons);
	*reasons = nvmlClocksEventReasonGpuIdle | nvmlClocksEventReasonApplicationsClocks | nvmlClocksEventReasonSwPowerCap |
		   nvmlClocksEventReasonHwSlowdown | nvmlClocksEventReasonSwThermalSlowdown | nvmlClocksEventReasonHwThermalSlowdown |
		   nvmlClocksEventReasonHwPowerBrakeSlowdown;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
	return nvmlDeviceGetSupportedClocksEventReasons(device, reasons);
}

/* A GPU with an idle memory clock is in P8; one that keeps it up (HBM) is always in P0. */
NVML_API nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, nvmlPstates_t *state)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(state);
	*state = sim_nvml_clock_mhz(&t, NVML_CLOCK_MEM, false) == t.hardware->memory_clock_mhz ? NVML_PSTATE_0 : NVML_PSTATE_8;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerState(nvmlDevice_t device, nvmlPstates_t *state)
{
	return nvmlDeviceGetPerformanceState(device, state);
}

NVML_API nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, nvmlPerfPolicyType_t policy, nvmlViolationTime_t *time)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(time && policy < NVML_PERF_POLICY_COUNT);
	*time = (nvmlViolationTime_t){ .referenceTime = sim_nvml_now_us() };     /* never held back */
	return NVML_SUCCESS;
}

/* ---- PCIe traffic: always 0, because device memory is simulated ---- */

NVML_API nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter, unsigned int *kbps)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(kbps && counter < NVML_PCIE_UTIL_COUNT);
	*kbps = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned int *count)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(count);
	*count = 0;
	return NVML_SUCCESS;
}

/* ---- power ---- */

#define POWER(function, type, expression)                                \
	NVML_API nvmlReturn_t function(nvmlDevice_t device, type *value) \
	{                                                                \
		TARGET(sim_nvml_gpu, device);                            \
		REQUIRE_ARGUMENT(value);                                 \
		*value = (expression);                                   \
		return NVML_SUCCESS;                                     \
	}

POWER(nvmlDeviceGetPowerUsage, unsigned int, sim_nvml_power_mw(&t))
POWER(nvmlDeviceGetPowerManagementMode, nvmlEnableState_t, NVML_FEATURE_ENABLED)
POWER(nvmlDeviceGetPowerManagementLimit, unsigned int, sim_nvml_power_limit_mw(&t))
POWER(nvmlDeviceGetEnforcedPowerLimit, unsigned int, sim_nvml_power_limit_mw(&t))
POWER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, t.hardware->power_limit_mw)
POWER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, sim_nvml_energy_mj(&t))

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *min_mw, unsigned int *max_mw)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(min_mw && max_mw);
	*min_mw = t.hardware->power_limit_min_mw;
	*max_mw = t.hardware->power_limit_max_mw;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned int limit_mw)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE(sim_nvml_require_admin() == NVML_SUCCESS, NVML_ERROR_NO_PERMISSION);
	REQUIRE_ARGUMENT(limit_mw >= t.hardware->power_limit_min_mw && limit_mw <= t.hardware->power_limit_max_mw);
	atomic_store(&t.settings->power_limit_mw, limit_mw);
	return NVML_SUCCESS;
}

/* ---- temperature ---- */

NVML_API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(celsius && sensor == NVML_TEMPERATURE_GPU);
	*celsius = sim_nvml_temperature_c(&t);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *temperature)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(temperature);
	REQUIRE(temperature->version == NVML_VERSION_WORD(nvmlTemperature_v1_t, 1), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	REQUIRE_ARGUMENT(temperature->sensorType == NVML_TEMPERATURE_GPU);
	temperature->temperature = (int)sim_nvml_temperature_c(&t);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_v1_t *margin)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(margin);
	REQUIRE(margin->version == NVML_VERSION_WORD(nvmlMarginTemperature_v1_t, 1), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	margin->marginTemperature = (int)t.hardware->temperature_slowdown_c - (int)sim_nvml_temperature_c(&t);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t threshold, unsigned int *celsius)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(celsius && threshold < NVML_TEMPERATURE_THRESHOLD_COUNT);
	switch (threshold) {
	case NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: *celsius = t.hardware->temperature_shutdown_c; return NVML_SUCCESS;
	case NVML_TEMPERATURE_THRESHOLD_SLOWDOWN:
	case NVML_TEMPERATURE_THRESHOLD_GPU_MAX:
	case NVML_TEMPERATURE_THRESHOLD_MEM_MAX: *celsius = t.hardware->temperature_slowdown_c; return NVML_SUCCESS;
	default: return NVML_ERROR_NOT_SUPPORTED;
	}
}

/* ---- field values ---- */

static unsigned active_links(const struct sim_target *t, uint32_t peer_kind)
{
	unsigned count = 0;
	for (uint32_t l = 0; l < t->hardware->nvlink_count; l++)
		count += peer_kind == SIM_LINK_NONE ? t->hardware->nvlinks[l].peer_kind != SIM_LINK_NONE
						    : t->hardware->nvlinks[l].peer_kind == peer_kind;
	return count;
}

static nvmlReturn_t answer_unsigned(nvmlFieldValue_t *field, unsigned long long value)
{
	field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
	field->value.ullVal = 0;
	field->value.uiVal = (unsigned int)value;
	return NVML_SUCCESS;
}

static nvmlReturn_t answer_wide(nvmlFieldValue_t *field, unsigned long long value)
{
	field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
	field->value.ullVal = value;
	return NVML_SUCCESS;
}

/* The older fields that name one link each: 84..89 for links 0 to 5, 132..137 for 6 to 11. */
static bool names_link_speed(unsigned int id, unsigned *link)
{
	bool low = id >= NVML_FI_DEV_NVLINK_SPEED_MBPS_L0 && id <= NVML_FI_DEV_NVLINK_SPEED_MBPS_L5;
	bool high = id >= NVML_FI_DEV_NVLINK_SPEED_MBPS_L6 && id <= NVML_FI_DEV_NVLINK_SPEED_MBPS_L11;
	*link = low ? id - NVML_FI_DEV_NVLINK_SPEED_MBPS_L0 : id - NVML_FI_DEV_NVLINK_SPEED_MBPS_L6 + 6;
	return low || high;
}

static nvmlReturn_t read_link_field(const struct sim_target *t, nvmlFieldValue_t *field)
{
	const struct sim_gpu *gpu = t->hardware;
	unsigned link;
	REQUIRE(gpu->nvlink_version, NVML_ERROR_NOT_SUPPORTED);
	if (names_link_speed(field->fieldId, &link)) {
		REQUIRE(link < gpu->nvlink_count, NVML_ERROR_NOT_SUPPORTED);
		return answer_unsigned(field, gpu->nvlink_mbps);
	}
	switch (field->fieldId) {
	case NVML_FI_DEV_NVLINK_LINK_COUNT: return answer_unsigned(field, gpu->nvlink_count);
	case NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: return answer_unsigned(field, gpu->nvlink_mbps);
	case NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT: return answer_unsigned(field, active_links(t, SIM_LINK_SWITCH));
	case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX:
	case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX:
	case NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX:
	case NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX:
	case NVML_FI_DEV_NVLINK_BANDWIDTH_C0_TOTAL: return answer_wide(field, 0);   /* no data moves between simulated GPUs */
	case NVML_FI_DEV_NVLINK_GET_SPEED:
		REQUIRE_ARGUMENT(field->scopeId < gpu->nvlink_count);
		return answer_unsigned(field, gpu->nvlink_mbps);
	case NVML_FI_DEV_NVLINK_GET_STATE:
		REQUIRE_ARGUMENT(field->scopeId < gpu->nvlink_count);
		return answer_unsigned(field, gpu->nvlinks[field->scopeId].peer_kind != SIM_LINK_NONE);
	case NVML_FI_DEV_NVLINK_GET_VERSION:
		REQUIRE_ARGUMENT(field->scopeId < gpu->nvlink_count);
		return answer_unsigned(field, gpu->nvlink_version);
	case NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID:
		REQUIRE_ARGUMENT(field->scopeId < gpu->nvlink_count);
		return answer_unsigned(field, gpu->nvlinks[field->scopeId].peer_link);
	default: return NVML_ERROR_NOT_SUPPORTED;
	}
}

static nvmlReturn_t read_ecc_field(const struct sim_target *t, nvmlFieldValue_t *field)
{
	REQUIRE(t->hardware->ecc_enabled, NVML_ERROR_NOT_SUPPORTED);
	switch (field->fieldId) {
	case NVML_FI_DEV_ECC_CURRENT: return answer_unsigned(field, NVML_FEATURE_ENABLED);
	case NVML_FI_DEV_ECC_PENDING: return answer_unsigned(field, atomic_load(&t->gpu->ecc_mode_pending));
	case NVML_FI_DEV_ECC_SBE_VOL_TOTAL:
	case NVML_FI_DEV_ECC_SBE_VOL_DEV: return answer_wide(field, atomic_load(&t->gpu->ecc_corrected_volatile));
	case NVML_FI_DEV_ECC_DBE_VOL_TOTAL:
	case NVML_FI_DEV_ECC_DBE_VOL_DEV: return answer_wide(field, atomic_load(&t->gpu->ecc_uncorrected_volatile));
	case NVML_FI_DEV_ECC_SBE_AGG_TOTAL:
	case NVML_FI_DEV_ECC_SBE_AGG_DEV: return answer_wide(field, atomic_load(&t->gpu->ecc_corrected_aggregate));
	case NVML_FI_DEV_ECC_DBE_AGG_TOTAL:
	case NVML_FI_DEV_ECC_DBE_AGG_DEV: return answer_wide(field, atomic_load(&t->gpu->ecc_uncorrected_aggregate));
	default: return NVML_ERROR_NOT_SUPPORTED;
	}
}

static nvmlReturn_t read_repair_field(const struct sim_target *t, nvmlFieldValue_t *field)
{
	bool rows = t->hardware->architecture >= NVML_DEVICE_ARCH_AMPERE;
	bool asks_rows = field->fieldId >= NVML_FI_DEV_REMAPPED_COR && field->fieldId <= NVML_FI_DEV_REMAPPED_FAILURE;
	REQUIRE(rows == asks_rows, NVML_ERROR_NOT_SUPPORTED);
	switch (field->fieldId) {
	case NVML_FI_DEV_REMAPPED_UNC:
	case NVML_FI_DEV_RETIRED_DBE: return answer_unsigned(field, atomic_load(&t->gpu->ecc_incidents));
	case NVML_FI_DEV_REMAPPED_PENDING:
	case NVML_FI_DEV_RETIRED_PENDING: return answer_unsigned(field, atomic_load(&t->gpu->row_remap_pending));
	default: return answer_unsigned(field, 0);   /* corrected errors use no rows and nothing fails */
	}
}

static nvmlReturn_t read_field(const struct sim_target *t, nvmlFieldValue_t *field)
{
	unsigned link;
	if (names_link_speed(field->fieldId, &link))
		return read_link_field(t, field);
	switch (field->fieldId) {
	case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
	case NVML_FI_DEV_ENERGY: return answer_wide(field, sim_nvml_energy_mj(t));
	case NVML_FI_DEV_POWER_AVERAGE:
	case NVML_FI_DEV_POWER_INSTANT: return answer_unsigned(field, sim_nvml_power_mw(t));
	case NVML_FI_DEV_POWER_MIN_LIMIT: return answer_unsigned(field, t->hardware->power_limit_min_mw);
	case NVML_FI_DEV_POWER_MAX_LIMIT: return answer_unsigned(field, t->hardware->power_limit_max_mw);
	case NVML_FI_DEV_POWER_DEFAULT_LIMIT: return answer_unsigned(field, t->hardware->power_limit_mw);
	case NVML_FI_DEV_POWER_CURRENT_LIMIT:
	case NVML_FI_DEV_POWER_REQUESTED_LIMIT: return answer_unsigned(field, sim_nvml_power_limit_mw(t));
	case NVML_FI_DEV_MEMORY_TEMP: return answer_unsigned(field, sim_nvml_temperature_c(t));
	case NVML_FI_DEV_PCIE_REPLAY_COUNTER:
	case NVML_FI_DEV_MMA_STALL_PERCENT: /* simulated kernels multiply no matrices */ return answer_unsigned(field, 0);
	case NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED:
		return answer_unsigned(field,
				       t->hardware->mig_family != SIM_MIG_NONE && t->hardware->architecture >= NVML_DEVICE_ARCH_HOPPER);
	case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
		return answer_unsigned(field, atomic_load(&t->gpu->row_remap_pending) ? NVML_GPU_RECOVERY_ACTION_GPU_RESET
										      : NVML_GPU_RECOVERY_ACTION_NONE);
	case NVML_FI_DEV_RETIRED_SBE:
	case NVML_FI_DEV_RETIRED_DBE:
	case NVML_FI_DEV_RETIRED_PENDING:
	case NVML_FI_DEV_REMAPPED_COR:
	case NVML_FI_DEV_REMAPPED_UNC:
	case NVML_FI_DEV_REMAPPED_PENDING:
	case NVML_FI_DEV_REMAPPED_FAILURE: return read_repair_field(t, field);
	case NVML_FI_DEV_NVLINK_LINK_COUNT:
	case NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON:
	case NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT:
	case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX:
	case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX:
	case NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX:
	case NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX:
	case NVML_FI_DEV_NVLINK_BANDWIDTH_C0_TOTAL:
	case NVML_FI_DEV_NVLINK_GET_SPEED:
	case NVML_FI_DEV_NVLINK_GET_STATE:
	case NVML_FI_DEV_NVLINK_GET_VERSION:
	case NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID: return read_link_field(t, field);
	default: return read_ecc_field(t, field);
	}
}

/* One call, one status per field. */
NVML_API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(values && count > 0);
	for (int i = 0; i < count; i++) {
		unsigned long long begin_us = sim_nvml_now_us();
		values[i].nvmlReturn = read_field(&t, &values[i]);
		values[i].timestamp = (long long)begin_us;
		values[i].latencyUsec = (long long)(sim_nvml_now_us() - begin_us);
	}
	return NVML_SUCCESS;
}
