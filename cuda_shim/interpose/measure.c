/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/measure.h"

#include <pthread.h>
#include <stdatomic.h>

#include "cancel.h"
#include "interpose/driver_nvml.h"
#include "interpose/naming.h"

enum state { UNTRIED, READY, ABSENT };

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static struct aq_driver_nvml nvml;
static _Atomic enum state state; /* this release pairs with the acquire where `nvml` is used */

bool aq_measure_open(void)
{
	enum state now = atomic_load_explicit(&state, memory_order_acquire);

	if (now != UNTRIED)
		return now == READY;
	/* Without the lock: a thread may hold the loader's own lock while a library that is being loaded calls the shim. NVML counts how
	 * often it is opened. */
	struct aq_driver_nvml found = { 0 };
	now = aq_driver_nvml_load(&found) && found.init() == NVML_SUCCESS ? READY : ABSENT;
	pthread_mutex_lock(&opening);
	if (atomic_load_explicit(&state, memory_order_relaxed) == UNTRIED) {
		nvml = found;
		atomic_store_explicit(&state, now, memory_order_release);
	}
	pthread_mutex_unlock(&opening);
	return atomic_load_explicit(&state, memory_order_acquire) == READY;
}

static uint64_t own_bytes(const struct aq_region *region, uint32_t device, nvmlDevice_t handle)
{
	struct aq_listed listed;
	struct aq_naming naming;
	uint64_t bytes = 0;

	aq_listed_query(&listed, handle, nvml.processes, nvml.mps_processes);
	aq_naming_learn(&naming, region, device, &listed);
	for (unsigned int i = 0; i < listed.count; i++)
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

	int cancel = aq_hold_cancel();
	if (aq_measure_open() && nvml.by_uuid(uuid, &handle) == NVML_SUCCESS) {
		if (nvml.memory(handle, &memory) == NVML_SUCCESS)
			sample.device_bytes = memory.used;
		sample.own_bytes = own_bytes(region, (uint32_t)device, handle);
	}
	aq_allow_cancel(cancel);
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
	atomic_store(&state, UNTRIED);
}
