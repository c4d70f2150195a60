#include "interpose/naming.h"

static bool is_listed(const struct aq_listed *listed, unsigned int pid)
{
	for (unsigned int i = 0; i < listed->count; i++)
		if (listed->process[i].pid == pid)
			return true;
	return false;
}

static bool is_taken(struct aq_region_slot *slot)
{
	return atomic_load_explicit(&slot->state, memory_order_relaxed) != AQ_SLOT_FREE;
}

/* The caller's own process is told whether it has a context, for it asks while it makes one. */
static bool should_be_listed(const struct aq_region *region, uint32_t index, uint32_t device)
{
	struct aq_region_slot *slot = aq_region_slot(region, index);

	return is_taken(slot) &&
	       ((int)index == region->slot_index || atomic_load_explicit(&slot->device[device].contexts, memory_order_relaxed));
}

struct aq_naming aq_naming_of(const struct aq_region *region, uint32_t device, const struct aq_listed *listed)
{
	unsigned int by_host_pid = 0, by_own_pid = 0;

	for (uint32_t i = 0; listed->known && i < region->slot_count; i++) {
		struct aq_region_slot *slot = aq_region_slot(region, i);
		uint32_t host_pid = atomic_load_explicit(&slot->host_pid, memory_order_relaxed);

		if (!host_pid || !should_be_listed(region, i, device))
			continue;
		by_host_pid += is_listed(listed, host_pid);
		by_own_pid += is_listed(listed, atomic_load_explicit(&slot->pid, memory_order_relaxed));
	}
	return (struct aq_naming){ .region = region, .listed = listed, .translates = by_own_pid > by_host_pid };
}

/* A pid of the container's own must be in the list too: else it is the number of a neighbour in the samples. */
static bool is_named(const struct aq_naming *naming, struct aq_region_slot *slot, unsigned int pid)
{
	uint32_t host_pid = atomic_load_explicit(&slot->host_pid, memory_order_relaxed);

	if (host_pid && !naming->translates)
		return pid == host_pid;
	return pid == atomic_load_explicit(&slot->pid, memory_order_relaxed) && (!naming->listed->known || is_listed(naming->listed, pid));
}

int aq_naming_slot(const struct aq_naming *naming, unsigned int pid)
{
	for (uint32_t i = 0; i < naming->region->slot_count; i++) {
		struct aq_region_slot *slot = aq_region_slot(naming->region, i);

		if (is_taken(slot) && is_named(naming, slot, pid))
			return (int)i;
	}
	return -1;
}
