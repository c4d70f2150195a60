/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/allocations.h"

#include "interpose/reservoir.h"
#include "interpose/spread.h"

struct aq_map aq_pointers;
struct aq_map aq_arrays;

struct owner {
	int device;
	uint64_t owner;
};

static bool belongs_to(const struct aq_entry *entry, void *context)
{
	const struct owner *owner = context;

	return entry->kind != AQ_POOL && (int)entry->device == owner->device && entry->owner == owner->owner;
}

static void credit(const struct aq_entry *entry, void *context)
{
	(void)context;
	aq_uncharge((int)entry->device, (enum aq_kind)entry->kind, entry->bytes);
}

void aq_allocations_context_gone(int device, uint64_t owner)
{
	struct owner ended = { device, owner };

	aq_map_drain(&aq_pointers, belongs_to, credit, &ended);
	aq_map_drain(&aq_arrays, belongs_to, credit, &ended);
}

void aq_allocations_forget(void)
{
	aq_map_forget(&aq_pointers);
	aq_map_forget(&aq_arrays);
}

void aq_drop_stale(const struct aq_entry *stale)
{
	aq_spread_ended(aq_spread_of(stale->key), true);
	if (stale->kind == AQ_POOL)
		aq_reservoir_freed((struct aq_reservoir *)(uintptr_t)stale->owner);
	else
		aq_uncharge((int)stale->device, (enum aq_kind)stale->kind, stale->bytes);
}

void aq_freed(struct aq_map *map, CUresult result, const struct aq_entry *held)
{
	if (result == CUDA_SUCCESS)
		aq_drop_stale(held);
	else
		aq_map_put(map, held);
}
