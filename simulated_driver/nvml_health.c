/* SPDX-License-Identifier: Apache-2.0 */
/* nvml_health.c - events, ECC counters and what the memory repaired.
 *
 * An event set remembers, per GPU, what it has reported: the number of the newest XID, the ECC counters, the count of MIG changes. A
 * difference is an event. A waiter sleeps on the node's bell (state.h), which every source of events rings, and looks again. So an event is
 * never lost between two waits, and an event set of a dead process needs no cleaning. */
#include <pthread.h>
#include <stdlib.h>

#include "simulated_driver/nvml_prototypes.h"
#include "simulated_driver/nvml_internal.h"

#define BANKS_PER_GIB 8     /* rows of a bank share its spare rows; an A100 with 80 GiB reports 640 banks */

/* ---- event sets ---- */

struct watched {
	unsigned long long types;
	uint32_t xid;
	uint64_t ecc_corrected, ecc_uncorrected;
	uint32_t mig_changes;
};

struct nvmlEventSet_st {
	pthread_mutex_t lock;       /* several threads may wait on one set */
	struct watched gpus[SIM_MAX_GPUS];
	struct nvmlEventSet_st *next;
};

static struct {
	pthread_mutex_t lock;
	struct nvmlEventSet_st *sets;   /* alive; distinguishes a set from any other pointer */
} events = { .lock = PTHREAD_MUTEX_INITIALIZER };

static bool known_set(const struct nvmlEventSet_st *set)
{
	pthread_mutex_lock(&events.lock);
	const struct nvmlEventSet_st *at = events.sets;
	while (at && at != set)
		at = at->next;
	pthread_mutex_unlock(&events.lock);
	return at;
}

NVML_API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *out)
{
	struct sim_state *state;
	nvmlReturn_t status = sim_nvml_enter(&state);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(out);
	struct nvmlEventSet_st *set = calloc(1, sizeof *set);
	REQUIRE(set, NVML_ERROR_MEMORY);
	pthread_mutex_init(&set->lock, NULL);
	pthread_mutex_lock(&events.lock);
	set->next = events.sets;
	events.sets = set;
	pthread_mutex_unlock(&events.lock);
	*out = set;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	struct sim_state *state;
	REQUIRE(sim_nvml_enter(&state) != NVML_ERROR_UNINITIALIZED, NVML_ERROR_UNINITIALIZED);
	pthread_mutex_lock(&events.lock);
	struct nvmlEventSet_st **at = &events.sets;
	while (*at && *at != set)
		at = &(*at)->next;
	bool found = *at;
	if (found)
		*at = set->next;
	pthread_mutex_unlock(&events.lock);
	REQUIRE_ARGUMENT(found);
	pthread_mutex_destroy(&set->lock);
	free(set);
	return NVML_SUCCESS;
}

static unsigned long long supported_types(const struct sim_target *t)
{
	unsigned long long types = nvmlEventTypeXidCriticalError;
	if (t->hardware->ecc_enabled)
		types |= nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError;
	if (t->hardware->mig_family != SIM_MIG_NONE)
		types |= nvmlEventMigConfigChange;
	return types;
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(types);
	*types = supported_types(&t);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(known_set(set));
	REQUIRE(!(types & ~supported_types(&t)), NVML_ERROR_NOT_SUPPORTED);
	pthread_mutex_lock(&set->lock);
	struct watched *watched = &set->gpus[t.index];
	if (!watched->types)    /* events count from the first registration on */
		*watched = (struct watched){
			.xid = atomic_load(&t.gpu->xid_sequence),
			.ecc_corrected = atomic_load(&t.gpu->ecc_corrected_aggregate),
			.ecc_uncorrected = atomic_load(&t.gpu->ecc_uncorrected_aggregate),
			.mig_changes = atomic_load(&t.mig.changes),
		};
	watched->types |= types;
	pthread_mutex_unlock(&set->lock);
	return NVML_SUCCESS;
}

/* ---- waiting ---- */

/* The next XID after *seen that is still in the ring. The caller holds the node's mutex, as do those who report. */
static bool next_xid_locked(const struct sim_gpu_state *gpu, uint32_t *seen, uint32_t *xid, int *mig_device)
{
	uint32_t newest = atomic_load(&gpu->xid_sequence);
	if (newest == *seen)
		return false;
	if (newest - *seen > SIM_XID_RING)
		*seen = newest - SIM_XID_RING;      /* overrun: the oldest are gone */
	const struct sim_xid_event *entry = &gpu->xids[++*seen % SIM_XID_RING];
	*xid = entry->xid;
	*mig_device = entry->mig_device;
	return true;
}

static bool moved(uint64_t *seen, uint64_t now)
{
	bool changed = *seen != now;
	*seen = now;
	return changed;
}

/* Takes one event of one GPU out of the set. Types that are not registered are kept up to date silently. */
static bool take_event_locked(struct watched *watched, const struct sim_gpu_state *gpu, nvmlEventData_t *data)
{
	uint32_t xid;
	int mig_device = SIM_WHOLE_GPU;
	data->eventData = 0;
	data->gpuInstanceId = data->computeInstanceId = NVML_NO_INSTANCE;
	while (next_xid_locked(gpu, &watched->xid, &xid, &mig_device)) {
		if (!(watched->types & nvmlEventTypeXidCriticalError))
			continue;
		data->eventType = nvmlEventTypeXidCriticalError;
		data->eventData = xid;
		if (mig_device != SIM_WHOLE_GPU) {
			data->gpuInstanceId = gpu->mig.devices[mig_device].gpu_instance_id;
			data->computeInstanceId = gpu->mig.devices[mig_device].id;
		}
		return true;
	}
	data->eventType = nvmlEventTypeDoubleBitEccError;
	if (moved(&watched->ecc_uncorrected, atomic_load(&gpu->ecc_uncorrected_aggregate)) && watched->types & data->eventType)
		return true;
	data->eventType = nvmlEventTypeSingleBitEccError;
	if (moved(&watched->ecc_corrected, atomic_load(&gpu->ecc_corrected_aggregate)) && watched->types & data->eventType)
		return true;
	data->eventType = nvmlEventMigConfigChange;
	uint64_t changes = watched->mig_changes;
	bool changed = moved(&changes, atomic_load(&gpu->mig.changes));
	watched->mig_changes = (uint32_t)changes;
	return changed && watched->types & data->eventType;
}

/* One look at the set: an event, or a lost GPU, or TIMEOUT. The events that led to the loss come first. */
static nvmlReturn_t look(struct sim_state *state, struct nvmlEventSet_st *set, nvmlEventData_t *data)
{
	bool lost = false, found = false;
	pthread_mutex_lock(&set->lock);
	sim_lock(state);
	for (uint32_t gpu = 0; gpu < state->topology.n_gpus && !found; gpu++) {
		if (!set->gpus[gpu].types)
			continue;
		found = take_event_locked(&set->gpus[gpu], &state->gpus[gpu], data);
		data->device = sim_nvml_gpu_handle(gpu);
		lost = lost || atomic_load(&state->gpus[gpu].lost);
	}
	sim_unlock(state);
	pthread_mutex_unlock(&set->lock);
	return found ? NVML_SUCCESS : lost ? NVML_ERROR_GPU_IS_LOST : NVML_ERROR_TIMEOUT;
}

NVML_API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
	struct sim_state *state;
	nvmlReturn_t status = sim_nvml_enter(&state);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(data && known_set(set));
	uint64_t deadline_ns = sim_now_ns() + timeout_ms * 1000000ull;
	nvmlEventData_t next;
	for (;;) {
		uint32_t bell = atomic_load(&state->settings.bell);     /* before the look, so that what happens after it wakes us */
		status = look(state, set, &next);
		uint64_t now_ns = sim_now_ns();
		if (status != NVML_ERROR_TIMEOUT || now_ns >= deadline_ns)
			break;
		sim_wait_bell(state, bell, (uint32_t)((deadline_ns - now_ns + 999999) / 1000000));
		nvmlReturn_t driver = sim_nvml_enter(&state);
		REQUIRE(driver == NVML_SUCCESS, driver);
	}
	if (status == NVML_SUCCESS)
		*data = next;
	return status;
}

/* The first version knew no MIG: the instance fields are not written. */
NVML_API nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
	nvmlEventData_t full;
	REQUIRE_ARGUMENT(data);
	nvmlReturn_t status = nvmlEventSetWait_v2(set, &full, timeout_ms);
	if (status == NVML_SUCCESS) {
		data->device = full.device;
		data->eventType = full.eventType;
		data->eventData = full.eventData;
	}
	return status;
}

/* ---- ECC ---- */

static nvmlReturn_t require_ecc(const struct sim_target *t)
{
	return t->hardware->ecc_enabled ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static unsigned long long ecc_count(const struct sim_target *t, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter)
{
	if (type == NVML_MEMORY_ERROR_TYPE_CORRECTED)
		return atomic_load(counter == NVML_VOLATILE_ECC ? &t->gpu->ecc_corrected_volatile : &t->gpu->ecc_corrected_aggregate);
	return atomic_load(counter == NVML_VOLATILE_ECC ? &t->gpu->ecc_uncorrected_volatile : &t->gpu->ecc_uncorrected_aggregate);
}

NVML_API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(current && pending);
	REQUIRE(require_ecc(&t) == NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED);
	*current = NVML_FEATURE_ENABLED;
	*pending = atomic_load(&t.gpu->ecc_mode_pending) ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetDefaultEccMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(mode);
	*mode = t.hardware->ecc_enabled ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
						  unsigned long long *count)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(count && type < NVML_MEMORY_ERROR_TYPE_COUNT && counter < NVML_ECC_COUNTER_TYPE_COUNT);
	REQUIRE(require_ecc(&t) == NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED);
	*count = ecc_count(&t, type, counter);
	return NVML_SUCCESS;
}

/* All simulated errors happen in DRAM. Ampere and newer count DRAM and SRAM only. */
NVML_API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
						      nvmlMemoryLocation_t location, unsigned long long *count)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(count && type < NVML_MEMORY_ERROR_TYPE_COUNT && counter < NVML_ECC_COUNTER_TYPE_COUNT &&
			 location < NVML_MEMORY_LOCATION_COUNT);
	REQUIRE(require_ecc(&t) == NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED);
	bool counted = location == NVML_MEMORY_LOCATION_DRAM || location == NVML_MEMORY_LOCATION_SRAM ||
		       t.hardware->architecture < NVML_DEVICE_ARCH_AMPERE;
	REQUIRE(counted, NVML_ERROR_NOT_SUPPORTED);
	*count = location == NVML_MEMORY_LOCATION_DRAM ? ecc_count(&t, type, counter) : 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
						     nvmlEccErrorCounts_t *counts)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(counts && type < NVML_MEMORY_ERROR_TYPE_COUNT && counter < NVML_ECC_COUNTER_TYPE_COUNT);
	REQUIRE(require_ecc(&t) == NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED);
	*counts = (nvmlEccErrorCounts_t){ .deviceMemory = ecc_count(&t, type, counter) };
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceClearEccErrorCounts(nvmlDevice_t device, nvmlEccCounterType_t counter)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(counter < NVML_ECC_COUNTER_TYPE_COUNT);
	REQUIRE(require_ecc(&t) == NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED);
	REQUIRE(sim_nvml_require_admin() == NVML_SUCCESS, NVML_ERROR_NO_PERMISSION);
	/* aggregate counters live in the InfoROM of newer boards, read-only */
	REQUIRE(counter == NVML_VOLATILE_ECC, NVML_ERROR_NOT_SUPPORTED);
	sim_lock(t.state);
	atomic_store(&t.gpu->ecc_corrected_volatile, 0);
	atomic_store(&t.gpu->ecc_uncorrected_volatile, 0);
	sim_unlock(t.state);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetEccMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(mode == NVML_FEATURE_DISABLED || mode == NVML_FEATURE_ENABLED);
	REQUIRE(require_ecc(&t) == NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED);
	REQUIRE(sim_nvml_require_admin() == NVML_SUCCESS, NVML_ERROR_NO_PERMISSION);
	atomic_store(&t.gpu->ecc_mode_pending, mode);
	return NVML_SUCCESS;
}

/* ---- repaired memory: rows since Ampere, whole pages before ---- */

static bool remaps_rows(const struct sim_target *t)
{
	return t->hardware->architecture >= NVML_DEVICE_ARCH_AMPERE;
}

/* Every uncorrectable error costs one row (or page), at the next reset. */
static uint32_t repairs(const struct sim_target *t)
{
	return atomic_load(&t->gpu->ecc_incidents);
}

NVML_API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
						unsigned int *pending, unsigned int *failed)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(corrected && uncorrected && pending && failed);
	REQUIRE(remaps_rows(&t), NVML_ERROR_NOT_SUPPORTED);
	*corrected = 0;
	*uncorrected = repairs(&t);
	*pending = atomic_load(&t.gpu->row_remap_pending);
	*failed = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *values)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(values);
	REQUIRE(remaps_rows(&t), NVML_ERROR_NOT_SUPPORTED);
	unsigned int banks = (unsigned int)(t.hardware->memory_bytes >> 30) * BANKS_PER_GIB, used = repairs(&t);
	if (used > banks)
		used = banks;
	*values = (nvmlRowRemapperHistogramValues_t){ .max = banks - used, .high = used };
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetRepairStatus(nvmlDevice_t device, nvmlRepairStatus_v1_t *status)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(status);
	REQUIRE(status->version == NVML_VERSION_WORD(nvmlRepairStatus_v1_t, 1), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	REQUIRE(t.hardware->architecture >= NVML_DEVICE_ARCH_HOPPER, NVML_ERROR_NOT_SUPPORTED);
	status->bChannelRepairPending = status->bTpcRepairPending = 0;
	return NVML_SUCCESS;
}

/* Pages retired for double-bit errors. The addresses are made up, one page each. */
NVML_API nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count,
						   unsigned long long *addresses, unsigned long long *timestamps)
{
	enum { PAGE_BYTES = 64 << 10 };
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(count && cause < NVML_PAGE_RETIREMENT_CAUSE_COUNT);
	REQUIRE(!remaps_rows(&t), NVML_ERROR_NOT_SUPPORTED);
	unsigned int room = *count;
	*count = cause == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR ? repairs(&t) : 0;
	REQUIRE(*count <= room && (addresses || *count == 0), NVML_ERROR_INSUFFICIENT_SIZE);
	for (unsigned int i = 0; i < *count; i++) {
		addresses[i] = (unsigned long long)(i + 1) * PAGE_BYTES;
		if (timestamps)
			timestamps[i] = t.state->boot_time_ns / 1000;
	}
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count,
						unsigned long long *addresses)
{
	return nvmlDeviceGetRetiredPages_v2(device, cause, count, addresses, NULL);
}

NVML_API nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(pending);
	REQUIRE(!remaps_rows(&t), NVML_ERROR_NOT_SUPPORTED);
	*pending = atomic_load(&t.gpu->row_remap_pending) ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}
