/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/naming.h"

#include <string.h>

/* Of the first entry with that pid; `count` without one. */
static unsigned int place_of(const struct aq_listed *listed, unsigned int pid)
{
	unsigned int i = 0;

	while (i < listed->count && listed->process[i].pid != pid)
		i++;
	return i;
}

static bool is_listed(const struct aq_listed *listed, unsigned int pid)
{
	return place_of(listed, pid) < listed->count;
}

/* For the caller's own process this says whether it has a context, because it calls while it makes one. */
static bool should_be_listed(const struct aq_region *region, uint32_t index, uint32_t device)
{
	return (int)index == region->slot_index ||
	       atomic_load_explicit(&aq_region_slot(region, index)->device[device].contexts, memory_order_relaxed);
}

void aq_listed_query(struct aq_listed *listed, nvmlDevice_t device, aq_nvml_processes compute, aq_nvml_processes mps)
{
	unsigned int count = AQ_LISTED_MAX, more;

	listed->known = compute && compute(device, &count, listed->process) == NVML_SUCCESS;
	listed->count = listed->known ? count : 0;
	memset(listed->as, AQ_LISTED_COMPUTE, listed->count);
	more = AQ_LISTED_MAX - listed->count;
	if (!listed->known || !mps || mps(device, &more, listed->process + listed->count) != NVML_SUCCESS)
		return;
	for (unsigned int i = listed->count, end = listed->count + more; i < end; i++) {
		unsigned int at = place_of(listed, listed->process[i].pid);

		if (at < listed->count) {
			listed->as[at] |= AQ_LISTED_MPS;
		} else {
			listed->as[listed->count] = AQ_LISTED_MPS;
			listed->process[listed->count++] = listed->process[i];
		}
	}
}

/* A pid of the container's own must also be in the list: otherwise it is a neighbour's number in the samples. A process that is not visible
 * here has its host pid, even from a driver that translates, and is then not in the list. */
static bool is_named(const struct aq_naming *naming, uint32_t at, unsigned int pid)
{
	uint32_t own = naming->living[at].pid, host_pid = naming->living[at].host_pid;

	if (host_pid && !naming->translates)
		return pid == host_pid;
	if (!own)
		return host_pid && pid == host_pid && !is_listed(naming->listed, pid);
	return pid == own && (!naming->listed->known || is_listed(naming->listed, pid));
}

/* The process that the driver names `pid`, as an index in `living`; `count` when it is not one of the container's. */
static uint32_t find(const struct aq_naming *naming, unsigned int pid)
{
	uint32_t at = 0;

	while (at < naming->count && !is_named(naming, at, pid))
		at++;
	return at;
}

void aq_naming_learn(struct aq_naming *naming, const struct aq_region *region, uint32_t device, const struct aq_listed *listed)
{
	unsigned int by_host_pid = 0, by_own_pid = 0;

	naming->listed = listed;
	naming->count = 0;
	naming->names_own = false;
	for (uint32_t i = 0; i < region->slot_count && naming->count < AQ_SLOT_COUNT; i++) {
		/* For a killed process, only the pid of its own namespace is left, which may be another process's pid here. */
		if (!aq_region_is_live(region, i))
			continue;
		uint32_t pid = aq_region_pid(region, i);
		uint32_t host_pid = atomic_load_explicit(&aq_region_slot(region, i)->host_pid, memory_order_relaxed);
		naming->living[naming->count].slot = i;
		naming->living[naming->count].pid = pid;
		naming->living[naming->count].as = 0;
		naming->living[naming->count++].host_pid = host_pid;
		if (!listed->known || !host_pid || !should_be_listed(region, i, device))
			continue;
		by_host_pid += is_listed(listed, host_pid);
		by_own_pid += pid && is_listed(listed, pid);
	}
	naming->translates = by_own_pid > by_host_pid;
	for (unsigned int i = 0; i < listed->count; i++) {
		uint32_t at = find(naming, listed->process[i].pid);

		if (at == naming->count)
			continue;
		naming->living[at].as |= listed->as[i];
		naming->names_own |= naming->living[at].pid == listed->process[i].pid;
	}
}

uint32_t aq_naming_ended(const struct aq_naming *naming, const struct aq_region *region, uint32_t index)
{
	const struct aq_region_slot *slot = aq_region_slot(region, index);
	uint32_t host_pid = atomic_load_explicit(&slot->host_pid, memory_order_relaxed);

	uint64_t namespace = atomic_load_explicit(&slot->pid_namespace, memory_order_relaxed);
	const struct aq_region_slot *own = aq_region_slot(region, (uint32_t)region->slot_index);

	if (host_pid && !naming->translates)
		return host_pid;
	if (!naming->names_own || !namespace || namespace != atomic_load_explicit(&own->pid_namespace, memory_order_relaxed))
		return 0;
	return atomic_load_explicit(&slot->pid, memory_order_relaxed);
}

bool aq_naming_lists(const struct aq_naming *naming, unsigned int pid)
{
	return is_listed(naming->listed, pid);
}

int aq_naming_slot(const struct aq_naming *naming, unsigned int pid)
{
	uint32_t at = find(naming, pid);

	return at < naming->count ? (int)naming->living[at].slot : -1;
}
