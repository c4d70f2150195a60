/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/own_use.h"

#include "interpose/driver_nvml.h"
#include "interpose/naming.h"

#define SAMPLES_MAX 512
#define ALL_OF_IT 65536u
#define WITHOUT_MOST 50 /* then the time of the last one is not believed: a clock was set back, or a tenant wrote it */

static struct aq_driver_nvml nvml;
static enum { UNTRIED, READY, ABSENT } state;
/* Not on the stack of a thread that only wants to launch. */
static nvmlProcessUtilizationSample_t samples[SAMPLES_MAX];
static struct aq_listed listed;
static struct aq_naming naming;
static int slot_of[SAMPLES_MAX]; /* of a new sample, the slot of its process; -1 = not one of ours, or not new */
static struct aq_process_use uses[2 * AQ_SLOT_COUNT];
/* Processes of ours that have ended lately. */
static struct ended {
	uint32_t slot;
	uint32_t pid;
	struct aq_compared *compared;
	int64_t ago_ns;
} ended[AQ_SLOT_COUNT];
static uint32_t ended_count;
static struct {
	nvmlDevice_t handle;
	bool known;
	uint64_t seen_us; /* the newest figure, or the time up to which there was none … */
	int64_t seen_at_ns; /* … and when that was found out */
	unsigned without; /* calls in a row without a new figure */
} devices[AQ_MAX_DEVICES];

static bool ready(const char *uuid, int device)
{
	if (state == UNTRIED)
		state = aq_driver_nvml_load(&nvml) && nvml.utilization && nvml.init() == NVML_SUCCESS ? READY : ABSENT;
	if (state == READY && !devices[device].known)
		devices[device].known = nvml.by_uuid(uuid, &devices[device].handle) == NVML_SUCCESS;
	return state == READY && devices[device].known;
}

/* The mean of a process's new samples. */
static uint32_t share_of(unsigned int count, int slot)
{
	unsigned int sum = 0, same = 0;

	for (unsigned int i = 0; i < count; i++) {
		if (slot_of[i] != slot)
			continue;
		sum += samples[i].smUtil;
		same++;
	}
	return same ? (uint32_t)((uint64_t)sum * ALL_OF_IT / (100 * same)) : 0;
}

static void learn_ended(const struct aq_region *region, uint32_t device, int64_t now_ns)
{
	ended_count = 0;
	for (uint32_t i = 0; i < region->slot_count && ended_count < AQ_SLOT_COUNT; i++) {
		struct aq_virtual_device *row = aq_region_virtual(region, i, device);
		int64_t ago_ns = aq_region_ended_ago_ns(row, now_ns);

		if (ago_ns >= 0 && atomic_load_explicit(&aq_region_slot(region, i)->state, memory_order_acquire) == AQ_SLOT_FREE)
			ended[ended_count++] = (struct ended){ i, aq_naming_ended(&naming, region, i), &row->compared, ago_ns };
	}
}

/* The slot of the ended process that the driver names `pid`, if no living one has that pid. */
static int ended_slot(unsigned int pid)
{
	uint32_t at = 0;

	if (!pid || aq_naming_lists(&naming, pid))
		return -1;
	while (at < ended_count && ended[at].pid != pid)
		at++;
	return at < ended_count ? (int)ended[at].slot : -1;
}

static int slot_of_pid(unsigned int pid)
{
	int slot = aq_naming_slot(&naming, pid);

	return slot >= 0 ? slot : ended_slot(pid);
}

/* Find our processes' new samples, and return the time of the newest. */
static uint64_t find_ours(unsigned int count, uint64_t since_us)
{
	uint64_t newest = since_us;

	for (unsigned int i = 0; i < count; i++) {
		slot_of[i] = samples[i].timeStamp > since_us ? slot_of_pid(samples[i].pid) : -1;
		if (slot_of[i] >= 0 && samples[i].timeStamp > newest)
			newest = samples[i].timeStamp;
	}
	return newest;
}

/* That mean, as far as our other processes leave it: together they used the device once. */
static uint32_t take_share(unsigned int count, uint32_t slot, uint32_t *left)
{
	uint32_t share = share_of(count, (int)slot);

	share = share < *left ? share : *left;
	*left -= share;
	return share;
}

/* What each of our processes that the driver names used, and had paid. */
static void collect(const struct aq_region *region, uint32_t device, unsigned int count, struct aq_measured *measured)
{
	uint32_t left = ALL_OF_IT;

	for (uint32_t i = 0; i < naming.count; i++) {
		uint32_t slot = naming.living[i].slot, share = take_share(count, slot, &left);
		struct aq_virtual_device *row = aq_region_virtual(region, slot, device);

		/* of MPS clients the driver may report nothing */
		if (!row || (!share && naming.living[i].as != AQ_LISTED_COMPUTE))
			continue;
		uses[measured->count++] = (struct aq_process_use){
			.compared = &row->compared,
			.paid_ns = (int64_t)atomic_load_explicit(&aq_region_slot(region, slot)->device[device].busy_ns,
								 memory_order_relaxed),
			.share_q16 = share,
		};
	}
	for (uint32_t i = 0; i < ended_count; i++)
		uses[measured->count++] = (struct aq_process_use){
			.compared = ended[i].compared,
			.share_q16 = take_share(count, ended[i].slot, &left),
			.has_ended = true,
		};
	measured->process = uses;
}

/* Does the driver name each process of ours that has a context there? */
static bool names_all(const struct aq_region *region, uint32_t device)
{
	for (uint32_t i = 0; i < naming.count; i++) {
		const struct aq_slot_device *used = &aq_region_slot(region, naming.living[i].slot)->device[device];

		if (!naming.living[i].as && atomic_load_explicit(&used->contexts, memory_order_relaxed))
			return false;
	}
	return true;
}

static bool take_in(const struct aq_region *region, uint32_t device, unsigned int count, uint64_t since_us, struct aq_measured *measured)
{
	uint64_t newest = find_ours(count, since_us);

	if (newest <= since_us)
		return false;
	collect(region, device, count, measured);
	measured->until_us = newest;
	measured->span_ns = since_us && newest - since_us < INT64_MAX / 1000 ? (int64_t)(newest - since_us) * 1000 : 0;
	measured->is_complete = names_all(region, device);
	return true;
}

/* There is no figure: the driver's clock has gone on as ours has. In whole steps, because its samples come in steps. */
static uint64_t move_on(int device, int64_t now_ns, uint64_t since_us)
{
	if (devices[device].seen_us != since_us) { /* another process took in a newer one */
		devices[device].seen_us = since_us;
		devices[device].seen_at_ns = now_ns;
	}
	int64_t steps = (now_ns - devices[device].seen_at_ns - AQ_CONTROL_LATE_NS) / AQ_CONTROL_PERIOD_NS;
	if (!since_us || steps <= 0)
		return since_us;
	devices[device].seen_at_ns += steps * AQ_CONTROL_PERIOD_NS;
	devices[device].seen_us += (uint64_t)(steps * AQ_CONTROL_PERIOD_NS / 1000);
	return devices[device].seen_us;
}

/* Figures go by in which an ended process could not be found. */
static void forfeit(bool all)
{
	for (uint32_t i = 0; i < ended_count; i++)
		if (all || !ended[i].pid || aq_naming_lists(&naming, ended[i].pid))
			aq_control_forfeit(ended[i].compared);
}

void aq_own_use_conclude(struct aq_settlement *settlement, int64_t now_ns)
{
	bool may_be_unseen = false;

	for (uint32_t i = 0; i < ended_count; i++)
		may_be_unseen |= aq_control_conclude_ended(settlement, ended[i].compared, now_ns, ended[i].ago_ns, may_be_unseen);
}

bool aq_own_use(struct aq_region *region, const char *uuid, int device, int64_t now_ns, uint64_t *since_us, struct aq_measured *measured)
{
	unsigned int count = SAMPLES_MAX;

	*measured = (struct aq_measured){ .at_ns = now_ns };
	bool known = ready(uuid, device);
	ended_count = 0;
	if (known && devices[device].without >= WITHOUT_MOST)
		*since_us = 0;
	if (known) {
		aq_region_reap(region);
		/* before the samples: what is in them and was not in the list had ended before */
		aq_listed_query(&listed, devices[device].handle, nvml.processes, nvml.mps_processes);
		aq_naming_learn(&naming, region, (uint32_t)device, &listed);
		learn_ended(region, (uint32_t)device, now_ns);
		nvmlReturn_t answer = nvml.utilization(devices[device].handle, samples, &count, *since_us);
		forfeit(!listed.known || (answer != NVML_SUCCESS && answer != NVML_ERROR_NOT_FOUND));
		known = answer == NVML_SUCCESS && take_in(region, (uint32_t)device, count, *since_us, measured);
	}
	devices[device].without = known ? 0 : devices[device].without + 1;
	if (known) {
		devices[device].seen_us = measured->until_us;
		devices[device].seen_at_ns = now_ns;
	} else {
		*since_us = move_on(device, now_ns, *since_us);
	}
	return known;
}

void aq_own_use_forget(void)
{
	state = UNTRIED;
	for (int i = 0; i < AQ_MAX_DEVICES; i++)
		devices[i].known = false;
}
