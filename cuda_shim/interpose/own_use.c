#include "interpose/own_use.h"

#include "interpose/driver_nvml.h"
#include "interpose/naming.h"

#define SAMPLES_MAX 512
#define ALL_OF_IT 65536u

static _Atomic bool busy; /* one thread at a time; another has no need to wait for it */
static struct aq_driver_nvml nvml;
static enum { UNTRIED, READY, ABSENT } state;
/* Not on the stack of a thread that only wants to launch. */
static nvmlProcessUtilizationSample_t samples[SAMPLES_MAX];
static struct aq_listed listed;
static struct aq_naming naming;
static struct {
	nvmlDevice_t handle;
	bool known;
	unsigned long long seen_us; /* the driver's clock, of the newest sample so far */
} devices[AQ_MAX_DEVICES];

static bool ready(const char *uuid, int device)
{
	if (state == UNTRIED)
		state = aq_driver_nvml_load(&nvml) && nvml.utilization && nvml.init() == NVML_SUCCESS ? READY : ABSENT;
	if (state == READY && !devices[device].known)
		devices[device].known = nvml.by_uuid(uuid, &devices[device].handle) == NVML_SUCCESS;
	return state == READY && devices[device].known;
}

/* Sum over our processes of each one's mean over its new samples; 65536 = the whole device. */
static bool sum_of_ours(unsigned int count, int device, uint32_t *share_q16)
{
	unsigned long long newest = devices[device].seen_us;
	bool any = false;

	*share_q16 = 0;
	for (unsigned int i = 0; i < count; i++) {
		unsigned int sum = 0, same = 0, earlier = 0;

		if (samples[i].timeStamp <= devices[device].seen_us || aq_naming_slot(&naming, samples[i].pid) < 0)
			continue;
		for (unsigned int j = 0; j < count; j++)
			if (samples[j].pid == samples[i].pid && samples[j].timeStamp > devices[device].seen_us) {
				sum += samples[j].smUtil;
				same++;
				earlier += j < i;
			}
		if (!earlier && same) /* each process once */
			*share_q16 += (uint32_t)((uint64_t)sum * ALL_OF_IT / (100 * same));
		newest = samples[i].timeStamp > newest ? samples[i].timeStamp : newest;
		any = true;
	}
	devices[device].seen_us = newest;
	return any;
}

bool aq_own_use(const struct aq_region *region, const char *uuid, int device, uint32_t *share_q16)
{
	unsigned int count = SAMPLES_MAX;

	*share_q16 = 0;
	if (atomic_exchange_explicit(&busy, true, memory_order_acquire))
		return false;
	bool told = ready(uuid, device) &&
		    nvml.utilization(devices[device].handle, samples, &count, devices[device].seen_us) == NVML_SUCCESS;
	if (told) {
		aq_listed_ask(&listed, devices[device].handle, nvml.processes, nvml.mps_processes);
		aq_naming_learn(&naming, region, (uint32_t)device, &listed);
		told = sum_of_ours(count, device, share_q16);
	}
	atomic_store_explicit(&busy, false, memory_order_release);
	if (*share_q16 > ALL_OF_IT)
		*share_q16 = ALL_OF_IT;
	return told;
}

void aq_own_use_forget(void)
{
	atomic_store(&busy, false);
	state = UNTRIED;
	for (int i = 0; i < AQ_MAX_DEVICES; i++)
		devices[i].known = false;
}
